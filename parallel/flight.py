"""A small TransferPlan in one go: nothing is agreed on beforehand, nothing is cut, and who only sends never waits.

For what is small beside memory, as rows of a batch are. Weights go by `transfer`, in rounds of bounded size.
"""

from __future__ import annotations

import torch

from hybridflow.parallel.parcels import InFlight, Parcel, Staging, Storages, keep, parcels_of
from hybridflow.parallel.plan import TransferPlan
from hybridflow.parallel.wires import rounds_of, wires_of
from hybridflow.parallel.world import World

ONE_MESSAGE = 2**62  # elements from which a piece travels apart: all that goes to a rank goes together


class Flight:
    """A plan without passing on, under way. Ranks of the plan start their flights in the same order, and may do other
    work before they `land`. What this rank sends is in the world's outbox, and must not change.
    """

    @torch.no_grad()
    def __init__(self, plan: TransferPlan, world: World, src: Storages, dst: Storages, *,
                 wire_dtype: torch.dtype) -> None:
        """
        Raises:
            TransferError: a rank at the other end of a wire is gone.
        """
        copies = plan.of_rank(world.rank)
        everything = {wire: sum(copy.box.numel for copy in found) for wire, found in wires_of(copies).items()}
        [now] = rounds_of(world.rank, copies, everything, ONE_MESSAGE)
        parcels = parcels_of(now, src, dst, wire_dtype, world.device)
        Staging(wire_dtype, world.device).pack([parcel for parcel in parcels if parcel.buffer is None])
        self._arriving = _start(world, parcels)
        for kept in now.kept:
            keep(kept, src, dst)

    @torch.no_grad()
    def land(self) -> None:
        """Wait for what this rank receives; all of its destination is in place then.

        Raises:
            TransferError: it does not come in time.
        """
        self._arriving = self._arriving.land()


def _start(world: World, parcels: list[Parcel]) -> InFlight:
    """Hand everything to the backend at once; what is received."""
    both = InFlight.start(0, parcels)
    if len(both.works) != len(both.parcels):  # the backend has one wait for all, which does not hold up the host
        return both
    pairs = list(zip(both.parcels, both.works))
    sent, received = ([pair for pair in pairs if pair[0].sent is is_sent] for is_sent in (True, False))
    for parcel, work in sent:
        world.outbox.keep(InFlight(0, [parcel], [work]).land)
    return InFlight(0, [parcel for parcel, _ in received], [work for _, work in received])
