"""The Python interface: `init_trainer`, then `train_step` on batches of prompts.

Owns reading whatever form of config and batch a caller has, and short names for the metrics that callers ask for most.
The work is `trainer.rl`'s.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from hybridflow.config.batch_math import BatchMath, layout_table
from hybridflow.config.load import to_tree
from hybridflow.config.reading import read_any
from hybridflow.config.recipe import algorithm_line, with_recipe
from hybridflow.config.reward_schema import asks_task_scorers
from hybridflow.config.schema import Config
from hybridflow.config.words import ReduceDtype
from hybridflow.data.columns import records_of_columns
from hybridflow.data.loader import TokenisedPrompt, tokenise_prompts
from hybridflow.data.records import PromptRecord
from hybridflow.data.row_schema import parse_row, require_text
from hybridflow.data.token_rows import check_ids
from hybridflow.observe.progress import open_console
from hybridflow.observe.run_view import RunView, ViewOptions
from hybridflow.parallel.comm_hook import CommHook
from hybridflow.parallel.place import launched_place
from hybridflow.parallel.world import World
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.prompts import require_same
from hybridflow.trainer.rl import RLTrainer

BatchItem = TokenisedPrompt | PromptRecord | Mapping[str, Any] | str
PromptBatch = Sequence[BatchItem] | Mapping[str, Sequence[Any]]

SHORT_NAMES = {"policy_loss": "policy/surrogate_loss", "value_loss": "critic/loss", "loss": "policy/loss",
               "entropy": "policy/entropy", "kl": "policy/kl_reference", "approx_kl": "policy/approx_kl",
               "reward": "reward/mean", "grad_norm": "policy/grad_norm"}


def init_trainer(config: Config | Mapping[str, Any] | str | Path, data_loader: Iterable[PromptBatch],
                 algorithm: str | None = None, comm_hook: CommHook | None = None) -> Trainer:
    """A trainer on all launched ranks, or on this process alone. Collective.

    Args:
        config: a `Config`, a path to a YAML file, a dict in our keys, or the nested dict of `config.article`.
        data_loader: batches of prompts for `Trainer.fit`; `train_step` takes any batch.
        algorithm: "ppo", "grpo" or another algorithm.name; None where the config names it.
        comm_hook: how gradient buckets are reduced over replicas (`parallel.comm_hook`; `DdpHook` takes simple hooks
            written for torch's DistributedDataParallel). None: as train.reduce_dtype says.

    Raises:
        ConfigError: every fault of the config, before any process group exists.
        ValueError: what the config names (tokenizer, model folder, reward function) is not as it must be, or a hook
            where the config has a reduce_dtype; also before.

    Example:
        trainer = init_trainer(config=config, data_loader=loader, algorithm="ppo")
        result = trainer.train_step(batch)
        print(result["policy_loss"], result["value_loss"])
    """
    reading = read_any(config, launched_place(os.environ).size, algorithm)
    if comm_hook is not None and reading.config.train.reduce_dtype is not ReduceDtype.FP32:
        raise ValueError(f"train.reduce_dtype = {reading.config.train.reduce_dtype.value} has no effect with a "
                         "communication hook, which decides what travels: remove one of the two")
    inputs = Inputs.read(with_recipe(reading.config))
    return Trainer(World.from_env(reading.config.train.timeout_s), inputs, data_loader, reading.notes, comm_hook)


class Trainer:
    """What `init_trainer` gives. Every method is collective: each rank passes the same batch.

    A batch is a sequence of prompts, or a dict of columns, as a torch `DataLoader` collates rows (`data.columns`). A
    prompt is text, a row of the schema of `data.row_schema`, a `PromptRecord` or a `TokenisedPrompt`.
    """

    def __init__(self, world: World, inputs: Inputs, data_loader: Iterable[PromptBatch],
                 notes: Sequence[str] = (), comm_hook: CommHook | None = None) -> None:
        config = inputs.config
        self.world, self.config, self.data_loader = world, config, data_loader
        self.trainer = RLTrainer(inputs, world, comm_hook)
        self.view = RunView(_view_options(config, world.size), world.rank, open_console())
        self.num_steps = self.num_prompts = 0
        self.asks_for_truth = asks_task_scorers(config.reward, config.model.reward_model)
        batches = BatchMath.of(config, world.size).line_of_any_batch()
        for sentence in (*notes, algorithm_line(config), batches, layout_table(config, world.size)):
            self.view.say(sentence)

    def train_step(self, batch: PromptBatch) -> dict[str, float]:
        """Generate answers to `batch`, score them and learn from them.

        Returns:
            every metric of the step by its full name, and the most wanted ones by a short one as well: policy_loss,
            value_loss, loss, entropy, kl, approx_kl, reward, grad_norm (those that the algorithm has).
        Raises:
            ValueError: the batch is empty, an item is no prompt (its place and the rule are named), or ranks have
                passed different prompts.
        """
        prompts = self._tokenised(batch)
        require_same(self.world, [prompt.record for prompt in prompts], "pass the same batch on every rank")
        metrics = self.trainer.step(prompts)
        self.num_steps += 1
        self.view.step(self.num_steps, metrics)
        self.view.samples(self.num_steps, self.trainer.samples(self.config.logging.samples))
        return metrics | {short: metrics[name] for short, name in SHORT_NAMES.items() if name in metrics}

    def fit(self) -> dict[str, float]:
        """`train.total_steps` steps on batches of the data loader; the last step's metrics. More steps may follow.

        Raises:
            ValueError: the data loader ends before that.
        """
        wanted, done = self.config.train.total_steps, 0
        result: dict[str, float] = {}
        for batch in islice(self.data_loader, wanted):
            result, done = self.train_step(batch), done + 1
        if done < wanted:
            raise ValueError(f"the data loader ended after {done} batches; train.total_steps is {wanted}: let it "
                             "repeat, or lower train.total_steps")
        self.view.sum_up()
        return result

    def export(self, folder: str | Path) -> None:
        """Write the actor and its tokenizer in Hugging Face's form."""
        self.trainer.export(Path(folder))

    def close(self) -> None:
        """Leave the job and end the reward workers."""
        self.view.close()
        self.trainer.close()
        self.world.close()

    def _tokenised(self, batch: PromptBatch) -> list[TokenisedPrompt]:
        items = _items(batch)
        origins = [f"batch item {place}" for place in range(len(items))]
        records = [require_text(_record(item, origin)) for item, origin in zip(items, origins)]
        if self.asks_for_truth:
            _require_truths(records)
        vocab_size = self.trainer.model.vocab_size
        ids = tokenise_prompts(records, self.trainer.tokenizer, vocab_size)
        prompts = [item if isinstance(item, TokenisedPrompt)
                   else TokenisedPrompt(self.num_prompts + place, ids[place], record)
                   for place, (item, record) in enumerate(zip(items, records))]
        check_ids([prompt.ids for prompt in prompts], origins, vocab_size)
        self._require_room(prompts)
        self.num_prompts += len(items)
        return prompts

    def _require_room(self, prompts: Sequence[TokenisedPrompt]) -> None:
        """The actor has positions for every prompt and the longest response to it."""
        positions, response = self.trainer.model.max_position_embeddings, self.config.generation.max_new_tokens
        for place, prompt in enumerate(prompts):
            if len(prompt.ids) + response > positions:
                raise ValueError(f"batch item {place}: has {len(prompt.ids)} tokens; with generation.max_new_tokens "
                                 f"{response} it may have {positions - response} (the actor's max_position_embeddings "
                                 f"is {positions})")


def _view_options(config: Config, num_ranks: int) -> ViewOptions:
    logging = config.logging
    return ViewOptions(Path(logging.dir), config.algorithm.name.value, config.train.total_steps,
                       progress=logging.progress, num_samples=logging.samples, wandb=logging.wandb,
                       tensorboard=logging.tensorboard, config=to_tree(config),
                       verl_ranks=num_ranks if logging.verl_names else None)


def _items(batch: PromptBatch) -> list[BatchItem]:
    """The prompts of a batch. A text is no batch, though Python could take it for one of letters.

    Raises:
        ValueError: it is no batch, or has no prompts.
    """
    if isinstance(batch, (str, bytes)) or not isinstance(batch, Iterable):
        raise ValueError(f"a batch is a list of prompts or a dict of columns, not {type(batch).__name__} "
                         f"{str(batch)[:40]!r}")
    items = records_of_columns(batch) if isinstance(batch, Mapping) else list(batch)
    if not items:
        raise ValueError("the batch has no prompts; give at least one")
    return items


def _require_truths(records: Sequence[PromptRecord]) -> None:
    for record in records:
        if not record.ground_truth.strip():
            raise ValueError(f"{record.origin}: has no ground truth, with which the tasks' scorer compares answers; "
                             "give it one, or the config reward.function or model.reward_model.path")


def _record(item: BatchItem, origin: str) -> PromptRecord:
    if isinstance(item, TokenisedPrompt):
        return replace(item.record, origin=origin)
    if isinstance(item, PromptRecord):
        return replace(item, origin=origin)
    if isinstance(item, str):
        return PromptRecord("", item, "", origin=origin)
    if not isinstance(item, Mapping):
        raise ValueError(f"{origin}: is a {type(item).__name__}; a prompt is text, a row (a dict), a PromptRecord or a "
                         "TokenisedPrompt")
    return parse_row(dict(item), origin)
