"""What follows the gradients in a schedule: the reduce of each bucket, the optimizer step, the sending of new weights.

Owns where REDUCE, STEP and RESHARD stand. It never knows what is in a bucket, only which chunk completes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.parallel.schedules.actions import STEP, Action, Kind, Schedule


def with_updates(
    schedule: Schedule, buckets: Sequence[Sequence[int]], reshards: Sequence[int] | None = None
) -> Schedule:
    """Add REDUCE right behind the action that completes its bucket, STEP behind everything, RESHARD behind STEP.

    Args:
        schedule: with backwards; messages may be there already.
        buckets: for each stage and each of its buckets the chunk whose last weight gradient completes it.
        reshards: for each stage the number of buckets in which its new weights are sent on; None: none.
    Raises:
        ValueError: not one entry for each stage, or a bucket of a chunk that is not on its stage.
    """
    pp = schedule.chunks.pp
    reshards = [0] * pp if reshards is None else reshards
    if (len(buckets), len(reshards)) != (pp, pp):
        raise ValueError(f"buckets of {len(buckets)} and reshards of {len(reshards)} stages were given for {pp} stages")
    stages = []
    for stage, (chunk_of_bucket, num_reshards) in enumerate(zip(buckets, reshards, strict=True)):
        after: dict[Action, list[Action]] = {}
        last = last_gradients(schedule, stage)
        for bucket, chunk in enumerate(chunk_of_bucket):
            if chunk not in last:
                raise ValueError(f"bucket {bucket} of stage {stage} is of chunk {chunk}; the stage has {sorted(last)}")
            after.setdefault(last[chunk], []).append(Action(Kind.REDUCE, bucket))
        actions = [a for action in schedule.stages[stage] for a in (action, *after.get(action, ()))]
        stages.append((*actions, STEP, *(Action(Kind.RESHARD, i) for i in range(num_reshards))))
    return Schedule(schedule.chunks, schedule.num_micro_batches, tuple(stages))


def last_gradients(schedule: Schedule, stage: int) -> dict[int, Action]:
    """For each chunk of `stage` its last action that adds to weight gradients: W where backwards are split, else B."""
    kind = Kind.W if schedule.splits_backward else Kind.B
    return {action.chunk: action for action in schedule.stages[stage]
            if action.kind is kind and action.chunk is not None}
