"""How the rows of a role's batch are cut over replicas and micro-batches: by number of rows, or by a budget of tokens.

Rows that a loss compares with each other, such as the two of a pair, are a unit and stay together.

Pure Python and deterministic: every rank works out the whole cut alone, from the lengths of all rows. It moves nothing,
and the optimizer step does not depend on it (weights of tokens are those of the whole batch).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import accumulate

from hybridflow.parallel.arithmetic import ceil_div

# Into how many pieces a group may be cut that would fill a micro-batch.
CLUSTERS_PER_BUDGET = (1, 2, 4, 8)
# The rows of each micro-batch of each replica: cut[replica][micro_batch] are row numbers.
Cut = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class MicroBatching:
    """How much one replica runs at once: `rows`, or `tokens` in rows of any number. One of the two is given.

    Example: `MicroBatching(tokens=8192)`.
    """

    rows: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.rows is None) == (self.tokens is None):
            raise ValueError(f"micro-batches of rows {self.rows} and tokens {self.tokens}: give one of the two")

    def __str__(self) -> str:
        return self.counted("row")

    def counted(self, unit: str) -> str:
        """Example: `MicroBatching(rows=8).counted("pair") == "8 pairs"`."""
        if self.tokens is not None:
            return f"{self.tokens} tokens"
        return f"1 {unit}" if self.rows == 1 else f"{self.rows} {unit}s"

    def cut(self, lengths: Sequence[int], dp: int, multiple_of: int = 1, together: int = 1,
            prompts: Sequence[SharedPrompt] | None = None) -> Cut:
        """The cut of rows 0, 1, .. of these lengths (tokens) over `dp` replicas.

        Args:
            multiple_of: what the tokens of a micro-batch are padded to a multiple of.
            together: so many consecutive rows are a unit, which no cut parts; `rows` then counts units. Example: rows
                0 to 5 with `together` 2 are three pairs, cut by `MicroBatching(rows=2)` into rows 0 1 2 3 and 4 5.
            prompts: of the rows, where those with the same one in a micro-batch have its tokens once; None: each row
                has its own, or they are units. Cut by number of rows, rows stay in their order whatever they share.

        Raises:
            ValueError: a row (or unit) is longer than the budget.
        """
        assert len(lengths) % together == 0, (len(lengths), together)
        units = [sum(lengths[start:start + together]) for start in range(0, len(lengths), together)]
        if self.tokens is None:
            assert self.rows is not None
            cut = by_rows(range(len(units)), dp, self.rows)
        else:
            if prompts is not None and together == 1:
                return by_shared_tokens(lengths, prompts, dp, self.tokens, multiple_of)
            cut = by_tokens(units, dp, self.tokens, multiple_of, "row" if together == 1 else f"unit of {together} rows")
        return cut if together == 1 else _rows_of_units(cut, together)


@dataclass(frozen=True)
class SharedPrompt:
    """The prompt of a row: rows of the same `group` have the same one, of so many `tokens`."""

    group: int
    tokens: int


def by_rows(rows: Sequence[int], dp: int, micro_batch_size: int) -> Cut:
    """Consecutive rows to each replica, at most `micro_batch_size` at once; numbers of rows differ by one at most.

    A replica has one micro-batch at least, empty where it has no row. Example: `by_rows(range(5), 2, 2)` is
    `(((0, 1), (2,)), ((3, 4),))`.
    """
    return tuple(tuple(share[start:start + micro_batch_size] for start in range(0, len(share), micro_batch_size))
                 or ((),) for share in split_rows(rows, dp))


def split_rows(rows: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """`rows` cut into `parts` consecutive runs whose sizes differ by one at most. Example: 10 rows in 4: 3 3 2 2."""
    base, extra = divmod(len(rows), parts)
    ends = list(accumulate(base + (part < extra) for part in range(parts)))
    return [tuple(rows[start:end]) for start, end in zip([0, *ends], ends)]


def _rows_of_units(cut: Cut, together: int) -> Cut:
    """The rows of a cut of units. Example: unit 1 of 2 rows has rows 2 and 3."""
    return tuple(tuple(tuple(unit * together + place for unit in units for place in range(together))
                       for units in replica) for replica in cut)


def by_tokens(lengths: Sequence[int], dp: int, budget: int, multiple_of: int = 1, noun: str = "row") -> Cut:
    """Micro-batches of at most `budget` tokens with their padding; as many on each replica, some of them empty.

    As few as two greedy packings find (longest row first, to the emptiest micro-batch or to the fullest that has room;
    Graham 1969, Johnson 1973), and of about equal tokens, as are the replicas. A replica's fullest comes first.
    Example: `by_tokens((5, 2, 6), 1, 8)` is `(((0, 1), (2,)),)`; on two replicas `(((0, 1),), ((2,),))`.

    Raises:
        ValueError: a row is longer than the budget.
    """
    room = _room(lengths, budget, multiple_of, noun)
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    return _dealt(_packed(order, lengths, room, dp), lengths, dp)


def by_shared_tokens(lengths: Sequence[int], prompts: Sequence[SharedPrompt], dp: int, budget: int,
                     multiple_of: int = 1) -> Cut:
    """`by_tokens` of rows some of which share their prompt: in a micro-batch its tokens are there once.

    Rows of a group go together in clusters as large as the budget allows, or smaller ones where that makes fewer
    micro-batches: large clusters pack badly, small ones repeat prompts. Example: rows of 6 tokens with 4 of a common
    prompt, on one replica with a budget of 10: `(((0, 1, 2),),)`, where `by_tokens` makes three micro-batches.

    Raises:
        ValueError: a row is longer than the budget.
    """
    room = _room(lengths, budget, multiple_of)
    cuts = [_of_clusters(_clusters(lengths, prompts, room // parts), lengths, prompts, room, dp)
            for parts in CLUSTERS_PER_BUDGET]
    return min(cuts, key=lambda cut: _cost(cut, lengths, prompts))


def shared_tokens(rows: Sequence[int], lengths: Sequence[int], prompts: Sequence[SharedPrompt]) -> int:
    """Tokens of a micro-batch of these rows, each prompt once."""
    once = {prompts[row].group: prompts[row].tokens for row in rows}
    return sum(lengths[row] - prompts[row].tokens for row in rows) + sum(once.values())


def _clusters(lengths: Sequence[int], prompts: Sequence[SharedPrompt], most: int) -> list[tuple[int, ...]]:
    """Rows of one group each, of at most so many tokens where one row alone is not longer."""
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt.group, []).append(row)
    found: list[tuple[int, ...]] = []
    for rows in groups.values():
        tokens = prompts[rows[0]].tokens
        answers = [lengths[row] - tokens for row in rows]
        order = sorted(range(len(rows)), key=lambda place: (-answers[place], place))
        bins = _fullest_first(order, answers, max(most - tokens, *answers))
        found += [tuple(sorted(rows[place] for place in places)) for places in bins]
    return found


def _of_clusters(clusters: Sequence[tuple[int, ...]], lengths: Sequence[int], prompts: Sequence[SharedPrompt],
                 room: int, dp: int) -> Cut:
    """Clusters packed and dealt as rows are."""
    sizes = [shared_tokens(rows, lengths, prompts) for rows in clusters]
    order = sorted(range(len(sizes)), key=lambda number: (-sizes[number], number))
    cut = _dealt(_packed(order, sizes, room, dp), sizes, dp)
    return tuple(tuple(tuple(sorted(row for number in numbers for row in clusters[number])) for numbers in replica)
                 for replica in cut)


def _cost(cut: Cut, lengths: Sequence[int], prompts: Sequence[SharedPrompt]) -> tuple[int, int]:
    """What a step takes: the tokens of the fullest replica; then how many micro-batches each has."""
    filled = [sum(shared_tokens(rows, lengths, prompts) for rows in replica) for replica in cut]
    return max(filled), len(cut[0])


def _room(lengths: Sequence[int], budget: int, multiple_of: int, noun: str = "row") -> int:
    """What can be filled of a budget.

    Raises:
        ValueError: a row is longer.
    """
    room = budget - budget % multiple_of  # more would be padded beyond the budget
    for row, length in enumerate(lengths):
        if length > room:
            usable = f", of which {room} is a multiple of {multiple_of}" if room != budget else ""
            raise ValueError(f"{noun} {row} has {length} tokens, more than train.micro_batch_tokens {budget} can hold"
                             f"{usable} (when rows are scored: train.forward_micro_batch_tokens, where given)")
    return room


def _packed(order: Sequence[int], sizes: Sequence[int], room: int, dp: int) -> list[list[int]]:
    """Bins of rows, each filled to `room` at most, a multiple of `dp` in number."""
    dense = _fullest_first(order, sizes, room)
    few, many = max(1, ceil_div(sum(sizes), room * dp)), max(1, ceil_div(len(dense), dp))
    even = None
    while few < many:  # an even packing into as few bins as a search by halves finds
        middle = (few + many) // 2
        found = _emptiest_first(order, sizes, room, middle * dp)
        few, many, even = (middle + 1, many, even) if found is None else (few, middle, found)
    even = even or _emptiest_first(order, sizes, room, many * dp)
    return even or dense + [[] for _ in range(many * dp - len(dense))]


def _emptiest_first(order: Iterable[int], sizes: Sequence[int], room: int, count: int) -> list[list[int]] | None:
    """Rows in this order into `count` bins, each to the bin with least in it; None where that one has no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    filled = [(0, number) for number in range(count)]
    for row in order:
        size, number = filled[0]
        if size + sizes[row] > room:
            return None
        bins[number].append(row)
        heapreplace(filled, (size + sizes[row], number))
    return bins


def _fullest_first(order: Iterable[int], sizes: Sequence[int], room: int) -> list[list[int]]:
    """Rows in this order into as many bins as it takes, each to the fullest bin that has room for it."""
    bins: list[list[int]] = []
    left: list[tuple[int, int]] = []  # (room left, bin), sorted
    for row in order:
        place = bisect_left(left, (sizes[row], 0))
        if place == len(left):
            free, number = room, len(bins)
            bins.append([])
        else:
            free, number = left.pop(place)
        bins[number].append(row)
        insort(left, (free - sizes[row], number))
    return bins


def _dealt(bins: list[list[int]], sizes: Sequence[int], dp: int) -> Cut:
    """Equally many bins to each replica, the fullest first and each to the replica that has least."""
    filled = [sum(sizes[row] for row in rows) for rows in bins]
    replicas: list[list[tuple[int, ...]]] = [[] for _ in range(dp)]
    open_ones = [(0, replica) for replica in range(dp)]
    for number in sorted(range(len(bins)), key=lambda number: (-filled[number], number)):
        size, replica = heappop(open_ones)
        replicas[replica].append(tuple(sorted(bins[number])))
        if len(replicas[replica]) < len(bins) // dp:
            heappush(open_ones, (size + filled[number], replica))
    return tuple(tuple(rows) for rows in replicas)
