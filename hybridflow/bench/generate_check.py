"""That contestants of `bench generate` compute the same model: asked before any of their times is reported.

Owns the bounds. transformers is the judge: what it gives for the same tokens in one forward, without any cache.
"""

from __future__ import annotations

from hybridflow.bench.generate_case import PROMPT_TOKENS, Cell, Precision, prompts
from hybridflow.bench.generate_process import ContestantProcess

# Of log-probs. fp32: rounding in another order. bf16: everybody rounds activations, each at other places.
TOLERANCE = {Precision.FP32: 1e-4, Precision.BF16: 0.1}
OF_PEERS = 0.1  # it must be the same model, no more: in fp32, greedy tokens of vLLM were 0.008 below the largest
ROWS, TOKENS = 8, 32
SEED = 12345


class WrongTokensError(Exception):
    """A contestant does not compute the model, so that its times say nothing."""


def check_greedy(contestant: ContestantProcess, judge: ContestantProcess, cell: Cell, bound: float) -> None:
    """Each token is the judge's own most probable one, or one whose log-prob is at most `bound` below that one's.

    By induction these are the judge's greedy tokens up to the first such tie, if there is any.

    Raises:
        WrongTokensError: it is not.
    """
    asked = prompts(_small(cell), SEED)
    tokens = contestant.call("greedy", asked, TOKENS).value
    _require_tokens(contestant, tokens)
    _, below = judge.call("scored", asked, tokens).value
    _require(contestant, cell, "greedy: a token's log-prob is {} below the largest", max(map(max, below)), bound)


def check_sampled(ours: ContestantProcess, judge: ContestantProcess, cell: Cell) -> float:
    """The log-probs that come with our sampled tokens are the judge's. Returns the largest difference.

    Raises:
        WrongTokensError: they are not.
    """
    asked = prompts(_small(cell), SEED + 1)
    tokens, log_probs = ours.call("sampled", asked, TOKENS, SEED).value
    _require_tokens(ours, tokens)
    expected, _ = judge.call("scored", asked, tokens).value
    worst = max(abs(a - b) for row, other in zip(log_probs, expected, strict=True)
                for a, b in zip(row, other, strict=True))
    _require(ours, cell, "sampled: a log-prob differs by {}", worst, TOLERANCE[cell.precision])
    return worst


def _small(cell: Cell) -> Cell:
    return Cell(cell.model, cell.precision, ROWS, TOKENS)


def _require_tokens(contestant: ContestantProcess, tokens: list[list[int]]) -> None:
    if [len(row) for row in tokens] != [TOKENS] * ROWS:
        raise WrongTokensError(f"{contestant.name}: after {ROWS} prompts of {PROMPT_TOKENS} tokens it gave "
                               f"{[len(row) for row in tokens]} new ones, not {TOKENS} each")


def _require(contestant: ContestantProcess, cell: Cell, what: str, value: float, bound: float) -> None:
    if not value <= bound:  # NaN is no pass
        raise WrongTokensError(f"{contestant.name}, {cell.model} {cell.precision.value}: "
                               f"{what.format(f'{value:.1e}')}, more than {bound:.0e}")
