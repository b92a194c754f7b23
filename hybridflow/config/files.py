"""Whether the files and folders that a config names are there. Looks at the file system and nothing else.

Kept apart from `validate`, which is pure. A file that the command itself will make is not missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hybridflow.config.command import Command
from hybridflow.config.faults import Fault
from hybridflow.config.reward_schema import reward_functions, reward_models
from hybridflow.config.schema import Config
from hybridflow.config.tools_schema import ToolsConfig

TRAINED_TOKENIZER = "tokenizer.model"


def missing_files(config: Config, command: Command) -> list[Fault]:
    """A fault for each file or folder that `command` would read or make, and that is not there or cannot be made."""
    faults = [*_models(config, command), *_run_folder(config.logging.dir)]
    if command is Command.EXPORT:
        return faults
    faults += _tokenizer(config, command)
    if command not in (Command.API, Command.COMPLETE):
        faults += _data(config)
    faults += _template(config.data.chat_template)
    if command.scores:
        faults += _reward_functions(config)
    if command in (Command.TRAIN, Command.API) and config.cost.function is not None:
        faults += _function("cost.function", config.cost.function)
    if command in (Command.TRAIN, Command.API):
        faults += _algorithm_functions(config)
    if command in (Command.TRAIN, Command.API, Command.EVALUATE):
        faults += _tools(config.tools)
    return faults


def _run_folder(folder: str) -> Iterator[Fault]:
    """The folder is made where it is missing, which a file in its way prevents."""
    file = next((path for path in (Path(folder), *Path(folder).parents) if path.exists()), None)
    if file is not None and not file.is_dir():
        yield Fault("logging.dir", folder, f"{file} is a file", "choose another folder")


def _models(config: Config, command: Command) -> Iterator[Fault]:
    named: dict[str, str | None] = {"model.path": config.model.path}
    if command in (Command.TRAIN, Command.API):
        named["model.critic.path"] = config.model.critic.path
        named["model.cost_critic.path"] = config.model.cost_critic.path
        named["model.cost_model.path"] = config.model.cost_model.path
    if command.scores:
        named |= reward_models(config.reward, config.model.reward_model)
    for key, path in named.items():
        if path is not None and not (Path(path) / "config.json").is_file():
            yield Fault(key, path, "is no folder with a config.json in it",
                        "give a local folder in Hugging Face's format (models are never downloaded)")


def _tokenizer(config: Config, command: Command) -> Iterator[Fault]:
    path = config.model.tokenizer
    if path is None or Path(path).exists():
        return
    if command is not Command.SFT or config.sft.tokenizer_vocab_size is None:
        yield Fault("model.tokenizer", path, "no such file or folder",
                    "give a sentencepiece .model file or a Hugging Face folder")
    elif Path(path).name != TRAINED_TOKENIZER:
        yield Fault("model.tokenizer", path, f"is to be trained, and a trained tokenizer is called {TRAINED_TOKENIZER}",
                    f"choose {Path(path).with_name(TRAINED_TOKENIZER)}")


def _data(config: Config) -> Iterator[Fault]:
    named = {"data.train_files": config.data.train_files, "data.test_files": config.data.test_files}
    named |= {f"data.mixture[{i}].files": source.files for i, source in enumerate(config.data.mixture)}
    for key, files in named.items():
        for i, path in enumerate(files):
            if not Path(path).is_file():
                yield Fault(f"{key}[{i}]", path, "no such file")


def _algorithm_functions(config: Config) -> Iterator[Fault]:
    named = {"algorithm.advantage": config.algorithm.advantage, "algorithm.policy_loss": config.algorithm.policy_loss}
    for key, spec in named.items():
        file = "" if spec is None else spec.rpartition(":")[0]
        if file and not Path(file).expanduser().is_file():
            yield Fault(key, spec, f"there is no file {file}")


def _tools(tools: ToolsConfig) -> Iterator[Fault]:
    for key, value, file in (("tools.file", tools.file, tools.file or ""),
                             ("tools.call", tools.call, tools.call.rpartition(":")[0])):
        if file and not (file.endswith(".py") and Path(file).expanduser().is_file()):
            yield Fault(key, value, f"there is no Python file {file}")


def _template(path: str | None) -> Iterator[Fault]:
    if path is not None and not Path(path).is_file():
        yield Fault("data.chat_template", path, "no such file", "give a file with a Jinja chat template")


def _reward_functions(config: Config) -> Iterator[Fault]:
    for key, function in reward_functions(config.reward).items():
        yield from _function(key, function)


def _function(key: str, function: str) -> Iterator[Fault]:
    """The last colon parts file from function, so that a path may hold colons too."""
    file, _, name = function.rpartition(":")
    if not file or not name.isidentifier():
        yield Fault(key, function, "is not file.py:function", "write e.g. rewards/maths.py:score")
    elif not Path(file).expanduser().is_file():
        yield Fault(key, function, f"there is no file {file}")
