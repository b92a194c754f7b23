"""A forward that gave answers is not computed again by the update that follows, and everything is as if it were."""

from __future__ import annotations

import torch

from hybridflow.algorithms.objectives import CriticObjective
from hybridflow.engine.native import TrainEngine
from hybridflow.engine.options import EngineOptions, TrainOptions
from hybridflow.micro_batch import MicroBatch, Sample, TokenColumns
from hybridflow.models.config import Family, Head, ModelConfig
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.optimizer import LrSchedule
from hybridflow.parallel.optimizer_state import AdamWSettings
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.world import World

CPU = torch.device("cpu")
CONFIG = ModelConfig(Family.LLAMA, 11, 16, 24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
                     initializer_range=0.3)
FIRST, SECOND = [Sample((1, 2), (3, 4)), Sample((1, 2), (5,))], [Sample((7,), (8, 9, 10))]


def make_engine(**options) -> tuple[TrainEngine, list[int]]:
    """The engine, and a list that gets an entry for each forward of its embedding."""
    engine = TrainEngine(CONFIG, Mesh(Grid.of(Layout()), World.single(CPU)), Head.VALUE,
                         EngineOptions(torch.float64, **options), train=TrainOptions(), adamw=AdamWSettings(),
                         lr=LrSchedule(0.1))
    engine.draw(0)
    ran: list[int] = []
    engine.stage.embed.register_forward_hook(lambda *_: ran.append(1))
    return engine, ran


def packed(*parts: list[Sample], with_columns: bool) -> list[MicroBatch]:
    """Micro-batches as they are scored, or learned from."""
    found = []
    for part in parts:
        count = sum(len(sample.response) for sample in part)
        ones = torch.ones(count, dtype=torch.float64)
        columns = TokenColumns(weight=ones, returns=ones, old_values=ones) if with_columns else TokenColumns()
        found.append(MicroBatch.pack(part, columns, device=CPU, share_prompts=True))
    return found


def learn(engine: TrainEngine, *parts: list[Sample]):
    objective = CriticObjective(value_clip=None)
    return engine.train(packed(*parts, with_columns=True), lambda out, columns, rows: objective(out, columns))


def test_the_first_micro_batch_is_computed_once():
    (plain, ran_plain), (keeping, ran) = make_engine(), make_engine()
    scored = packed(FIRST, SECOND, with_columns=False)
    answers = [plain.forward(scored), keeping.forward(scored, keep_first=True)]
    for one, other in zip(*answers, strict=True):
        assert torch.equal(one, other) and not other.requires_grad
    updates = [learn(plain, FIRST, SECOND), learn(keeping, FIRST, SECOND)]
    assert (len(ran_plain), len(ran)) == (4, 3)
    assert updates[0] == updates[1]
    assert all(torch.equal(plain.storages[name], weight) for name, weight in keeping.storages.items())


def test_other_tokens_are_computed_and_what_was_kept_is_let_go():
    (plain, _), (keeping, ran) = make_engine(), make_engine()
    keeping.forward(packed(FIRST, with_columns=False), keep_first=True)
    assert learn(keeping, SECOND) == learn(plain, SECOND)
    assert len(ran) == 2 and keeping._kept is None
    assert learn(keeping, FIRST) == learn(plain, FIRST)
    assert len(ran) == 3


def test_nothing_is_kept_of_several_chunks_or_where_weights_leave():
    for options in ({"chunks": Chunks(1, 2)}, {"offload": True}):
        engine, _ = make_engine(**options)
        with engine.on_device():
            engine.forward(packed(FIRST, with_columns=False), keep_first=True)
            assert engine._kept is None
