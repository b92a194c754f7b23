"""Where the tokens of samples lie when they are packed: row after row, or a prompt that several share once.

Pure Python: it knows samples, and neither tensors nor what is done with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain


@dataclass(frozen=True)
class Sample:
    """A prompt and the response to it. Example: `Sample((5, 9), (7, 2))` has 2 targets, seen from positions 1 and 2."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class Branches:
    """Rows that go on from the end of another one, which they share.

    Attributes:
        lengths: tokens of each branch, without what it goes on from.
        roots: for each the row that it goes on from.
    Example: two answers of 3 and 2 tokens to the prompt in row 0 are `Branches((3, 2), (0, 0))`.
    """

    lengths: tuple[int, ...] = ()
    roots: tuple[int, ...] = ()


@dataclass(frozen=True)
class PackedRows:
    """Packed samples without padding: first all rows that begin at position 0, then the branches.

    Attributes:
        lengths: tokens of the rows that begin at position 0: samples, and prompts that several samples share.
        branches: responses of those.
        ids, positions: of every token.
        places: of each sample the packed places of its positions, as far as they were packed.
    Example: two samples of prompt (5, 9) with responses (7,) and (8, 2) are, shared, `ids` [5, 9, 7, 8, 2].
    """

    lengths: tuple[int, ...]
    branches: Branches
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    places: tuple[tuple[range, range], ...]

    @classmethod
    def of(cls, samples: Sequence[Sample], *, share_prompts: bool = False, unread: int = 0) -> PackedRows:
        """Pack `samples`; with `share_prompts` a prompt that several of them have is packed once.

        Args:
            unread: tokens at the end of a response that nobody asks for: branches are packed without them.
        """
        times = Counter(sample.prompt for sample in samples) if share_prompts else Counter()
        shared = [times[sample.prompt] > 1 for sample in samples]
        rows, owners = _rows(samples, shared)
        branches = [sample.response[:max(0, len(sample.response) - unread)] if is_shared else ()
                    for sample, is_shared in zip(samples, shared)]
        starts = (0, *accumulate(map(len, (*rows, *branches))))
        places = tuple(_places(samples[i], starts[owners[i]], starts[len(rows) + i] if shared[i] else None)
                       for i in range(len(samples)))
        there = [i for i, branch in enumerate(branches) if branch]
        positions = (*(range(len(row)) for row in rows),
                     *(range(len(samples[i].prompt), len(samples[i].prompt) + len(branches[i])) for i in there))
        return cls(tuple(map(len, rows)),
                   Branches(tuple(len(branches[i]) for i in there), tuple(owners[i] for i in there)),
                   tuple(chain(*rows, *branches)), tuple(chain(*positions)), places)

    def place(self, sample: int, position: int) -> int:
        """The packed place of a position of a sample's row."""
        prompt, response = self.places[sample]
        return prompt[position] if position < len(prompt) else response[position - len(prompt)]


def _rows(samples: Sequence[Sample], shared: Sequence[bool]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Tokens of the rows that begin at position 0, and of each sample which of them it has."""
    rows: list[tuple[int, ...]] = []
    root_of: dict[tuple[int, ...], int] = {}
    owners = []
    for sample, is_shared in zip(samples, shared, strict=True):
        if not is_shared:
            rows.append((*sample.prompt, *sample.response))
            owners.append(len(rows) - 1)
            continue
        if sample.prompt not in root_of:
            root_of[sample.prompt] = len(rows)
            rows.append(sample.prompt)
        owners.append(root_of[sample.prompt])
    return rows, owners


def _places(sample: Sample, row: int, branch: int | None) -> tuple[range, range]:
    """Of the prompt's and the response's tokens, from where the sample's row begins, and its branch if it has one."""
    middle = row + len(sample.prompt)
    begin = middle if branch is None else branch
    return range(row, middle), range(begin, begin + len(sample.response))
