"""The prompts of a run, as its config's data block names them.

Owns turning the block into records and loaders. Every rank makes the same ones; a fingerprint is compared.
"""

from __future__ import annotations

from hybridflow.config.schema import Config, TaskConfig
from hybridflow.config.words import DataSource
from hybridflow.data.loader import PromptLoader, TokenisedPrompt, tokenise_prompts
from hybridflow.data.readers import FileFormat, read_prompt_files
from hybridflow.data.reasoning import TaskSpec, build_reasoning_mix
from hybridflow.data.records import DataSplit, fingerprint
from hybridflow.data.token_rows import Overlong
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.exchange import share_json
from hybridflow.parallel.world import World


def read_records(config: Config, world: World) -> DataSplit:
    """Training and held-out records, the same on every rank. Collective.

    Raises:
        ValueError: ranks have read different data (a file differs between nodes, or a task is not deterministic).
    """
    records = _read(config)
    marks = share_json(world, fingerprint((*records.train, *records.test)))
    if len(set(marks)) > 1:
        odd = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
        raise ValueError(f"ranks {odd} have read other data than rank 0: check that data files are the same on every "
                         "node, and set PYTHONHASHSEED=0 where a reasoning-gym task depends on it")
    return records


def _read(config: Config) -> DataSplit:
    data = config.data
    if data.source is DataSource.REASONING_GYM:
        return build_reasoning_mix(_specs(data.tasks), data.size, data.test_size, config.train.seed,
                                   data.prompt_template, _specs(data.test_tasks))
    file_format = FileFormat(data.source.value)
    test = read_prompt_files(data.test_files, file_format) if data.test_files else ()
    return DataSplit(read_prompt_files(data.train_files, file_format), test)


def _specs(tasks: list[TaskConfig]) -> tuple[TaskSpec, ...]:
    return tuple(TaskSpec(task.name, task.weight, dict(task.config), task.template) for task in tasks)


def training_prompts(config: Config, records: DataSplit, tokenizer: Tokenizer, vocab_size: int) -> PromptLoader:
    """The endless sequence of training prompts."""
    data = config.data
    return PromptLoader(records.train, tokenizer, data.prompts_per_step, config.train.seed, data.shuffle,
                        data.max_prompt_length, Overlong(data.overlong.value), vocab_size)


def held_out_prompts(config: Config, records: DataSplit, tokenizer: Tokenizer,
                     vocab_size: int) -> tuple[TokenisedPrompt, ...]:
    """The first evaluation.prompts held-out prompts; none where there is no test data."""
    chosen = records.test[:config.evaluation.prompts]
    ids = tokenise_prompts(chosen, tokenizer, vocab_size) if chosen else ()
    return tuple(TokenisedPrompt(i, ids[i], record) for i, record in enumerate(chosen))
