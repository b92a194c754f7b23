"""The rows that the memory of activations is worked out for."""

from __future__ import annotations

import pytest

from hybridflow.config.batch_math import BatchMath
from hybridflow.config.command import Command
from hybridflow.config.layouts import Role, role_layout, token_multiple
from hybridflow.config.shapes import spec_decoder
from hybridflow.models.activation_memory import PackedShape
from hybridflow.packing import by_tokens
from hybridflow.trainer.activations import activation_line, activation_peaks, longest_rows
from tests.config.builders import config

ROW = ("data.max_prompt_length=100", "generation.max_new_tokens=8")


def longest(*overrides: str, world_size: int = 4, command: Command = Command.TRAIN) -> PackedShape:
    read = config(*ROW, *overrides)
    layout = role_layout(read, Role.ACTOR, world_size)
    return longest_rows(read, BatchMath.of(read, world_size), layout.cp, token_multiple(layout) // layout.cp, command)


def test_as_many_rows_as_run_at_once_or_as_there_are() -> None:
    assert longest("train.micro_batch_size=3") == PackedShape((108,) * 3, 324, 24)
    assert len(longest("train.micro_batch_size=99").lengths) == 16  # 64 over four replicas
    cut = longest("train.micro_batch_size=3", "train.layout={tp: 2, cp: 2, sequence_parallel: true}")
    assert cut == PackedShape((108,) * 3, 162, 12)


@pytest.mark.parametrize(("budget", "rows"), [(324, 3), (327, 3), (323, 2), (431, 3), (432, 4)])
def test_a_budget_holds_the_rows_that_packing_puts_in_it(budget: int, rows: int) -> None:
    """431 tokens are 428 whose padding would not exceed the budget."""
    for layout, multiple in (("{tp: 4}", 1), ("{tp: 2, cp: 2, sequence_parallel: true}", 4)):
        shape = longest(f"train.micro_batch_tokens={budget}", f"train.layout={layout}")
        assert len(shape.lengths) == rows
        assert rows == max(map(len, by_tokens((108,) * 64, 1, budget, multiple)[0]))


def test_padding_is_taken_off_a_budget_first() -> None:
    row, cut = "generation.max_new_tokens=9", "train.layout={tp: 4, sequence_parallel: true}"  # 109 tokens
    assert len(longest(row, "train.micro_batch_tokens=327", "train.layout={tp: 4}").lengths) == 3
    assert len(longest(row, "train.micro_batch_tokens=327", cut).lengths) == 2  # 327 would be padded to 328
    assert len(by_tokens((109,) * 64, 1, 327, 4)[0][0]) == 2
    read = config(*ROW, row, "train.micro_batch_tokens=327", cut)
    assert "(2 rows of 109 tokens at once" in activation_line(read, 4, spec_decoder(read.model.spec, 50))


def test_a_pair_may_be_all_response() -> None:
    assert longest("train.micro_batch_size=1", command=Command.SFT) == PackedShape((108,), 108, 107)
    read = config(*ROW, "train.micro_batch_size=1")
    model = spec_decoder(read.model.spec, 50)
    assert activation_peaks(read, 1, model, command=Command.SFT) > activation_peaks(read, 1, model)
    assert "(1 row of 108 tokens at once, recompute none)" in activation_line(read, 1, model)
