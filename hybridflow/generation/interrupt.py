"""A signal that asks a run to stop, seen where it suits the run.

Owns the handlers while it is entered. What is done about the request is the caller's.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Self


class Interrupt:
    """Notes SIGTERM and SIGUSR1 (what SLURM sends ahead of a preemption) instead of dying of them.

    Example:
        with Interrupt() as interrupt:
            completions = generator.generate(prompts, params, seed, interrupt=interrupt.asked)

    Entered by the main thread, as Python's signal handlers demand.
    """

    def __init__(self, signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        self._signals, self._before, self._asked = signals, {}, False

    def asked(self) -> bool:
        """Whether one has come."""
        return self._asked

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
