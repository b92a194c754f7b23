"""Rows that have more tokens than allowed: refused, left out or cut, one rule for prompts and one for pairs.

Owns what becomes of one row and the counting. Whole data sets that are refused at once are `token_rows`' to tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.data.token_rows import Overlong

Ids = Sequence[int]


@dataclass(frozen=True)
class LengthCounts:
    """Rows that were too long, by what became of them. Example: `LengthCounts(dropped=2) + LengthCounts(truncated=1)`.
    """

    dropped: int = 0
    truncated: int = 0

    def __add__(self, other: LengthCounts) -> LengthCounts:
        return LengthCounts(self.dropped + other.dropped, self.truncated + other.truncated)

    def sentence(self, num_rows: int, noun: str) -> str | None:
        """What to tell at the start of a run, None where every row is short enough. Example: "2 of 10 prompts are too
        long: 2 were dropped."
        """
        parts = [f"{count} {'was' if count == 1 else 'were'} {what}"
                 for count, what in ((self.dropped, "dropped"), (self.truncated, "truncated")) if count]
        if not parts:
            return None
        total = self.dropped + self.truncated
        return f"{total} of {num_rows} {noun} {'is' if total == 1 else 'are'} too long: {' and '.join(parts)}."


@dataclass(frozen=True)
class LengthRule:
    """At most `most` tokens a row (None: any number). `knob` is the setting's name, for messages.

    Example: `LengthRule(2, Overlong.TRUNCATE_LEFT).prompt((5, 6, 7)) == (6, 7)`.
    """

    most: int | None
    overlong: Overlong = Overlong.ERROR
    knob: str = "data.max_prompt_length"

    def prompt(self, ids: Ids, origin: str = "row") -> Ids | None:
        """The ids that are used: all, the last (truncate_left) or the first (truncate_right) `most` of them; None where
        the row is left out.

        Raises:
            ValueError: the policy is error and the row is too long; it is named.
        """
        if self.most is None or len(ids) <= self.most:
            return ids
        if self.overlong is Overlong.ERROR:
            raise ValueError(self._refusal(origin, len(ids)))
        return _cut(ids, self.most, self.overlong) if self.overlong.truncates else None

    def response(self, ids: Ids, origin: str = "row") -> Ids | None:
        """As `prompt`, but a response has no end to keep without its start: truncate_right cuts it, which takes its end
        token, and truncate_left leaves the row out.
        """
        if self.overlong is Overlong.TRUNCATE_LEFT and self.most is not None and len(ids) > self.most:
            return None
        return self.prompt(ids, origin)

    def pair(self, prompt: Ids, response: Ids, origin: str = "row") -> tuple[Ids, Ids] | None:
        """A prompt and the response to it, `most` tokens together. Truncation cuts the prompt, of which a token is
        kept; a response that leaves no room even for that is cut on its right (truncate_right: without the end token
        then) or left out (truncate_left). None where the pair is left out.

        Raises:
            ValueError: as `prompt`.
        """
        total = len(prompt) + len(response)
        if self.most is None or total <= self.most:
            return prompt, response
        if self.overlong is Overlong.ERROR:
            raise ValueError(self._refusal(origin, total))
        if self.overlong is Overlong.DROP:
            return None
        room = self.most - len(response)
        if room < 1 and (self.overlong is Overlong.TRUNCATE_LEFT or self.most < 2):
            return None
        kept = _cut(prompt, max(room, 1), self.overlong)
        return kept, response[:self.most - len(kept)]

    def _refusal(self, origin: str, length: int) -> str:
        return (f"{origin}: has {length} tokens, more than {self.knob} = {self.most}. Set {self.knob} to at least "
                f"{length}, or shorten the row, or set data.overlong: drop")


def _cut(ids: Ids, most: int, overlong: Overlong) -> Ids:
    if len(ids) <= most:
        return ids
    return ids[len(ids) - most:] if overlong is Overlong.TRUNCATE_LEFT else ids[:most]
