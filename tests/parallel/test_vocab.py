"""Vocabulary-parallel operations against the whole matrices, at ragged sizes (vocabulary 37 on 4 ranks)."""

import math

import pytest
import torch
import torch.nn.functional as F

from hybridflow.parallel import vocab
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.vocab import VocabParallelEmbedding, gather_logits, token_log_probs, vocab_range
from hybridflow.parallel.world import World
from tests.ranks import run_ranks

VOCAB, HIDDEN, TOKENS, TEMPERATURE = 37, 6, 7, 0.7
CPU = torch.device("cpu")


def inputs(tokens: int = TOKENS, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    hidden = 4.0 * torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCAB, (tokens,), generator=generator)
    factors = torch.randn(2, tokens, generator=generator, dtype=torch.float64)  # of log-probs and entropies in the loss
    return hidden.to(dtype), weight.to(dtype), targets, factors


def whole(with_entropy: bool) -> tuple[torch.Tensor, ...]:
    """Log-probs, entropies, and the gradients of hidden and weight, in one process and in plain torch."""
    hidden, weight, targets, factors = inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    log_p = torch.log_softmax(hidden @ weight.T / TEMPERATURE, dim=-1)
    log_probs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    ((log_probs * factors[0]).sum() + with_entropy * (entropy * factors[1]).sum()).backward()
    return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad


def group_of(world: World):
    return Mesh(Grid.of(Layout(tp=world.size)), world).tp


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def log_probs_and_logits(world: World, with_entropy: bool, logits_at_once: int, kept: int) -> None:
    before = vocab.LOGITS_AT_ONCE, vocab.KEPT_LOGITS
    vocab.LOGITS_AT_ONCE, vocab.KEPT_LOGITS = logits_at_once, kept
    tp = group_of(world)
    hidden, weight, targets, factors = inputs()
    mine = slice(*vocab_range(VOCAB, tp.size, tp.index))
    close(gather_logits(hidden, weight[mine], tp, VOCAB), hidden @ weight.T)
    hidden.requires_grad_()
    part = weight[mine].clone().requires_grad_()
    log_probs, entropy = token_log_probs(hidden, part, targets, tp, VOCAB, TEMPERATURE, with_entropy)
    loss = (log_probs * factors[0]).sum() + (0.0 if entropy is None else (entropy * factors[1]).sum())
    loss.backward()
    want = whole(with_entropy)
    close(log_probs.detach(), want[0])
    assert (entropy is not None) == with_entropy
    if entropy is not None:
        close(entropy.detach(), want[1])
    close(hidden.grad, want[2])
    close(part.grad, want[3][mine])
    vocab.LOGITS_AT_ONCE, vocab.KEPT_LOGITS = before


def embedding(world: World, tokens: int, sequence_parallel: bool) -> None:
    tp = group_of(world)
    _, weight, ids, _ = inputs(tokens)
    up = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    weight.requires_grad_()
    (F.embedding(ids, weight) * up).sum().backward()
    layer = VocabParallelEmbedding(VOCAB, HIDDEN, tp=tp, sequence_parallel=sequence_parallel, dtype=torch.float64,
                                   device=CPU)
    vocab_part = slice(*vocab_range(VOCAB, tp.size, tp.index))
    layer.weight.data.copy_(weight[vocab_part].detach())
    mine = slice(tp.index * tokens // tp.size, (tp.index + 1) * tokens // tp.size) if sequence_parallel else slice(None)
    out = layer(ids)
    assert torch.equal(out.detach(), F.embedding(ids, weight)[mine].detach())
    (out * up[mine]).sum().backward()
    close(layer.weight.grad, weight.grad[vocab_part])


def no_targets(world: World) -> None:
    """A micro-batch without a target still joins every collective and has a live graph."""
    tp = group_of(world)
    hidden, weight, targets, _ = inputs()
    hidden.requires_grad_()
    part = weight[slice(*vocab_range(VOCAB, tp.size, tp.index))].clone().requires_grad_()
    log_probs, entropy = token_log_probs(hidden[:0], part, targets[:0], tp, VOCAB, with_entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,)
    assert not hidden.grad.any() and not part.grad.any()
    assert gather_logits(hidden[:0], part, tp, VOCAB).shape == (0, VOCAB)


def backward_twice(world: World) -> None:
    """The first backward overwrites the logits that were kept; the second computes them again."""
    tp = group_of(world)
    hidden, weight, targets, factors = inputs()
    hidden.requires_grad_()
    part = weight[slice(*vocab_range(VOCAB, tp.size, tp.index))].clone().requires_grad_()
    loss = (token_log_probs(hidden, part, targets, tp, VOCAB, TEMPERATURE)[0] * factors[0]).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    close(hidden.grad, 2 * whole(False)[2])


def all_cases(world: World) -> None:
    for with_entropy in (False, True):
        for logits_at_once in (1, 30, 1 << 25):  # one row at a time, three rows, all
            for kept in (0, 1 << 23):
                log_probs_and_logits(world, with_entropy, logits_at_once, kept)
    backward_twice(world)
    embedding(world, TOKENS, False)
    embedding(world, 12, True)
    no_targets(world)


def test_ranges_are_ragged_balanced_and_complete() -> None:
    assert [vocab_range(37, 4, i) for i in range(4)] == [(0, 10), (10, 19), (19, 28), (28, 37)]
    assert [vocab_range(4, 4, i) for i in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    with pytest.raises(ValueError, match="vocab_size 3 cannot be cut over tp 4: use tp <= 3"):
        vocab_range(3, 4, 0)


def test_one_rank() -> None:
    all_cases(World.single(CPU))


def test_four_ranks() -> None:
    run_ranks(4, all_cases)


@pytest.mark.parametrize("used", [0, 1], ids=["log-probs", "entropy"])
def test_an_output_that_no_loss_uses_costs_and_adds_no_gradient(used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    logit_grad = vocab._logit_grad
    monkeypatch.setattr(vocab, "_logit_grad", lambda *args: seen.append(args[-2:]) or logit_grad(*args))
    hidden, weight, targets, factors = inputs()
    grads = []
    for scale in (0.0, None):  # the other output with weight zero, and not at all
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        outputs = token_log_probs(x, w, targets, group_of(World.single(CPU)), VOCAB, TEMPERATURE, with_entropy=True)
        loss = (outputs[used] * factors[used]).sum()
        (loss if scale is None else loss + scale * outputs[1 - used].sum()).backward()
        grads.append((x.grad, w.grad))
    close(grads[0][0], grads[1][0])
    close(grads[0][1], grads[1][1])
    assert seen[0][1 - used] is not None and seen[1][1 - used] is None


def test_worked_example_with_temperature() -> None:
    tp = group_of(World.single(CPU))
    hidden, weight = torch.ones(1, 1), torch.tensor([[2.0], [1.0], [0.0]])
    log_probs, entropy = token_log_probs(hidden, weight, torch.tensor([1]), tp, 3, temperature=0.5, with_entropy=True)
    assert math.isclose(log_probs.item(), -2.142932, abs_tol=1e-6)
    assert math.isclose(entropy.item(), 0.441057, abs_tol=1e-6)
    with pytest.raises(ValueError, match="temperature 0.0 must be > 0"):
        token_log_probs(hidden, weight, torch.tensor([1]), tp, 3, temperature=0.0)


def test_bf16_inputs_have_fp32_statistics() -> None:
    tp = group_of(World.single(CPU))
    hidden, weight, targets, _ = inputs(dtype=torch.bfloat16)
    hidden.requires_grad_(), weight.requires_grad_()
    log_probs, entropy = token_log_probs(hidden, weight, targets, tp, VOCAB, with_entropy=True)
    want = torch.log_softmax(hidden.double() @ weight.double().T, -1).gather(1, targets[:, None])[:, 0]
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert (log_probs - want).abs().max() < 1e-5
    log_probs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_far_apart_logits_stay_finite() -> None:
    tp = group_of(World.single(CPU))
    hidden, weight = torch.ones(1, 1, requires_grad=True), torch.tensor([[1e4], [0.0], [-1e4]], requires_grad=True)
    log_probs, entropy = token_log_probs(hidden, weight, torch.tensor([2]), tp, 3, with_entropy=True)
    (log_probs + entropy).sum().backward()
    assert log_probs.item() == -2e4 and entropy.item() == 0.0
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()
