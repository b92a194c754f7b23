"""The prompts of a run, as its config's data block names them.

Owns turning the block into records and loaders. Every rank makes the same ones; a fingerprint is compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from hybridflow.config.schema import Config, TaskConfig
from hybridflow.config.words import DataSource
from hybridflow.data.loader import PromptLoader, TokenisedPrompt, tokenise_prompts
from hybridflow.data.readers import FileFormat, read_prompt_files
from hybridflow.data.reasoning import TaskSpec, build_reasoning_mix
from hybridflow.data.records import DataSplit, PromptRecord, fingerprint, prompt_text
from hybridflow.data.token_rows import Overlong, within_length
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.exchange import share_json
from hybridflow.parallel.world import World

FILES_DIFFER = ("check that data files are the same on every node, and set PYTHONHASHSEED=0 where a reasoning-gym task "
                "depends on it")


def require_same(world: World, records: Sequence[PromptRecord], advice: str = FILES_DIFFER) -> None:
    """Every rank holds the same `records`. Collective.

    Raises:
        ValueError: the ranks that differ from rank 0, and the advice.
    """
    require_equal(world, fingerprint(records), advice)


def require_equal(world: World, value: Any, advice: str) -> None:
    """Every rank holds the same `value`, which is made of what JSON knows. Collective.

    Raises:
        ValueError: the ranks that differ from rank 0, and the advice.
    """
    digest = hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
    marks = share_json(world, digest)
    odd = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
    if odd:
        raise ValueError(f"ranks {odd} have other prompts than rank 0: {advice}")


def read_records(config: Config) -> DataSplit:
    """Training and held-out records.

    Raises:
        ValueError: a file, a row, a task or its settings are not as they must be, or a held-out prompt is a training
            prompt too.
    """
    data = config.data
    if data.source is DataSource.REASONING_GYM:
        return build_reasoning_mix(_specs(data.tasks), data.size, data.test_size, config.train.seed,
                                   data.prompt_template, _specs(data.test_tasks))
    file_format = FileFormat(data.source.value)
    test = read_prompt_files(data.test_files, file_format) if data.test_files else ()
    train = read_prompt_files(data.train_files, file_format)
    _require_apart(train, test)
    return DataSplit(train, test)


def _require_apart(train: Sequence[PromptRecord], test: Sequence[PromptRecord]) -> None:
    held_out = {prompt_text(record.prompt): record.origin for record in test}
    both = [record for record in train if prompt_text(record.prompt) in held_out]
    if both:
        raise ValueError(f"{len(both)} of {len(train)} training prompts are held-out prompts too, the first of them "
                         f"{both[0].origin} ({held_out[prompt_text(both[0].prompt)]}); remove them from "
                         "data.train_files or from data.test_files")


def _specs(tasks: list[TaskConfig]) -> tuple[TaskSpec, ...]:
    return tuple(TaskSpec(task.name, task.weight, dict(task.config), task.template) for task in tasks)


def training_prompts(config: Config, records: DataSplit, tokenizer: Tokenizer, vocab_size: int) -> PromptLoader:
    """The endless sequence of training prompts."""
    data = config.data
    return PromptLoader(records.train, tokenizer, data.prompts_per_step, config.train.seed, data.shuffle,
                        data.max_prompt_length, Overlong(data.overlong.value), vocab_size)


def held_out_prompts(config: Config, records: DataSplit, tokenizer: Tokenizer,
                     vocab_size: int) -> tuple[TokenisedPrompt, ...]:
    """The first evaluation.prompts held-out prompts, too long ones treated by data.overlong; none without test data."""
    if not records.test:
        return ()
    data, origins = config.data, [record.origin for record in records.test]
    ids = tokenise_prompts(records.test, tokenizer, vocab_size)
    kept = within_length(ids, origins, data.max_prompt_length, Overlong(data.overlong.value), "data.max_prompt_length")
    return tuple(TokenisedPrompt(i, ids[i], records.test[i]) for i in kept[:config.evaluation.prompts])
