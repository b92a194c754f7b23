"""vLLM as a generation engine: its weights filled from boxes of canonical tensors, its answers in our records.

Owns the engine and the memory that weights pass through on their way in. vLLM is imported when one is made, and needs
to be installed only then. Its engine runs in this process, on one rank: tp 1, dp 1.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridflow.generation.engine import StaleWeightsError
from hybridflow.generation.engines.vllm_words import chosen_log_probs, completion, request_ids, request_words
from hybridflow.generation.records import Completion, Prompt, SamplingParams
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.weights import canonical_shapes
from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.shard_map import ShardMap

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class VllmHome:
    """A `WeightHome`: whole canonical tensors, which vLLM cuts, fuses and packs as it likes when they are all there."""

    def __init__(self, engine: VllmEngine, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self._engine, self._shapes, self._dtype = engine, shapes, dtype
        self.shard_map = ShardMap(dict(shapes), (0,), lambda rank: [Shard.of_rows(Box.whole(name, shape), name)
                                                                    for name, shape in shapes.items()])
        self.taken_bytes = sum(map(prod, shapes.values())) * dtype.itemsize
        self.storages: dict[str, Tensor] = {}

    def take(self, training: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.storages = {name: torch.empty(shape, dtype=self._dtype) for name, shape in self._shapes.items()}
        return self.storages

    def ready(self) -> None:
        self._engine.load(self._given_away())

    def free(self) -> None:
        self.storages = {}

    def _given_away(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor once, and its memory with it: what vLLM has taken over is not kept twice."""
        while self.storages:
            name = next(iter(self.storages))
            yield name, self.storages.pop(name)


class VllmEngine:
    """A `GenerationEngine`.

    Attributes:
        home: what a reshard fills.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, max_rows: int = 256, max_length: int | None = None,
                 max_cache_bytes: int = 4 << 30, tokenizer: str | None = None, **settings: Any) -> None:
        """Args:
            max_length: tokens of the longest sequence; None: what the model allows.
            tokenizer: a folder, for stop strings; None where there will be none.
            settings: further arguments of `vllm.LLM`.

        Raises:
            ImportError: vLLM is not installed.
        """
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read at import: tensors are handed to it by reference
        from vllm import LLM

        self._config, self._has_text = config, tokenizer is not None
        self.home = VllmHome(self, canonical_shapes(config, Head.LANGUAGE_MODEL), dtype)
        self.weight_version: int | None = None
        with tempfile.TemporaryDirectory() as folder:  # it wants a folder, of which it reads the config alone
            Path(folder, "config.json").write_text(json.dumps(config.to_hf_dict()))
            self._llm = LLM(folder, tokenizer=tokenizer, skip_tokenizer_init=tokenizer is None, load_format="dummy",
                            dtype=NAMES[dtype], max_model_len=max_length or config.max_position_embeddings,
                            max_num_seqs=max_rows, kv_cache_memory_bytes=max_cache_bytes,
                            logprobs_mode="processed_logprobs", disable_log_stats=True, **settings)
        self._can_sleep = self._llm.model_config.enable_sleep_mode

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take over all canonical tensors, by name; vLLM fuses query, key and value, and gate and up, as it loads."""
        if self._can_sleep:
            self._llm.wake_up(tags=["weights"])
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})

    def wake(self, version: int = 0) -> None:
        if self._can_sleep:
            self._llm.wake_up(tags=["kv_cache"])
        self._llm.reset_prefix_cache()
        self.weight_version = version

    def sleep(self) -> None:
        """Nothing is generated from now on. Memory is given back where vLLM can do so, which on a CPU it cannot."""
        self.weight_version = None
        if self._can_sleep:
            self._llm.sleep(level=2)

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int,
                 expected_version: int | None = None) -> list[Completion]:
        """As `GenerationEngine.generate`. Draws are vLLM's, from a random generator for each sample.

        Where min_p and top_p restrict together, vLLM applies min_p first.
        """
        version = self.weight_version
        if version is None or expected_version not in (None, version):
            raise StaleWeightsError(f"generation expects weight version {expected_version}, but vLLM holds {version}: "
                                    "load the weights of this version before generating")
        if params.stop_strings and not self._has_text:
            raise ValueError(f"generation: stop strings {list(params.stop_strings)} need a tokenizer; make the engine "
                             "with one")
        answers = self._ask([request_ids(prompt) for prompt in prompts],
                            [request_words(prompt, params, seed) for prompt in prompts])
        outputs = [answer.outputs[0] for answer in answers]
        drawn = [chosen_log_probs(output.token_ids, output.logprobs) for output in outputs]
        raw = drawn if params.draws_raw else self._raw(prompts, [output.token_ids for output in outputs],
                                                       params.temperature or 1.0)
        return [completion(prompt, output.token_ids, output.finish_reason, log_probs,
                           None if params.draws_raw else processed, version)
                for prompt, output, log_probs, processed in zip(prompts, outputs, raw, drawn, strict=True)]

    def _raw(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]],
             temperature: float) -> list[list[float]]:
        """Log-probs before anything but the temperature. vLLM gives those of one distribution at a time; these are of
        one more forward, as of a prompt.
        """
        started = [request_ids(prompt) for prompt in prompts]
        self._llm.apply_model(partial(_scale_logits, 1 / temperature))  # its own are before the temperature
        try:
            answers = self._ask([[*ids, *response] for ids, response in zip(started, responses, strict=True)],
                                [{"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "ignore_eos": True,
                                  "detokenize": False}] * len(prompts))
        finally:
            self._llm.apply_model(partial(_scale_logits, 1.0))
        return [chosen_log_probs(response, answer.prompt_logprobs[len(ids):])
                for ids, response, answer in zip(started, responses, answers, strict=True)]

    def _ask(self, ids: Sequence[list[int]], words: Sequence[dict[str, Any]]) -> list[Any]:
        from vllm import SamplingParams as VllmParams

        if not ids:
            return []
        return self._llm.generate([{"prompt_token_ids": row} for row in ids], [VllmParams(**one) for one in words],
                                  use_tqdm=False)


def _scale_logits(scale: float, model: nn.Module) -> None:
    model.logits_processor.scale = scale
