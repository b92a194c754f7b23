import pytest
import torch

from hybridflow.generation.categorical import Categorical

ALMOST_ONE = 1 - 2.0**-53


def drawn(weights, uniforms):
    """The tokens that `Categorical` draws from weights given as they are."""
    table = Categorical(weights.shape[-1])
    table.fill(weights.log(), 1.0)
    table.weights.copy_(weights)
    table.cut(torch.zeros(len(weights), 1, dtype=weights.dtype))
    return table.draw(torch.as_tensor(uniforms, dtype=torch.float64))


@pytest.mark.parametrize("vocab", [1, 2, 3, 5, 63, 64, 65, 100, 1023, 4097])
def test_a_draw_is_the_plain_running_sum(vocab):
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.randn(50, vocab, generator=generator, dtype=torch.float64).mul_(3).exp_()
    weights[torch.rand(50, vocab, generator=generator) < 0.3] = 0
    weights[:, vocab // 2] += 0.1
    uniforms = torch.rand(50, generator=generator, dtype=torch.float64)
    running = weights.cumsum(-1)
    want = torch.searchsorted(running, uniforms[:, None] * running[:, -1:], right=True)[:, 0]
    assert torch.equal(drawn(weights, uniforms), want)


@pytest.mark.parametrize("vocab", [5, 100, 4097])
def test_sums_of_blocks_in_fp32_move_the_borders_by_a_hair_only(vocab):
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.randn(50, vocab, generator=generator).exp_()
    running = weights.double().cumsum(-1)
    for share in (-1e-6, 1e-6):  # a token's cell is as wide as its weight
        token = torch.randint(vocab, (50, 1), generator=generator)
        border = (running.gather(-1, token) / running[:, -1:])[:, 0] + share
        want = torch.searchsorted(running, border[:, None] * running[:, -1:], right=True)[:, 0].clamp(max=vocab - 1)
        assert torch.equal(drawn(weights, border.clamp(max=ALMOST_ONE)), want)


@pytest.mark.parametrize("vocab", [1, 7, 64, 999])
def test_the_ends_of_the_unit_interval_never_pick_a_weight_of_zero(vocab):
    generator = torch.Generator().manual_seed(vocab)
    for _ in range(20):
        weights = torch.rand(32, vocab, generator=generator)
        weights[torch.rand(32, vocab, generator=generator) < 0.8] = 0
        weights[torch.arange(32), torch.randint(vocab, (32,), generator=generator)] = 1e-30
        first = (weights > 0).int().argmax(-1)
        last = vocab - 1 - (weights > 0).flip(-1).int().argmax(-1)
        assert torch.equal(drawn(weights, torch.zeros(32)), first)
        tokens = drawn(weights, torch.full((32,), ALMOST_ONE, dtype=torch.float64))
        assert (weights[torch.arange(32), tokens] > 0).all()
        assert (tokens <= last).all()


@pytest.mark.parametrize("vocab", [7, 100])
def test_memory_is_kept_and_what_lies_behind_the_vocabulary_stays_zero(vocab):
    table = Categorical(vocab)
    table.fill(torch.randn(5, vocab), 1.0)
    place = table.weights.data_ptr()
    for rows in (3, 5, 1):
        logits = torch.randn(rows, vocab)
        normaliser = table.fill(logits, 0.5)
        assert table.weights.data_ptr() == place and table.weights.shape == (rows, vocab)
        want = (logits.double() / 0.5).log_softmax(-1)
        tokens = torch.arange(rows) % vocab
        torch.testing.assert_close(normaliser.log_probs(logits, tokens).double(), want[torch.arange(rows), tokens],
                                   rtol=0, atol=1e-6)
    table.fill(torch.randn(6, vocab, dtype=torch.float64), 1.0)  # more rows, another dtype: new memory
    assert table.weights.dtype == torch.float64
