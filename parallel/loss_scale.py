"""The dynamic loss scale of fp16 training: how much losses are multiplied by, so that small gradients do not vanish.

Owns the number and when it changes. Whoever makes the loss multiplies it; the optimizer divides the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossScaleState:
    """What a checkpoint keeps. Example: `LossScaleState(scale=65536.0, good_steps=12)`."""

    scale: float
    good_steps: int


class LossScale:
    """Doubles after `window` finite steps in a row, halves after each that is not finite.

    The method is that of arXiv 1710.03740, section 3.2.
    With powers of two, scaling and unscaling are exact wherever nothing over- or underflows.

    Args:
        start: the first scale.
        window: finite steps before it grows.
        minimum, maximum: it stays between them; where gradients are zero nothing else would stop its growth.
    Raises:
        ValueError: a window below 1, or a start outside of the bounds.
    """

    def __init__(self, start: float = 65536.0, window: int = 1000, minimum: float = 1.0,
                 maximum: float = 2.0**32) -> None:
        if window < 1:
            raise ValueError(f"loss scale window {window} must be at least 1 step, for example 1000")
        if not 0 < minimum <= start <= maximum:
            raise ValueError(f"loss scale {start} must be from {minimum} to {maximum}, for example 65536")
        self.window, self.minimum, self.maximum = window, minimum, maximum
        self.state = LossScaleState(start, 0)

    @property
    def scale(self) -> float:
        """What the loss is multiplied by now."""
        return self.state.scale

    def update(self, is_finite: bool) -> None:
        """Count one step."""
        if not is_finite:
            self.state = LossScaleState(max(self.minimum, self.scale / 2), 0)
        elif self.state.good_steps + 1 == self.window:
            self.state = LossScaleState(min(self.maximum, self.scale * 2), 0)
        else:
            self.state = LossScaleState(self.scale, self.state.good_steps + 1)
