"""A role's numbers do not depend on the cut of its rows: by rows or tokens, over replicas, stages, context ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.losses import supervised_loss
from hybridflow.algorithms.reduction import LossReduction
from hybridflow.batch import Batch
from hybridflow.engine.native import Output
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.models.config import Head
from hybridflow.packing import MicroBatching
from hybridflow.parallel.mesh import Layout
from hybridflow.parallel.world import World
from hybridflow.target_rows import TargetRows
from hybridflow.trainer.roles import Reduction, TrainedRole
from tests.engine.models import assemble, canonical_grads, ragged_batch, tiny_model, train_engine
from tests.ranks import run_ranks

ALONE = (Layout(), False, MicroBatching(rows=3))
TOKEN_MEAN = Reduction(LossReduction.TOKEN_MEAN)
# Rows of 2 to 11 tokens; the tightest budgets hold the longest row alone, padded where it is cut.
CUTS = [
    (Layout(dp=4), False, MicroBatching(rows=1)),
    (Layout(dp=4), False, MicroBatching(tokens=11)),
    (Layout(dp=4), False, MicroBatching(tokens=1000)),
    (Layout(tp=2, dp=2), True, MicroBatching(tokens=13)),
    (Layout(pp=2, dp=2), False, MicroBatching(tokens=16)),
    (Layout(pp=4), False, MicroBatching(tokens=24)),
    (Layout(tp=2, pp=2), True, MicroBatching(tokens=12)),
    (Layout(cp=2, dp=2), False, MicroBatching(tokens=12)),
    (Layout(tp=2, cp=2), True, MicroBatching(tokens=15)),
    (Layout(cp=4), False, MicroBatching(rows=4)),
    (Layout(pp=2, cp=2), False, MicroBatching(rows=3)),
]


def learner(world: World, cut: tuple[Layout, bool, MicroBatching], head: Head, reduction: Reduction,
            num_layers: int = 4) -> TrainedRole:
    layout, sequence_parallel, at_once = cut
    engine = train_engine(world, layout, tiny_model(num_layers=num_layers), head, sequence_parallel=sequence_parallel)
    return TrainedRole(engine, at_once, at_once, reduction)


def sft_loss(output: Output, columns: TokenColumns, rows: TargetRows) -> tuple[Tensor, dict[str, Tensor]]:
    return supervised_loss(output.log_probs, columns)


def given_loss(output: Output, columns: TokenColumns, rows: TargetRows) -> tuple[Tensor, dict[str, Tensor]]:
    """The token losses that stand in the column of advantages, whatever the model says; its gradient is theirs."""
    loss = (columns.weight * columns.advantages * (1 + output - output.detach())).sum()
    return loss, {"loss": loss.detach()}


# --- every cut takes the step of one process -------------------------------------------------------------------------

MASKED = {"none": (), "some": (1, 4, 8), "neighbours": (0, 1, 2, 3, 4, 5), "all": tuple(range(10))}


def masked_batch(world: World, rows: int, masked: tuple[int, ...]) -> Batch:
    """Ragged rows, of which the reward of the masked ones failed, as the dataflow marks them."""
    batch = ragged_batch(world, rows)
    scores = torch.tensor([float("nan") if row in masked else 1.0 for row in range(rows)], dtype=torch.float64)
    lengths = torch.tensor(batch.home_lengths(world.rank), dtype=torch.int64)
    of_row = torch.tensor([row not in masked for row in batch.home[world.rank]], dtype=torch.float64)
    return replace(batch, scores=scores).with_columns(loss_mask=of_row.repeat_interleave(lengths))


def updates(world: World, cuts: list, rows: int, masked: tuple[int, ...]) -> list:
    """For each cut: loss sums, gradient norm, skipped steps, this rank's gradients."""
    results = []
    for cut in cuts:
        role = learner(world, cut, Head.LANGUAGE_MODEL, TOKEN_MEAN)
        update = role.update(masked_batch(world, rows, masked), range(rows), sft_loss)
        results.append((update.sums, update.step.grad_norm, role.trainer.optimizer.num_skipped,
                        canonical_grads(role.trainer)))
    return results


@pytest.mark.parametrize(("rows", "masked", "cuts"), [
    (10, "none", CUTS),  # case 8: 10 rows over 4 replicas
    (2, "none", CUTS[:6]),  # case 10: replicas without rows
    (10, "some", CUTS[1:9:2]),  # case 7
    (10, "neighbours", CUTS[:6]),  # whole micro-batches without a trained token
    (10, "all", CUTS[1:9:2]),
])
def test_every_cut_takes_the_step_of_one_process(rows: int, masked: str, cuts: list):
    world = World.single(torch.device("cpu"))
    like = train_engine(world, Layout(), tiny_model(), Head.LANGUAGE_MODEL)
    [(sums, norm, skipped, alone)] = updates(world, [ALONE], rows, MASKED[masked])
    expected = assemble(like, [alone])
    assert skipped == (masked == "all") and (norm > 0) == (masked != "all")
    by_rank = run_ranks(4, updates, cuts, rows, MASKED[masked])
    for number, cut in enumerate(cuts):
        grads = assemble(like, [rank[number][3] for rank in by_rank])
        for name, grad in grads.items():
            largest = (grad - expected[name]).abs().max().item()
            assert largest <= 1e-9, (cut, name, largest)
        for rank in by_rank:
            assert rank[number][0] == pytest.approx(sums, rel=1e-9, abs=1e-12), cut
            assert rank[number][1] == pytest.approx(norm, rel=1e-9, abs=1e-12), cut
            assert rank[number][2] == skipped, cut


# --- losses by hand (cases 1 to 3) -----------------------------------------------------------------------------------

def batch_of(world: World, responses: tuple[int, ...], losses: tuple[tuple[float, ...], ...]) -> Batch:
    """Rows with prompts of 2 tokens, responses of these lengths and these token losses, at home on the last rank."""
    rows = range(len(responses))
    home = (*((),) * (world.size - 1), tuple(rows))
    mine = [Sample((1, 2), (3,) * responses[row]) for row in home[world.rank]]
    flat = [loss for row in home[world.rank] for loss in losses[row]]
    columns = TokenColumns(advantages=torch.tensor(flat, dtype=torch.float64))
    return Batch((2,) * len(responses), responses, tuple(rows), home, tuple(mine), columns)


BY_HAND = {  # responses, token losses, and what each reduction makes of them
    "case 1": ((1, 3, 2, 6), ((4.0,), (1.0,) * 3, (2.0,) * 2, (0.5,) * 6), {
        LossReduction.TOKEN_MEAN: 14 / 12, LossReduction.SEQ_MEAN_TOKEN_MEAN: 1.875,
        LossReduction.SEQ_MEAN_TOKEN_SUM: 14 / 4, LossReduction.CONSTANT_LENGTH: 14 / 24}),
    "case 1, two rows": ((1, 9), ((1.0,), (0.0,) * 9), {LossReduction.TOKEN_MEAN: 0.1}),
    "case 2": ((3, 1, 2, 2), ((0.5,) * 3, (0.5,), (0.5,) * 2, (0.5,) * 2), {LossReduction.TOKEN_MEAN: 0.5}),
    "case 3": ((4, 4), ((1.0,) * 4,) * 2, {LossReduction.CONSTANT_LENGTH: 4 / 6, LossReduction.TOKEN_MEAN: 1.0}),
}
HAND_CUTS = [
    *((Layout(dp=dp, tp=4 // dp), False, at_once) for dp in (1, 2, 4)
      for at_once in (MicroBatching(rows=1), MicroBatching(rows=2), MicroBatching(rows=4), MicroBatching(tokens=11))),
    (Layout(cp=2, dp=2), False, MicroBatching(tokens=12)),
]


def losses_of(world: World, cuts: list) -> list[tuple]:
    """(name, reduction, cut, loss, gradient norm) of every case by hand."""
    results = []
    for number, cut in enumerate(cuts):
        for name, (responses, losses, values) in BY_HAND.items():
            for kind in values:
                reduction = Reduction(kind, 6 if kind is LossReduction.CONSTANT_LENGTH else None)
                role = learner(world, cut, Head.VALUE, reduction, num_layers=1)  # these losses ask no model
                update = role.update(batch_of(world, responses, losses), range(len(responses)), given_loss)
                results.append((name, kind, number, update.sums["loss"], update.step.grad_norm))
    return results


def test_losses_by_hand_for_every_cut():
    alone = losses_of(World.single(torch.device("cpu")), [ALONE])
    norms = {(name, kind): norm for name, kind, _, _, norm in alone}
    for name, kind, number, loss, norm in (*alone, *run_ranks(4, losses_of, HAND_CUTS)[3]):
        assert loss == pytest.approx(BY_HAND[name][2][kind], abs=1e-9), (name, kind, number)
        assert norm == pytest.approx(norms[name, kind], rel=1e-9), (name, kind, number)


# --- answers come home ---------------------------------------------------------------------------------------------

def answers(world: World, cuts: list, head: Head) -> list[list[float]]:
    """For each cut what the role answers: for each token of my home rows, or one for each row."""
    results = []
    for cut in cuts:
        role = learner(world, cut, head, TOKEN_MEAN)
        batch = ragged_batch(world, 10)
        results.append((role.score_rows(batch) if head is Head.SCORE else role.answer_tokens(batch)).tolist())
    return results


@pytest.mark.parametrize("head", list(Head))
def test_answers_do_not_depend_on_the_cut(head: Head):
    [alone] = answers(World.single(torch.device("cpu")), [ALONE], head)
    assert len(alone) == 10 if head is Head.SCORE else len(alone) > 10
    by_rank = run_ranks(4, answers, CUTS, head)
    for number, cut in enumerate(CUTS):
        assert by_rank[0][number] == pytest.approx(alone, rel=1e-9, abs=1e-12), cut  # rank 0 is home to every row
        for rank in by_rank[1:]:
            assert rank[number] == ([] if head is not Head.SCORE else by_rank[0][number]), cut


def refused(world: World) -> str:
    role = learner(world, (Layout(dp=4), False, MicroBatching(tokens=6)), Head.LANGUAGE_MODEL, TOKEN_MEAN)
    try:
        role.update(ragged_batch(world, 10), range(10), sft_loss)
    except ValueError as error:
        return str(error)
    return ""


def test_a_row_beyond_the_budget_is_refused_on_every_rank_alike():
    messages = run_ranks(4, refused)
    assert len(set(messages)) == 1 and "more than train.micro_batch_tokens 6 can hold" in messages[0]
