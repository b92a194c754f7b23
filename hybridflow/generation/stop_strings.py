"""When the text of a response has a stop string in it, asked after every token.

Owns the search. Text is made by the decoder that it is given; sampling and ids are others'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no whole character yet
MARGIN = 8  # characters at a window's start that may read otherwise in the whole text: a dropped blank, a cut character


class StopStrings:
    """Looks only at the response: a string that begins in the prompt does not count.

    A string ends a response at the token with which it is first whole, be it in the middle of that token's text, made
    of several tokens, or whole only with the last byte of a character.

    Example: `StopStrings(("END",), tokenizer.decode).ends(tokenizer.encode("the END"))`.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        """`decode`: token ids to text, of any part of a response; as `data.tokenizer.Tokenizer.decode`."""
        self._strings, self._decode = tuple(strings), decode
        self._longest = max(map(len, strings), default=0)
        self._may_end: dict[int, bool] = {}  # of each token met so far, whether a string can end in it

    def ends(self, response_ids: Sequence[int]) -> bool:
        """Whether the last of `response_ids` makes a string whole that was not before.

        Costs a look into a table for tokens in whose text no string can end, and else two short decodes.
        """
        if not len(response_ids) or not self._can_end(response_ids):
            return False
        before, after = self._windows(response_ids)
        return any(self._place(string, before, after) is not None for string in self._strings)

    def cut(self, response_ids: Sequence[int]) -> str:
        """The text of a response that a string has ended, up to that string; the whole text of any other."""
        if not len(response_ids) or not self._can_end(response_ids):
            return self._decode(response_ids)
        before, after = self._decode(response_ids[:-1]), self._decode(response_ids)
        places = [self._place(string, before, after) for string in self._strings]
        return after[: min((place for place in places if place is not None), default=len(after))]

    def _place(self, string: str, before: str, after: str) -> int | None:
        """Where `string` first stands in `after` without standing there in `before`; None where it does not."""
        place = after.find(string)
        while place >= 0 and before.startswith(string, place):
            place = after.find(string, place + 1)
        return None if place < 0 else place

    def _can_end(self, response_ids: Sequence[int]) -> bool:
        """False only where the last token's text alone rules out that a string ends in it."""
        token = response_ids[-1]
        known = self._may_end.get(token)
        if known is not None:
            return known
        if len(response_ids) < 2:  # the first token's text may lack a blank that it has elsewhere: learn nothing of it
            return True
        before, both = self._decode(response_ids[-2:-1]), self._decode(response_ids[-2:])
        text = both[len(before) :]
        if not text or REPLACEMENT in both or not both.startswith(before):
            return True  # part of a character, or a decoder that changes what it has written: look at the text
        may_end = any(string in text or _overlap(string, text) for string in self._strings)
        self._may_end[token] = may_end
        return may_end

    def _windows(self, response_ids: Sequence[int]) -> tuple[str, str]:
        """Texts before and with the last token, of as many of the last tokens as any string can reach back over."""
        size = self._longest + MARGIN
        while True:
            start = max(0, len(response_ids) - 1 - size)
            before = self._decode(response_ids[start:-1])
            if not start or len(before) >= self._longest + MARGIN:
                return before, self._decode(response_ids[start:])
            size *= 2  # tokens without a text of their own: special ones, or parts of characters


def _overlap(string: str, text: str) -> bool:
    """Whether `text` begins with an end of `string`."""
    return any(text.startswith(string[i:]) for i in range(1, len(string)))
