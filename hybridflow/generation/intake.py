"""How a replica comes to more prompts while it generates: its leader asks where rows are free, all ranks hear of it.

Owns what was asked for and is not heard of yet. Who gets which prompts is the source's to say.
"""

from __future__ import annotations

from hybridflow.generation.scheduler import Scheduler
from hybridflow.generation.work_source import WorkSource

MOST_PROMPTS = 64  # in one answer, so that the size of its message is known beforehand


class Intake:
    """The same on every rank of a replica, but that only the leader calls `ask`.

    Attributes:
        more: prompts may still come.
    """

    def __init__(self, source: WorkSource, scheduler: Scheduler) -> None:
        self._source, self._scheduler = source, scheduler
        self.more = True
        self._on_its_way, self._is_empty = 0, False  # on the leader

    def ask(self) -> list[int] | None:
        """Prompts to begin, [] where none is left, None without asking: no row is free, or the end is told already."""
        scheduler = self._scheduler
        others_get_theirs = self._source.most_rows - scheduler.num_running - scheduler.num_waiting
        room = min(scheduler.wanted_rows, others_get_theirs) - self._on_its_way
        if not self.more or self._is_empty or room < 1:
            return None
        taken = self._source.take(min(room, MOST_PROMPTS))
        self._on_its_way += len(taken)
        self._is_empty = not taken
        return taken

    def hear(self, taken: list[int] | None) -> list[int]:
        """What the leader's `ask` gave; the prompts to begin now."""
        if taken is None:
            return []
        self.more = bool(taken)
        self._on_its_way -= len(taken)
        self._source.taken += taken
        return taken

    @property
    def taken(self) -> list[int]:
        """All that was heard of, in the order of the whole list."""
        return sorted(self._source.taken)
