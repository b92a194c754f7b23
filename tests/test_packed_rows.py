"""Prompts that several samples have, packed once: which token lies where, and that a model answers the same."""

from __future__ import annotations

import pytest
import torch

from hybridflow.engine.native import ForwardEngine
from hybridflow.engine.options import EngineOptions
from hybridflow.kernels.attention import causal_attention_reference
from hybridflow.kernels.fused_attention import Families
from hybridflow.micro_batch import MicroBatch, Sample
from hybridflow.models.branch_attention import BranchCausal, bundles
from hybridflow.models.config import Family, Head, ModelConfig
from hybridflow.models.recompute import Recompute
from hybridflow.packed_rows import Branches, PackedRows
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.world import World

CPU = torch.device("cpu")
A, B, C = (5, 9), (4, 4, 4), (8,)
SAMPLES = [Sample(A, (1, 2)), Sample(B, (3,)), Sample(A, (6, 7, 8)), Sample(C, (9, 9)), Sample(B, ()), Sample(A, (3,))]
PLAIN = ModelConfig(Family.LLAMA, 11, 16, 24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
                    initializer_range=0.3)
NORMED = ModelConfig(Family.QWEN3, 11, 16, 24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
                     initializer_range=0.3, qk_norm=True)


def test_shared_prompts_come_first_and_branches_behind_all_rows():
    packed = PackedRows.of(SAMPLES, share_prompts=True)
    assert packed.lengths == (2, 3, 3)  # A, B, and the one sample of C
    assert packed.branches == Branches((2, 1, 3, 1), (0, 1, 0, 0))
    assert packed.ids == (*A, *B, *C, 9, 9, 1, 2, 3, 6, 7, 8, 3)
    assert packed.positions == (0, 1, 0, 1, 2, 0, 1, 2, 2, 3, 3, 2, 3, 4, 2)
    for row, sample in enumerate(SAMPLES):
        whole = (*sample.prompt, *sample.response)
        assert tuple(packed.ids[packed.place(row, position)] for position in range(len(whole))) == whole


def test_the_last_token_of_a_branch_is_read_by_nobody():
    packed = PackedRows.of(SAMPLES, share_prompts=True, unread=1)
    assert packed.branches == Branches((1, 2), (0, 0)) and packed.lengths == (2, 3, 3)
    batch = MicroBatch.pack(SAMPLES, device=CPU, share_prompts=True, multiple_of=4)
    assert batch.num_tokens == 12 and batch.branches.lengths == (1, 3)  # the last one has the padding
    assert batch.targets.tolist() == [1, 2, 3, 6, 7, 8, 9, 9, 3]
    assert batch.target_index.tolist() == [1, 8, 4, 1, 9, 10, 5, 6, 1]  # the end of A predicts three
    assert batch.target_rows.tolist() == [0, 0, 1, 2, 2, 2, 3, 3, 5]


def test_without_shared_prompts_rows_are_whole():
    packed = PackedRows.of(SAMPLES)
    assert packed.lengths == (4, 4, 5, 3, 3, 3) and packed.branches == Branches()
    different = [Sample((1,), (2,)), Sample((3,), (4,))]
    assert PackedRows.of(different) == PackedRows.of(different, share_prompts=True)
    assert PackedRows.of([], share_prompts=True).ids == ()
    assert MicroBatch.pack([], device=CPU, share_prompts=True, multiple_of=2).lengths == (2,)


def test_same_tokens():
    batch = MicroBatch.pack(SAMPLES, device=CPU, share_prompts=True)
    assert batch.same_tokens(MicroBatch.pack(SAMPLES, device=CPU, share_prompts=True))
    assert not batch.same_tokens(MicroBatch.pack(SAMPLES, device=CPU))
    assert not batch.same_tokens(MicroBatch.pack(SAMPLES[::-1], device=CPU, share_prompts=True))
    assert not batch.same_tokens(MicroBatch.pack([*SAMPLES[:-1], Sample(A, (4,))], device=CPU, share_prompts=True))


def test_branches_with_prompts_of_one_length_are_computed_together():
    found = bundles((4, 7, 4), Branches((5, 6, 5, 5), (0, 1, 2, 0)))
    assert [(bundle.rectangle.rows, bundle.roots, bundle.owners) for bundle in found] == [
        ((0, 2, 3), (0, 2), (0, 1, 0)), ((1,), (1,), (0,))]


@pytest.mark.parametrize(("lengths", "branches"), [
    ((3,), Branches((4, 4), (0, 0))),
    ((3, 1, 5), Branches((4, 1, 2, 700), (0, 2, 0, 0))),
    ((1, 2, 1), Branches((3, 3, 2), (2, 0, 0))),
], ids=str)
def test_a_branch_sees_its_row_and_itself(lengths, branches):
    tokens = sum(lengths) + sum(branches.lengths)
    q, k, v = (torch.randn(tokens, heads, 6, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    out = BranchCausal(lengths, branches, CPU)(0, q, k, v)
    expected = torch.zeros_like(out)
    for root, *rest in families(lengths, branches):
        for branch in ([], *([each] for each in rest)):
            row = torch.cat([torch.arange(start, start + length) for start, length in (root, *branch)])
            alone = causal_attention_reference(*(x[row].transpose(0, 1)[None] for x in (q, k, v)))[0].transpose(0, 1)
            mine = slice(root[1], None) if branch else slice(None)
            expected = expected.index_put((row[mine],), alone[mine])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    given = torch.randn_like(out)
    for mine, other in zip(torch.autograd.grad(out, (q, k, v), given), torch.autograd.grad(expected, (q, k, v), given)):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def families(lengths, branches):
    """(start, length) of each row and its branches."""
    found = Families.of(lengths, branches.lengths, branches.roots)
    starts = [0, *found.ends.tolist()]
    return [found.segments[a:b].tolist() for a, b in zip(starts, starts[1:])]


@pytest.mark.parametrize("head", [Head.LANGUAGE_MODEL, Head.VALUE])
@pytest.mark.parametrize("config", [PLAIN, NORMED], ids=["plain", "qk norm"])
@pytest.mark.parametrize("recompute", Recompute)
def test_a_model_answers_and_learns_the_same(config, head, recompute):
    engine = ForwardEngine(config, Mesh(Grid.of(Layout()), World.single(CPU)), head,
                           EngineOptions(torch.float64, recompute=recompute))
    engine.draw(0)
    found = []
    for share_prompts in (False, True):
        batch = MicroBatch.pack(SAMPLES, device=CPU, share_prompts=share_prompts)
        out = engine.stage(batch.input_ids, batch, temperature=0.7, with_entropy=True)
        answers = torch.stack([out.log_probs, out.entropy]) if head is Head.LANGUAGE_MODEL else out[None]
        engine.stage.zero_grad()
        (answers * torch.arange(1, answers.numel() + 1).view_as(answers)).sum().backward()
        found.append([answers.detach(), *(parameter.grad.clone() for parameter in engine.stage.parameters())])
    for alone, shared in zip(*found, strict=True):
        torch.testing.assert_close(shared, alone, rtol=1e-12, atol=1e-12)


def test_scores_are_read_at_the_last_token():
    engine = ForwardEngine(PLAIN, Mesh(Grid.of(Layout()), World.single(CPU)), Head.SCORE, EngineOptions(torch.float64))
    engine.draw(0)
    alone, shared = (engine.forward([MicroBatch.pack_last_tokens(SAMPLES, device=CPU, share_prompts=share)])[0]
                     for share in (False, True))
    torch.testing.assert_close(shared, alone, rtol=0, atol=1e-14)
