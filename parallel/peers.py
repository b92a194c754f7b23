"""Small messages between pairs of ranks, in which both know that the other will send one.

Owns the exchange and the error that names who did not answer. What the numbers mean is its callers'.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor


class PeerError(RuntimeError):
    """A rank did not answer in time, or is gone. Names it."""


def swap(mine: Mapping[int, Tensor], theirs: Mapping[int, Tensor], what: str) -> None:
    """Send each peer its tensor of `mine` and fill that of `theirs` with what the peer sends.

    Args:
        what: is exchanged, for the error.
    Raises:
        PeerError: some peer does not answer.
    """
    parts = [(peer, dist.P2POp(dist.irecv, message, peer)) for peer, message in sorted(theirs.items())]
    parts += [(peer, dist.P2POp(dist.isend, message, peer)) for peer, message in sorted(mine.items())]
    if not parts:
        return
    peers = [peer for peer, _ in parts]
    try:
        works = dist.batch_isend_irecv([operation for _, operation in parts])
    except RuntimeError as error:
        raise _lost(peers, what, error) from error
    for number, work in enumerate(works):
        try:
            work.wait()
        except RuntimeError as error:
            each_its_own = len(works) == len(peers)  # else the backend waits for all as one
            raise _lost(peers[number : number + 1] if each_its_own else peers, what, error) from error


def _lost(peers: list[int], what: str, error: RuntimeError) -> PeerError:
    names = ", ".join(str(peer) for peer in dict.fromkeys(peers))
    return PeerError(f"could not exchange {what} with rank {names}: {error}")
