"""The phase stop-watch, on a clock that the test moves."""

import pytest

from hybridflow.observe.metric_names import find_metric
from hybridflow.observe.phases import Phase, PhaseTimer
from hybridflow.observe.trace import Trace, TraceCategory


class Clock:
    """A clock that stands still until told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def run(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timer(clock):
    return PhaseTimer(Trace(), clock=clock)


def test_a_step_and_its_phases(timer, clock):
    with timer.step():
        with timer.phase(Phase.GENERATE):
            clock.run(2)
        clock.run(1)
        with timer.phase(Phase.UPDATE_ACTOR):
            clock.run(4)
        with timer.phase(Phase.UPDATE_ACTOR):
            clock.run(8)
    assert timer.take() == {"time/generate": 2, "time/update_actor": 12, "time/step": 15}
    assert timer.take() == {"time/step": 0}


def test_an_inner_phase_counts_once(timer, clock):
    with timer.step(), timer.phase(Phase.GENERATE):
        clock.run(1)
        with timer.phase(Phase.RESHARD):
            clock.run(16)
        clock.run(2)
    assert timer.take() == {"time/generate": 3, "time/reshard": 16, "time/step": 19}


def test_evaluation_is_apart(timer, clock):
    with timer.step():
        with timer.phase(Phase.GENERATE):
            clock.run(1)
        with timer.phase(Phase.EVALUATE):
            clock.run(2)
            with timer.phase(Phase.GENERATE):
                clock.run(32)
    with timer.phase(Phase.EVALUATE):
        clock.run(64)
    assert timer.take() == {"time/generate": 1, "time/evaluate": 98, "time/step": 1}


def test_a_raising_phase_is_timed_and_closed(timer, clock):
    with pytest.raises(OSError), timer.phase(Phase.REWARD):
        clock.run(1)
        raise OSError
    with timer.phase(Phase.VALUES):
        clock.run(2)
    assert timer.take() == {"time/reward": 1, "time/values": 2, "time/step": 0}


def test_phases_are_spans_of_the_trace():
    trace = Trace()
    timer = PhaseTimer(trace)
    trace.start()
    with timer.step(), timer.phase(Phase.EVALUATE), timer.phase(Phase.GENERATE):
        pass
    assert [event.name for event in trace.events] == ["generate", "evaluate", "step"]
    assert {event.category for event in trace.events} == {TraceCategory.PHASES}


def test_settles_so_that_queued_work_is_counted(clock):
    timer = PhaseTimer(Trace(), settle=lambda: clock.run(1), clock=clock)
    with timer.phase(Phase.VALUES):
        clock.run(4)
    assert timer.take()["time/values"] == 5


def test_every_phase_has_a_metric():
    assert all(find_metric(f"time/{phase.value}") is not None for phase in Phase)
