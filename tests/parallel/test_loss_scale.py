"""The dynamic loss scale, step by step."""

import pytest

from hybridflow.parallel.loss_scale import LossScale, LossScaleState


def test_it_doubles_after_a_window_of_good_steps_and_halves_at_once() -> None:
    scale = LossScale(start=8.0, window=3, minimum=2.0)
    seen = []
    for is_finite in (True, True, True, True, True, False, True, True, False, False, False, True, True, True):
        scale.update(is_finite)
        seen.append(scale.scale)
    assert seen == [8, 8, 16, 16, 16, 8, 8, 8, 4, 2, 2, 2, 2, 4]


def test_it_stops_growing() -> None:
    scale = LossScale(8.0, window=1, maximum=20.0)
    for _ in range(3):
        scale.update(True)
    assert scale.scale == 20.0


def test_its_state_goes_on() -> None:
    scale, other = LossScale(8.0, window=3), LossScale(1.0, window=3)
    scale.update(True)
    scale.update(True)
    other.state = scale.state
    assert other.state == LossScaleState(8.0, 2)
    other.update(True)
    assert other.state == LossScaleState(16.0, 0)


def test_faults() -> None:
    with pytest.raises(ValueError, match="window 0 must be at least 1"):
        LossScale(window=0)
    with pytest.raises(ValueError, match="scale 0.5 must be from 1.0 to 4294967296.0"):
        LossScale(0.5)
