"""What a run reads before its ranks meet: tokenizer, the actor's shape, the rewards.

Whatever is wrong with these is a ValueError here, before a process group or a device is touched. It makes no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hybridflow.algorithms.advantages import Estimator
from hybridflow.algorithms.functions import find_estimator, find_policy_loss
from hybridflow.algorithms.policy import PolicyLoss
from hybridflow.config.algorithm_schema import AlgorithmConfig
from hybridflow.config.recipe import with_recipe
from hybridflow.config.schema import Config
from hybridflow.config.shapes import spec_decoder
from hybridflow.config.tools_schema import ToolsConfig
from hybridflow.config.words import EngineName, OnToolError
from hybridflow.data.chat import ChatFormat
from hybridflow.data.tokenizer import Tokenizer, open_tokenizer
from hybridflow.gathering import Gathering
from hybridflow.generation.blocks import BLOCK_TOKENS
from hybridflow.kernels.native_build import Unavailable, native_library
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.hf_import import FRESH_IN_TRAINING
from hybridflow.models.layout import split_heads
from hybridflow.parallel.arithmetic import ceil_div
from hybridflow.parallel.world import default_device
from hybridflow.response_text import ResponseEnds
from hybridflow.rewards.function import RewardFunction
from hybridflow.tools.detect import call_ends
from hybridflow.tools.observation import ObservationForm
from hybridflow.tools.toolbox import ToolBox
from hybridflow.trainer.engine_options import DTYPES, MIB
from hybridflow.trainer.model_folders import require_vocabulary, require_weights
from hybridflow.trainer.rewards.inputs import RewardDecoder, RewardInput, read_costs, read_rewards
from hybridflow.trainer.turns import TurnLoop


@dataclass(frozen=True)
class Inputs:
    """Example: `Inputs.read(config).model.vocab_size`.

    Attributes:
        model: the actor's shape.
        ends: what ends a response: the tokenizer's and the model's ends, and generation.stop.
        rewards: what scores answers, the workers of functions running; empty where nothing is scored.
        costs: what says what an answer costs, the workers of a function running; None where nothing does.
        turns: of answers that may call tools, with the tools' workers running; None where an answer is one turn.
        estimator, policy_loss: those of the algorithm, the user's own files run; None where nothing is scored.
    """

    config: Config
    tokenizer: Tokenizer
    model: ModelConfig
    ends: ResponseEnds
    rewards: tuple[RewardInput, ...]
    estimator: Estimator | None = None
    policy_loss: PolicyLoss | None = None
    costs: RewardFunction | RewardDecoder | None = None
    turns: TurnLoop | None = None

    @classmethod
    def read(cls, config: Config, tokenizer: Tokenizer | None = None, *, scores: bool = True,
             head: Head = Head.LANGUAGE_MODEL) -> Inputs:
        """Open what `config` names.

        Args:
            tokenizer: one that has just been made; None opens the configured one.
            scores: whether answers will be scored; only then are the models besides the actor looked at, and reward
                functions started.
            head: what model.path is trained under; a score head may be missing there.

        Raises:
            ValueError: files, models' tensors, ids to stop at, functions or rewards that are not as they must be, or
                this machine cannot compute as generation.batch_invariant asks, or has no generation.engine; all that
                is wrong, but what needs something else that is.
        """
        gathering = Gathering()
        if config.generation.batch_invariant:
            gathering.read(require_invariance, default_device(0))
        opened = gathering.read(_open_tokenizer, config) if tokenizer is None else tokenizer
        model = gathering.read(_actor_shape, config, opened, head)
        size = None if model is None else model.vocab_size
        estimator = policy_loss = rewards = costs = turns = ends = None
        if scores:
            estimator, policy_loss = _algorithm_functions(with_recipe(config).algorithm, gathering)
            for role in ("critic", "cost_critic"):
                gathering.read(_require_critic, f"model.{role}.path", vars(config.model)[role].path, size)
            rewards = gathering.read(read_rewards, config, opened, size)
            costs = gathering.read(read_costs, config, opened, size)
            turns = gathering.read(_turn_loop, config, opened)
        if opened is not None and model is not None:
            calls = call_ends(config.tools.call) if scores and config.tools.file is not None else ()
            ends = gathering.read(response_ends, [*config.generation.stop, *calls], opened, model)
            if scores:
                gathering.read(require_cache, config, model, config.data.max_prompt_length)
        if config.generation.engine is EngineName.VLLM and ends is not None:
            gathering.read(require_vllm, config, ends)
        gathering.finish()
        assert opened is not None and model is not None and ends is not None
        return cls(config, opened, model, ends, rewards or (), estimator, policy_loss, costs, turns)

    def close_tools(self) -> None:
        """End the workers of tools, if any."""
        if self.turns is not None:
            self.turns.toolbox.close()


def chat_format(config: Config) -> ChatFormat:
    """How the data block wants its chats. Raises ValueError if its template is no UTF-8."""
    data = config.data
    try:
        template = None if data.chat_template is None else Path(data.chat_template).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.chat_template = {data.chat_template}: is no text: {error}") from None
    return ChatFormat(template, data.system_prompt, data.chat_template_kwargs)


def require_cache(config: Config, model: ModelConfig, longest_prompt: int) -> None:
    """
    Raises:
        ValueError: generation.kv_cache_mb does not hold the longest response to a prompt of `longest_prompt` tokens.
    """
    generation, layout = config.generation, config.generation.layout
    if generation.kv_cache_mb is None or generation.engine is EngineName.VLLM:
        return
    layers = max(layout.layers_per_stage or [ceil_div(model.num_layers, layout.pp)])
    numbers = 2 * layers * split_heads(model, layout.tp, 0).num_kv * model.head_dim * BLOCK_TOKENS
    blocks = ceil_div(longest_prompt + generation.max_new_tokens - 1, BLOCK_TOKENS)  # the last token is never fed back
    needed = ceil_div(blocks * numbers * DTYPES[config.train.mixed_precision].itemsize, MIB)
    if generation.kv_cache_mb < needed:
        raise ValueError(f"generation.kv_cache_mb = {generation.kv_cache_mb}: a prompt of {longest_prompt} tokens and "
                         f"generation.max_new_tokens = {generation.max_new_tokens} take {needed} MiB on each rank; "
                         f"choose {needed} or more")


def require_invariance(device: torch.device) -> None:
    """What generation.batch_invariant needs is there. Compiles the kernels where no run of this user has.

    Raises:
        ValueError: `device` is no CPU, or has no native kernels (with the reason).
    """
    why = None
    if device.type != "cpu":
        why = f"only the kernels of a CPU are batch-invariant, and this run would be on {device.type}"
    elif isinstance(found := native_library(), Unavailable):
        why = f"the native kernels cannot be had: {found.reason}"
    if why is not None:
        raise ValueError(f"generation.batch_invariant = true: {why}; choose false")


def require_vllm(config: Config, ends: ResponseEnds) -> None:
    """What generation.engine vllm needs is there.

    Raises:
        ValueError: vLLM cannot be imported (with the reason), or cannot find the strings that end a response.
    """
    if ends.strings and text_folder(config) is None:
        raise ValueError(f"generation.stop {ends.strings[0]!r} has several tokens, and vllm looks for it in texts of a "
                         "Hugging Face tokenizer alone; name the folder of one in model.tokenizer, or choose "
                         "generation.engine own")
    from hybridflow.generation.engines.vllm import import_vllm  # it is imported only where it is chosen

    import_vllm()


def text_folder(config: Config) -> str | None:
    """The folder of a tokenizer that transformers opens; None where it is a sentencepiece file."""
    path = config.model.tokenizer or config.model.path
    return path if path is not None and Path(path, "tokenizer_config.json").is_file() else None


def model_shape(config: Config, path: str | None, tokenizer: Tokenizer | None) -> ModelConfig:
    """The shape of the model in folder `path`, or of model.spec; that one ends where the tokenizer's texts end."""
    if path is not None:
        return ModelConfig.from_hf_folder(path)
    assert config.model.spec is not None, "the config was checked"
    model = spec_decoder(config.model.spec, tokenizer.vocab_size if tokenizer else 0)
    return replace(model, eos_token_ids=tokenizer.stop_ids) if tokenizer else model


def response_ends(stops: Sequence[int | str], tokenizer: Tokenizer, model: ModelConfig) -> ResponseEnds:
    """The ends of the tokenizer and the model, and `stops`: ids, strings of one token, and others.

    Raises:
        ValueError: ids that are not in the model's vocabulary, all of them.
    """
    ids, strings, wrong = [*tokenizer.stop_ids, *model.eos_token_ids], [], []
    for stop in stops:
        tokens = [stop] if isinstance(stop, int) else tokenizer.encode(stop)
        if len(tokens) != 1:
            strings.append(stop)
        elif 0 <= tokens[0] < model.vocab_size:
            ids.append(tokens[0])
        else:
            wrong.append(f"generation.stop {stop!r} is no id of the vocabulary; ids are 0 to {model.vocab_size - 1}")
    if wrong:
        raise ValueError("; ".join(wrong))
    return ResponseEnds(tuple(dict.fromkeys(ids)), tuple(dict.fromkeys(strings)))


def _open_tokenizer(config: Config) -> Tokenizer:
    return open_tokenizer(config.model.tokenizer or config.model.path, chat_format(config))


def _actor_shape(config: Config, tokenizer: Tokenizer | None, head: Head) -> ModelConfig | None:
    """The actor's shape, its folder looked into; None without the tokenizer that a new model's shape needs."""
    path = config.model.path
    require_weights("model.path", path, head, FRESH_IN_TRAINING)
    return None if path is None and tokenizer is None else model_shape(config, path, tokenizer)


def _algorithm_functions(algorithm: AlgorithmConfig, gathering: Gathering
                         ) -> tuple[Estimator | None, PolicyLoss | None]:
    """Of an algorithm with nothing left open."""
    assert algorithm.advantage is not None and algorithm.policy_loss is not None
    return (gathering.read(find_estimator, algorithm.advantage),
            gathering.read(find_policy_loss, algorithm.policy_loss))


def _require_critic(key: str, path: str | None, size: int | None) -> None:
    """Of an actor with `size` ids, None where that is not known."""
    require_weights(key, path, Head.VALUE)
    if size is not None:
        require_vocabulary(key, path, size)


def _observation_form(tools: ToolsConfig, tokenizer: Tokenizer) -> ObservationForm:
    """
    Raises:
        ValueError: a role is named, and there are no turns for it to have.
    """
    if tools.role != ToolsConfig().role and tokenizer.turn_between(tools.role) is None:
        raise ValueError(f"tools.role = {tools.role}: has no effect with a tokenizer without a chat template; remove "
                         "it, or name a template in data.chat_template")
    return ObservationForm.of(tokenizer, tools.wrapper, tools.role, limit=tools.max_observation_tokens)


def _turn_loop(config: Config, tokenizer: Tokenizer | None) -> TurnLoop | None:
    """With its tools loaded; None without tools, or without the tokenizer that the run will miss."""
    tools = config.tools
    if tools.file is None:
        return None
    gathering = Gathering()
    toolbox = gathering.read(ToolBox, tools.file, tools.call, timeout_s=tools.timeout_s)
    form = None
    if tokenizer is not None:
        form = gathering.read(_observation_form, tools, tokenizer)
    gathering.finish()
    if tokenizer is None or toolbox is None or form is None:
        return None
    return TurnLoop(toolbox, form, tokenizer, tools.max_turns, ends_at_error=tools.on_error is OnToolError.END)
