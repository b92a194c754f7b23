"""What has been sent and may not have been received yet: nobody waits for it, and somebody must keep it.

Owns messages that are on their way from this rank. It never receives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Outbox:
    """Sends that are let go: the sender goes on at once, and waits where all must have been received anyway."""

    def __init__(self) -> None:
        self._waits: deque[Callable[[], None]] = deque()

    def keep(self, wait: Callable[[], None]) -> None:
        """`wait` holds on to what it waits for."""
        self._waits.append(wait)

    def finish(self) -> None:
        """Wait until everything has been received."""
        while self._waits:
            self._waits.popleft()()
