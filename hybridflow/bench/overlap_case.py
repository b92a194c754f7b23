"""What `bench overlap` runs: one GRPO run in several placements, and its steps on the ranks of this host.

Owns the configs and what a rank does and notes. It judges nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hybridflow.bench.stand_in import StandIn, stand_in
from hybridflow.bench.timing import Clocked, in_turns
from hybridflow.config.layouts import Role, generation_ranks, role_ranks
from hybridflow.config.load import load_config
from hybridflow.config.recipe import with_recipe
from hybridflow.config.schema import Config
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.row_source import RowLoader
from hybridflow.data.sentencepiece_tokenizer import train_sentencepiece
from hybridflow.observe.trace import TraceEvent
from hybridflow.observe.trace_gather import gather_events
from hybridflow.parallel.world import World
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.prompts import read_records, training_prompts
from hybridflow.trainer.rl import RLTrainer

WORLD = 4
VOCAB = 273
NEW_TOKENS = 32
MOST_TOKENS = 64  # of ragged answers
STOPS = list(range(100, 114))  # of 273 tokens that a random model draws alike: an answer ends after 18 in the mean
SHAPES = {"tiny": {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
          "small": {"hidden_size": 128, "intermediate_size": 344, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}}
APART = "placement={actor: 0-1, reference: 0-1, generation: 2-3}"
RAGGED = (f"generation.max_new_tokens={MOST_TOKENS}", "generation.min_new_tokens=0", f"generation.stop={STOPS}")
COLOCATED, IN_TURN, ONE_STEP_OFF = "colocated", "2 + 2, in turn", "2 + 2, one_step_off"
PARTIAL = "2 + 2, partial, ragged"
CASES: Mapping[str, tuple[str, ...]] = {
    COLOCATED: (),
    IN_TURN: (APART,),
    ONE_STEP_OFF: (APART, "generation.overlap=one_step_off"),
    f"{COLOCATED}, ragged": RAGGED,
    f"{ONE_STEP_OFF}, ragged": (APART, *RAGGED, "generation.overlap=one_step_off"),
    PARTIAL: (APART, *RAGGED, "generation.overlap=partial", "generation.max_staleness=2"),
}
NOTED = ("rollout/staleness_mean", "rollout/staleness_max", "policy/loss", "policy/grad_norm", "reward/mean")
Answers = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class Noted:
    """What a rank knows of its steps.

    Attributes:
        clocked: by case, as `timing.in_turns` has it.
        metrics: by case the NOTED ones of each step.
        mixed: by case of each step the answers at home here that went on under newer weights.
        events: by case those of all ranks; {} on ranks other than 0.
    """

    clocked: Clocked
    metrics: dict[str, list[dict[str, float]]]
    mixed: dict[str, list[int]]
    events: dict[str, dict[int, list[TraceEvent]]]


def write_data(folder: Path) -> None:
    """The tokenizer and the prompts, for `config_of`."""
    sums = [f"{a} + {b} = " for a in range(30) for b in range(30)]
    train_sentencepiece([f"{text}{len(text)}" for text in sums], VOCAB).save(folder)
    rows = ({"data_source": "sums", "prompt": text, "reward_model": {"ground_truth": ""}} for text in sums)
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def config_of(folder: Path, shape: str, overrides: tuple[str, ...]) -> Config:
    """Sixteen prompts with four samples a step, learned from in one optimizer step; scored by the reference."""
    tree = {
        "model": {"tokenizer": str(folder / "tokenizer.model"), "spec": SHAPES[shape] | {
            "max_position_embeddings": 128}},
        "train": {"total_steps": 100, "global_batch_size": 64, "micro_batch_size": 8, "mixed_precision": "no",
                  "optimizer": {"lr": 1e-4}},
        "generation": {"samples_per_prompt": 4, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS},
        "algorithm": {"name": "grpo", "kl": {"where": "loss", "coef": 0.01}},
        "data": {"source": "jsonl", "train_files": [str(folder / "sums.jsonl")], "prompts_per_step": 16,
                 "max_prompt_length": 32},
        "reward": {"function": f"{Path(__file__).with_name('overlap_reward.py')}:score"},
        "logging": {"dir": str(folder)},
    }
    return with_recipe(load_config(tree, overrides))


def ranks_of(config: Config) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Those that generate, and those on which the actor trains."""
    return generation_ranks(config, WORLD), role_ranks(config, Role.ACTOR, WORLD)


class Case:
    """A trainer in mid-run: what it needs ahead has been begun. Making one is collective."""

    def __init__(self, inputs: Inputs, world: World, device: StandIn | None) -> None:
        self.trainer = RLTrainer(inputs, world)
        self.metrics: list[dict[str, float]] = []
        self.mixed: list[int] = []
        self._loader = loader_of(inputs)
        if device is not None:
            stand_in(self.trainer, device)
        for _ in range(self.trainer.steps_ahead):
            self.trainer.start(next(self._loader))

    def step(self) -> None:
        """One step."""
        metrics = self.trainer.step(next(self._loader))
        self.metrics.append({name: metrics[name] for name in NOTED if name in metrics})
        self.mixed.append(self._mixed())

    def _mixed(self) -> int:
        batch = self.trainer.batch
        assert batch is not None
        if batch.columns.versions is None:
            return 0
        rows = batch.columns.versions.split(batch.home_lengths(self.trainer.world.rank))
        return sum(bool(row[0] != row[-1]) for row in rows)

    def trace(self) -> None:
        """Forget what was noted, and keep every step from here on."""
        self.metrics.clear()
        self.mixed.clear()
        self.trainer.trace.start()

    def answers(self) -> Answers:
        """Of the last step, by row; those that are at home on this rank."""
        trainer = self.trainer
        assert trainer.batch is not None
        home = trainer.batch.home[trainer.world.rank]
        return {row: sample.response for row, sample in zip(home, trainer.batch.samples, strict=True)}


def inputs_of(configs: Mapping[str, Config]) -> dict[str, Inputs]:
    """Of each case; all have one reward function, whose workers start once."""
    first = Inputs.read(next(iter(configs.values())))
    return {name: replace(Inputs.read(config, first.tokenizer, scores=False), rewards=first.rewards,
                          estimator=first.estimator, policy_loss=first.policy_loss)
            for name, config in configs.items()}


def loader_of(inputs: Inputs) -> RowLoader[TokenisedPrompt]:
    """The same prompts on every rank."""
    return training_prompts(inputs.config, read_records(inputs.config), inputs.tokenizer, inputs.model.vocab_size)


def run_in_turns(world: World, configs: Mapping[str, Config], rounds: int, device_s: float | None) -> Noted:
    """Steps of all cases in turns, after one step of each that is not noted. `device_s`: of stand-in devices."""
    cases = {name: Case(inputs, world, None if device_s is None else StandIn(device_s))
             for name, inputs in inputs_of(configs).items()}
    try:
        for case in cases.values():
            case.step()
            case.trace()
        clocked = in_turns(world, {name: case.step for name, case in cases.items()}, rounds)
        events = {name: gather_events(world, case.trainer.trace) or {} for name, case in cases.items()}
    finally:
        for case in cases.values():
            case.trainer.close()
    return Noted(clocked, {name: case.metrics for name, case in cases.items()},
                 {name: case.mixed for name, case in cases.items()}, events)


def first_steps(world: World, config: Config, steps: int) -> list[tuple[dict[str, float], Answers]]:
    """Metrics and answers of the first steps, as they are where nobody waits for a stand-in."""
    case, found = Case(Inputs.read(config), world, None), []
    for _ in range(steps):
        case.step()
        found.append((case.metrics[-1], case.answers()))
    case.trainer.close()
    return found
