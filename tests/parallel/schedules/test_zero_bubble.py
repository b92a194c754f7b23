"""Zero-bubble schedules: golden texts, how little they idle, and that they stand up to messages and unequal costs."""

import pytest

from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.schedules.simulate import Costs, simulate
from hybridflow.parallel.schedules.timeline import Timeline
from hybridflow.parallel.schedules.training import build

GOLDEN_H1_3_4 = """\
stage 0: F0.0 F1.0 F2.0 B0.0 W0.0 F3.0 B1.0 W1.0 B2.0 W2.0 B3.0 W3.0
stage 1: F0.1 F1.1 B0.1 F2.1 B1.1 W0.1 F3.1 B2.1 W1.1 B3.1 W2.1 W3.1
stage 2: F0.2 B0.2 F1.2 B1.2 F2.2 B2.2 W0.2 F3.2 B3.2 W1.2 W2.2 W3.2"""
GOLDEN_V_2_2 = """\
stage 0: F0.0 F1.0 F0.3 B0.3 F1.3 B1.3 W0.3 B0.0 W1.3 B1.0 W0.0 W1.0
stage 1: F0.1 F0.2 F1.1 F1.2 B0.2 B0.1 B1.2 B1.1 W0.2 W0.1 W1.2 W1.1"""
GOLDEN_V_4_4 = """\
stage 0: F0.0 F1.0 F2.0 F3.0 F0.7 B0.7 F1.7 B1.7 F2.7 B2.7 F3.7 B3.7 W0.7 W1.7 W2.7 W3.7 B0.0 B1.0 W0.0 W1.0 B2.0 \
W2.0 B3.0 W3.0
stage 1: F0.1 F1.1 F2.1 F3.1 F0.6 F1.6 B0.6 F2.6 B1.6 F3.6 B2.6 W0.6 W1.6 B3.6 B0.1 B1.1 W2.6 W3.6 B2.1 W0.1 B3.1 \
W1.1 W2.1 W3.1
stage 2: F0.2 F1.2 F2.2 F0.5 F3.2 F1.5 F2.5 B0.5 F3.5 B1.5 W0.5 B0.2 B2.5 B1.2 B3.5 W1.5 B2.2 W0.2 B3.2 W2.5 W1.2 \
W3.5 W2.2 W3.2
stage 3: F0.3 F0.4 F1.3 F1.4 F2.3 F2.4 F3.3 F3.4 B0.4 B0.3 B1.4 B1.3 W0.4 B2.4 B2.3 B3.4 B3.3 W0.3 W1.4 W1.3 W2.4 \
W2.3 W3.4 W3.3"""


def timed(kind: ScheduleKind, pp: int, m: int, costs: tuple[float, float, float], hop: float = 0.0) -> Timeline:
    """With the costs of a whole stage; each of its chunks has its share."""
    chunks = kind.chunks(pp, 2 if kind is ScheduleKind.ZB_V else 1)
    return simulate(build(kind, chunks, m), Costs(*(cost / chunks.vpp for cost in costs), alpha=hop))


@pytest.mark.parametrize(
    ("kind", "pp", "m", "text"),
    [(ScheduleKind.ZB_H1, 3, 4, GOLDEN_H1_3_4), (ScheduleKind.ZB_V, 2, 2, GOLDEN_V_2_2),
     (ScheduleKind.ZB_V, 4, 4, GOLDEN_V_4_4)],
)
def test_golden_texts(kind: ScheduleKind, pp: int, m: int, text: str) -> None:
    assert kind.compute(kind.chunks(pp, 2 if kind is ScheduleKind.ZB_V else 1), m).to_text() == text


@pytest.mark.parametrize("pp", [2, 3, 4, 5, 8])
def test_h1_idles_as_its_paper_says(pp: int) -> None:
    """(pp - 1)(F + B - W), where 1F1B idles (pp - 1)(F + B + W)."""
    for m in (pp, pp + 1, 2 * pp + 1, 17, 40):
        assert timed(ScheduleKind.ZB_H1, pp, max(m, pp), (1, 1, 1)).makespan == 3 * max(m, pp) + pp - 1


@pytest.mark.parametrize("m", [4, 7, 8, 16])
def test_v_idles_the_least_that_is_possible_on_four_stages(m: int) -> None:
    """The last stage cannot start before 3 half-forwards are done; a third of 1F1B's bubble would be three units."""
    zero_bubble = timed(ScheduleKind.ZB_V, 4, m, (1, 1, 1))
    assert zero_bubble.makespan == 3 * m + 1.5
    assert zero_bubble.bubble_fraction < timed(ScheduleKind.ONE_F_ONE_B, 4, m, (1, 1, 1)).bubble_fraction / 3


@pytest.mark.parametrize("pp", [2, 3, 5, 8])
def test_v_idles_little_for_any_number_of_micro_batches(pp: int) -> None:
    for m in (1, 2, 3, 4, 5, 7, 9, 12, 17, 32):
        fill = max(2 * (pp - m), 0)  # with fewer micro-batches than stages the pipeline is never full
        assert timed(ScheduleKind.ZB_V, pp, m, (1, 1, 1)).makespan <= 3 * m + (pp - 1) + fill


def test_no_stage_waits_long_for_the_optimizer_step() -> None:
    """The step needs every stage's gradients; a stage waits for it no longer than it waited for its first forward."""
    for pp, m in ((2, 4), (4, 4), (4, 8), (4, 16), (8, 8), (8, 16)):
        h1, v = timed(ScheduleKind.ZB_H1, pp, m, (1, 1, 1)), timed(ScheduleKind.ZB_V, pp, m, (1, 1, 1))
        assert {h1.compute(stage)[-1].end for stage in range(pp)} == {h1.makespan}
        assert max(v.makespan - v.compute(stage)[-1].end for stage in range(pp)) <= (pp - 1) / 2


@pytest.mark.parametrize("m", [4, 7, 8, 16, 64])
def test_v_stands_up_to_messages_and_unequal_costs(m: int) -> None:
    """A hop of a twentieth of a chunk's F, and a B 1.5 times W, cost a fixed time, not some on each micro-batch."""
    assert timed(ScheduleKind.ZB_V, 4, m, (1, 1, 1), hop=0.025).makespan <= 3 * m + 3
    assert timed(ScheduleKind.ZB_V, 4, m, (1, 1.2, 0.8), hop=0.025).makespan <= 3 * m + 4
