"""The schedules that properties are tried on: every kind, at every size that a laptop can hold in its head."""

from hybridflow.parallel.schedules.builders import ScheduleKind, forward_only
from hybridflow.parallel.schedules.chunks import ChunkOrder, Chunks
from hybridflow.parallel.schedules.messages import with_messages

PPS = (1, 2, 3, 4, 5, 8)
MS = range(1, 18)


def chunks_of(kind: ScheduleKind, pp: int) -> list[Chunks]:
    """All ways to cut a model for `kind` on `pp` stages, up to three chunks on each."""
    vpps = {ScheduleKind.INTERLEAVED: (2, 3), ScheduleKind.ZB_V: (2,)}
    return [kind.chunks(pp, vpp) for vpp in (vpps.get(kind, (1,)) if pp > 1 else (1,))]


def forwards(pp: int, m: int):
    """Forward schedules with messages over all chunk orders."""
    cuts = [Chunks(pp, vpp) for vpp in (1, 2, 3)] + [Chunks(pp, 2, ChunkOrder.V)]
    return [with_messages(forward_only(chunks, m)) for chunks in cuts]


def buckets_of(chunks: Chunks) -> list[list[int]]:
    """Two gradient buckets for each chunk, in the order in which backward completes them."""
    return [[chunk for chunk in reversed(chunks.of_stage(stage)) for _ in range(2)] for stage in range(chunks.pp)]
