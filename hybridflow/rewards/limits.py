"""What a reward may use: seconds for a call, memory for its process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Example: `Limits(timeout_s=10.0, memory_mb=2048)`.

    Attributes:
        timeout_s: longest wall time of one call of the function.
        memory_mb: MiB that a process of it may take on top of what its imports took; None for no limit.

    Raises:
        ValueError: a limit that is not positive.
    """

    timeout_s: float
    memory_mb: int | None = None

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ValueError(f"reward.timeout_s is {self.timeout_s}; it must be positive, for example 10.0")
        if self.memory_mb is not None and self.memory_mb < 1:
            raise ValueError(f"reward.memory_mb is {self.memory_mb}; it must be at least 1, or null for no limit")
