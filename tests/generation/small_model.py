"""A decoder small enough to sample from in milliseconds, its generator, and the trainer's view of a completion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridflow.generation.engine import Generator
from hybridflow.generation.limits import GenerationLimits
from hybridflow.generation.records import Completion, Prompt
from hybridflow.generation.runners import make_runner
from hybridflow.micro_batch import MicroBatch, Sample
from hybridflow.models.config import Family, Head, ModelConfig
from hybridflow.models.decoder import DecoderStage
from hybridflow.models.init import init_weights
from hybridflow.models.layout import chunk_layers
from hybridflow.models.weights import decoder_shard_map
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.world import World

CONFIG = ModelConfig(Family.LLAMA, vocab_size=37, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
                     num_kv_heads=2, head_dim=8, max_position_embeddings=512, initializer_range=0.3)
ONE_PROCESS = Layout()
CONFIGS = {
    "llama": CONFIG,
    "qwen2": replace(CONFIG, family=Family.QWEN2, qkv_bias=True, tie_word_embeddings=True),
    "qwen3": replace(CONFIG, family=Family.QWEN3, qk_norm=True, num_kv_heads=4),
}


class WholeGenerator(Generator):
    """It keeps a stage for `full_log_probs`: runners take the weights of the one that they execute.

    Attributes:
        trained: the trainer's view of the same weights.
    """

    trained: DecoderStage


def make_generator(world: World | None = None, layout: Layout = ONE_PROCESS, *, config: ModelConfig = CONFIG,
                   dtype: torch.dtype = torch.float64, seed: int = 0, owns_weights: bool = True,
                   batch_invariant: bool = False, **limits: Any) -> WholeGenerator:
    """`owns_weights` False: the stage is left as it is, to be lent others' weights."""
    mesh = Mesh(Grid.of(layout), world or World.single(torch.device("cpu")))
    stage = make_stage(mesh, config, dtype, seed)
    runner = make_runner(stage, mesh, owns_weights=owns_weights, batch_invariant=batch_invariant)
    generator = WholeGenerator(stage, mesh, config, runner, GenerationLimits(**limits))
    generator.trained = make_stage(mesh, config, dtype, seed)
    generator.wake()
    return generator


def make_stage(mesh: Mesh, config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float64,
               seed: int = 0) -> DecoderStage:
    chunks = Chunks(mesh.layout.pp)
    stage = DecoderStage(config, mesh, Head.LANGUAGE_MODEL, chunks=chunks,
                         chunk_layers=chunk_layers(config.num_layers, chunks), sequence_parallel=False, dtype=dtype)
    set_weights(stage, mesh.grid, mesh.world.rank, config, seed)
    return stage


def set_weights(stage: DecoderStage, grid: Grid, rank: int, config: ModelConfig, seed: int) -> None:
    init_weights(stage.state_dict(), decoder_shard_map(config, grid, Head.LANGUAGE_MODEL), rank, seed, config)


def give_weights(source: DecoderStage, destination: DecoderStage) -> None:
    """Other weights in memory of their own, as a reshard brings them; what was prepared of the old ones stays."""
    for new, old in zip(source.parameters(), destination.parameters(), strict=True):
        old.data = new.data.clone()


def make_prompts(lengths: list[int], samples: int = 1, vocab_size: int = 37) -> list[Prompt]:
    """One prompt of random tokens per length, ids from 100, each with `samples` samples."""
    generator = torch.Generator().manual_seed(1)
    rows = [tuple(torch.randint(vocab_size, (length,), generator=generator).tolist()) for length in lengths]
    return [Prompt(100 + i, sample, ids) for i, ids in enumerate(rows) for sample in range(samples)]


def full_log_probs(generator: WholeGenerator, completion: Completion, temperature: float = 1.0) -> list[float]:
    """What the trainer computes for the response tokens, without any cache."""
    batch = MicroBatch.pack([Sample(completion.prompt_ids, completion.response_ids)], device=torch.device("cpu"))
    with torch.no_grad():
        return generator.trained(batch.input_ids, batch, temperature=temperature).log_probs.tolist()


def assert_same(one: list[Completion], other: list[Completion], tolerance: float = 1e-9) -> None:
    """Equal tokens and finish reasons, and log-probs that differ by rounding only."""
    def exact(completion: Completion) -> Completion:
        return replace(completion, log_probs=(), processed_log_probs=None)

    assert [exact(c) for c in one] == [exact(c) for c in other]
    for left, right in zip(one, other, strict=True):
        assert left.log_probs == pytest.approx(right.log_probs, rel=0, abs=tolerance)
        assert (left.processed_log_probs is None) == (right.processed_log_probs is None)
        if left.processed_log_probs is not None:
            assert left.processed_log_probs == pytest.approx(right.processed_log_probs, rel=0, abs=tolerance)
