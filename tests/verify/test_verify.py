"""The matrix is green where our engine is right, and planted faults turn it red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from hybridflow.models.recompute import Recompute
from hybridflow.parallel.box import Box
from hybridflow.parallel.mesh import Layout
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.verify.combinations import MICRO_BATCHES, TOKENS, Combination, Deep, Offload, TinyModel
from hybridflow.verify.gradients import OURS, Parts, Step, whole
from hybridflow.verify.matrix import report, verdict, verify
from tests.ranks import kept_ranks
from tests.verify import faulty

TP4 = Combination(Layout(4), sequence_parallel=True, micro_batching=TOKENS, bucket_bytes=4096)
PP2 = Combination(Layout(pp=2, dp=2), ScheduleKind.INTERLEAVED, 2, zero_stage=1, model=TinyModel.TIED,
                  micro_batching=MICRO_BATCHES[0])
CP2 = Combination(Layout(pp=2, cp=2), ScheduleKind.ZB_V, 2, zero_stage=2, recompute=Recompute.FULL,
                  model=TinyModel.CRITIC, recompute_layers=1, deep=Deep.LAST, some_failed=True)
ZB = Combination(Layout(tp=2, pp=2), ScheduleKind.ZB_H1, deep=Deep.LAST, offload=Offload.ROLE)
CP4 = Combination(Layout(cp=2, dp=2), offload=Offload.OPTIMIZER, zero_stage=1)
RIGHT = (TP4, PP2, CP2, ZB, CP4)


def verdicts(parts: Parts, *combinations: Combination) -> list:
    return list(verify(kept_ranks(4), combinations, parts))


def test_our_engine_is_right_on_any_cut_and_says_so():
    lines: list[str] = []
    found = verdicts(OURS, *RIGHT)
    assert [one.fault for one in found] == [""] * 5
    assert all(one.right and one.absolute < 1e-12 for one in found)
    assert report(iter(found), 5, lines.append) == 0
    assert "5 of 5 combinations" in lines[-1]
    assert all(str(one).split()[5] in line for one, line in zip(RIGHT, lines[1:]))


@pytest.mark.parametrize("parts, wrong, unharmed", [
    (Parts(role=faulty.local_counts), (PP2,), TP4),  # a missed division: by the tokens of this replica alone
    (Parts(role=faulty.mean_of_means), (TP4, PP2, CP2), None),
    (Parts(engine=faulty.tied_summed_twice), (PP2,), TP4),
    (Parts(engine=faulty.kv_counted_twice), (TP4,), PP2),
    (Parts(engine=faulty.never_zeroed), (TP4, PP2), None),
    (Parts(engine=faulty.update_dropped), (TP4, CP4), None),
    (Parts(engine=faulty.gather_lost), (PP2, CP4), TP4),
    (Parts(engine=faulty.not_decayed), (PP2, CP4), None),
    (Parts(engine=faulty.clipped_by_own_norm), (ZB,), None),
    (Parts(engine=faulty.only_first_layers), (CP2, ZB), PP2),
    (Parts(engine=faulty.answers_one_target_late), (TP4, CP2), None),
    (Parts(engine=faulty.last_weight_work_dropped), (CP2, ZB), PP2),
    (Parts(engine=faulty.context_not_summed), (replace(CP4, zero_stage=0),), PP2),
], ids=["missed division", "mean of means", "double reduce of a tied weight", "replicated heads twice", "not zeroed",
        "no update", "no all-gather of weights", "no weight decay", "clipped by a part", "one layer of each chunk",
        "answers shifted", "a W is missing", "no sum over the context"])
def test_a_planted_fault_is_found(parts: Parts, wrong: tuple[Combination, ...], unharmed: Combination | None):
    found = verdicts(parts, *wrong, *(() if unharmed is None else (unharmed,)))
    for one in found[:len(wrong)]:
        assert not one.right and not one.absolute <= 1e-9 and one.crash is None, one
        assert " in step " in one.worst, one
    assert all(one.right for one in found[len(wrong):]), found


@pytest.mark.parametrize("fault", [faulty.stale_weights, faulty.moments_forgotten, faulty.never_zeroed],
                         ids=lambda fault: fault.__name__)
def test_what_only_a_second_step_shows_is_found_in_it(fault: Callable):
    found = verdicts(Parts(engine=fault), PP2, CP4)
    assert all(not one.right and one.fault.endswith(" in step 2") for one in found), found


@pytest.mark.parametrize("fault, beginning", [
    (faulty.answers_one_target_late, "answers"), (faulty.update_dropped, "lm_head."), (faulty.gather_lost, "model."),
    (faulty.context_not_summed, "main_grad/"),
], ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_a_fault_says_what_was_wrong_and_when(fault: Callable, beginning: str):
    [one] = verdicts(Parts(engine=fault), CP4 if fault is faulty.gather_lost else replace(CP4, zero_stage=0))
    assert one.fault.startswith(beginning) and one.fault.endswith(" in step 1"), one


def test_a_crash_is_a_row_and_the_next_combination_runs():
    found = verdicts(Parts(engine=faulty.one_rank_raises), PP2, TP4)
    lines: list[str] = []
    assert report(iter(found), 2, lines.append) == 2
    assert all(one.fault == "crash: ZeroDivisionError: planted" for one in found)
    assert "rank 1 of 4 raised" in "\n".join(lines)


def step(value: float, norm: float = 1.0, loss: float = 2.0, at: tuple[int, int] = (0, 4), size: int = 8,
         others: tuple[str, ...] = ()) -> Step:
    """What is under test is `w`; the `others` are right."""
    tensors = {Box("w", at[:1], at[1:]): np.full(at[1] - at[0], value)}
    return Step({"loss": loss}, norm, tensors | {Box(name, (0,), (3,)): np.ones(3) for name in others}, size)


@pytest.mark.parametrize("others", [(), ("a",), ("a", "z")], ids=str)
def test_what_is_compared(others: tuple[str, ...]):
    make = partial(step, others=others)
    alone = make(1.0)
    right = [make(1.0, at=(0, 2)), make(1.0, at=(2, 4))]
    judge = lambda *ranks: verdict(Combination(), [alone, alone], [[one, one] for one in ranks])  # noqa: E731
    assert judge(*right).right
    assert judge(make(1.0), *right).right, "copies agree"
    assert judge(right[0]).fault == "w in step 1", "a missing part"
    assert judge(make(1.0 + 2e-9)).fault == "w in step 1"
    assert judge(make(np.nan)).fault == "w in step 1"
    assert judge(make(np.nan), make(1.0)).fault == "w in step 1", "one copy is NaN"
    assert judge(make(1.0), make(np.nan)).fault == "w in step 1"
    assert judge(make(1.0), make(1.0 + 5e-10)).fault == "w in step 1", "copies differ"
    assert judge(make(1.0, norm=1.1)).fault == judge(make(1.0, loss=np.nan)).fault == "loss sums or gradient norm"
    assert verdict(Combination(), [alone, alone], [[alone, make(1.0, size=9)]]).fault.startswith("reduced bytes")
    assert verdict(Combination(), [alone, alone], [[alone, make(3.0)]]).fault == "w in step 2", "the second step"
    assert verdict(Combination(), [alone, alone], [[make(1.1), make(9.0)]]).fault == "w in step 1", "the first fault"
    assert verdict(Combination(), [alone, alone], [[make(np.nan), alone]]).fault == "w in step 1", "then a right one"


def test_a_tensor_that_no_rank_has_is_wrong_wherever_it_stands():
    alone = step(1.0, others=("a", "z"))
    for name in ("a", "w", "z"):
        lacking = Step(alone.sums, alone.grad_norm, {box: g for box, g in alone.tensors.items() if box.name != name}, 8)
        found = verdict(Combination(), [alone, alone], [[lacking, lacking]])
        assert not found.right and found.fault == f"{name} in step 1" and np.isnan(found.absolute)


def test_a_copy_that_differs_is_not_hidden_by_the_next():
    found = whole([{Box("w", (0,), (2,)): np.array(values)} for values in ([1.0, 2], [1.0, 3], [1.0, 3])], {"w": (2,)})
    assert found["w"][0] == 1.0 and np.isnan(found["w"][1])
