"""The meter of live bytes, and that a step's memory is judged by it."""

import torch

from hybridflow.bench.live_bytes import LiveBytes
from hybridflow.bench.memory import Held, growing, measure
from hybridflow.parallel.schedules.builders import ScheduleKind
from tests.ranks import run_ranks


def test_the_peak_is_of_what_lives_at_once_and_was_made_inside():
    before = torch.zeros(1000)
    with LiveBytes() as live:
        kept = torch.zeros(10)
        for _ in range(5):
            torch.ones(100).sum()
        view = before.add_(1)[5:]
    assert live.peak == 440 + 4  # kept, one temporary, its sum
    assert kept.numel() + view.numel() == 1005


def test_what_has_a_shape_alone_is_no_memory():
    with LiveBytes() as live:
        shape = torch.empty(1000, device="meta").add(1)
    assert live.peak == 0 and shape.numel() == 1000


def test_saved_tensors_count_until_the_backward_lets_them_go():
    x = torch.ones(100, requires_grad=True)
    with LiveBytes() as live:
        x.exp().exp().sum().backward()
        first = live.peak
        x.exp().exp().sum().backward()
    assert 800 <= first < 1800 and live.peak <= first + 400  # of the second one x.grad is there already


def test_a_step_holds_no_more_for_more_micro_batches():
    flat, all_kept = ([max(ranks, key=lambda one: one.peak) for ranks in zip(*run_ranks(4, measure, kind, (4, 8)))]
                      for kind in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE))
    held = {(ScheduleKind.ONE_F_ONE_B, m): one for m, one in zip((4, 8), flat)}
    assert growing(held) == []
    assert all_kept[1].peak > 1.5 * all_kept[0].peak > flat[0].peak
    assert growing({(ScheduleKind.ZB_V, m): one for m, one in zip((4, 8), all_kept)})[0].startswith("zb-v: the peak")


def test_what_grows_is_named():
    held = lambda peaks, reduced: {(ScheduleKind.ONE_F_ONE_B, m): Held(*one)  # noqa: E731
                                   for m, one in enumerate(zip(peaks, reduced))}
    assert growing(held((100, 101), (7, 7))) == []
    assert "peak grows" in growing(held((100, 110), (7, 7)))[0]
    assert "reduced bytes" in growing(held((100, 100), (7, 8)))[0]
