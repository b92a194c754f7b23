"""Every number of a batch, derived from the config and the number of ranks, and the lines that a run prints at start.

Pure arithmetic; nothing here decides how rows are dealt out (`data` and the engines do), it says what will come of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.config.command import Command
from hybridflow.config.layouts import (
    LEARNING,
    Role,
    answers_held_out,
    divisors,
    generation_layout,
    generation_ranks,
    layout_key,
    role_layout,
    role_ranks,
    used_roles,
)
from hybridflow.config.model_schema import LayoutConfig
from hybridflow.config.reward_rules import classifiers
from hybridflow.config.schema import Config
from hybridflow.packing import MicroBatching
from hybridflow.parallel.arithmetic import ceil_div

ROWS_AT_ONCE = 8  # where a config says nothing


@dataclass(frozen=True)
class BatchMath:
    """The numbers of one step of a role.

    Example: 1024 prompts x 5 samples, global_batch_size 1280, dp 2, micro_batch_size 4 give 4 updates per step, 1280
    rollouts per update, 640 per replica, 160 micro-batches.

    Attributes:
        prompts_per_step: prompts of one step, all replicas together; likewise rollouts.
        rollouts_per_update: rollouts of one optimizer step, all replicas together (global_batch_size).
        dp: replicas.
        micro_batching: rollouts, or tokens, that one replica runs at once.
        epochs: passes over a step's rollouts.
    """

    prompts_per_step: int
    samples_per_prompt: int
    rollouts_per_update: int
    dp: int
    micro_batching: MicroBatching
    epochs: int = 1

    @classmethod
    def of(cls, config: Config, world_size: int, role: Role = Role.ACTOR) -> BatchMath:
        """The numbers of a role that trains (actor, critic)."""
        train, dp = config.train, role_layout(config, role, world_size).dp
        assert dp is not None
        return cls(config.data.prompts_per_step, config.generation.samples_per_prompt, train.global_batch_size, dp,
                   trained_at_once(config), train.epochs_per_rollout)

    @property
    def rollouts_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def updates_per_epoch(self) -> int:
        return ceil_div(self.rollouts_per_step, self.rollouts_per_update)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of one step of the run."""
        return self.updates_per_epoch * self.epochs

    @property
    def last_update(self) -> int:
        """Rollouts of the last update of an epoch, which may be short; the loss divides by what there is."""
        return self.rollouts_per_step - (self.updates_per_epoch - 1) * self.rollouts_per_update

    @property
    def rollouts_per_replica(self) -> int:
        """Rollouts of one update that the fullest replica trains on."""
        return ceil_div(self.rollouts_per_update, self.dp)

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of one update in one replica (gradient accumulation steps); None where the tokens tell."""
        rows = self.micro_batching.rows
        return None if rows is None else ceil_div(self.rollouts_per_replica, rows)

    def line(self) -> str:
        """The derivation in one sentence.

        "1024 prompts x 5 samples = 5120 rollouts per step; 4 updates per step, 1280 rollouts per update, 640 per
        replica (dp 2), 160 micro-batches of 4."
        """
        epochs = f" ({self.updates_per_epoch} x {self.epochs} epochs)" if self.epochs > 1 else ""
        short = f" (the last has {self.last_update})" if self.last_update != self.rollouts_per_update else ""
        return (f"{counted(self.prompts_per_step, 'prompt')} x {counted(self.samples_per_prompt, 'sample')} = "
                f"{counted(self.rollouts_per_step, 'rollout')} per step; "
                f"{counted(self.updates_per_step, 'update')} per step{epochs}, "
                f"{counted(self.rollouts_per_update, 'rollout')} per update{short}, {self.share_line()}")

    def uneven_line(self) -> str | None:
        """A sentence on updates that are not alike, None where all are: "The last update of each pass over the
        rollouts learns from 8 of them, the others from 10, ...".
        """
        total, each = self.rollouts_per_step, self.rollouts_per_update
        if total % each == 0:
            return None
        alike = divisors(total)
        near = [max(size for size in alike if size < each), min(size for size in alike if size > each)]
        return (f"The last update of each pass over the rollouts learns from {self.last_update} of them, the others "
                f"from {each}, since train.global_batch_size {each} does not divide {total}; {near[0]} and "
                f"{near[1]} do.")

    def line_of_any_batch(self) -> str:
        """What is known where the caller brings the prompts of each step: "5 samples for each prompt of a batch; 1280
        rollouts per update or what is left, 640 per replica (dp 2), 160 micro-batches of 4".
        """
        epochs = f"; {self.epochs} epochs over the rollouts of a batch" if self.epochs > 1 else ""
        return (f"{counted(self.samples_per_prompt, 'sample')} for each prompt of a batch{epochs}; "
                f"{counted(self.rollouts_per_update, 'rollout')} per update or what is left, {self.share_line()}")

    def share_line(self) -> str:
        """How a replica does its part of an update: "640 per replica (dp 2), 160 micro-batches of 4", or, by tokens,
        "shared out by tokens (dp 2), micro-batches of at most 8192 tokens". What not all replicas and micro-batches
        have is said to be the most: "at most 4 per replica (dp 2), 1 micro-batch of at most 8".
        """
        if self.micro_batching.tokens is not None:
            return f"shared out by tokens (dp {self.dp}), micro-batches of at most {self.micro_batching.tokens} tokens"
        rows, fewest = self.micro_batching.rows, self.rollouts_per_update // self.dp
        uneven = fewest < self.rollouts_per_replica
        return (f"{_at_most(uneven)}{self.rollouts_per_replica} per replica (dp {self.dp}), "
                f"{_at_most(max(1, ceil_div(fewest, rows)) < self.micro_batches)}"
                f"{counted(self.micro_batches, 'micro-batch')} of "
                f"{_at_most(uneven or self.rollouts_per_replica % rows > 0)}{rows}")


def trained_at_once(config: Config) -> MicroBatching:
    """What a replica runs at once in an optimizer step."""
    train = config.train
    if train.micro_batch_tokens is not None:
        return MicroBatching(tokens=train.micro_batch_tokens)
    return MicroBatching(rows=ROWS_AT_ONCE if train.micro_batch_size is None else train.micro_batch_size)


def scored_at_once(config: Config) -> MicroBatching:
    """What a replica runs at once when it only scores: as in training where nothing else is said."""
    train = config.train
    if train.forward_micro_batch_tokens is not None:
        return MicroBatching(tokens=train.forward_micro_batch_tokens)
    if train.forward_micro_batch_size is not None:
        return MicroBatching(rows=train.forward_micro_batch_size)
    return trained_at_once(config)


def offline_line(config: Config, world_size: int, command: Command) -> str:
    """How a command that learns from given answers comes to its updates.

    "100 updates of 64 pairs, 32 per replica (dp 2), 4 micro-batches of 8".
    """
    math = BatchMath.of(config, world_size)
    steps = config.sft.steps if command is Command.SFT else config.preference.steps
    unit = "answer" if command is Command.KTO else "pair"
    return f"{counted(steps, 'update')} of {counted(math.rollouts_per_update, unit)}, {math.share_line()}"


def layout_table(config: Config, world_size: int, command: Command = Command.TRAIN) -> str:
    """A line for each role: its degrees on `world_size` ranks, its micro-batches, and the key that says so."""
    answers = not command.is_offline or answers_held_out(config, command)
    rows = [("role", "ranks", "tp", "cp", "pp", "dp", "sequence parallel", "at once", "set by")]
    for role in used_roles(config, command):
        layout = role_layout(config, role, world_size)
        rows.append(_row(role.value, role_ranks(config, role, world_size), layout, _at_once(config, role, command),
                         layout_key(config, role)))
        if role is Role.ACTOR and answers:
            rows.append(_row("actor, generating", generation_ranks(config, world_size),
                             generation_layout(config, world_size), "-", "generation.layout"))
    if answers and (number := len(classifiers(config))):
        at_once = f"{config.model.reward_model.micro_batch_size} rows"
        rows.append((counted(number, "text classifier"), "all", *"----", "-", at_once, "whole on each rank"))
    return aligned(rows)


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Columns padded to their widest cell, two spaces between them."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def counted(number: int, noun: str) -> str:
    """Example: counted(1, "update") == "1 update", counted(2, "batch") == "2 batches"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def ranges(ranks: Sequence[int]) -> str:
    """Ascending ranks as a config has them. Example: ranges((0, 1, 2, 5)) == "0-2,5"."""
    starts = [rank for place, rank in enumerate(ranks) if place == 0 or ranks[place - 1] != rank - 1]
    ends = [rank for place, rank in enumerate(ranks) if place == len(ranks) - 1 or ranks[place + 1] != rank + 1]
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))


def _at_most(of_some: bool) -> str:
    return "at most " if of_some else ""


def _row(name: str, ranks: Sequence[int], layout: LayoutConfig, at_once: str, key: str) -> tuple[str, ...]:
    chunks = f" x {layout.vpp} chunks" if layout.vpp > 1 else ""
    stages = f"{layout.pp}{chunks}" + (f" {layout.layers_per_stage}" if layout.layers_per_stage else "")
    split = "yes" if layout.sequence_parallel else "no"
    return (name, ranges(ranks), str(layout.tp), str(layout.cp), stages, str(layout.dp), split, at_once, key)


def _at_once(config: Config, role: Role, command: Command) -> str:
    trained = [f"{trained_at_once(config).counted(command.unit)} trained"] if role in LEARNING else []
    scored = [] if trained and command is Command.SFT else [f"{scored_at_once(config)} scored"]
    return ", ".join(trained + scored)
