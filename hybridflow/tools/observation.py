"""The ids of what a tool says, as they stand behind the ids of the turn that called it.

Owns the form around it. What is sampled is never encoded here: an observation is encoded alone, in three pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.data.tokenizer import Tokenizer

PLACE = "{observation}"
PLAIN = f"\n<result>{PLACE}</result>\n"


@dataclass(frozen=True)
class ObservationForm:
    """Example: `ObservationForm.of(tokenizer, PLAIN, limit=64).ids("5", last=2)`.

    Attributes:
        head, tail: ids in front of an observation and behind it.
        limit: most tokens of the observation itself.
    """

    tokenizer: Tokenizer
    head: tuple[int, ...]
    tail: tuple[int, ...]
    limit: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, wrapper: str | None, role: str, *, limit: int) -> ObservationForm:
        """
        Args:
            wrapper: a text with {observation} in it; None is a turn of `role` in the tokenizer's chat template, and of
                the model again, where there is a template, else PLAIN.

        Raises:
            ValueError: the chat template has no turns of this role.
        """
        around = tokenizer.turn_between(role) if wrapper is None else None
        if around is None:
            head, _, tail = (wrapper or PLAIN).partition(PLACE)
            around = head, tail
        head, tail = (tuple(tokenizer.encode(text)) if text else () for text in around)
        return cls(tokenizer, head, tail, limit)

    def ids(self, text: str, last: int) -> tuple[tuple[int, ...], bool]:
        """(ids, whether the observation was cut) behind a turn whose last id is `last`: an end of turn that the model
        has sampled does not come twice.
        """
        inner: Sequence[int] = self.tokenizer.encode_literally(text)
        head = self.head[1:] if self.head[:1] == (last,) else self.head
        return (*head, *inner[:self.limit], *self.tail), len(inner) > self.limit
