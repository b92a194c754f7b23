"""The rows of a run, as its config's data block names them.

Owns turning the block into records, files to stream and loaders. Every rank makes the same ones; marks are compared.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from hybridflow.config.data_schema import MixtureConfig, TaskConfig
from hybridflow.config.schema import Config
from hybridflow.config.words import DataSource
from hybridflow.data.lengths import LengthRule
from hybridflow.data.loader import TokenisedPrompt, fit_prompts, tokenise_prompts
from hybridflow.data.readers import FileFormat, read_prompt_files
from hybridflow.data.reasoning import TaskSpec, build_reasoning_mix, build_reasoning_source, build_reasoning_tests
from hybridflow.data.records import PromptRecord, fingerprint, prompt_text
from hybridflow.data.row_files import RowFiles
from hybridflow.data.row_source import RowLoader
from hybridflow.data.sft import LENGTH_KEYS, SftExample
from hybridflow.data.token_rows import Overlong
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.data.train_source import Loading, TrainSource, pair_loader, prompt_loader
from hybridflow.exchange import share_json
from hybridflow.gathering import Gathering
from hybridflow.parallel.world import World

FILES_DIFFER = ("check that data files are the same on every node, and set PYTHONHASHSEED=0 where a reasoning-gym task "
                "depends on it")


@dataclass(frozen=True)
class RunData:
    """The rows of a run; no held-out prompt is among the training prompts (of streamed ones: that is seen when met).

    Example: RunData((TrainSource("sums.jsonl", 1.0, (record, ...)),), test=(record, ...))
    """

    sources: tuple[TrainSource, ...]
    test: tuple[PromptRecord, ...]

    @property
    def train(self) -> tuple[PromptRecord, ...]:
        """The training records that are in memory."""
        return tuple(record for source in self.sources for record in source.records)

    @property
    def num_rows(self) -> int:
        """Training rows, wherever they are."""
        return sum(source.num_rows for source in self.sources)

    def mark(self) -> list[Any]:
        """What ranks compare: fingerprints of records, and of files that are streamed sizes and digests."""
        return [fingerprint(self.test), *(fingerprint(source.records) if source.files is None else source.files.mark()
                                          for source in self.sources)]


def require_same(world: World, records: Sequence[PromptRecord], advice: str = FILES_DIFFER) -> None:
    """Every rank holds the same `records`. Collective.

    Raises:
        ValueError: the ranks that differ from rank 0, and the advice.
    """
    require_equal(world, fingerprint(records), advice)


def require_same_data(world: World, data: RunData) -> None:
    """Every rank has the same rows, held in memory or streamed. Collective.

    Raises:
        ValueError: as `require_same`.
    """
    require_equal(world, data.mark(), FILES_DIFFER)


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


def read_records(config: Config) -> RunData:
    """Training and held-out rows. What is streamed is not read here, but for its files' ends and where rows lie.

    Raises:
        ValueError: files, rows, tasks or their settings that are not as they must be, the first of each source; or a
            held-out prompt that is a training prompt too.
    """
    data = config.data
    if data.source is DataSource.REASONING_GYM:
        split = build_reasoning_mix(_specs(data.tasks), data.size, data.test_size, config.train.seed,
                                    data.prompt_template, _specs(data.test_tasks))
        return RunData((TrainSource("tasks", 1.0, split.train),), split.test)
    gathering = Gathering()
    test = gathering.read(_read_tests, config)
    if data.source is DataSource.MIXTURE:
        sources = _mixture(config, gathering)
    else:
        sources = [gathering.read(_files, "files", 1.0, data.train_files, config)]
    gathering.finish()
    assert test is not None
    run = RunData(tuple(source for source in sources if source is not None), test)
    _require_apart(run.train, test)
    return run


def _read_tests(config: Config) -> tuple[PromptRecord, ...]:
    data = config.data
    test = _read(data.test_files, data.source) if data.test_files else ()
    if data.source is not DataSource.MIXTURE or not data.test_tasks:
        return test
    return (*test, *build_reasoning_tests(_specs(data.test_tasks), data.test_size, config.train.seed,
                                          data.prompt_template))


def _read(files: list[str], source: DataSource) -> tuple[PromptRecord, ...]:
    if source is not DataSource.MIXTURE:
        return read_prompt_files(files, FileFormat(source.value))
    return tuple(record for file in files for record in read_prompt_files([file], FileFormat.of(file)))


def _files(name: str, weight: float, files: list[str], config: Config) -> TrainSource:
    data = config.data
    if not data.streaming:
        return TrainSource(name, weight, _read(files, data.source))
    only = None if data.source is DataSource.MIXTURE else FileFormat(data.source.value)
    return TrainSource(name, weight, files=RowFiles.open(files, only))


def _mixture(config: Config, gathering: Gathering) -> list[TrainSource | None]:
    """Each source with a name of its own: its task's or its first file's, numbered where it is taken."""
    sources: dict[str, TrainSource | None] = {}
    for source in config.data.mixture:
        first = name = _name(source)
        number = 1
        while name in sources:
            name = f"{first}_{(number := number + 1)}"
        sources[name] = gathering.read(_mixed, name, source, config)
    return list(sources.values())


def _name(source: MixtureConfig) -> str:
    return Path(source.files[0]).stem if source.task is None else source.task


def _mixed(name: str, source: MixtureConfig, config: Config) -> TrainSource:
    if source.task is None:
        return _files(name, source.weight, source.files, config)
    spec = TaskSpec(source.task, 1.0, dict(source.config), source.template)
    records = build_reasoning_source(spec, source.size, config.train.seed, config.data.prompt_template)
    return TrainSource(name, source.weight, records)


def _require_apart(train: Sequence[PromptRecord], test: Sequence[PromptRecord]) -> None:
    held_out = texts_of(test)
    both = [record for record in train if prompt_text(record.prompt) in held_out]
    if both:
        raise ValueError(f"{len(both)} of {len(train)} training prompts are held-out prompts too, the first of them "
                         f"{both[0].origin} ({held_out[prompt_text(both[0].prompt)]}); remove them from "
                         "the training prompts or from the held-out ones")


def texts_of(records: Sequence[PromptRecord]) -> Mapping[str, str]:
    """Origins of prompts by their text."""
    return {prompt_text(record.prompt): record.origin for record in records}


def _specs(tasks: list[TaskConfig]) -> tuple[TaskSpec, ...]:
    return tuple(TaskSpec(task.name, task.weight, dict(task.config), task.template) for task in tasks)


def length_rule(config: Config) -> LengthRule:
    """What bounds a prompt."""
    return LengthRule(config.data.max_prompt_length, Overlong(config.data.overlong.value))


def training_prompts(config: Config, records: RunData, tokenizer: Tokenizer, vocab_size: int
                     ) -> RowLoader[TokenisedPrompt]:
    """The endless sequence of training prompts."""
    how = _loading(config, config.data.prompts_per_step, length_rule(config), vocab_size)
    return prompt_loader(records.sources, tokenizer, how, texts_of(records.test))


def training_pairs(config: Config, records: RunData, tokenizer: Tokenizer, vocab_size: int,
                   per_step: int | None = None) -> RowLoader[SftExample]:
    """The endless sequence of supervised examples, `per_step` (None: a global batch) at a time; prompt and response may
    have as many tokens together as a rollout.
    """
    rule = LengthRule(config.data.max_prompt_length + config.generation.max_new_tokens,
                      Overlong(config.data.overlong.value), LENGTH_KEYS)
    how = _loading(config, per_step or config.train.global_batch_size, rule, vocab_size)
    return pair_loader(records.sources, tokenizer, how, texts_of(records.test))


def _loading(config: Config, per_step: int, rule: LengthRule, vocab_size: int) -> Loading:
    return Loading(per_step, config.train.seed, config.data.shuffle, config.data.shuffle_buffer, rule, vocab_size)


def held_out_prompts(config: Config, records: RunData, tokenizer: Tokenizer,
                     vocab_size: int) -> tuple[TokenisedPrompt, ...]:
    """evaluation.prompts held-out prompts, too long ones treated by data.overlong; none without test data. Tasks are
    mixed by weight already; of files, data sources take turns, so that each is asked.
    """
    test = records.test
    if not test:
        return ()
    fitted = fit_prompts(test, tokenise_prompts(test, tokenizer, vocab_size), length_rule(config))
    order = fitted.kept
    if config.data.source is not DataSource.REASONING_GYM:
        order = _in_turn(order, test)
    return tuple(TokenisedPrompt(i, fitted.tokens[i], test[i]) for i in order[:config.evaluation.prompts])


def _in_turn(rows: Sequence[int], records: Sequence[PromptRecord]) -> list[int]:
    """One row of each data source, then the next of each, until all have been taken."""
    by_source = defaultdict(list)
    for row in rows:
        by_source[records[row].data_source].append(row)
    return [row for row in chain.from_iterable(zip_longest(*by_source.values())) if row is not None]
