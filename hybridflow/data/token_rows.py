"""Tokenised texts kept small, and the checks that every row must pass before a run starts.

Owns the overlong policy and the checks of ids against the model's vocabulary. Never reorders rows.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum


class Overlong(Enum):
    """What to do with a row that has more tokens than allowed."""

    ERROR = "error"
    DROP = "drop"
    TRUNCATE_LEFT = "truncate_left"
    TRUNCATE_RIGHT = "truncate_right"

    @property
    def truncates(self) -> bool:
        return self in (Overlong.TRUNCATE_LEFT, Overlong.TRUNCATE_RIGHT)


class TokenRows:
    """Ragged rows of token ids, 4 bytes an id (a list of Python ints takes 36).

    Example: TokenRows([[5, 6], [7]])[0] == (5, 6)
    """

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        """Ids must be in range(2**32)."""
        self.rows = [array("I", row) for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[int, ...]:
        return tuple(self.rows[row])

    def __iter__(self) -> Iterator[array]:
        return iter(self.rows)


def check_ids(rows: Iterable[Sequence[int]], origins: Sequence[str], vocab_size: int) -> None:
    """Every row has a token and every id is in the model's vocabulary.

    Raises ValueError naming the first row that breaks this, its position and the vocabulary size.
    """
    for ids, origin in zip(rows, origins, strict=True):
        if not ids:
            raise ValueError(f"{origin}: has no tokens; a response needs at least one token before it")
        if max(ids) >= vocab_size or min(ids) < 0:
            position = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
            raise ValueError(
                f"{origin}: token id {ids[position]} at position {position} is not in the model's vocabulary of "
                f"{vocab_size}; the tokenizer and the model do not belong together"
            )


def check_stop_ids(stop_ids: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError if the id that ends a response is one that the model cannot produce."""
    for token in stop_ids[:1]:
        if not 0 <= token < vocab_size:
            raise ValueError(f"the tokenizer's end id {token} is not in the model's vocabulary of {vocab_size}")


def within_length(rows: TokenRows, origins: Sequence[str], max_length: int, overlong: Overlong, knob: str) -> list[int]:
    """The indices of the rows that have at most `max_length` tokens, in order. `knob` is the setting's name.

    Cutting rows is `lengths`'; a row that is too long here, where the policy is to truncate, is one that cannot be cut.

    Raises ValueError naming the longest row if the policy is not DROP and a row is too long, or if no row is left.
    """
    kept = [i for i, ids in enumerate(rows) if len(ids) <= max_length]
    too_long = len(rows) - len(kept)
    if too_long == 0:
        return kept
    lengths = [len(ids) for ids in rows]
    longest = lengths.index(max(lengths))
    if overlong is Overlong.DROP and kept:
        return kept
    raise ValueError(
        f"{too_long} of {len(rows)} rows have more than {knob} = {max_length} tokens; the longest, {origins[longest]}, "
        f"has {lengths[longest]}. Set {knob} to at least {lengths[longest]}, or shorten the prompts"
        + ("" if overlong is Overlong.DROP else ", or set data.overlong: drop")
    )
