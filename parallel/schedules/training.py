"""From the name of a schedule to what a training step runs: computation, messages, updates, each by its own module."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.parallel.schedules.actions import Schedule
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.schedules.messages import with_messages
from hybridflow.parallel.schedules.updates import with_updates


def build(
    kind: ScheduleKind, chunks: Chunks, m: int, buckets: Sequence[Sequence[int]] | None = None,
    reshards: Sequence[int] | None = None,
) -> Schedule:
    """The whole schedule of a step of `m` micro-batches.

    Args:
        chunks: what `kind.chunks(pp, vpp)` gives.
        buckets: for each stage the chunk of each of its gradient buckets; None: nothing is reduced.
        reshards: for each stage how many buckets of new weights it sends on after the step; None: none.
    Raises:
        ValueError: arguments that do not belong together (which is said).
    """
    compute = with_messages(kind.compute(chunks, m))
    return with_updates(compute, [()] * chunks.pp if buckets is None else buckets, reshards)
