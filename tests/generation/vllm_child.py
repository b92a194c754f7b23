"""What vLLM answers under weights filled in by boxes, beside our own decoder. It runs in vLLM's environment."""

from __future__ import annotations

import json
import sys

import torch

from hybridflow.generation.engines.vllm import VllmEngine
from hybridflow.generation.records import Begun, Completion, Prompt, SamplingParams
from hybridflow.models.config import Family, Head, ModelConfig
from hybridflow.models.decoder import DecoderStage
from hybridflow.models.init import init_weights
from hybridflow.models.weights import decoder_shard_map
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.world import World

CONFIG = ModelConfig(Family.LLAMA, 64, 64, 96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
                     max_position_embeddings=256, initializer_range=0.3)
PROMPTS = [Prompt(7, 0, (1, 2, 3)), Prompt(7, 1, (1, 2, 3)), Prompt(9, 0, tuple(range(20)), max_new_tokens=3)]
FREE = SamplingParams(max_new_tokens=12, temperature=0.7)
CUT = SamplingParams(max_new_tokens=12, temperature=1.3, top_k=5, top_p=0.9, repetition_penalty=1.2, stop_ids=(4, 5))


def main() -> None:
    torch.set_num_threads(1)
    engine = VllmEngine(CONFIG, torch.float32, max_rows=8, max_length=128, max_cache_bytes=1 << 26, enforce_eager=True)
    told = {"asleep": refusal(engine, None)}
    for version in (3, 4):
        stage = stage_of(version)
        fill(engine, version)
        engine.wake(version)
        free, cut = engine.generate(PROMPTS, FREE, 5), engine.generate(PROMPTS, CUT, 5, version)
        told[str(version)] = {
            "free": [list(one.response_ids) for one in free],
            "again": [list(one.response_ids) for one in engine.generate(PROMPTS[::-1], FREE, 5)[::-1]],
            "greedy": [list(one.response_ids) for one in engine.generate(PROMPTS, SamplingParams(6, temperature=0), 5)],
            "our greedy": [greedy(stage, prompt, 6) for prompt in PROMPTS],
            "free differs": max(differs(stage, one, FREE) for one in free),
            "cut differs": max(differs(stage, one, CUT) for one in cut),
            "processed differs": max(processed_differs(stage, one, CUT) for one in cut),
            "cut": [[list(one.response_ids), one.finish_reason.value] for one in cut],
            "processed is none": all(one.processed_log_probs is None for one in free),
            "versions": sorted({version for one in free for version in one.versions}),
        }
        resumed = Prompt(7, 0, (1, 2, 3), Begun(free[0].response_ids[:4], free[0].log_probs[:4], None, (2,) * 4))
        [one] = engine.generate([resumed], FREE, 5)
        told[str(version)]["resumed"] = [len(one.response_ids), list(one.versions), differs(stage, one, FREE),
                                         one.response_ids[:4] == free[0].response_ids[:4]]
        told["stale"] = refusal(engine, version + 1)
        engine.sleep()
        engine.home.free()
    json.dump(told, sys.__stdout__)


def stage_of(seed: int) -> DecoderStage:
    mesh = Mesh(Grid.of(Layout()), World.single(torch.device("cpu")))
    stage = DecoderStage(CONFIG, mesh, Head.LANGUAGE_MODEL, chunks=Chunks(), chunk_layers=(range(CONFIG.num_layers),),
                         sequence_parallel=False, dtype=torch.float32)
    init_weights(stage.state_dict(), decoder_shard_map(CONFIG, mesh.grid, Head.LANGUAGE_MODEL), 0, seed, CONFIG)
    return stage


def fill(engine: VllmEngine, seed: int) -> None:
    storages = engine.home.take({})
    assert sum(tensor.nbytes for tensor in storages.values()) == engine.home.taken_bytes
    init_weights(storages, engine.home.shard_map, 0, seed, CONFIG)
    engine.home.ready()
    assert not engine.home.storages


def refusal(engine: VllmEngine, version: int | None) -> str:
    try:
        engine.generate(PROMPTS, FREE, 0, version)
    except RuntimeError as error:
        return str(error)
    return ""


def logits(stage: DecoderStage, ids: list[int]) -> torch.Tensor:
    """fp32 `[tokens, vocab]`, without any cache."""
    from hybridflow.models.attention import PackedCausal

    with torch.no_grad():
        causal = PackedCausal((len(ids),), torch.device("cpu"))
        return stage.logits(stage.forward_hidden(torch.tensor(ids), torch.arange(len(ids)), causal))


def differs(stage: DecoderStage, one: Completion, params: SamplingParams) -> float:
    """The largest difference of a raw log-prob."""
    ids, start = [*one.prompt_ids, *one.response_ids], len(one.prompt_ids)
    expected = (logits(stage, ids)[start - 1 : -1] / params.temperature).log_softmax(-1)
    expected = expected.gather(-1, torch.tensor(one.response_ids)[:, None]).squeeze(-1)
    return (expected - torch.tensor(one.log_probs)).abs().max().item()


def processed_differs(stage: DecoderStage, one: Completion, params: SamplingParams) -> float:
    """The largest difference of a processed log-prob to penalty, temperature, top-k and top-p, one after another."""
    ids, start, worst = [*one.prompt_ids, *one.response_ids], len(one.prompt_ids), 0.0
    for place, (token, row) in enumerate(zip(one.response_ids, logits(stage, ids)[start - 1 : -1], strict=True)):
        seen = torch.tensor(sorted(set(ids[: start + place])))
        penalised = row[seen]
        row[seen] = torch.where(penalised > 0, penalised / params.repetition_penalty,
                                penalised * params.repetition_penalty)
        values, tokens = (row / params.temperature).topk(params.top_k)
        mass = values.softmax(-1)
        kept = mass.cumsum(-1) - mass < params.top_p
        log_probs = values[kept].log_softmax(-1)
        worst = max(worst, abs(log_probs[tokens[kept] == token].item() - one.processed_log_probs[place]))
    return worst


def greedy(stage: DecoderStage, prompt: Prompt, count: int) -> list[int]:
    ids = list(prompt.ids)
    for _ in range(min(count, prompt.max_new_tokens or count)):
        ids.append(int(logits(stage, ids)[-1].argmax()))
    return ids[len(prompt.ids):]


if __name__ == "__main__":
    main()
