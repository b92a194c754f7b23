"""Our records in vLLM's words and back: sampling parameters of a request, and the log-probs of what it answers.

Owns the mapping alone, as plain values; it imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridflow.generation.random import splitmix64, stream_keys
from hybridflow.generation.records import Begun, Completion, FinishReason, Prompt, SamplingParams

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.INTERRUPTED}


def request_words(prompt: Prompt, params: SamplingParams, seed: int) -> dict[str, Any]:
    """The arguments of `vllm.SamplingParams` for one prompt; with its `begun` response it is asked for the rest.

    Greedy requests have no restriction that could change the most probable token, which is what they have here.
    """
    begun = num_begun(prompt)
    most = prompt.longest(params)
    return {
        "max_tokens": most - begun,
        "min_tokens": max(0, params.min_new_tokens - begun),
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "stop_token_ids": list(params.stop_ids),
        "stop": list(params.stop_strings),
        "ignore_eos": True,  # our stop ids are all there are
        "detokenize": bool(params.stop_strings),
        "seed": request_seed(seed, prompt),
        "logprobs": 0,  # of the token that was drawn alone
    }


def request_seed(seed: int, prompt: Prompt) -> int:
    """What a request's own random generator starts from, 63 bits: a function of (seed, prompt id, sample), and of how
    much of the response there is, since a generator that starts anew must not repeat its draws.
    """
    key = stream_keys(seed, np.array([prompt.id]), np.array([prompt.sample]))
    begun = num_begun(prompt)
    return int((splitmix64(key ^ np.uint64(begun)) if begun else key)[0]) & (2**63 - 1)


def request_ids(prompt: Prompt) -> list[int]:
    """The tokens that a request starts with."""
    return [*prompt.ids, *(prompt.begun.response_ids if prompt.begun else ())]


def num_begun(prompt: Prompt) -> int:
    """Tokens of the response that there are already."""
    return 0 if prompt.begun is None else len(prompt.begun.response_ids)


def chosen_log_probs(ids: Sequence[int], entries: Sequence[Mapping[int, Any]]) -> list[float]:
    """The log-prob of each token from vLLM's maps, token id -> an entry with `logprob`."""
    return [entry[token].logprob for token, entry in zip(ids, entries, strict=True)]


def unfinished(prompt: Prompt) -> Completion:
    """The answer to a prompt with which nothing was done: what was begun."""
    begun = prompt.begun or Begun((), (), None, ())
    return Completion(prompt.id, prompt.sample, prompt.ids, begun.response_ids, begun.log_probs,
                      FinishReason.INTERRUPTED, begun.processed_log_probs, begun.versions)


def completion(prompt: Prompt, ids: Sequence[int], reason: str | None, log_probs: Sequence[float],
               processed: Sequence[float] | None, version: int) -> Completion:
    """An answer of vLLM, behind what was begun, in our words.

    Args:
        log_probs: raw ones of the new tokens `ids`.
        processed: of the distribution they were drawn from; None where that is the raw one.

    Raises:
        RuntimeError: vLLM ended the request for a reason that we have no word for, such as an error.
    """
    if reason not in REASONS:
        raise RuntimeError(f"vLLM ended prompt id {prompt.id}, sample {prompt.sample} with {reason!r}")
    begun = prompt.begun
    if begun is None:
        return Completion(prompt.id, prompt.sample, prompt.ids, tuple(ids), tuple(log_probs), REASONS[reason],
                          None if processed is None else tuple(processed), (version,) * len(ids))
    if processed is not None or begun.processed_log_probs is not None:
        processed = (*(begun.processed_log_probs or begun.log_probs), *(log_probs if processed is None else processed))
    return Completion(prompt.id, prompt.sample, prompt.ids, (*begun.response_ids, *ids),
                      (*begun.log_probs, *log_probs), REASONS[reason], processed,
                      (*begun.versions, *[version] * len(ids)))
