"""What the contestants of `bench generate` share: the two models, the cells of the matrix, the prompts.

Owns how many bytes and operations a decode step needs at least. It runs no model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.models.config import Family, Head, ModelConfig
from hybridflow.models.hf_export import export_hf
from hybridflow.models.init import init_weights
from hybridflow.models.weights import EMBEDDING, canonical_shapes, decoder_shard_map
from hybridflow.parallel.mesh import Grid, Layout
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.world import World

MODELS = {
    "tiny": ModelConfig(Family.LLAMA, 4096, 256, 704, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=32),
    "small": ModelConfig(Family.LLAMA, 32000, 768, 2048, num_layers=12, num_heads=12, num_kv_heads=4, head_dim=64),
}  # 8.00 and 124.7 million parameters
BATCHES = (1, 8, 32, 64)
PROMPT_TOKENS = 32
NEW_TOKENS = 128


class Precision(Enum):
    """What weights, activations and the cache are stored as."""

    FP32 = "fp32"
    BF16 = "bf16"

    @property
    def dtype(self) -> torch.dtype:
        return {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}[self]


@dataclass(frozen=True)
class Cell:
    """One entry of the matrix. Example: `Cell("tiny", Precision.FP32, 8, 128)` is 8 prompts of 32, 128 tokens each."""

    model: str
    precision: Precision
    batch: int
    new_tokens: int = NEW_TOKENS

    def __str__(self) -> str:
        return f"{self.model} {self.precision.value} b{self.batch}"

    @property
    def config(self) -> ModelConfig:
        return MODELS[self.model]

    @property
    def tokens(self) -> int:
        """Sampled in a round."""
        return self.batch * self.new_tokens

    @property
    def matrix_numel(self) -> int:
        """Of weights that every token is multiplied with: all matrices but the embedding, of which a row is read."""
        shapes = canonical_shapes(self.config, Head.LANGUAGE_MODEL)
        return sum(prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name != EMBEDDING)

    @property
    def step_bytes(self) -> int:
        """Read at least by a step in the middle: every matrix once, and the keys and values of every sequence."""
        config = self.config
        cached = PROMPT_TOKENS + self.new_tokens // 2
        kept = 2 * config.num_layers * config.num_kv_heads * config.head_dim * cached * self.batch
        return (self.matrix_numel + kept) * self.precision.dtype.itemsize

    @property
    def step_flops(self) -> int:
        """Done at least by a step in the middle: products with the matrices, with keys and with values."""
        config = self.config
        cached = PROMPT_TOKENS + self.new_tokens // 2
        attention = 4 * config.num_layers * config.num_heads * config.head_dim * cached
        return (2 * self.matrix_numel + attention) * self.batch

    @property
    def prefill_flops(self) -> int:
        """Done at least for the prompts: the head's product is of their last tokens alone."""
        head = self.config.vocab_size * self.config.hidden_size
        attention = 2 * self.config.num_layers * self.config.num_heads * self.config.head_dim * PROMPT_TOKENS**2
        return (2 * (self.matrix_numel - head) * PROMPT_TOKENS + 2 * head + attention) * self.batch


def prompts(cell: Cell, number: int) -> list[list[int]]:
    """The prompts of round `number`, random tokens: new ones each time, so that no cache of prefixes has them."""
    draw = torch.Generator().manual_seed(number)
    return torch.randint(cell.config.vocab_size, (cell.batch, PROMPT_TOKENS), generator=draw).tolist()


def write_model(config: ModelConfig, folder: Path, precision: Precision, seed: int = 0,
                head: Head = Head.LANGUAGE_MODEL) -> None:
    """A Hugging Face folder of random weights; those of bf16 are those of fp32, rounded."""
    world, grid = World.single(torch.device("cpu")), Grid.of(Layout())
    shard_map = decoder_shard_map(config, grid, head)
    storages = storages_of(shard_map)
    init_weights(storages, shard_map, world.rank, seed, config)
    export_hf(folder, replace(config, file_dtype=precision.dtype), shard_map, storages, world, dtype=precision.dtype)


def storages_of(shard_map: ShardMap) -> dict[str, Tensor]:
    """fp32 tensors for every storage of a map of one rank."""
    sizes: dict[str, int] = {}
    for shard in shard_map.shards(0):
        sizes[shard.storage] = max(sizes.get(shard.storage, 0), shard.end_of(shard.box))
    return {name: torch.empty(size) for name, size in sizes.items()}
