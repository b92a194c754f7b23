"""One way of the weights into the generator: from which storages, by which plan, what must have stepped before, and
how much is checked after.

Owns a plan with its executor and its check, and the order of optimizer buckets. It never allocates a weight and never
steps a bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import torch
from torch import Tensor

from hybridflow.parallel.checksum import TransferCheck, sampled
from hybridflow.parallel.parameter_shares import share_storage
from hybridflow.parallel.plan import TransferPlan, lower_bound_numel
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.state_map import FlatLayout
from hybridflow.parallel.transfer import Transfer, TransferStats
from hybridflow.parallel.world import World


class ReshardCheck(Enum):
    """Whose checksums are compared after each reshard: all tensors', a part's that changes with the version, or none's.
    """

    ALL = "all"
    SAMPLED = "sampled"
    OFF = "off"


class Route:
    """A plan and its rounds on this rank. Making one is collective.

    Attributes:
        plan: from `src` to `dst`.
        steps: by round, the optimizer's buckets whose parameters that round is the first to read.
        lower_bound_bytes: of what this rank must receive.
    """

    def __init__(self, src: ShardMap, dst: ShardMap, world: World, layout: FlatLayout, *, wire_dtype: torch.dtype,
                 bucket_bytes: int, check: ReshardCheck) -> None:
        """`src` has its shards in parameters (of `layout`'s names) or in shares of buckets.

        Raises:
            IntegrityError: the plan, where it is checked, does not bring each element once to some rank.
        """
        self.plan = TransferPlan(src, dst, world.nodes)
        self._check = None if check is ReshardCheck.OFF else TransferCheck(src, dst, self.plan, world, wire_dtype)
        self._transfer = Transfer(self.plan, world, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes)
        bucket_of = _buckets(layout)
        self.steps = tuple(tuple(sorted({bucket_of[name] for name in self._transfer.sources(number)
                                         if name in bucket_of})) for number in range(self.num_rounds))
        self._which = check
        self.lower_bound_bytes = lower_bound_numel(src, dst, world.rank) * wire_dtype.itemsize

    @property
    def num_rounds(self) -> int:
        return self._transfer.num_rounds

    @property
    def stats(self) -> TransferStats:
        """Counted over all reshards so far."""
        return self._transfer.stats

    def round(self, number: int, src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
        """Carry out one round, in order; after the last one all of `dst` is in place."""
        self._transfer.round(number, src, dst)

    def verify(self, src: dict[str, Tensor], dst: dict[str, Tensor], version: int) -> None:
        """Compare what has arrived with what was sent. Collective, after the last round and before `src` changes.

        Raises:
            IntegrityError: values or versions differ on any rank; raised on all. Names tensors, ranks and the version.
        """
        if self._check is not None:
            names = sampled(self.plan.dst.shapes, version) if self._which is ReshardCheck.SAMPLED else None
            self._check.verify(src, dst, version=version, names=names)


def _buckets(layout: FlatLayout) -> Mapping[str, int]:
    """The bucket of each parameter and of each share; frozen parameters have none."""
    of_parameter = {name: place.bucket for name, place in layout.items()}
    return of_parameter | {share_storage(bucket): bucket for bucket in set(of_parameter.values())}
