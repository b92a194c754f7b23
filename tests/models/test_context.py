"""Context parallelism against whole rows in one process, fp64: answers of every target and every gradient."""

from dataclasses import replace

import pytest
import torch

from hybridflow.context import ContextCut
from hybridflow.models.config import Head
from hybridflow.models.recompute import Recompute
from hybridflow.parallel.mesh import Layout
from tests.models.context_stages import Case, padded_attention, picture, scores
from tests.ranks import run_ranks

RAGGED = ((3, 4), (1, 1), (2, 1), (40, 23), (1, 6), (5, 0), (7, 3))  # (prompt, response): rows of 2, 3 and 63 tokens
SHORT = ((1, 1), (1, 2))  # more pieces than tokens
LATE = ((30, 1),)  # one rank has the only target
MICRO_BATCHES = (RAGGED, SHORT, LATE)
CASES = {
    "cp2": Case(Layout(cp=2), (MICRO_BATCHES,)),
    "cp4": Case(Layout(cp=4), (MICRO_BATCHES,)),
    "cp4, one long row": Case(Layout(cp=4), ((((700, 301),),),)),
    "cp4, a row shorter than the group": Case(Layout(cp=4), ((((1, 1),),),)),
    "tp2 cp2": Case(Layout(tp=2, cp=2), (MICRO_BATCHES,)),
    "tp2 cp2 sp": Case(Layout(tp=2, cp=2), (MICRO_BATCHES,), sequence_parallel=True),
    "tp2 cp2 sp, shared keys": Case(Layout(tp=2, cp=2), (MICRO_BATCHES,), sequence_parallel=True,
                                    changes=(("num_kv_heads", 1), ("qk_norm", True))),
    "cp2, every head its own keys": Case(Layout(cp=2), (MICRO_BATCHES,), changes=(("num_kv_heads", 4),)),
    "cp2 pp2": Case(Layout(pp=2, cp=2), (MICRO_BATCHES,)),
    "cp2 pp2, tied": Case(Layout(pp=2, cp=2), (MICRO_BATCHES,), changes=(("tie_word_embeddings", True),)),
    "cp2 dp2": Case(Layout(dp=2, cp=2), (MICRO_BATCHES, (SHORT, RAGGED, RAGGED[:2]))),
    "cp2 dp2, a replica without rows": Case(Layout(dp=2, cp=2), (MICRO_BATCHES, ((), (), ()))),
    "tp2 cp2 dp2 sp": Case(Layout(tp=2, dp=2, cp=2), ((RAGGED, SHORT), (LATE, ())), sequence_parallel=True),
    "cp2, values": Case(Layout(cp=2), (MICRO_BATCHES,), head=Head.VALUE),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_answers_and_gradients_are_those_of_whole_rows(case: Case):
    alone = replace(case, layout=Layout(), sequence_parallel=False, rows=(sum(case.rows, ()),))
    (expected,) = run_ranks(1, picture, alone)
    wanted = dict((box.name, grad) for box, grad in expected.gradients)
    covered = {name: torch.zeros_like(grad) for name, grad in wanted.items()}
    per_replica = len(case.rows[0])
    stage = case.layout.tp * case.layout.cp * case.layout.dp
    for rank, seen in enumerate(run_ranks(case.layout.size, picture, case)):
        for box, grad in seen.gradients:
            torch.testing.assert_close(grad, wanted[box.name][box.slices], rtol=1e-10, atol=1e-10, msg=str(box))
            covered[box.name][box.slices] = 1
        if rank >= (case.layout.pp - 1) * stage:
            first = rank % stage // (case.layout.tp * case.layout.cp) * per_replica
            torch.testing.assert_close(seen.answers, expected.answers[first:first + per_replica], rtol=0, atol=1e-12)
    assert all(bool(mask.all()) for mask in covered.values())


@pytest.mark.parametrize("recompute", [Recompute.SELECTIVE, Recompute.FULL])
@pytest.mark.parametrize("name", ["cp4", "cp4, a row shorter than the group", "tp2 cp2 sp, shared keys", "cp2 pp2"])
def test_gathering_again_in_backward_changes_nothing(name: str, recompute: Recompute):
    case = CASES[name]
    kept = run_ranks(4, picture, case)
    for seen, expected in zip(run_ranks(4, picture, replace(case, recompute=recompute)), kept):
        for (box, grad), (like, wanted) in zip(seen.gradients, expected.gradients):
            assert box == like
            torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(cp=4), Layout(tp=2, cp=2)], ids=str)
def test_every_rank_knows_all_scores(layout: Layout):
    (expected,) = run_ranks(1, scores, Layout(), RAGGED)
    for seen in run_ranks(layout.size, scores, layout, RAGGED):
        torch.testing.assert_close(seen, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", [(5, 2), (1,), ()], ids=str)
def test_padding_is_neither_seen_nor_does_it_see(lengths: tuple[int, ...]):
    for out, grads in run_ranks(4, padded_attention, lengths, 4):
        assert out.numel() > 0 and all(bool((x == 0.0).all()) for x in (out, *grads))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_cut_deals_out_every_token_and_nearly_the_same_work(size: int):
    lengths = (1, 2, 3, 63, 1000, 9, 9, 9, 17)
    cut = ContextCut(lengths, size)
    tokens = [cut.tokens(rank) for rank in range(size)]
    assert torch.cat(tokens).sort().values.tolist() == list(range(sum(lengths)))
    counts = [part.numel() for part in tokens]
    assert max(counts) - min(counts) <= 1 and cut.tokens_per_rank(1) == max(counts)
    assert cut.tokens_per_rank(4) % 4 == 0 and max(counts) <= cut.tokens_per_rank(4) < max(counts) + 4
    owner, place = cut.places()
    assert all(tokens[rank][there] == position
               for position, (rank, there) in enumerate(zip(owner.tolist(), place.tolist())))
    # Keys seen by the queries of each rank in the longest row.
    work = [sum(position + 1 for piece in cut.pieces(rank)[4] for position in piece) for rank in range(size)]
    assert max(work) < 1.02 * min(work)


def test_a_cut_by_hand():
    cut = ContextCut((8, 3), 2)
    assert cut.bounds == ((0, 2, 4, 6, 8), (0, 1, 2, 3, 3))
    assert cut.tokens(0).tolist() == [0, 1, 6, 7, 8] and cut.tokens(1).tolist() == [2, 3, 4, 5, 9, 10]
    assert ContextCut((), 2).tokens_per_rank(4) == 4
