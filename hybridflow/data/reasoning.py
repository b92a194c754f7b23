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
from collections.abc import Container
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from hybridflow.data.records import DataSplit, PromptRecord
from hybridflow.gathering import Gathering

# One prompt text in this many is held out.
HELD_OUT_ONE_IN = 8
# Rounds of drawing after which a task is taken to have too few distinct items.
DRAW_ROUNDS = 8
# The smallest round: a share of few records of a task with few items must meet them.
LEAST_DRAWS = 32
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
    tasks: tuple[TaskSpec, ...],
    size: int,
    test_size: int,
    seed: int,
    template: str | None = None,
    test_tasks: tuple[TaskSpec, ...] = (),
) -> DataSplit:
    """`size` training records of `tasks` and `test_size` test records of `test_tasks` (none: of `tasks`), drawn by
    weight and shuffled; a function of its arguments.

    Which prompts are held out depends on their text alone (`is_held_out`), so that no two mixes share a prompt between
    the training of one and the tests of the other, whatever their tasks, weights, sizes and seeds. Test prompts are
    distinct; training prompts repeat as often as the task's generator repeats itself. `template` is a format string
    over question and metadata (None: the question alone).
    Raises ValueError for an unknown task (with the nearest names), a setting or a template that the task does not
    take, or a task with too few distinct items for its share.
    """
    _check_mix((*tasks, *test_tasks), size, test_size)
    _check_tasks((*tasks, *test_tasks))  # before the first, perhaps slow, task is drawn
    shares = list(zip(tasks, _apportion(tasks, size), [0] * len(tasks) if test_tasks else _apportion(tasks, test_size)))
    shares += [(task, 0, count) for task, count in zip(test_tasks, _apportion(test_tasks, test_size))]
    return _drawn(shares, seed, template)


def _drawn(shares: list[tuple[TaskSpec, int, int]], seed: int, template: str | None) -> DataSplit:
    """The records of tasks with how many of each are for training and for tests."""
    train: list[PromptRecord] = []
    test: dict[str, PromptRecord] = {}
    for position, (task, num_train, num_test) in enumerate(shares):
        source = _TaskSource(task, f"{seed} {position} {task.name}", task.template or template or "{question}")
        share = source.share(num_train, num_test, test.keys())
        train += share.train
        test |= {record.prompt: record for record in share.test}
    return DataSplit(_shuffled(train, f"{seed} train"), _shuffled(list(test.values()), f"{seed} test"))


def build_reasoning_source(task: TaskSpec, size: int, seed: int, template: str | None = None
                           ) -> tuple[PromptRecord, ...]:
    """`size` training records of one task, shuffled. Raises ValueError as `build_reasoning_mix`."""
    return build_reasoning_mix((task,), size, 0, seed, template).train


def build_reasoning_tests(tasks: tuple[TaskSpec, ...], size: int, seed: int, template: str | None = None
                          ) -> tuple[PromptRecord, ...]:
    """`size` different held-out records of `tasks`, by weight. Raises ValueError as `build_reasoning_mix`."""
    _check_mix(tasks, 1, size)
    _check_tasks(tasks)
    shares = [(task, 0, count) for task, count in zip(tasks, _apportion(tasks, size))]
    return _drawn(shares, seed, template).test


def is_held_out(text: str) -> bool:
    """Whether a prompt is for tests only: a fixed eighth of all texts, by their hash."""
    return _number(text) % HELD_OUT_ONE_IN == 0


class _TaskSource:
    """Draws records of one task, round after round, each round from a seed of its own."""

    def __init__(self, task: TaskSpec, key: str, template: str) -> None:
        self.task = task
        self.key = key
        self.template = template
        self.num_rounds = 0
        self.drawn: list[PromptRecord] = []

    def share(self, num_train: int, num_test: int, taken: Container[str]) -> DataSplit:
        """The first `num_train` records that are not held out, and the first `num_test` distinct ones that are and
        are not `taken`; draws on until there are so many.
        """
        while True:
            train = [record for record in self.drawn if not is_held_out(record.prompt)]
            held_out = {record.prompt: record for record in reversed(self.drawn) if is_held_out(record.prompt)}
            test = [record for text, record in reversed(held_out.items()) if text not in taken]
            missing_train, missing_test = max(0, num_train - len(train)), max(0, num_test - len(test))
            if not missing_train and not missing_test:
                return DataSplit(tuple(train[:num_train]), tuple(test[:num_test]))
            if self.num_rounds == DRAW_ROUNDS:
                raise ValueError(f"task {self.task.name!r}: " + "; ".join(filter(None, (
                    missing_train and f"its share of data.size is {num_train} training prompts, and {len(self.drawn)} "
                    f"draws gave only {len(train)}",
                    missing_test and f"its share of data.test_size is {num_test} different held-out prompts, and "
                    f"{len(self.drawn)} draws gave only {len(test)} (one text in {HELD_OUT_ONE_IN} is held out)",
                    f"lower data.{'test_size' if missing_test else 'size'}, or make the task's config wider"))))
            # A little more than what is missing on average; later rounds also repeat what was drawn before.
            self._draw(2 * missing_train if self.num_rounds else ceil(1.2 * missing_train), missing_test)

    def _draw(self, num_train: int, num_test: int) -> None:
        """Add records to `drawn` (entries without an answer are skipped)."""
        count = max(num_train, 2 * HELD_OUT_ONE_IN * num_test, LEAST_DRAWS)
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


def _check_tasks(tasks: tuple[TaskSpec, ...]) -> None:
    """All that is wrong with any of them in one error."""
    gathering = Gathering()
    for task in tasks:
        gathering.read(_check_task, task)
    gathering.finish()


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
