"""Every way of cutting the tiny models that a number of ranks has, and a small selection that meets all pairs of them.

Pure Python: no tensor, no process group. What a combination is run on is `workload`'s.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop, heapreplace
from itertools import combinations as pairs_of
from itertools import product

from hybridflow.models.recompute import Recompute
from hybridflow.packing import MicroBatching
from hybridflow.parallel.mesh import Layout
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.schedules.chunks import Chunks

FEWEST = 60  # combinations of a selection, where there are as many
MOST_CHUNKS = 12  # more would only make the models deeper
TOKENS = MicroBatching(tokens=24)
MICRO_BATCHES = (MicroBatching(rows=1), MicroBatching(rows=3), TOKENS)
SMALL_BUCKET = 4096  # bytes, of main gradients
ROWS = 7  # fewer than dp 8, and of no divisor but 1
FAILED = (1, 4)  # rows without a score


class TinyModel(Enum):
    """What is trained. Each model has 2 key-value heads, a vocabulary and layers that divide nothing."""

    ACTOR = "actor"  # Llama: the head has its own matrix
    TIED = "tied"  # Qwen2: biases, and the embedding is the head
    CRITIC = "critic"  # Qwen3: norms of queries and keys, and a value head


class Deep(Enum):
    """Which chunk has two layers, where the others have one."""

    FIRST = "deep-first"
    MIDDLE = "deep-middle"
    LAST = "deep-last"

    def chunk(self, count: int) -> int:
        """Of `count` chunks. Example: `Deep.MIDDLE.chunk(4) == 2`."""
        return {Deep.FIRST: 0, Deep.MIDDLE: count // 2, Deep.LAST: count - 1}[self]


class Offload(Enum):
    """What waits on the host."""

    NONE = "-"
    OPTIMIZER = "optimizer"  # masters and moments, always
    ROLE = "role"  # everything, between the turns of the role


@dataclass(frozen=True)
class Combination:
    """One way to run optimizer steps.

    Attributes:
        bucket_bytes: of main gradients at most in one reduction; None: any number.
        recompute_layers: of each chunk, where there is recomputation; None: all.
        some_failed: two rows have no score, and are not trained.
        layers: None for one more than there are chunks; see `deep`.
    Example: `str(Combination(Layout(2, 2), ScheduleKind.ZB_V, 2)) ==
    "tp2 pp2 vpp2 cp1 dp1 zb-v - rows3 zero0 none - actor all deep-first 7of7 -"`.
    """

    layout: Layout = Layout()
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    vpp: int = 1
    sequence_parallel: bool = False
    micro_batching: MicroBatching = MICRO_BATCHES[1]
    zero_stage: int = 0
    recompute: Recompute = Recompute.NONE
    model: TinyModel = TinyModel.ACTOR
    bucket_bytes: int | None = None
    recompute_layers: int | None = None
    deep: Deep = Deep.FIRST
    some_failed: bool = False
    offload: Offload = Offload.NONE
    layers: int | None = None

    @property
    def chunks(self) -> Chunks:
        return self.schedule.chunks(self.layout.pp, self.vpp)

    @property
    def num_layers(self) -> int:
        return self.chunks.count + 1 if self.layers is None else self.layers

    @property
    def layers_per_chunk(self) -> tuple[int, ...]:
        """One for each chunk, and for the deep one what is left."""
        count = self.chunks.count
        deep = self.deep.chunk(count)
        return tuple(1 + (self.num_layers - count) * (chunk == deep) for chunk in range(count))

    @property
    def second_cut(self) -> MicroBatching:
        """Of a second step: the next one, so that all are run from new weights too."""
        return MICRO_BATCHES[(MICRO_BATCHES.index(self.micro_batching) + 1) % len(MICRO_BATCHES)]

    def cells(self) -> tuple[str, ...]:
        """One word for each axis."""
        layout, cut = self.layout, self.micro_batching
        again = "-" if self.recompute is Recompute.NONE else "every" if self.recompute_layers is None else "first"
        return (f"tp{layout.tp}", f"pp{layout.pp}", f"vpp{self.vpp}", f"cp{layout.cp}", f"dp{layout.dp}",
                self.schedule.value, "sp" if self.sequence_parallel else "-",
                f"rows{cut.rows}" if cut.tokens is None else f"tokens{cut.tokens}", f"zero{self.zero_stage}",
                self.recompute.value, again, self.model.value, "all" if self.bucket_bytes is None else "small",
                self.deep.value, f"{ROWS - len(FAILED) * self.some_failed}of{ROWS}", self.offload.value)

    def __str__(self) -> str:
        return " ".join(self.cells())


AXES = ("tp", "pp", "vpp", "cp", "dp", "schedule", "sp", "micro-batch", "zero", "recompute", "layers", "model",
        "buckets", "two in", "trained", "offload")


def every(world: int) -> Iterator[Combination]:
    """On exactly `world` ranks every combination of what makes the most difference, each with one choice of the rest.

    The rest is drawn, the same on every machine: all of it with all of it would be a million.
    """
    draw = random.Random(world)
    pick = lambda values: values[int(draw.random() * len(values))]  # noqa: E731
    for layout, kind, vpp in shapes(world):
        sharded = (0, 1, 2) if layout.dp * layout.cp > 1 else (0,)
        for rest in product((False, True) if layout.tp > 1 else (False,), MICRO_BATCHES, sharded, Recompute, TinyModel,
                            (None, SMALL_BUCKET)):
            again = pick((None, 1)) if rest[3] is not Recompute.NONE else None
            yield Combination(layout, kind, vpp, *rest, again, pick(deep_places(layout.pp * vpp)), pick((False, True)),
                              pick(tuple(Offload)))


def shapes(world: int) -> Iterator[tuple[Layout, ScheduleKind, int]]:
    """Every layout of `world` ranks, schedule on it and number of chunks of a stage."""
    for layout, kind in product(layouts(world), ScheduleKind):
        if kind is ScheduleKind.INTERLEAVED:
            numbers: tuple[int, ...] = (2, 3) if layout.pp > 1 else ()  # on one stage it is 1F1B
        else:
            numbers = (2,) if kind is ScheduleKind.ZB_V and layout.pp > 1 else (1,)
        for vpp in numbers:
            if layout.pp * vpp <= MOST_CHUNKS:
                yield layout, kind, vpp


def deep_places(count: int) -> tuple[Deep, ...]:
    """Those that differ with `count` chunks."""
    return tuple(Deep) if count > 2 else (Deep.FIRST, Deep.LAST)[:count]


def layouts(world: int) -> list[Layout]:
    """Every layout of exactly `world` ranks whose tensor degree is a power of two (as many as the models' heads)."""
    degrees = [degree for degree in range(1, world + 1) if world % degree == 0]
    return [Layout(tp, pp, world // (tp * pp * cp), cp) for tp, pp, cp in product(degrees, repeat=3)
            if tp & (tp - 1) == 0 and tp <= 8 and world % (tp * pp * cp) == 0]


def selection(world: int, fewest: int = FEWEST) -> list[Combination]:
    """Few combinations in which every two values that can occur together do, a whole layout being one value too.

    Greedy: always the one that meets most pairs not met yet, of equals the first. Once all pairs are met they are met
    again by others, until there are `fewest`. The same on every machine.
    """
    candidates = list(every(world))
    masks = _masks(candidates)
    chosen = _cover(masks, set())
    while len(chosen) < min(fewest, len(candidates)):
        chosen += _cover(masks, set(chosen))[:fewest - len(chosen)]
    return sorted((candidates[i] for i in chosen), key=_order)


def _cover(masks: list[int], without: set[int]) -> list[int]:
    """Places of masks that have all bits which any of them has, not counting those `without`.

    What a mask adds can only shrink, so that one which still adds what it did when it was last looked at is the best.
    """
    heap = [(-mask.bit_count(), place) for place, mask in enumerate(masks) if place not in without]
    heapify(heap)
    met, chosen = 0, []
    while heap:
        before, place = heap[0]
        adds = (masks[place] & ~met).bit_count()
        if adds == 0:
            heappop(heap)
        elif adds < -before:
            heapreplace(heap, (-adds, place))
        else:
            chosen.append(place)
            met |= masks[place]
            heappop(heap)
    return chosen


def values(combination: Combination) -> tuple[str, ...]:
    """The value on every axis, and the layout as a whole."""
    return (*(f"{axis} {cell}" for axis, cell in zip(AXES, combination.cells())), str(combination.layout))


def _masks(candidates: Sequence[Combination]) -> list[int]:
    """For each candidate the pairs of values in it, as bits."""
    numbers: dict[str, int] = {}
    bits: dict[int, int] = {}
    masks = []
    for candidate in candidates:
        found = [numbers.setdefault(value, len(numbers)) for value in values(candidate)]
        mask = 0
        for one, other in pairs_of(found, 2):
            pair = one << 16 | other
            if pair not in bits:
                bits[pair] = 1 << len(bits)
            mask |= bits[pair]
        masks.append(mask)
    return masks


def _order(combination: Combination) -> tuple[int | str, ...]:
    layout = combination.layout
    return (layout.tp, layout.pp, layout.cp, str(combination))


def matching(combinations: Sequence[Combination], only: str) -> list[Combination]:
    """Those whose text has `only` in it."""
    return [combination for combination in combinations if only in str(combination)]
