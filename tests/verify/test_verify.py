"""The matrix is green where our engine is right, and planted faults turn it red."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from hybridflow.models.recompute import Recompute
from hybridflow.parallel.box import Box
from hybridflow.parallel.mesh import Layout
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.verify.combinations import MICRO_BATCHES, TOKENS, Combination, TinyModel
from hybridflow.verify.gradients import OURS, Parts, Step, whole
from hybridflow.verify.matrix import report, verdict, verify
from tests.verify import faulty

TP4 = Combination(Layout(4), sequence_parallel=True, micro_batching=TOKENS, bucket_bytes=4096)
PP2 = Combination(Layout(pp=2, dp=2), ScheduleKind.INTERLEAVED, 2, zero_stage=1, model=TinyModel.TIED,
                  micro_batching=MICRO_BATCHES[0])
CP2 = Combination(Layout(pp=2, cp=2), ScheduleKind.ZB_V, 2, zero_stage=2, recompute=Recompute.FULL,
                  model=TinyModel.CRITIC)
RIGHT = (TP4, PP2, CP2)


def verdicts(parts: Parts, *combinations: Combination) -> list:
    return list(verify(4, combinations, parts))


def test_our_engine_is_right_on_any_cut_and_says_so():
    lines: list[str] = []
    found = verdicts(OURS, *RIGHT)
    assert [one.fault for one in found] == ["", "", ""]
    assert all(one.right and one.absolute < 1e-12 for one in found)
    assert report(iter(found), 3, lines.append) == 0
    assert "3 of 3 combinations" in lines[-1]
    assert all(str(one).split()[5] in line for one, line in zip(RIGHT, lines[1:]))


@pytest.mark.parametrize("parts, wrong, unharmed", [
    (Parts(role=faulty.local_counts), (PP2,), TP4),  # a missed division: by the tokens of this replica alone
    (Parts(role=faulty.mean_of_means), (TP4, PP2, CP2), None),
    (Parts(engine=faulty.tied_summed_twice), (PP2,), TP4),
    (Parts(engine=faulty.kv_counted_twice), (TP4,), PP2),
    (Parts(engine=faulty.never_zeroed), (TP4, PP2), None),
], ids=["missed division", "mean of means", "double reduce of a tied weight", "replicated heads twice", "not zeroed"])
def test_a_planted_fault_is_found(parts: Parts, wrong: tuple[Combination, ...], unharmed: Combination | None):
    for one in verdicts(parts, *wrong):
        assert not one.right and not one.absolute <= 1e-9 and one.crash is None, one
        assert one.worst, one
    if unharmed is not None:
        [one] = verdicts(parts, unharmed)
        assert one.right, one


def test_a_crash_is_a_row_and_the_next_combination_runs():
    found = verdicts(Parts(engine=faulty.one_rank_raises), PP2, TP4)
    lines: list[str] = []
    assert report(iter(found), 2, lines.append) == 2
    assert all(one.fault == "crash: ZeroDivisionError: planted" for one in found)
    assert "rank 1 of 4 raised" in "\n".join(lines)


def step(value: float, norm: float = 1.0, loss: float = 2.0, at: tuple[int, int] = (0, 4), size: int = 8,
         others: tuple[str, ...] = ()) -> Step:
    """What is under test is `w`; the `others` are right."""
    grads = {Box("w", at[:1], at[1:]): np.full(at[1] - at[0], value)}
    return Step({"loss": loss}, norm, grads | {Box(name, (0,), (3,)): np.ones(3) for name in others}, size)


@pytest.mark.parametrize("others", [(), ("a",), ("a", "z")], ids=str)
def test_what_is_compared(others: tuple[str, ...]):
    make = partial(step, others=others)
    alone = make(1.0)
    right = [make(1.0, at=(0, 2)), make(1.0, at=(2, 4))]
    judge = lambda *ranks: verdict(Combination(), alone, [[one, one] for one in ranks])  # noqa: E731
    assert judge(*right).right
    assert judge(make(1.0), *right).right, "copies agree"
    assert judge(right[0]).fault == "w", "a missing part"
    assert judge(make(1.0 + 2e-9)).fault == "w"
    assert judge(make(np.nan)).fault == "w"
    assert judge(make(np.nan), make(1.0)).fault == judge(make(1.0), make(np.nan)).fault == "w", "one copy is NaN"
    assert judge(make(1.0), make(1.0 + 5e-10)).fault == "w", "copies differ"
    assert judge(make(1.0, norm=1.1)).fault == judge(make(1.0, loss=np.nan)).fault == "loss sums or gradient norm"
    assert verdict(Combination(), alone, [[alone, make(1.0, size=9)]]).fault.startswith("reduced bytes")
    assert verdict(Combination(), alone, [[alone, make(3.0)]]).fault == "w", "the second step"
    assert verdict(Combination(), alone, [[make(np.nan), alone]]).fault == "w", "the first step, the second is right"


def test_a_tensor_that_no_rank_has_is_wrong_wherever_it_stands():
    alone = step(1.0, others=("a", "z"))
    for name in ("a", "w", "z"):
        lacking = Step(alone.sums, alone.grad_norm, {box: g for box, g in alone.grads.items() if box.name != name}, 8)
        found = verdict(Combination(), alone, [[lacking, lacking]])
        assert not found.right and found.fault == name and np.isnan(found.absolute)


def test_a_copy_that_differs_is_not_hidden_by_the_next():
    found = whole([{Box("w", (0,), (2,)): np.array(values)} for values in ([1.0, 2], [1.0, 3], [1.0, 3])], {"w": (2,)})
    assert found["w"][0] == 1.0 and np.isnan(found["w"][1])
