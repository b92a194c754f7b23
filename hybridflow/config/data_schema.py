"""The keys of the data and the evaluation block, as `schema` has those of the others. It checks nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hybridflow.config.words import DataSource, Overlong


@dataclass(frozen=True)
class TaskConfig:
    """One reasoning-gym task of a mix."""

    name: str = "chain_sum"
    """Name of the task in reasoning-gym."""
    weight: float = 1.0
    """Share of the mix, relative to the other tasks' weights."""
    config: dict[str, Any] = field(default_factory=dict)
    """The task's own settings, e.g. {min_terms: 2, max_digits: 2}."""
    template: str | None = None
    """This task's prompt_template. null: data.prompt_template."""


@dataclass(frozen=True)
class MixtureConfig:
    """One source of a mixture: files, or a reasoning-gym task."""

    weight: float = 1.0
    """Share of the prompts of a step, relative to the other sources' weights, whatever the sources' sizes."""
    files: list[str] = field(default_factory=list)
    """Files of prompts: *.parquet, others are JSON lines. Empty: a task is named."""
    task: str | None = None
    """Name of a task in reasoning-gym. null: files are named."""
    config: dict[str, Any] = field(default_factory=dict)
    """The task's own settings."""
    template: str | None = None
    """The task's prompt_template. null: data.prompt_template."""
    size: int = 4096
    """Prompts of the task that are made."""


@dataclass(frozen=True)
class DataConfig:
    """Where prompts come from."""

    source: DataSource = DataSource.REASONING_GYM
    """reasoning_gym (procedural, no files) | jsonl | parquet | mixture (of files and tasks, drawn by weight)."""
    mixture: list[MixtureConfig] = field(default_factory=list)
    """The sources of a mixture; every one has its own order and epoch (mixture only)."""
    tasks: list[TaskConfig] = field(default_factory=lambda: [TaskConfig()])
    """The mix of reasoning-gym tasks (reasoning_gym only)."""
    test_tasks: list[TaskConfig] = field(default_factory=list)
    """Tasks of the held-out prompts (not with jsonl, parquet). Empty: those of data.tasks; in a mixture none."""
    train_files: list[str] = field(default_factory=list)
    """Files of training prompts (jsonl, parquet)."""
    test_files: list[str] = field(default_factory=list)
    """Files of held-out prompts (not with reasoning_gym). Empty: no evaluation on files."""
    size: int = 4096
    """Training prompts that are made (reasoning_gym only)."""
    test_size: int = 256
    """Different held-out prompts that are made of tasks; a fixed eighth of all texts is never trained."""
    prompts_per_step: int = 64
    """Prompts of one step; times generation.samples_per_prompt are its rollouts."""
    max_prompt_length: int = 256
    """Longest prompt, in tokens."""
    overlong: Overlong = Overlong.ERROR
    """A longer prompt: error | drop | truncate_left (the end is kept) | truncate_right; counted (see README)."""
    prompt_template: str | None = None
    """Format string over {question} and {metadata[...]} (of tasks). null: the question as it stands."""
    shuffle: bool = True
    """Shuffle the prompts in each epoch, from train.seed."""
    streaming: bool = False
    """Read training files row by row as they are needed, instead of holding them in memory."""
    shuffle_buffer: int = 1024
    """Rows that wait in memory, out of which the next is drawn (streaming)."""
    chat_template: str | None = None
    """File of a Jinja chat template in place of the tokenizer's. null: the tokenizer's."""
    system_prompt: str | None = None
    """System message of every prompt that has none. null: none is added."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, e.g. {enable_thinking: false}."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out prompts answered and scored."""

    every_steps: int | None = 10
    """Evaluate before the first step, every so many steps, and after the last. null: never."""
    prompts: int = 64
    """Held-out prompts of one evaluation, and of `generate`; of files, from each data_source in turn."""
    samples_per_prompt: int = 1
    """Answers to each held-out prompt: n of mean@n, best@k, maj@k. Above 1 a temperature is needed."""
    temperature: float = 0.0
    """Sampling temperature of evaluation. 0: greedy."""
    top_k: int = 0
    """As generation.top_k, in evaluation."""
    top_p: float = 1.0
    """As generation.top_p, in evaluation."""
    min_p: float = 0.0
    """As generation.min_p, in evaluation."""
    save_answers: bool = False
    """Append every answer with its reward to evaluations.jsonl in logging.dir."""


def task_names(data: DataConfig) -> tuple[str, ...]:
    """The reasoning-gym tasks that prompts are made of, to train on and held out."""
    tested = tuple(task.name for task in data.test_tasks)
    if data.source is DataSource.REASONING_GYM:
        return (*(task.name for task in data.tasks), *tested)
    if data.source is DataSource.MIXTURE:
        return (*(source.task for source in data.mixture if source.task is not None), *tested)
    return ()


def holds_out(data: DataConfig) -> bool:
    """Whether there are held-out prompts, of files or of tasks."""
    if data.source is DataSource.REASONING_GYM:
        return data.test_size > 0
    return bool(data.test_files or (data.source is DataSource.MIXTURE and data.test_tasks))


def trains_on_files(data: DataConfig) -> bool:
    """Whether training prompts come from files, which have data sources of their own."""
    if data.source is DataSource.MIXTURE:
        return any(source.files for source in data.mixture)
    return data.source is not DataSource.REASONING_GYM
