"""Our generation engine as a contestant of `bench generate`, by its public interface.

Owns the making of a generator from a model folder in one process.
"""

from __future__ import annotations

import torch

from hybridflow.generation.engine import Generator
from hybridflow.generation.native_runner import NativeRunner
from hybridflow.generation.records import Completion, Prompt, SamplingParams
from hybridflow.generation.torch_runner import TorchRunner
from hybridflow.hybrid_engine import generation_stage
from hybridflow.kernels.native_build import Unavailable, native_library
from hybridflow.kernels.native_ops import set_threads
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.hf_import import load_hf
from hybridflow.models.weights import decoder_shard_map
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.world import World


class Ours:
    """`Generator.generate`; each token comes with its log-prob."""

    def __init__(self, folder: str, precision: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._generator = generator_of(folder, threads)

    def sample(self, prompts: list[list[int]], new_tokens: int, seed: int) -> int:
        return sum(len(one.response_ids) for one in self._generate(prompts, new_tokens, 1.0, seed))

    def greedy(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        return [list(one.response_ids) for one in self._generate(prompts, new_tokens, 0.0, 0)]

    def sampled(self, prompts: list[list[int]], new_tokens: int,
                seed: int) -> tuple[list[list[int]], list[list[float]]]:
        """What `sample` draws, with its log-probs."""
        completions = self._generate(prompts, new_tokens, 1.0, seed)
        return [list(one.response_ids) for one in completions], [list(one.log_probs) for one in completions]

    def _generate(self, prompts: list[list[int]], new_tokens: int, temperature: float, seed: int) -> list[Completion]:
        params = SamplingParams(max_new_tokens=new_tokens, temperature=temperature)
        return self._generator.generate([Prompt(i, 0, tuple(ids)) for i, ids in enumerate(prompts)], params, seed)


def generator_of(folder: str, threads: int) -> Generator:
    """A generator of the model in a folder, in the dtype of its files, in one process."""
    config = ModelConfig.from_hf_folder(folder)
    assert config.file_dtype is not None, "the folder has weights"
    world = World.single(torch.device("cpu"))
    mesh = Mesh(Grid.of(Layout()), world)
    stage = generation_stage(config, mesh, config.file_dtype)
    storages = {name: param.data for name, param in stage.named_parameters()}
    load_hf(folder, storages, decoder_shard_map(config, mesh.grid, Head.LANGUAGE_MODEL), world.rank)
    if isinstance(native_library(), Unavailable):
        runner = TorchRunner(stage, mesh.device, owns_weights=True)
    else:
        set_threads(threads)
        runner = NativeRunner(stage)
    generator = Generator(stage, mesh, config, runner)
    generator.wake()
    return generator
