"""What the traces of all ranks say of a step: the seconds of its parts, and those in which two of them run at once.

Owns the arithmetic on spans. It measures nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hybridflow.observe.phases import Phase
from hybridflow.observe.trace import TraceEvent

STEP = "step"  # the span of a whole step (`PhaseTimer.step`)
SCORING = (Phase.REWARD, Phase.REFERENCE, Phase.LOG_PROBS, Phase.VALUES)
Interval = tuple[int, int]  # start and end, in ns


@dataclass(frozen=True)
class StepSeconds:
    """Of one step. Generation, scoring and update are those of the slowest of the ranks that do it.

    Attributes:
        score: what is scored of a batch while the rest of it is generated is left out: it takes no time of its own.
        overlap: in which a rank generates while another one updates the actor.
        shorter: of generation and update, each by any of its ranks.
        beside: in which a rank generates while another one scores or updates; 0 where it is the same batch.
    """

    generate: float
    score: float
    update: float
    overlap: float
    shorter: float
    beside: float

    @property
    def total(self) -> float:
        """What the step takes where its parts come one after another."""
        return self.generate + self.score + self.update


def step_seconds(events: Mapping[int, Sequence[TraceEvent]], generating: Collection[int],
                 training: Collection[int], *, ahead: bool) -> list[StepSeconds]:
    """Of every traced step, in order. Steps are taken from the spans of that name, which no two steps share on a rank.

    Args:
        events: by rank, on one clock.
        generating, training: ranks on which the actor generates, and trains.
        ahead: what is generated in a step is for a later one.
    """
    steps = [_sorted_spans(events[rank], (STEP,)) for rank in sorted(events)]
    found = []
    for edges in zip(*steps, strict=True):
        within = {rank: _inside(events[rank], edge) for rank, edge in zip(sorted(events), edges, strict=True)}
        found.append(_one_step(within, generating, training, ahead))
    return found


def merged(intervals: Collection[Interval]) -> list[Interval]:
    """The same moments in ascending intervals that do not touch. Example: (0, 2), (1, 3), (5, 6) are (0, 3), (5, 6)."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def common(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The moments that lie in both. Example: (0, 3), (5, 9) and (2, 6) have (2, 3), (5, 6)."""
    pairs = ((max(a[0], b[0]), min(a[1], b[1])) for a in merged(some) for b in merged(others))
    return [(start, end) for start, end in pairs if start < end]


def seconds(intervals: Collection[Interval]) -> float:
    """How long they are together, each moment counted once."""
    return sum(end - start for start, end in merged(intervals)) / 1e9


def _one_step(events: Mapping[int, Sequence[TraceEvent]], generating: Collection[int],
              training: Collection[int], ahead: bool) -> StepSeconds:
    def of(ranks: Collection[int], *phases: Phase) -> dict[int, list[Interval]]:
        return {rank: _sorted_spans(events[rank], [phase.value for phase in phases]) for rank in ranks}

    made, scored, learned = of(generating, Phase.GENERATE), of(training, *SCORING), of(training, Phase.UPDATE_ACTOR)
    made_by_any, scored_by_any, learned_by_any = (sum(spans.values(), []) for spans in (made, scored, learned))
    return StepSeconds(
        generate=_slowest(made),
        score=max(seconds(spans) - (0 if ahead else seconds(common(spans, made_by_any))) for spans in scored.values()),
        update=_slowest(learned),
        overlap=seconds(common(made_by_any, learned_by_any)),
        shorter=min(seconds(made_by_any), seconds(learned_by_any)),
        beside=seconds(common(made_by_any, scored_by_any + learned_by_any)) if ahead else 0.0,
    )


def _slowest(by_rank: Mapping[int, Sequence[Interval]]) -> float:
    return max(map(seconds, by_rank.values()))


def _sorted_spans(events: Sequence[TraceEvent], names: Collection[str]) -> list[Interval]:
    return sorted((event.start_ns, event.start_ns + event.duration_ns) for event in events if event.name in names)


def _inside(events: Sequence[TraceEvent], edge: Interval) -> list[TraceEvent]:
    return [event for event in events if edge[0] <= event.start_ns < edge[1]]
