"""vLLM as a generation engine: its weights filled from boxes of canonical tensors, its answers in our records.

Owns the engine and the memory that weights pass through on their way in. vLLM is imported when one is made, and needs
to be installed only then. Its engine runs in this process, on this rank alone: replicas have one each.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hybridflow.generation.engine import StaleWeightsError, check_requests
from hybridflow.generation.engines.vllm_words import (
    chosen_log_probs,
    completion,
    request_ids,
    request_words,
    unfinished,
)
from hybridflow.generation.limits import GenerationLimits, ranks_of_host
from hybridflow.generation.records import Completion, OnEnd, Prompt, SamplingParams
from hybridflow.generation.work_source import WorkSource
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.weights import canonical_shapes
from hybridflow.parallel.arithmetic import round_up
from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.mesh import Mesh
from hybridflow.parallel.shard_map import ShardMap

CPU = torch.device("cpu")
LARGEST_BLOCK = 128  # positions of one of vLLM's blocks; it has one that nobody uses
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class VllmHome:
    """A `WeightHome`: whole canonical tensors, which vLLM cuts, fuses and packs as it likes when they are all there."""

    def __init__(self, engine: VllmEngine, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype,
                 ranks: Sequence[int] = (0,), device: torch.device = CPU) -> None:
        """`ranks`: each has such a home, this one among them; `device` is this one's."""
        self._engine, self._shapes, self._dtype, self._device = engine, shapes, dtype, device
        whole = [Shard.of_rows(Box.whole(name, shape), name) for name, shape in shapes.items()]
        self.shard_map = ShardMap(dict(shapes), tuple(ranks), lambda rank: whole, lambda rank: 0)
        self.taken_bytes = sum(map(prod, shapes.values())) * dtype.itemsize
        self.storages: dict[str, Tensor] = {}

    def take(self, training: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.storages = {name: torch.empty(shape, dtype=self._dtype, device=self._device)
                         for name, shape in self._shapes.items()}
        return self.storages

    def ready(self) -> None:
        self._engine.load(self._given_away())

    def free(self) -> None:
        self.storages = {}

    def _given_away(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor once, and its memory with it: what vLLM has taken over is not kept twice."""
        while self.storages:
            name = next(iter(self.storages))
            yield name, self.storages.pop(name)


class VllmEngine:
    """A `GenerationEngine`.

    Attributes:
        home: what a reshard fills.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, max_rows: int = 256, max_length: int | None = None,
                 max_cache_bytes: int = 4 << 30, tokenizer: str | None = None, ranks: Sequence[int] = (0,),
                 device: torch.device = CPU, **settings: Any) -> None:
        """
        Args:
            max_length: tokens of the longest sequence; None: what the model allows.
            tokenizer: a folder, for stop strings; None where there will be none.
            ranks: of this job that have such an engine each, this one among them.
            device: of this rank.
            settings: further arguments of `vllm.LLM`.

        Raises:
            ValueError: vLLM cannot be imported.
        """
        self._config, self._has_text = config, tokenizer is not None
        self.home = VllmHome(self, canonical_shapes(config, Head.LANGUAGE_MODEL), dtype, ranks, device)
        self.weight_version: int | None = None
        room = (max_length or config.max_position_embeddings) + 1  # `_raw` asks for a token behind the longest sequence
        with tempfile.TemporaryDirectory() as folder:  # it wants a folder, of which it reads the config alone
            Path(folder, "config.json").write_text(json.dumps(config.to_hf_dict() | {"max_position_embeddings": room}))
            self._llm = import_vllm().LLM(
                folder, tokenizer=tokenizer, skip_tokenizer_init=tokenizer is None, load_format="dummy",
                dtype=NAMES[dtype], max_model_len=room, max_num_seqs=max_rows, kv_cache_memory_bytes=max_cache_bytes,
                logprobs_mode="processed_logprobs", disable_log_stats=True, **settings)
        if len(ranks) > 1:  # its end would be that of all process groups, the job's own among them
            self._llm.llm_engine.engine_core._finalizer.detach()
        self._is_asleep = False
        self._can_sleep = self._llm.model_config.enable_sleep_mode

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take over all canonical tensors, by name; vLLM fuses query, key and value, and gate and up, as it loads."""
        if self._is_asleep:
            self._llm.wake_up(tags=["weights"])
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})

    def wake(self, version: int = 0) -> None:
        if self._is_asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._is_asleep = False
        self._llm.reset_prefix_cache()
        self.weight_version = version

    def sleep(self) -> None:
        """Nothing is generated from now on. Memory is given back where vLLM can do so, which on a CPU it cannot."""
        self.weight_version = None
        if self._can_sleep and not self._is_asleep:
            self._llm.sleep(level=2)
            self._is_asleep = True

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int,
                 expected_version: int | None = None, *, source: WorkSource | None = None,
                 interrupt: Callable[[], bool] | None = None,
                 ended: OnEnd | None = None) -> list[Completion]:
        """As `GenerationEngine.generate`. Draws are vLLM's, from a random generator for each sample.

        Where min_p and top_p restrict together, vLLM applies min_p first. All that `source` has for this replica is
        taken at once. vLLM goes through to the end of what it was given, so that `interrupt` is asked before that
        alone: then nothing is taken, and what was given without a source comes back as it came. After that all is
        finished, and there is nothing left to stop.
        """
        version = self.weight_version
        if version is None or expected_version not in (None, version):
            raise StaleWeightsError(f"generation expects weight version {expected_version}, but vLLM holds {version}: "
                                    "load the weights of this version before generating")
        check_requests(prompts, params, self._config, self._has_text)
        if interrupt is not None and interrupt():
            return [] if source is not None else [unfinished(prompt) for prompt in prompts]
        indices = list(range(len(prompts))) if source is None else _taken(source)
        prompts = [prompts[index] for index in indices]
        answers = self._ask([request_ids(prompt) for prompt in prompts],
                            [request_words(prompt, params, seed) for prompt in prompts])
        outputs = [answer.outputs[0] for answer in answers]
        drawn = [chosen_log_probs(output.token_ids, output.logprobs) for output in outputs]
        raw = drawn if params.draws_raw else self._raw(prompts, [output.token_ids for output in outputs],
                                                       params.temperature or 1.0)
        found = [completion(prompt, output.token_ids, output.finish_reason, log_probs,
                            None if params.draws_raw else processed, version)
                 for prompt, output, log_probs, processed in zip(prompts, outputs, raw, drawn, strict=True)]
        if ended is not None:
            for index, one in zip(indices, found, strict=True):
                ended(index, one.response_ids)
        return found

    def _raw(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]],
             temperature: float) -> list[list[float]]:
        """Log-probs before anything but the temperature. vLLM gives those of one distribution at a time; these are of
        one more forward, as of a prompt.
        """
        started = [request_ids(prompt) for prompt in prompts]
        self._llm.apply_model(partial(_scale_logits, 1 / temperature))  # its own are before the temperature
        try:
            answers = self._ask([[*ids, *response] for ids, response in zip(started, responses, strict=True)],
                                [{"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "ignore_eos": True,
                                  "detokenize": False}] * len(prompts))
        finally:
            self._llm.apply_model(partial(_scale_logits, 1.0))
        return [chosen_log_probs(response, answer.prompt_logprobs[len(ids):])
                for ids, response, answer in zip(started, responses, answers, strict=True)]

    def _ask(self, ids: Sequence[list[int]], words: Sequence[dict[str, Any]]) -> list[Any]:
        if not ids:
            return []
        params = import_vllm().SamplingParams
        return self._llm.generate([{"prompt_token_ids": row} for row in ids], [params(**one) for one in words],
                                  use_tqdm=False)


def vllm_engine(config: ModelConfig, mesh: Mesh, dtype: torch.dtype, limits: GenerationLimits,
                tokenizer: str | None = None) -> tuple[VllmHome, VllmEngine]:
    """A whole model on each rank of a generation mesh, within `limits`. Collective.

    Args:
        tokenizer: as the engine's.
    """
    settings = {"distributed_executor_backend": "external_launcher"} if mesh.world.size > 1 else {}
    if mesh.device.type == "cuda":
        settings["enable_sleep_mode"] = True
    engine = VllmEngine(config, dtype, max_rows=limits.max_batch_rows, tokenizer=tokenizer, ranks=mesh.grid.ranks,
                        max_cache_bytes=_cache_bytes(config, mesh, dtype, limits), device=mesh.device,
                        max_num_batched_tokens=max(limits.max_step_tokens, limits.max_batch_rows), **settings)
    return engine.home, engine


def _cache_bytes(config: ModelConfig, mesh: Mesh, dtype: torch.dtype, limits: GenerationLimits) -> int:
    """What `limits` allow, but no more than as many of the longest sequences as they allow need."""
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    sequence = round_up(config.max_position_embeddings + 1, LARGEST_BLOCK) * token
    return min(limits.room(mesh.device, ranks_of_host(mesh.world)), (limits.max_batch_rows + 1) * sequence)


def import_vllm() -> ModuleType:
    """vLLM, told to work in this process: tensors are handed to it by reference.

    Raises:
        ValueError: it cannot be imported, with the reason.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        import vllm
        from vllm import LLM, SamplingParams  # noqa: F401  (what they need is imported only when they are asked for)
    except ImportError as error:
        raise ValueError(f"generation.engine = vllm: {sys.executable} cannot import vLLM ({error}); install it there, "
                         "or choose own") from error
    return vllm


def _taken(source: WorkSource) -> list[int]:
    """All that there is for this replica, in the order of the whole list."""
    while more := source.take(source.most_rows):
        source.taken += more
    return sorted(source.taken)


def _scale_logits(scale: float, model: nn.Module) -> None:
    model.logits_processor.scale = scale
