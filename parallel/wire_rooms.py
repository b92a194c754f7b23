"""Before the first round: the two ends of every wire agree on how much it carries in each, and that they mean the same.

Owns this one exchange. How much there is room for at one end is `wires`'.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridflow.parallel.peers import PeerError, swap
from hybridflow.parallel.plan import Copy
from hybridflow.parallel.wires import Wire
from hybridflow.parallel.world import World

MOST_WIRES = 8  # between two ranks: both directions, hop by hop

def agreed_rooms(room: Mapping[Wire, int], wires: Mapping[Wire, Sequence[Copy]], world: World) -> dict[Wire, int]:
    """By wire the smaller of what its two ends have room for. One small message each way between peers.

    Raises:
        PeerError: the ends of a wire have different plans, or one does not answer. Names the rank at the other end.
    """
    by_peer: dict[int, list[Wire]] = {}
    for wire in sorted(room):
        by_peer.setdefault(wire.peer(world.rank), []).append(wire)
    mine = {peer: _message([room[wire] for wire in found], [copy for wire in found for copy in wires[wire]]).to(
        world.device) for peer, found in by_peer.items()}
    theirs = {peer: torch.empty_like(message) for peer, message in mine.items()}
    swap(mine, theirs, "the room of a round")
    agreed: dict[Wire, int] = {}
    for peer, found in by_peer.items():
        (print_here, *here), (print_there, *there) = mine[peer].tolist(), theirs[peer].tolist()
        if print_here != print_there:
            raise PeerError(f"rank {peer} has another plan of what goes between it and rank {world.rank}: ranks must "
                            "plan from the same maps")
        agreed |= dict(zip(found, map(min, here, there)))
    return agreed


def _message(rooms: list[int], copies: list[Copy]) -> Tensor:
    """A fingerprint of what goes where in which order, and the rooms. Of one length, whatever the plan."""
    assert len(rooms) <= MOST_WIRES, rooms
    fingerprint = zlib.crc32("".join(map(_places, copies)).encode())
    return torch.tensor([fingerprint, *rooms, *[0] * (MOST_WIRES - len(rooms))])


def _places(copy: Copy) -> str:
    shards = [(shard.storage, shard.offset_of(copy.box), shard.strides)
              for shard in (copy.src_shard, *copy.dst_shards)]
    return f"{copy.source} {copy.dest} {copy.hop} {copy.box.name} {copy.box.lo} {copy.box.hi} {shards}"
