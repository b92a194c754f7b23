"""What the rewards of a config need before ranks meet: functions with their workers running, folders looked into.

Whatever is wrong with these is a ValueError here. It makes no weights.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.config.data_schema import task_names
from hybridflow.config.model_schema import RewardModelConfig
from hybridflow.config.reward_rules import is_decoder_folder
from hybridflow.config.reward_schema import OnFault, OnFaultConfig, RewardPartConfig
from hybridflow.config.schema import Config
from hybridflow.config.shapes import has_tokenizer
from hybridflow.config.words import FaultAction, GymScoring
from hybridflow.data.tokenizer import Tokenizer, open_tokenizer
from hybridflow.data.tokenizer_match import same_tokenizer
from hybridflow.gathering import Gathering
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.text_classifier import pads_rows, require_classifier
from hybridflow.rewards.function import ReasoningScoring, RewardFunction
from hybridflow.rewards.policy import Consequence, FaultPolicy
from hybridflow.rewards.records import FaultKind
from hybridflow.trainer.model_folders import require_weights


@dataclass(frozen=True)
class RewardDecoder:
    """A decoder of ours. `tokenizer` is its own, None where it reads the actor's ids."""

    path: str
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class RewardClassifier:
    """Any other sequence classifier; its tokenizer is opened with it."""

    path: str


@dataclass(frozen=True)
class RewardInput:
    """A part of the reward, by what scores it; the rest as in `source.WeightedPart`."""

    scorer: RewardFunction | RewardDecoder | RewardClassifier
    policy: FaultPolicy
    name: str = ""
    weight: float = 1.0
    data_sources: frozenset[str] = frozenset()


def read_rewards(config: Config, tokenizer: Tokenizer | None, vocab_size: int | None) -> tuple[RewardInput, ...]:
    """Every part of the reward; one where there is no mixture.

    Args:
        tokenizer, vocab_size: the actor's; None where it is wrong and the run will not begin.

    Raises:
        ValueError: functions, models' folders or their tokenizers that are not as they must be, all of them.
    """
    gathering = Gathering()
    if config.reward.mixture:
        read = [gathering.read(_part, config, f"reward.mixture[{place}]", part, tokenizer, vocab_size)
                for place, part in enumerate(config.reward.mixture)]
    else:
        read = [gathering.read(_whole, config, tokenizer, vocab_size)]
    parts = tuple(part for part in read if part is not None)
    if len(parts) == len(read):
        gathering.read(_require_effect, config, [part.scorer for part in parts])
    gathering.finish()
    return parts


def _require_effect(config: Config, scorers: Sequence[RewardFunction | RewardDecoder | RewardClassifier]) -> None:
    """
    Raises:
        ValueError: a key is set that none of these scorers has a use for, as only they could tell.
    """
    workers, at_once = config.reward.workers, config.model.reward_model.micro_batch_size
    functions = [scorer for scorer in scorers if isinstance(scorer, RewardFunction)]
    if workers is not None and functions and all(function.batched for function in functions):
        raise ValueError(f"reward.workers = {workers}: has no effect with a function that takes lists, which is called "
                         "once for all rows; remove it, or let the function take one row")
    texts = [scorer.path for scorer in scorers if isinstance(scorer, RewardClassifier)]
    if at_once != RewardModelConfig().micro_batch_size and texts and not any(map(pads_rows, texts)):
        raise ValueError(f"model.reward_model.micro_batch_size = {at_once}: has no effect with {texts[0]}, whose "
                         "tokenizer has no padding token of its own that the model knows, so that rows are run one by "
                         "one; remove it")


def read_costs(config: Config, tokenizer: Tokenizer | None, vocab_size: int | None
               ) -> RewardFunction | RewardDecoder | None:
    """What says what an answer costs, None where nothing does. Arguments and errors as of `read_rewards`."""
    cost, path = config.cost, config.model.cost_model.path
    if path is not None:
        return _decoder("model.cost_model.path", path, tokenizer, vocab_size)
    return None if cost.function is None else _loaded("cost.function", cost.function, timeout_s=cost.timeout_s)


def _whole(config: Config, tokenizer: Tokenizer | None, vocab_size: int | None) -> RewardInput:
    """The only scorer."""
    reward, path = config.reward, config.model.reward_model.path
    if path is not None:
        scorer = _model(config, "model.reward_model.path", path, tokenizer, vocab_size)
    else:
        scorer = _function(config, "reward.function", reward.function,
                           reward.reasoning_gym if reward.function is None else None)
    return RewardInput(scorer, fault_policy(reward.on_fault))


def _part(config: Config, key: str, part: RewardPartConfig, tokenizer: Tokenizer | None,
          vocab_size: int | None) -> RewardInput:
    if part.model is not None:
        scorer = _model(config, f"{key}.model", part.model, tokenizer, vocab_size)
    else:
        scorer = _function(config, f"{key}.function", part.function, part.reasoning_gym)
    policy = fault_policy(config.reward.on_fault if part.on_fault is None else part.on_fault)
    return RewardInput(scorer, policy, part.name, part.weight, frozenset(part.data_sources))


def _function(config: Config, key: str, spec: str | None, scoring: GymScoring | None) -> RewardFunction:
    """The function `spec`, else the tasks' scorers."""
    reward = config.reward
    if spec is not None:
        return _loaded(key, spec, timeout_s=reward.timeout_s, memory_mb=reward.memory_mb,
                       num_workers=reward.workers, batched=reward.batched)
    assert scoring is not None, "the config was checked"
    return RewardFunction.reasoning_gym(ReasoningScoring(scoring.value), task_names(config.data),
                                        timeout_s=reward.timeout_s, memory_mb=reward.memory_mb,
                                        num_workers=reward.workers)


def _loaded(key: str, spec: str, **options: Any) -> RewardFunction:
    try:
        return RewardFunction.load(spec, **options)
    except ValueError as error:
        raise ValueError(f"{key} = {spec}: {error}") from error


def _model(config: Config, key: str, path: str, tokenizer: Tokenizer | None,
           vocab_size: int | None) -> RewardDecoder | RewardClassifier:
    if is_decoder_folder(path):
        return _decoder(key, path, tokenizer, vocab_size)
    try:
        require_classifier(path, config.model.reward_model.label)
    except ValueError as error:
        raise ValueError(f"{key} = {error}") from error
    return RewardClassifier(path)


def _decoder(key: str, path: str, tokenizer: Tokenizer | None, vocab_size: int | None) -> RewardDecoder:
    require_weights(key, path, Head.SCORE)
    if tokenizer is None or vocab_size is None:
        return RewardDecoder(path, None)
    try:
        return RewardDecoder(path, _own_tokenizer(path, tokenizer, vocab_size))
    except ValueError as error:
        raise ValueError(f"{key} = {error}") from error


def _own_tokenizer(path: str, spoken: Tokenizer, vocab_size: int) -> Tokenizer | None:
    """The tokenizer in a decoder's folder, None where it has none or the actor's.

    Raises:
        ValueError: the model has no embedding of ids that it would be given.
    """
    model = ModelConfig.from_hf_folder(path)
    read = open_tokenizer(path) if has_tokenizer(path) else None
    own = None if read is None or same_tokenizer(read, spoken) else read
    needed = vocab_size if own is None else own.vocab_size
    if model.vocab_size < needed:
        whose = "the actor's, whose tokens it has to read" if own is None else "its own tokenizer's"
        raise ValueError(f"{path}: its vocabulary of {model.vocab_size} is smaller than that of {needed} of {whose}")
    return own


def require_parts(rewards: Sequence[RewardInput], data_sources: Iterable[str], *, all_known: bool = False) -> None:
    """Every data source is scored, where anything is. With `all_known` there are no others than these.

    Raises:
        ValueError: the data sources that no part scores, or those of parts that are none.
    """
    known = set(data_sources)
    if all_known and (none := sorted(set().union(*(part.data_sources for part in rewards)) - known)):
        near = difflib.get_close_matches(none[0], known, n=1)
        raise ValueError(f"reward.mixture: {', '.join(map(repr, none))}: no row has that data source; "
                         + (f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"))
    unscored = sorted(source for source in known
                      if not any(not part.data_sources or source in part.data_sources for part in rewards))
    if rewards and unscored:
        raise ValueError(f"reward.mixture: no part scores the data source {', '.join(map(repr, unscored))}; name it in "
                         "the data_sources of a part, or leave those of one empty")


def fault_policy(block: OnFaultConfig) -> FaultPolicy:
    """The policy of a config block."""
    return FaultPolicy({FaultKind(cause): _action(value) for cause, value in vars(block).items()})


def _action(value: OnFault) -> Consequence | float:
    if not isinstance(value, str):
        return float(value)
    action = FaultAction(value)
    return 0.0 if action is FaultAction.ZERO else Consequence(action.value)
