"""Who generates which prompts: dealt out to the replicas beforehand, or taken from one queue as each gets room.

Owns the choice. It knows prompts and numbers of tokens, and neither weights nor ranks; what is waiting for a free row
of its replica is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heapreplace
from typing import Protocol

from hybridflow.generation.records import Prompt, SamplingParams
from hybridflow.packing import split_rows
from hybridflow.parallel.arithmetic import ceil_div

PORTIONS_PER_REPLICA = 4  # at least, as far as rows last: the largest is then a quarter of a replica's share


class Balance(Enum):
    """How prompts come to replicas. Example: `Balance("shared")`."""

    OWN = "own"
    SHARED = "shared"


class WorkSource(Protocol):
    """Where a replica gets prompts from. All sources of a call of generation together hand out every prompt once.

    Attributes:
        most_rows: rows that the replica should have at work at once, so that others get their part.
        taken: what the replica has taken so far. The engine keeps it on all ranks of the replica.
    """

    most_rows: int
    taken: list[int]

    def take(self, rows: int) -> list[int]:
        """At most `rows` (1 or more) prompts to start, by their index in the whole list; [] once nothing is left.

        Samples of one prompt come together, and all of a portion where they fit. Asked by one rank of the replica.
        """


@dataclass(frozen=True)
class Portion:
    """Samples of one prompt that a replica takes together, so that they share its prefill and its blocks.

    Attributes:
        indices: of the prompts, in the whole list.
        prompt_tokens: of the prompt that they share.
        cost: tokens to be computed: the prompt's once, and of each sample the longest response (one that resumes
            computes what it has in a prefill, and the rest a token at a time).
    """

    indices: tuple[int, ...]
    prompt_tokens: int
    cost: int


def portions(prompts: Sequence[Prompt], params: SamplingParams, replicas: int) -> list[Portion]:
    """The prompts in portions, dearest first, of equal ones the first; the same on every rank.

    A portion has all samples of a prompt, unless prompts are so few that replicas would be uneven: then it has at most
    a quarter of a replica's even share. How long responses get is not known, so each counts as the longest.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_prompt.setdefault(prompt.ids, []).append(index)
    whole = list(by_prompt.values())
    if replicas > 1 and len(whole) < PORTIONS_PER_REPLICA * replicas:
        most = ceil_div(len(prompts), PORTIONS_PER_REPLICA * replicas)
        whole = [list(part) for group in whole for part in split_rows(group, ceil_div(len(group), most))]
    tokens = [len(prompts[part[0]].ids) for part in whole]
    found = [Portion(tuple(part), length, length + sum(prompts[i].longest(params) for i in part))
             for part, length in zip(whole, tokens, strict=True)]
    return sorted(found, key=lambda portion: (-portion.cost, portion.indices))


def dealt(dearest_first: Iterable[Portion], replicas: int) -> list[list[Portion]]:
    """Portions of each replica: the dearest first, each to the replica that has least (Graham 1969)."""
    shares: list[list[Portion]] = [[] for _ in range(replicas)]
    loads = [(0, replica) for replica in range(replicas)]
    heapify(loads)
    for portion in dearest_first:
        load, replica = loads[0]
        shares[replica].append(portion)
        heapreplace(loads, (load + portion.cost, replica))
    return shares


class OwnShare:
    """What is dealt to one replica beforehand: who generates what depends on nothing but the prompts."""

    def __init__(self, prompts: Sequence[Prompt], params: SamplingParams, replicas: int, replica: int) -> None:
        mine = dealt(portions(prompts, params, replicas), replicas)[replica]
        # Longest prompt first, so that a lack of memory shows at the start, and parts of a prompt side by side.
        mine.sort(key=lambda portion: (-portion.prompt_tokens, prompts[portion.indices[0]].ids, portion.indices))
        self._waiting = [portion.indices for portion in reversed(mine)]
        self.most_rows = max(1, sum(len(portion.indices) for portion in mine))
        self.taken: list[int] = []

    def take(self, rows: int) -> list[int]:
        taken: list[int] = []
        while self._waiting and len(taken) < rows:
            portion = self._waiting[-1]
            room = rows - len(taken)
            if len(portion) > room and taken:
                break
            taken += portion[:room]
            self._waiting.pop()
            if len(portion) > room:
                self._waiting.append(portion[room:])
        return taken


class PinnedShare:
    """What is dealt to one replica where some prompts have begun: these go on where they are, and the rest is dealt so
    that loads are even. The samples of a prompt stay on one replica.
    """

    def __init__(self, prompts: Sequence[Prompt], params: SamplingParams, pins: Sequence[int | None], replicas: int,
                 replica: int) -> None:
        """`pins`: by prompt the replica that has begun it; the same on every rank. Samples of a prompt have the same.
        """
        self.portions = [[] for _ in range(replicas)]
        whole = portions(prompts, params, 1)
        for portion in whole:
            if (pin := pins[portion.indices[0]]) is not None:
                self.portions[pin].append(portion)
        loads = [(sum(portion.cost for portion in mine), place) for place, mine in enumerate(self.portions)]
        heapify(loads)
        for portion in (portion for portion in whole if pins[portion.indices[0]] is None):
            load, place = loads[0]
            self.portions[place].append(portion)
            heapreplace(loads, (load + portion.cost, place))
        # Oldest first: prompts are in the order in which they came.
        mine = sorted(index for portion in self.portions[replica] for index in portion.indices)
        self._waiting = mine[::-1]
        self.most_rows = max(1, len(mine))
        self.taken: list[int] = []

    def take(self, rows: int) -> list[int]:
        taken = self._waiting[-rows:][::-1]
        del self._waiting[-rows:]
        return taken


class Count(Protocol):
    """A number that replicas raise one after another."""

    def fetch_add(self, amount: int) -> int:
        """Add `amount`; what it was before."""


class SharedQueue:
    """One line of portions for all replicas, dearest first: a prompt goes to whoever has room first.

    How far the line has been handed out is one number that all replicas count up, so that taking costs one message and
    nobody waits for another. Who generates what, and so which rows are computed together, depends on time: tokens do
    not, where the arithmetic of a row does not depend on the rows beside it.
    """

    def __init__(self, prompts: Sequence[Prompt], params: SamplingParams, replicas: int, handed_out: Count) -> None:
        """`handed_out`: portions, 0 at the start; the same number on all replicas."""
        self._portions = [portion.indices for portion in portions(prompts, params, replicas)]
        self._handed_out = handed_out
        self._left: tuple[int, ...] = ()  # of a portion that did not fit
        self._largest = max(map(len, self._portions), default=1)
        self.most_rows = max(self._largest, ceil_div(len(prompts), replicas))
        self.taken: list[int] = []

    def take(self, rows: int) -> list[int]:
        taken = list(self._left[:rows])
        self._left = self._left[rows:]
        while len(taken) < rows:
            wanted = (rows - len(taken)) // self._largest
            if not wanted and taken:
                break
            first = self._handed_out.fetch_add(max(1, wanted))
            found = [index for portion in self._portions[first : first + max(1, wanted)] for index in portion]
            if not found:
                break
            room = rows - len(taken)
            taken += found[:room]
            self._left = tuple(found[room:])
        return taken
