"""Mixes of reasoning-gym tasks as prompt records, split into training and test by prompt text.

The only module of data that knows reasoning_gym, which is imported when a mix is made (it takes seconds).
Never scores an answer.

Things to know about the library (0.1.25): item i of seed s is item i - 1 of seed s + 1, so two seeds do not make two
sets; small settings have few distinct items (255 in one); some tasks give empty answers now and then (skipped here) or
none at all (refused, with those that do not obey their seed); isomorphic_strings depends on PYTHONHASHSEED (see
records.fingerprint); countdown and number_sorting explain themselves at 360 to 400 characters an item: give these a
short template over the metadata, as in "Make {metadata[target]} from {metadata[numbers]}: ".
"""

import difflib
import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

from hybridflow.data.records import DataSplit, PromptRecord

# Rounds of drawing after which a task is taken to have too few distinct items.
DRAW_ROUNDS = 8
# Items made twice to see whether a task repeats itself (list_functions does not).
PROBE_ITEMS = 4


@dataclass(frozen=True)
class TaskSpec:
    """One task of a mix. `weight` is its share of the records relative to the other tasks' weights; `config` goes to
    the task's own settings; `template` replaces the mix's (None: the mix's).

    Example: TaskSpec("chain_sum", weight=2.0, config={"max_terms": 3}, template="{question} ")
    """

    name: str
    weight: float = 1.0
    config: dict[str, Any] = field(default_factory=dict)
    template: str | None = None


def build_reasoning_mix(
    tasks: tuple[TaskSpec, ...], size: int, test_size: int, seed: int, template: str | None = None
) -> DataSplit:
    """`size` training and `test_size` test records drawn from `tasks` by weight, shuffled; a function of its arguments.

    Test prompts are distinct and none is a training prompt. Training prompts repeat as often as the task's generator
    repeats itself. `template` is a format string over question and metadata (None: the question alone).
    Raises ValueError for an unknown task (with the nearest names), a setting or a template that the task does not
    take, or a task with too few distinct items for its share of the test records.
    """
    _check_mix(tasks, size, test_size)
    for task in tasks:
        _check_task(task)  # before the first, perhaps slow, task is drawn
    sources = [
        _TaskSource(task, f"{seed} {position} {task.name}", task.template or template or "{question}")
        for position, task in enumerate(tasks)
    ]
    counts = list(zip(sources, _apportion(tasks, size), _apportion(tasks, test_size), strict=True))
    test: dict[str, PromptRecord] = {}
    for source, num_train, num_test in counts:
        source.draw(num_train + num_test)
        test.update(_hold_out(source, num_test, test))
    # Only now: a task listed twice with two configs can draw the other one's held-out prompts.
    train = [record for source, num_train, _ in counts for record in _training_records(source, num_train, test)]
    return DataSplit(_shuffled(train, f"{seed} train"), _shuffled(list(test.values()), f"{seed} test"))


class _TaskSource:
    """Draws records of one task, round after round, each round from a seed of its own."""

    def __init__(self, task: TaskSpec, key: str, template: str) -> None:
        self.task = task
        self.key = key
        self.template = template
        self.num_rounds = 0
        self.drawn: list[PromptRecord] = []

    def draw(self, count: int) -> None:
        """Add up to `count` records to `drawn` (entries without an answer are skipped)."""
        dataset = _create_dataset(self.task, count, _number(f"{self.key} {self.num_rounds}") % 2**31)
        entries = (dataset[i] for i in range(count))
        self.drawn += [self._record(entry, i) for i, entry in enumerate(entries) if entry["answer"]]
        self.num_rounds += 1

    def _record(self, entry: dict[str, Any], index: int) -> PromptRecord:
        try:
            prompt = self.template.format(question=entry["question"], metadata=entry["metadata"])
        except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"task {self.task.name!r}: the prompt template {self.template!r} does not fit ({error!r}); it may use "
                f"{{question}} and {{metadata[NAME]}} with NAME one of {', '.join(map(str, entry['metadata']))}"
            ) from error
        origin = f"{self.task.name} round {self.num_rounds} item {index}"
        return PromptRecord(self.task.name, prompt, entry["answer"], {}, origin, entry)


def _hold_out(source: _TaskSource, count: int, taken: dict[str, PromptRecord]) -> dict[str, PromptRecord]:
    """`count` distinct prompts with the smallest hashes, at most half of all; draws on until there are so many."""
    while True:
        distinct = {record.prompt: record for record in reversed(source.drawn)}
        free = sorted((text for text in distinct if text not in taken), key=lambda text: _number(source.key + text))
        if count <= min(len(free), len(distinct) // 2):
            return {text: distinct[text] for text in free[:count]}
        if source.num_rounds == DRAW_ROUNDS:
            raise ValueError(
                f"task {source.task.name!r}: {len(source.drawn)} draws have {len(distinct)} distinct prompts, and at "
                f"most half may be held out, but {count} test records are its share; lower data.test_size or make the "
                "task's config wider"
            )
        # Twice as many: what comes next repeats prompts that were drawn before.
        source.draw(2 * count)


def _training_records(source: _TaskSource, count: int, held_out: dict[str, PromptRecord]) -> list[PromptRecord]:
    """The first `count` records whose prompts are not held out; draws on until there are so many."""
    while True:
        train = [record for record in source.drawn if record.prompt not in held_out]
        if len(train) >= count:
            return train[:count]
        if source.num_rounds >= 2 * DRAW_ROUNDS:
            raise ValueError(
                f"task {source.task.name!r}: only {len(train)} of {len(source.drawn)} draws are free for training, but "
                f"{count} records are its share; lower data.test_size or make the task's config wider"
            )
        source.draw(2 * (count - len(train)))


def _create_dataset(task: TaskSpec, size: int, seed: int) -> Any:
    import reasoning_gym.factory

    if task.name not in reasoning_gym.factory.DATASETS:
        nearest = difflib.get_close_matches(task.name, reasoning_gym.factory.DATASETS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else "reasoning_gym.factory.DATASETS has all names"
        raise ValueError(f"unknown reasoning-gym task {task.name!r}; {hint}")
    try:
        return reasoning_gym.create_dataset(task.name, size=size, seed=seed, **task.config)
    except (TypeError, AssertionError, ValueError) as error:
        fields = reasoning_gym.factory.DATASETS[task.name][1].__dataclass_fields__
        known = ", ".join(name for name in fields if name not in ("seed", "size"))
        raise ValueError(
            f"task {task.name!r} does not take config {task.config}: {error}; its settings are {known}"
        ) from error


def _check_task(task: TaskSpec) -> None:
    """Name and settings exist, and a few items are fit for training on several ranks."""
    entries, again = (
        [(entry["question"], entry["answer"]) for entry in map(dataset.__getitem__, range(PROBE_ITEMS))]
        for dataset in (_create_dataset(task, PROBE_ITEMS, 0), _create_dataset(task, PROBE_ITEMS, 0))
    )
    if entries != again:
        raise ValueError(
            f"task {task.name!r} gives other items for the same seed, so that every rank would have its own data; "
            "leave it out of the mix"
        )
    if all(answer is None for _, answer in entries):
        raise ValueError(
            f"task {task.name!r} states no answer in its items, so there is no ground truth to compare with or to "
            "train on; leave it out of the mix"
        )


def _check_mix(tasks: tuple[TaskSpec, ...], size: int, test_size: int) -> None:
    if not tasks:
        raise ValueError("data.tasks is empty; name at least one reasoning-gym task")
    for task in tasks:
        if not 0 < task.weight < float("inf"):
            raise ValueError(f"task {task.name!r}: weight is {task.weight}; it must be a positive number")
        if {"size", "seed"} & task.config.keys():
            raise ValueError(f"task {task.name!r}: size and seed belong to data.size and train.seed, not to its config")
    if size < 1 or test_size < 0:
        raise ValueError(f"data.size is {size} and data.test_size {test_size}; they must be at least 1 and 0")


def _apportion(tasks: tuple[TaskSpec, ...], total: int) -> list[int]:
    """`total` cut by weight into whole numbers, the largest remainders up. Example: weights 2, 1 of 10: 7, 3."""
    weights = [task.weight / sum(task.weight for task in tasks) * total for task in tasks]
    counts = [int(weight) for weight in weights]
    by_remainder = sorted(range(len(tasks)), key=lambda i: counts[i] - weights[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _shuffled(records: list[PromptRecord], key: str) -> tuple[PromptRecord, ...]:
    generator = random.Random(key)
    return tuple(sorted(records, key=lambda record: generator.random()))


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
