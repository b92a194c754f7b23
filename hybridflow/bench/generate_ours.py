"""Our generation engine as a contestant of `bench generate`, by its public interface.

Owns the making of a generator from a model folder in one process.
"""

from __future__ import annotations

import torch

from hybridflow.generation.engine import Generator
from hybridflow.generation.limits import GenerationLimits
from hybridflow.generation.records import Completion, Prompt, SamplingParams
from hybridflow.generation.runners import make_runner
from hybridflow.hybrid_engine import generation_stage
from hybridflow.kernels.native_build import NativeLibrary, native_library
from hybridflow.kernels.native_ops import set_threads
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.hf_import import load_hf
from hybridflow.models.weights import decoder_shard_map
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.world import World

MOST_ROWS = 64
CACHE_BYTES = 1 << 30


class Ours:
    """`Generator.generate`; each token comes with its log-prob."""

    def __init__(self, folder: str, precision: str, threads: int) -> None:
        torch.set_num_threads(threads)
        if isinstance(native_library(), NativeLibrary):
            set_threads(threads)
        self._folder = folder
        self._generator = generator_of(folder)

    def sample(self, prompts: list[list[int]], new_tokens: int, seed: int) -> int:
        return sum(len(one.response_ids) for one in self._generate(prompts, new_tokens, 1.0, seed))

    def greedy(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        return [list(one.response_ids) for one in self._generate(prompts, new_tokens, 0.0, 0)]

    def sampled(self, prompts: list[list[int]], new_tokens: int,
                seed: int) -> tuple[list[list[int]], list[list[float]]]:
        """What `sample` draws, with its log-probs."""
        completions = self._generate(prompts, new_tokens, 1.0, seed)
        return [list(one.response_ids) for one in completions], [list(one.log_probs) for one in completions]

    def limit_rows(self, max_rows: int) -> None:
        """From now on at most so many sequences decode together."""
        self._generator = generator_of(self._folder, max_rows)

    def ragged(self, prompts: list[list[int]], lengths: list[int], at_once: int, seed: int) -> int:
        """Draw so many tokens after each prompt, `at_once` prompts a call, one call after the other."""
        params, drawn = SamplingParams(max_new_tokens=max(lengths)), 0
        asked = [Prompt(i, 0, tuple(ids), max_new_tokens=length)
                 for i, (ids, length) in enumerate(zip(prompts, lengths, strict=True))]
        for start in range(0, len(asked), at_once):
            drawn += sum(len(one.response_ids)
                         for one in self._generator.generate(asked[start : start + at_once], params, seed))
        return drawn

    def _generate(self, prompts: list[list[int]], new_tokens: int, temperature: float, seed: int) -> list[Completion]:
        params = SamplingParams(max_new_tokens=new_tokens, temperature=temperature)
        return self._generator.generate([Prompt(i, 0, tuple(ids)) for i, ids in enumerate(prompts)], params, seed)


def generator_of(folder: str, max_rows: int = MOST_ROWS) -> Generator:
    """A generator of the model in a folder, in the dtype of its files, in one process."""
    config = ModelConfig.from_hf_folder(folder)
    assert config.file_dtype is not None, "the folder has weights"
    world = World.single(torch.device("cpu"))
    mesh = Mesh(Grid.of(Layout()), world)
    stage = generation_stage(config, mesh, config.file_dtype)
    storages = {name: param.data for name, param in stage.named_parameters()}
    load_hf(folder, storages, decoder_shard_map(config, mesh.grid, Head.LANGUAGE_MODEL), world.rank)
    limits = GenerationLimits(max_batch_rows=max_rows, max_cache_bytes=CACHE_BYTES)
    generator = Generator(stage, mesh, config, make_runner(stage, mesh, owns_weights=True), limits)
    generator.wake()
    return generator
