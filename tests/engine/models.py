"""Small models, batches and gradient pictures shared by the engine tests."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.engine.native import TrainEngine
from hybridflow.engine.options import EngineOptions, TrainOptions
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.models.config import Family, Head, ModelConfig
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.optimizer import LrSchedule
from hybridflow.parallel.optimizer_state import AdamWSettings
from hybridflow.parallel.world import World

VOCAB = 37
PLAIN = TrainOptions()


def tiny_model(**changes: object) -> ModelConfig:
    """Four layers, 4 query and 2 key-value heads, untied; vocabulary and lengths divide nothing."""
    shape = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_layers=4, num_heads=4, num_kv_heads=2,
                 head_dim=4, initializer_range=0.3)
    return ModelConfig(Family.LLAMA, **{**shape, **changes})


def train_engine(world: World, layout: Layout, model: ModelConfig, head: Head, *, sequence_parallel: bool = False,
                 train: TrainOptions = PLAIN, vpp: int = 1, layers_per_chunk: tuple[int, ...] | None = None,
                 dtype: torch.dtype = torch.float64, temperature: float = 1.0) -> TrainEngine:
    options = EngineOptions(dtype, sequence_parallel, layers_per_chunk, temperature,
                            train.schedule.chunks(layout.pp, vpp))
    engine = TrainEngine(model, Mesh(Grid.of(layout), world), head, options, train=train,
                         adamw=AdamWSettings(clip_grad_norm=None), lr=LrSchedule(1e-3))
    engine.draw(seed=7)
    return engine


def ragged_samples(rows: int, seed: int = 0) -> tuple[Sample, ...]:
    """Rows with 1-5 prompt and 1-6 response tokens."""
    draw = random.Random(seed)
    ids = lambda low, high: tuple(draw.randrange(VOCAB) for _ in range(draw.randint(low, high)))  # noqa: E731
    return tuple(Sample(ids(1, 5), ids(1, 6)) for _ in range(rows))


def ragged_batch(world: World, rows: int, seed: int = 0) -> Batch:
    """Rows with random columns, every one at home on rank 0 to make them travel."""
    samples = ragged_samples(rows, seed)
    mine = samples if world.rank == 0 else ()
    targets = sum(len(sample.response) for sample in mine)
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(targets, generator=generator, dtype=torch.float64)  # noqa: E731
    columns = TokenColumns(old_log_probs=draw() - 3, ref_log_probs=draw() - 3, rollout_log_probs=draw() - 3,
                           advantages=draw(), returns=draw(), old_values=draw())
    home = (tuple(range(rows)), *((),) * (world.size - 1))
    return Batch(tuple(len(s.prompt) for s in samples), tuple(len(s.response) for s in samples),
                 tuple(range(rows)), home, mine, columns)


def canonical_grads(engine: TrainEngine) -> dict[tuple, Tensor]:
    """This rank's main gradients by the box of the canonical tensor that they are of."""
    flat = {slot.name: bucket.grads[slot.start:slot.end]
            for bucket in engine.grads.buckets for slot in bucket.slots}
    shapes = {name: param.shape for name, param in engine.stage.named_parameters()}
    storages = {name: grad.view(shapes[name]) for name, grad in flat.items()}
    return {shard.box: shard.view(storages).clone() for shard in engine.shard_map.shards(engine.mesh.world.rank)}


def assemble(engine: TrainEngine, ranks: list[dict]) -> dict[str, Tensor]:
    """Whole canonical gradients from every rank's boxes, which must agree where they overlap."""
    whole = {name: torch.full(shape, float("nan"), dtype=torch.float64)
             for name, shape in engine.shard_map.shapes.items()}
    for boxes in ranks:
        for box, grad in boxes.items():
            place = whole[box.name][box.slices]
            known = ~place.isnan()
            torch.testing.assert_close(grad[known], place[known], rtol=0, atol=1e-10)
            place.copy_(grad)
    return whole
