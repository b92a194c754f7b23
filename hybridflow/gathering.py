"""Several things that are read, of which each may be wrong: all that is wrong is told in one error.

Owns the collecting. What is read, and which of it needs what, is the readers'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Found = TypeVar("Found")


class InputFaults(ValueError):
    """More than one thing that is wrong; `faults` has a sentence for each, and the message a line."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join([f"{len(self.faults)} faults", *(f"  {fault}" for fault in self.faults)]))


class Gathering:
    """Example:
        gathering = Gathering()
        first, second = gathering.read(int, "1"), gathering.read(int, "two")  # 1, None
        gathering.finish()  # ValueError: invalid literal for int() ...
    """

    def __init__(self) -> None:
        self._faults: dict[str, None] = {}

    def read(self, reader: Callable[Arguments, Found], *args: Arguments.args, **options: Arguments.kwargs
             ) -> Found | None:
        """What `reader` gives; None where it raised ValueError, which `finish` will tell."""
        try:
            return reader(*args, **options)
        except InputFaults as error:
            self._faults |= dict.fromkeys(error.faults)
        except ValueError as error:
            self._faults[str(error)] = None
        return None

    def finish(self) -> None:
        """
        Raises:
            ValueError: something that was read is wrong; InputFaults where several things are.
        """
        if len(self._faults) == 1:
            raise ValueError(*self._faults)
        if self._faults:
            raise InputFaults(self._faults)
