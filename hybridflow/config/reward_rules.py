"""What the reward block must be by itself and beside the rest of a config. Pure, but for the kinds of reward models,
which their config.json tells.

Most keys without effect are `idle`'s; those that depend on the kind of a model are told here.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from hybridflow.config.data_schema import task_names, trains_on_files
from hybridflow.config.faults import Fault, nearest_key
from hybridflow.config.model_schema import RewardModelConfig
from hybridflow.config.reward_schema import OnFaultConfig, RewardPartConfig, reward_models
from hybridflow.config.schema import Config
from hybridflow.config.words import DataSource, FaultAction, ModelFamily

LARGEST_WEIGHT = 1e6  # times the largest score that a part may give, this is still a number in fp32
OF_CLASSIFIERS = ("label", "pair", "dtype", "micro_batch_size")


def reward_faults(config: Config) -> Iterator[Fault]:
    """A fault for each value of the reward block that cannot be."""
    yield from _on_fault("reward.on_fault", config.reward.on_fault)
    names = Counter(part.name for part in config.reward.mixture)
    for place, part in enumerate(config.reward.mixture):
        yield from _part(f"reward.mixture[{place}]", part, config, names)
    if config.reward.mixture and not any(part.weight for part in config.reward.mixture):
        yield Fault("reward.mixture", "[...]", "every weight is 0, so that every reward would be", "give one a weight")
    if task_names(config.data):
        yield from _routes(config)


def _on_fault(key: str, block: OnFaultConfig) -> Iterator[Fault]:
    words = [action.value for action in FaultAction]
    for field in fields(block):
        value = vars(block)[field.name]
        if isinstance(value, str) and value not in words:
            near = nearest_key(value.lower(), words, ())
            yield Fault(f"{key}.{field.name}", value, "is no action",
                        f"did you mean {near}?" if near else "choose drop, zero, error or a number")
        elif not isinstance(value, str) and not math.isfinite(value):
            yield Fault(f"{key}.{field.name}", value, "is no score to train on", "choose a finite number")


def _part(key: str, part: RewardPartConfig, config: Config, names: Counter[str]) -> Iterator[Fault]:
    if not part.name.replace("-", "_").isidentifier():
        yield Fault(f"{key}.name", part.name, "is no name for a metric", "use letters, digits, _ and -, e.g. format")
    elif names[part.name] > 1:
        yield Fault(f"{key}.name", part.name, "is the name of another part too", "give each its own")
    if not abs(part.weight) <= LARGEST_WEIGHT:
        yield Fault(f"{key}.weight", part.weight, f"must lie in [{-LARGEST_WEIGHT:g}, {LARGEST_WEIGHT:g}]",
                    "choose e.g. 1.0")
    judges = [part.function, part.reasoning_gym, part.model]
    if sum(judge is not None for judge in judges) != 1:
        yield Fault(key, part.name, "a part is scored by one thing", "give one of function, reasoning_gym and model")
    if part.reasoning_gym is not None and not task_names(config.data):
        yield Fault(f"{key}.reasoning_gym", part.reasoning_gym.value, "cannot score prompts from files",
                    "give a function or a model, or choose data.source reasoning_gym")
    if len(set(part.data_sources)) < len(part.data_sources):
        yield Fault(f"{key}.data_sources", part.data_sources, "names one twice", "name each once")
    if part.on_fault is not None:
        yield from _on_fault(f"{key}.on_fault", part.on_fault)


def _routes(config: Config) -> Iterator[Fault]:
    """Tasks are known beforehand: each has a part, and each source that a part names is a task, but where there are
    files, whose sources only their rows tell: these the scorers of tasks cannot score.
    """
    parts, data, tasks = config.reward.mixture, config.data, set(task_names(config.data))
    from_files = trains_on_files(data) or bool(data.source is DataSource.MIXTURE and data.test_files)
    unscored = sorted(task for task in tasks if not any(scores(part, task) for part in parts))
    if parts and unscored:
        yield Fault("reward.mixture", "[...]", f"no part scores the task {unscored[0]}",
                    "name it in the data_sources of a part, or leave those of one empty")
    for place, part in enumerate(parts):
        if from_files and part.reasoning_gym is not None and not part.data_sources:
            yield Fault(f"reward.mixture[{place}].data_sources", [], "the scorers of tasks cannot score prompts from "
                        "files", f"name tasks: choose of {', '.join(sorted(tasks))}")
        for source in part.data_sources:
            if source not in tasks and not (from_files and part.reasoning_gym is None):
                near = nearest_key(source, tasks, ())
                yield Fault(f"reward.mixture[{place}].data_sources", source, "is no task of the data",
                            f"did you mean {near}?" if near else f"choose of {', '.join(sorted(tasks))}")


def scores(part: RewardPartConfig, data_source: str) -> bool:
    """Whether a part scores the rows of a data source."""
    return not part.data_sources or data_source in part.data_sources


def is_decoder_folder(path: str | Path) -> bool:
    """Whether a folder's config.json names a family of decoders that we have: such a reward model has a layout."""
    try:
        model = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True  # whoever reads it as a decoder will say what is wrong with it
    return not isinstance(model, dict) or model.get("model_type") in {family.value for family in ModelFamily}


def scored_on_a_mesh(config: Config) -> bool:
    """Whether a reward model has a layout. Reads the config.json of each."""
    return any(map(is_decoder_folder, reward_models(config.reward, config.model.reward_model).values()))


def classifiers(config: Config) -> list[str]:
    """The folders of reward models that each rank has whole. Reads the config.json of each."""
    paths = reward_models(config.reward, config.model.reward_model).values()
    return [path for path in paths if not is_decoder_folder(path)]


def reward_model_faults(config: Config) -> Iterator[Fault]:
    """Keys of model.reward_model that do nothing for the kinds of models in the folders, whose config.json it reads."""
    paths = reward_models(config.reward, config.model.reward_model).values()
    kinds = {is_decoder_folder(path) for path in paths}
    own, default = config.model.reward_model, RewardModelConfig()
    if kinds == {True}:
        for name in OF_CLASSIFIERS:
            if vars(own)[name] != vars(default)[name]:
                yield Fault(f"model.reward_model.{name}", vars(own)[name], "has no effect with a decoder", "remove it")
    placed = {"model.reward_model.layout": own.layout, "placement.reward": config.placement.reward}
    for key, value in placed.items():
        if kinds == {False} and value is not None:
            yield Fault(key, value, "has no effect with a model that is no decoder of ours: each rank has a whole one",
                        "remove it")
