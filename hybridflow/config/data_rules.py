"""Rules of the data and the evaluation block, between keys. As pure as `validate`, which asks for them."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config.bounds import MOST_MADE
from hybridflow.config.command import Command
from hybridflow.config.data_schema import MixtureConfig, trains_on_files
from hybridflow.config.faults import Fault
from hybridflow.config.layouts import Role, layout_key, ranks_of_replica, written_layout
from hybridflow.config.reward_rules import scored_on_a_mesh
from hybridflow.config.reward_schema import asks_task_scorers
from hybridflow.config.schema import Config
from hybridflow.config.words import DataSource


def data_faults(config: Config, command: Command) -> Iterator[Fault]:
    """A fault for each part of the data block that does not go with the others or with `command`."""
    data = config.data
    if data.streaming and command is Command.SFT and config.sft.tokenizer_vocab_size is not None:
        yield Fault("sft.tokenizer_vocab_size", config.sft.tokenizer_vocab_size, "a tokenizer is trained on data that "
                    "are held in memory", "choose data.streaming false, or train the tokenizer beforehand")
    if data.source is DataSource.MIXTURE and command.prefers:
        yield Fault("data.source", "mixture", "preferences are of one source", "choose jsonl, parquet or reasoning_gym")
    elif data.source is DataSource.MIXTURE:
        yield from _mixture(config, command)
    elif data.source is DataSource.REASONING_GYM:
        yield from _tasks(config, command)
    else:
        if not data.train_files:
            yield Fault("data.train_files", [], f"data.source {data.source.value} has no file", "name at least one")
        if command.asks_held_out and not data.test_files:
            yield Fault("data.test_files", [], "there are no held-out prompts to answer", "name at least one file")
        yield from _judged(config, command)


def _tasks(config: Config, command: Command) -> Iterator[Fault]:
    data = config.data
    if not data.tasks:
        yield Fault("data.tasks", [], "no task is named", "choose e.g. [{name: chain_sum}]")
    for key, tasks in (("data.tasks", data.tasks), ("data.test_tasks", data.test_tasks)):
        yield from _weights({f"{key}[{i}].weight": task.weight for i, task in enumerate(tasks)})
    asked = command.asks_held_out or config.evaluation.every_steps is not None
    if asked and data.test_size == 0:
        yield Fault("data.test_size", 0, "there are no held-out prompts to answer", "choose 1 or more" if
                    command.asks_held_out else "choose 1 or more, or evaluation.every_steps null")
    else:
        yield from _enough_tests(config)


def _enough_tests(config: Config) -> Iterator[Fault]:
    """Where held-out prompts are of tasks alone."""
    evaluation, test_size = config.evaluation, config.data.test_size
    if evaluation.every_steps is not None and evaluation.prompts > test_size:
        yield Fault("evaluation.prompts", evaluation.prompts, f"only data.test_size {test_size} prompts are held out",
                    f"choose {test_size} or less")


def _mixture(config: Config, command: Command) -> Iterator[Fault]:
    data = config.data
    if not data.mixture:
        yield Fault("data.mixture", [], "no source is named", "choose e.g. [{files: [train.jsonl]}, {task: chain_sum}]")
    yield from _weights({f"data.mixture[{i}].weight": source.weight for i, source in enumerate(data.mixture)})
    yield from _weights({f"data.test_tasks[{i}].weight": task.weight for i, task in enumerate(data.test_tasks)})
    for i, source in enumerate(data.mixture):
        key = f"data.mixture[{i}]"
        if bool(source.files) == (source.task is not None):
            yield Fault(key, "{...}", "names files and a task" if source.files else "names neither files nor a task",
                        "give one of the two; another source may have the other")
        if source.task is not None and not 1 <= source.size <= MOST_MADE:
            yield Fault(f"{key}.size", source.size, f"must lie in [1, {MOST_MADE}]", "choose e.g. 4096")
        for name in ("config", "template", "size") if source.task is None else ():
            if (value := vars(source)[name]) != vars(MixtureConfig())[name]:
                yield Fault(f"{key}.{name}", value, "has no effect without a task", "remove it")
    if data.test_tasks and not data.test_files:
        yield from _enough_tests(config)
    if command.asks_held_out and not data.test_files and not data.test_tasks:
        yield Fault("data.test_files", [], "there are no held-out prompts to answer", "name a file, or data.test_tasks")
    if trains_on_files(data):
        yield from _judged(config, command)


def _weights(weights: dict[str, float]) -> Iterator[Fault]:
    for key, weight in weights.items():
        if not 1e-12 <= weight <= 1e12:  # sums of such weights are exact enough to draw by
            yield Fault(key, weight, "must lie in [1e-12, 1e12]", "choose e.g. 1.0")


def _judged(config: Config, command: Command) -> Iterator[Fault]:
    """Tasks have scorers of their own, files have none."""
    judged = bool(config.reward.mixture) or not asks_task_scorers(config.reward, config.model.reward_model)
    if command in (Command.TRAIN, Command.EVALUATE) and not judged:
        yield Fault("reward.function", None, "nothing judges prompts from files",
                    "give file.py:function, reward.mixture, or model.reward_model.path")


def evaluation_faults(config: Config, command: Command, world_size: int) -> Iterator[Fault]:
    """A fault for each part of the evaluation block that does not go with the others, or with these ranks."""
    evaluation = config.evaluation
    if evaluation.samples_per_prompt > 1 and evaluation.temperature == 0 and command is not Command.GENERATE:
        yield Fault("evaluation.temperature", 0, f"is greedy, and all {evaluation.samples_per_prompt} answers to a "
                    "prompt would be the same", "choose e.g. 1.0, or evaluation.samples_per_prompt 1")
    if command is not Command.EVALUATE or not scored_on_a_mesh(config):
        return
    replica = ranks_of_replica(written_layout(config, Role.REWARD))
    if replica < 1 or world_size % replica:
        yield Fault(layout_key(config, Role.REWARD), "{...}", f"world size {world_size} cannot be cut in replicas of "
                    f"{replica} ranks", "give model.reward_model.layout one that fits")
