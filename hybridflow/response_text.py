"""What ends a response, and its text without that.

Owns the cut between a response and its end. Finding the end while tokens are sampled is generation's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.data.tokenizer import Tokenizer
from hybridflow.generation.stop_strings import StopStrings


@dataclass(frozen=True)
class ResponseEnds:
    """Example: `ResponseEnds(ids=(2,), strings=("</answer>",))`: token 2 ends a response, and so does the text."""

    ids: tuple[int, ...]
    strings: tuple[str, ...] = ()


def answer_text(tokenizer: Tokenizer, response: Sequence[int], ends: ResponseEnds) -> str:
    """A response in words, without the token or the string that ended it (and what its last token has behind that)."""
    if response and response[-1] in ends.ids:
        return tokenizer.decode(response[:-1])
    if not ends.strings:
        return tokenizer.decode(response)
    return StopStrings(ends.strings, tokenizer.decode).cut(response)
