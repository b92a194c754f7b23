"""vLLM as a contestant of `bench generate`: its engine in this process, compiled, as large a cache as the cells need.

Owns its settings. It is imported where vLLM is installed, and nowhere else.
"""

from __future__ import annotations

import os

MOST_ROWS = 64
MOST_TOKENS = 256  # of one sequence


class Vllm:
    """`LLM.generate` on token ids. It returns the log-prob of each token drawn, as we do."""

    def __init__(self, folder: str, precision: str, threads: int) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # read when vLLM is imported
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        import torch
        from vllm import LLM

        torch.set_num_threads(threads)
        self._engine = LLM(folder, dtype="auto", skip_tokenizer_init=True, max_model_len=MOST_TOKENS,
                           max_num_seqs=MOST_ROWS, disable_log_stats=True)

    def sample(self, prompts: list[list[int]], new_tokens: int, seed: int) -> int:
        return sum(map(len, self._generate(prompts, new_tokens, 1.0)))

    def greedy(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        return self._generate(prompts, new_tokens, 0.0)

    def _generate(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=temperature, max_tokens=new_tokens, ignore_eos=True, logprobs=0,
                                detokenize=False)
        outputs = self._engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
