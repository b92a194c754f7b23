"""The parts of `bench overlap`: the arithmetic on spans, its verdicts, and that training and generation do meet."""

import time
from contextlib import closing
from pathlib import Path

import pytest

from hybridflow.bench.overlap import Measured, lagging, unseen, wrong
from hybridflow.bench.overlap_case import (
    CASES,
    COLOCATED,
    IN_TURN,
    ONE_STEP_OFF,
    PARTIAL,
    WORLD,
    Case,
    config_of,
    ranks_of,
    write_data,
)
from hybridflow.bench.overlap_spans import StepSeconds, common, merged, seconds, step_seconds
from hybridflow.bench.stand_in import RIDGE, StandIn
from hybridflow.config.command import Command
from hybridflow.config.validate import validate
from hybridflow.observe.trace import TraceCategory, TraceEvent
from hybridflow.observe.trace_gather import gather_events
from hybridflow.parallel.shared_count import SharedCount
from hybridflow.parallel.world import World
from hybridflow.trainer.inputs import Inputs
from tests.ranks import run_ranks

PATIENCE_S = 60.0


def test_moments_are_counted_once():
    assert merged([(5, 6), (1, 3), (0, 2), (3, 4)]) == [(0, 4), (5, 6)]
    assert common([(0, 3), (5, 9)], [(2, 6)]) == [(2, 3), (5, 6)]
    assert common([(0, 2), (1, 4)], [(3, 5), (3, 4)]) == [(3, 4)] and common([(0, 1)], [(1, 2)]) == []
    assert seconds([(0, 2_000_000_000), (1_000_000_000, 3_000_000_000)]) == 3.0


def span(name: str, start: int, end: int) -> TraceEvent:
    return TraceEvent(name, TraceCategory.PHASES, start * 10**9, (end - start) * 10**9)


def traced(*, ahead: bool) -> list[StepSeconds]:
    learner = [span("reference", 0, 2), span("update_actor", 2, 6), span("generate", 6, 7), span("step", 0, 8),
               span("update_actor", 11, 12), span("step", 10, 15)]
    maker = [span("generate", 1, 4), span("step", 0, 8), span("generate", 12, 14), span("step", 10, 15)]
    return step_seconds({0: learner, 1: maker}, generating=(1,), training=(0,), ahead=ahead)


def test_the_steps_of_all_ranks_are_taken_apart():
    first, second = traced(ahead=True)
    assert first == StepSeconds(generate=3, score=2, update=4, overlap=2, shorter=3, beside=3) and first.total == 9
    assert second == StepSeconds(generate=2, score=0, update=1, overlap=0, shorter=1, beside=0)


def test_what_is_scored_of_a_batch_that_is_still_generated_takes_no_time_of_its_own():
    first, _ = traced(ahead=False)
    assert (first.score, first.beside) == (1, 0)


def measured(wall: float, overlap: float, mixed: int = 0) -> Measured:
    return Measured(wall, [StepSeconds(2.0, 1.0, 1.0, overlap, 1.0, overlap)], [], [mixed])


def test_overlapping_must_gain_and_be_seen():
    cases = {COLOCATED: measured(4.5, 0.0), IN_TURN: measured(4.5, 0.0), ONE_STEP_OFF: measured(3.9, 1.0),
             PARTIAL: measured(3.0, 0.5, mixed=2)}
    assert lagging(cases) == []
    assert len(lagging(cases | {ONE_STEP_OFF: measured(4.0, 1.0)})) == 2
    assert lagging(cases | {PARTIAL: measured(3.0, 0.5)}) == [f"{PARTIAL}: no answer was interrupted"]
    (told,) = unseen(cases | {PARTIAL: measured(3.0, 0.0)})
    assert told == f"{PARTIAL}: nobody generates while others learn (overlap 0)"


def test_cases_that_compute_something_else_are_told():
    def steps(*stale: float, loss: float = 1.0, answer: int = 7) -> list:
        return [({"rollout/staleness_mean": one, "rollout/staleness_max": one, "policy/loss": loss}, {0: (answer,)})
                for one in stale]

    right = {COLOCATED: steps(0, 0), IN_TURN: steps(0, 0), ONE_STEP_OFF: steps(0, 1), PARTIAL: steps(0, 2)}
    assert wrong(right) == []
    for case, other in ((IN_TURN, steps(0, 0, loss=1.1)), (IN_TURN, steps(0, 0, answer=8)), (ONE_STEP_OFF, steps(1, 1)),
                        (ONE_STEP_OFF, steps(0, 2)), (PARTIAL, steps(0, 3))):
        assert wrong(right | {case: other}), (case, other)


def test_the_roofline():
    device = StandIn(0.5)
    assert [device.forward_seconds(tokens) for tokens in (0, 1, RIDGE, 3 * RIDGE)] == [0.5, 0.5, 0.5, 1.5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overlap")
    write_data(folder)
    return folder


def test_the_cases_are_valid_and_where_they_say(folder: Path):
    for name, overrides in CASES.items():
        config = config_of(folder, "tiny", overrides)
        assert validate(config, WORLD, Command.TRAIN) == []
        apart = ((2, 3), (0, 1))
        assert ranks_of(config) == (((0, 1, 2, 3),) * 2 if name.startswith(COLOCATED) else apart)


class Meeting(StandIn):
    """A device on which a step of generation waits for a backward to begin, and a backward for a step of generation:
    they go on only if both are under way at once.
    """

    def __init__(self, world: World) -> None:
        super().__init__(0.0)
        self.generation, self.learning = world.count(), world.count()
        self.is_on = False

    def generate(self, tokens: int, started: float) -> None:
        self._meet(self.generation, self.learning)

    def backward(self, tokens: int, started: float) -> None:
        self._meet(self.learning, self.generation)

    def _meet(self, mine: SharedCount, others: SharedCount) -> None:
        if not self.is_on:
            return
        mine.fetch_add(1)
        until = time.monotonic() + PATIENCE_S
        while not others.fetch_add(0):
            assert time.monotonic() < until, "generation and the update never run at the same time"
            time.sleep(0.001)


def meet(world: World, folder: Path, overrides: tuple[str, ...]) -> dict[int, list[TraceEvent]] | None:
    device = Meeting(world)
    case = Case(Inputs.read(config_of(folder, "tiny", overrides)), world, device)
    with closing(case.trainer):
        device.is_on = True  # what is begun ahead has nobody to meet
        case.trace()
        case.step()
        return gather_events(world, case.trainer.trace)


def test_ranks_generate_while_others_update_the_actor(folder: Path):
    events, *_ = run_ranks(WORLD, meet, folder, CASES[ONE_STEP_OFF])
    (step,) = step_seconds(events, generating=(2, 3), training=(0, 1), ahead=True)
    assert 0 < step.overlap <= step.shorter
