"""transformers as contestants of `bench generate`: `generate` with its growing cache, and its continuous batching.

Owns nothing of ours: what it does here is what a user of transformers would write.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig
from transformers.utils import logging

PAGE_TOKENS = 32
NO_TOKEN = -1


class Generate:
    """`model.generate` with a dynamic cache and `scaled_dot_product_attention`."""

    def __init__(self, folder: str, precision: str, threads: int) -> None:
        torch.set_num_threads(threads)
        logging.set_verbosity_error()
        self._model = _load(folder)

    @torch.inference_mode()
    def sample(self, prompts: list[list[int]], new_tokens: int, seed: int) -> int:
        torch.manual_seed(seed)
        return self._generate(prompts, new_tokens, do_sample=True, top_k=0).numel()

    @torch.inference_mode()
    def greedy(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        return self._generate(prompts, new_tokens, do_sample=False).tolist()

    @torch.inference_mode()
    def scored(self, prompts: list[list[int]],
               responses: list[list[int]]) -> tuple[list[list[float]], list[list[float]]]:
        """Of each response token: its log-prob, and how far that is below the largest one."""
        ids = torch.tensor([[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)])
        start = len(prompts[0])
        log_probs = self._model(ids).logits[:, start - 1 : -1].float().log_softmax(-1)
        chosen = log_probs.gather(-1, ids[:, start:, None]).squeeze(-1)
        return chosen.tolist(), (log_probs.amax(-1) - chosen).tolist()

    def _generate(self, prompts: list[list[int]], new_tokens: int, **how: object) -> Tensor:
        ids = torch.tensor(prompts)
        out = self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens,
                                   min_new_tokens=None, eos_token_id=None, pad_token_id=0, **how)
        return out[:, ids.shape[1]:]


class Continuous:
    """`model.generate_batch`, with as large a cache as the batch needs: left alone it would take the host's memory."""

    def __init__(self, folder: str, precision: str, threads: int) -> None:
        torch.set_num_threads(threads)
        logging.set_verbosity_error()
        self._model = _load(folder)

    def sample(self, prompts: list[list[int]], new_tokens: int, seed: int) -> int:
        return sum(map(len, self._generate(prompts, new_tokens, seed, do_sample=True, top_k=0)))

    def greedy(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        return self._generate(prompts, new_tokens, 0, do_sample=False)

    def _generate(self, prompts: list[list[int]], new_tokens: int, seed: int, **how: object) -> list[list[int]]:
        pages = -(-(len(prompts[0]) + new_tokens) // PAGE_TOKENS) + 1
        settings = ContinuousBatchingConfig(page_size=PAGE_TOKENS, num_blocks=pages * len(prompts) + 1,
                                            max_batch_tokens=max(256, len(prompts) * len(prompts[0])), seed=seed)
        config = GenerationConfig(max_new_tokens=new_tokens, eos_token_id=NO_TOKEN, pad_token_id=0, **how)
        outputs = self._model.generate_batch(prompts, generation_config=config, continuous_batching_config=settings)
        return [output.generated_tokens for output in outputs.values()]


def _load(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="sdpa").eval()
