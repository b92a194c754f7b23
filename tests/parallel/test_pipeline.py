"""The executor against one process: gradients, losses, outputs, order of events, memory held."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hybridflow.bench.live_bytes import LiveBytes
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.pipeline import Events, PipelineRunner
from hybridflow.parallel.schedules.actions import Action, Kind, Schedule
from hybridflow.parallel.schedules.builders import ScheduleKind, forward_only
from hybridflow.parallel.schedules.chunks import ChunkOrder, Chunks
from hybridflow.parallel.schedules.messages import with_messages
from hybridflow.parallel.schedules.training import build
from hybridflow.parallel.schedules.updates import with_updates
from hybridflow.parallel.world import World
from tests.parallel.chunked_model import CPU, HIDDEN, Gradients, Ids, Stage, loss, micro_batches, whole
from tests.ranks import run_ranks

TOKENS = (7, 1, 5, 0, 2, 9, 4)  # of each micro-batch: ragged
COUNTS = (1, 3, 4, 7)
RESHARDS = 2
TOKENS_OF_EACH = 40  # where memory is counted
MESSAGE_BYTES = TOKENS_OF_EACH * HIDDEN * 8
KINDS = ((ScheduleKind.GPIPE, 1), (ScheduleKind.ONE_F_ONE_B, 1), (ScheduleKind.INTERLEAVED, 2),
         (ScheduleKind.ZB_H1, 1), (ScheduleKind.ZB_V, 2))


def one_by_one(chunks: Chunks, m: int, split: bool) -> Schedule:
    """Each micro-batch all the way, before the next one; with the weight gradients of all at the end, if split."""
    stages = []
    for stage in range(chunks.pp):
        mine, order = chunks.of_stage(stage), []
        for i in range(m):
            order += [Action(Kind.F, i, chunk) for chunk in mine] + [Action(Kind.B, i, chunk) for chunk in mine[::-1]]
        if split:
            order += [Action(Kind.W, i, chunk) for i in range(m) for chunk in mine[::-1]]
        stages.append(tuple(order))
    return Schedule(chunks, m, tuple(stages))


def schedules(pp: int, m: int) -> list[Schedule]:
    """Everything that can train `m` micro-batches on `pp` stages, with a bucket for each chunk, and its messages."""
    buckets_of = lambda chunks: [chunks.of_stage(stage)[::-1] for stage in range(pp)]  # noqa: E731
    found = []
    for kind, vpp in (*KINDS, (ScheduleKind.INTERLEAVED, 3)):
        chunks = kind.chunks(pp, 1 if pp == 1 else vpp)
        found.append(build(kind, chunks, m, buckets_of(chunks), [RESHARDS] * pp))
    for chunks in (Chunks(pp), Chunks(pp, 2), Chunks(pp, 2, ChunkOrder.V)):
        for split in (False, True):
            compute = with_messages(one_by_one(chunks, m, split))
            found.append(with_updates(compute, buckets_of(chunks), [RESHARDS] * pp))
    return found


class Log:
    """What happened on a stage, in order: actions and calls."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def span(self, name: str):
        self.lines.append(name)
        return nullcontext()

    def events(self, at_reduce) -> Events:
        def reduce(bucket: int) -> None:
            self.lines.append(f"reduce {bucket}")
            at_reduce(bucket)

        return Events(lambda buckets: self.lines.append(f"arm {buckets}"), reduce, lambda: self.lines.append("step"),
                      lambda bucket: self.lines.append(f"reshard {bucket}"))


def expected_log(schedule: Schedule, stage: int) -> list[str]:
    actions, lines = schedule.stages[stage], []
    for place, action in enumerate(actions):
        behind = []
        while actions[place + 1 + len(behind) : place + 2 + len(behind)] and (
                actions[place + 1 + len(behind)].kind is Kind.REDUCE):
            behind.append(actions[place + 1 + len(behind)].index)
        if action.kind in (Kind.B, Kind.W) and behind:
            lines.append(f"arm {tuple(behind)}")
        lines.append(str(action))
        called = {Kind.REDUCE: f"reduce {action.index}", Kind.STEP: "step", Kind.RESHARD: f"reshard {action.index}"}
        lines += [called[action.kind]] if action.kind in called else []
    return lines


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def trains_like_the_whole(mesh: Mesh, schedule: Schedule, recompute: bool = False) -> None:
    tokens = TOKENS[:schedule.num_micro_batches]
    want, _, losses = whole(tokens)
    stage, log = Stage(schedule.chunks, mesh.pp.index), Log()
    gradients = Gradients(stage)
    mine = schedule.chunks.of_stage(mesh.pp.index)[::-1]

    def at_reduce(bucket: int) -> None:
        for name, grad in gradients.of(mine[bucket]).items():
            close(grad, want[name])

    def recomputed(*args):
        return checkpoint(stage, *args, use_reentrant=False)

    runner = PipelineRunner(recomputed if recompute else stage, mesh, schedule.chunks, HIDDEN, torch.float64,
                            weight_grads=gradients.weight_grads)
    results = runner.run(schedule, micro_batches(tokens), loss, log.events(at_reduce), log)
    assert log.lines == expected_log(schedule, mesh.pp.index)
    assert set().union(*map(stage.names_of, mine)) == dict(stage.named_parameters()).keys()
    for chunk in mine:
        for name, grad in gradients.of(chunk).items():
            close(grad, want[name])
    assert len(results) == (len(tokens) if mesh.pp.index == schedule.chunks.head_stage else 0)
    for metrics, value in zip(results, losses, strict=False):
        assert not metrics["loss"].requires_grad
        close(metrics["loss"], value)


def answers_like_the_whole(mesh: Mesh, chunks: Chunks, m: int) -> None:
    _, outputs, losses = whole(TOKENS[:m])
    runner = PipelineRunner(Stage(chunks, mesh.pp.index), mesh, chunks, HIDDEN, torch.float64)
    schedule, batches = with_messages(forward_only(chunks, m)), micro_batches(TOKENS[:m])
    got, metrics = runner.run(schedule, batches), runner.run(schedule, batches, loss)
    assert len(got) == len(metrics) == (m if mesh.pp.index == chunks.head_stage else 0)
    for out, of_loss, want, value in zip(got, metrics, outputs, losses, strict=False):
        assert not out.requires_grad
        close(out, want)
        close(of_loss["loss"], value)


def everything(world: World, layout: Layout) -> None:
    mesh = Mesh(Grid.of(layout), world)
    for m in COUNTS:
        for schedule in schedules(layout.pp, m):
            trains_like_the_whole(mesh, schedule)
        for chunks in (Chunks(layout.pp), Chunks(layout.pp, 2), Chunks(layout.pp, 2, ChunkOrder.V)):
            answers_like_the_whole(mesh, chunks, m)
    for schedule in schedules(layout.pp, 3):
        trains_like_the_whole(mesh, schedule, recompute=True)


def test_one_stage():
    everything(World.single(CPU), Layout())


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=4), Layout(pp=2, dp=2)], ids=str)
def test_several_stages(layout: Layout):
    run_ranks(layout.size, everything, layout)


def sequence_parallel_shapes(world: World) -> None:
    """Messages are `[tokens/tp, hidden]`: each rank of tp sends its own part."""
    mesh = Mesh(Grid.of(Layout(tp=2, pp=2)), world)
    batches = [Ids(torch.arange(4)), Ids(torch.arange(8))]

    def stage(x, micro_batch, chunk):
        if chunk != 0:
            return x * 2.0
        part = micro_batch.input_ids.chunk(2)[mesh.tp.index].double()
        return part[:, None].expand(-1, HIDDEN)  # not contiguous: the executor must cope

    runner = PipelineRunner(stage, mesh, Chunks(2), HIDDEN, torch.float64, sequence_parallel=True)
    got = runner.run(with_messages(forward_only(Chunks(2), 2)), batches)
    if mesh.is_last_stage:
        assert [out[:, 0].tolist() for out in got] == [
            [2.0 * i for i in batch.input_ids.chunk(2)[mesh.tp.index].tolist()] for batch in batches
        ]


def test_sequence_parallel_messages():
    run_ranks(4, sequence_parallel_shapes)


def peaks(world: World, counts: tuple[int, int]) -> dict[str, dict[int, int]]:
    """Most bytes alive at once during a run on this rank, by schedule and number of equal micro-batches."""
    pp, found = world.size, {}
    mesh = Mesh(Grid.of(Layout(pp=pp)), world)
    kinds = {kind.value: (kind, vpp) for kind, vpp in KINDS if pp > 1 or vpp == 1}
    makes = {name: (kind.chunks(pp, vpp), partial(build, kind)) for name, (kind, vpp) in kinds.items()}
    forward = lambda chunks, m: with_messages(forward_only(chunks, m))  # noqa: E731
    makes |= {"forward": (Chunks(pp), forward), "forward v": (Chunks(pp, 2, ChunkOrder.V), forward)}
    for name, (chunks, make) in makes.items():
        found[name] = {}
        for m in counts:
            stage = Stage(chunks, mesh.pp.index)
            gradients, batches = Gradients(stage), micro_batches((TOKENS_OF_EACH,) * m)
            runner = PipelineRunner(stage, mesh, chunks, HIDDEN, torch.float64, weight_grads=gradients.weight_grads)
            with LiveBytes() as live:
                runner.run(make(chunks, m), batches, lambda out, batch: (loss(out, batch)[0], {}))
            found[name][m] = live.peak
    return found


def test_memory_does_not_grow_with_the_micro_batches():
    few, many = counts = 12, 36
    for found in (peaks(World.single(CPU), counts), *run_ranks(4, peaks, counts)):
        gpipe = found.pop("gpipe")
        assert gpipe[many] > 2.8 * gpipe[few]  # so it would be seen
        for name, by_m in found.items():
            # The order of zb-v is found by a search, and is not quite the same for every count: two messages more.
            more = 2 * MESSAGE_BYTES if name == "zb-v" else 0
            assert abs(by_m[few] - by_m[many]) <= more, (name, by_m)


def test_what_does_not_belong_together():
    mesh = Mesh(Grid.of(Layout()), World.single(CPU))
    stage, batches = Stage(Chunks(), 0), micro_batches(TOKENS)
    runner = PipelineRunner(stage, mesh, Chunks(), HIDDEN, torch.float64)
    gpipe = lambda chunks, m: build(ScheduleKind.GPIPE, chunks, m)  # noqa: E731
    with pytest.raises(ValueError, match=r"over Chunks\(pp=2.* was given 7 micro-batches over Chunks\(pp=1"):
        runner.run(gpipe(Chunks(2), 7), batches, loss)
    with pytest.raises(ValueError, match="of 5 micro-batches over .* was given 7 micro-batches"):
        runner.run(gpipe(Chunks(), 5), batches, loss)
    with pytest.raises(ValueError, match="needs a loss: use forward_only"):
        runner.run(gpipe(Chunks(), 7), batches)
    with pytest.raises(ValueError, match="chunks on 2 stages do not fit a mesh with pp 1"):
        PipelineRunner(stage, mesh, Chunks(2), HIDDEN, torch.float64)
