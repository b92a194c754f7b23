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
from hybridflow.config.reward_rules import is_decoder_folder
from hybridflow.config.reward_schema import reward_models
from hybridflow.config.schema import Config
from hybridflow.config.shapes import spec_decoder
from hybridflow.config.words import EngineName, OnToolError
from hybridflow.data.chat import ChatFormat
from hybridflow.data.tokenizer import Tokenizer, open_tokenizer
from hybridflow.generation.blocks import BLOCK_TOKENS
from hybridflow.kernels.native_build import Unavailable, native_library
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.hf_import import FRESH, FRESH_IN_TRAINING, require_tensors
from hybridflow.models.layout import split_heads
from hybridflow.models.weights import canonical_shapes
from hybridflow.parallel.arithmetic import ceil_div
from hybridflow.parallel.world import default_device
from hybridflow.response_text import ResponseEnds
from hybridflow.rewards.function import RewardFunction
from hybridflow.tools.detect import call_ends
from hybridflow.tools.observation import ObservationForm
from hybridflow.tools.toolbox import ToolBox
from hybridflow.trainer.engine_options import DTYPES, MIB
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
            ValueError: a file, a model's tensors, an id to stop at, a function or a reward is not as it must be, or
                this machine cannot compute as generation.batch_invariant asks, or has no generation.engine.
        """
        if config.generation.batch_invariant:
            require_invariance(default_device(0))
        opened = (open_tokenizer(config.model.tokenizer or config.model.path, chat_format(config))
                  if tokenizer is None else tokenizer)
        model = model_shape(config, config.model.path, opened)
        require_weights("model.path", config.model.path, head, FRESH_IN_TRAINING)
        if scores:
            require_cache(config, model, config.data.max_prompt_length)
            require_weights("model.critic.path", config.model.critic.path, Head.VALUE)
            require_weights("model.cost_model.path", config.model.cost_model.path, Head.SCORE)
            require_weights("model.cost_critic.path", config.model.cost_critic.path, Head.VALUE)
            for role in ("critic", "cost_critic"):
                require_vocabulary(f"model.{role}.path", vars(config.model)[role].path, model.vocab_size)
            for key, path in reward_models(config.reward, config.model.reward_model).items():
                if is_decoder_folder(path):
                    require_weights(key, path, Head.SCORE)
        calls = call_ends(config.tools.call) if scores and config.tools.file is not None else ()
        ends = response_ends([*config.generation.stop, *calls], opened, model)
        if config.generation.engine is EngineName.VLLM:
            require_vllm(config, ends)
        if not scores:
            return cls(config, opened, model, ends, ())
        functions = _algorithm_functions(with_recipe(config).algorithm)
        return cls(config, opened, model, ends, read_rewards(config, opened, model.vocab_size), *functions,
                   read_costs(config, opened, model.vocab_size), _turn_loop(config, opened))

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


def require_weights(key: str, path: str | None, head: Head, fresh: Sequence[str] = FRESH) -> None:
    """The folder that `key` names, if any, has the tensors of its model under `head`, but perhaps the `fresh` heads.

    Raises:
        ValueError: as `load_hf`; the key is named.
    """
    if path is None:
        return
    try:
        require_tensors(Path(path), canonical_shapes(ModelConfig.from_hf_folder(path), head), fresh)
    except ValueError as error:
        wanted = "; it must be a *ForSequenceClassification with one label" if head is Head.SCORE else ""
        raise ValueError(f"{key} = {error}{wanted}") from None


def require_vocabulary(key: str, path: str | None, size: int) -> None:
    """The model that `key` names, if any, reads all `size` ids of the actor.

    Raises:
        ValueError: it does not.
    """
    if path is not None and (own := ModelConfig.from_hf_folder(path).vocab_size) < size:
        raise ValueError(f"{key} = {path}: its vocabulary of {own} is smaller than the actor's of {size}, whose tokens "
                         "it has to read; choose a model with the actor's tokenizer")


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


def _algorithm_functions(algorithm: AlgorithmConfig) -> tuple[Estimator, PolicyLoss]:
    """Of an algorithm with nothing left open."""
    assert algorithm.advantage is not None and algorithm.policy_loss is not None
    return find_estimator(algorithm.advantage), find_policy_loss(algorithm.policy_loss)


def _turn_loop(config: Config, tokenizer: Tokenizer) -> TurnLoop | None:
    """With its tools loaded; None without tools."""
    tools = config.tools
    if tools.file is None:
        return None
    form = ObservationForm.of(tokenizer, tools.wrapper, tools.role, limit=tools.max_observation_tokens)
    return TurnLoop(ToolBox(tools.file, tools.call, timeout_s=tools.timeout_s), form, tokenizer, tools.max_turns,
                    ends_at_error=tools.on_error is OnToolError.END)
