"""vLLM as an engine: our words for its requests and answers; where it is installed, weights, tokens and log-probs."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hybridflow.bench.generate_options import VLLM_PYTHON
from hybridflow.generation.engine import Generator
from hybridflow.generation.engines.interface import GenerationEngine
from hybridflow.generation.engines.vllm import VllmEngine, VllmHome, _taken
from hybridflow.generation.engines.vllm_words import (
    chosen_log_probs,
    completion,
    request_ids,
    request_seed,
    request_words,
    unfinished,
)
from hybridflow.generation.records import Begun, Completion, FinishReason, Prompt, SamplingParams
from hybridflow.generation.work_source import OwnShare

ROOT = Path(__file__).parent.parent.parent
HALF = Begun((7, 8), (-1.0, -2.0), None, (3, 3))


@dataclass(frozen=True)
class Entry:
    logprob: float


def test_every_parameter_has_its_word():
    params = SamplingParams(20, min_new_tokens=4, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1,
                            repetition_penalty=1.2, stop_ids=(2, 9), stop_strings=("\n\n",))
    words = request_words(Prompt(1, 0, (5, 6)), params, seed=3)
    assert words.pop("seed") == request_seed(3, Prompt(1, 0, (5, 6)))
    assert words == {"max_tokens": 20, "min_tokens": 4, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1,
                     "repetition_penalty": 1.2, "stop_token_ids": [2, 9], "stop": ["\n\n"], "ignore_eos": True,
                     "detokenize": True, "logprobs": 0}
    assert not request_words(Prompt(1, 0, (5,)), SamplingParams(20), 3)["detokenize"]


def test_a_begun_response_is_asked_for_the_rest():
    prompt = Prompt(1, 0, (5, 6), HALF)
    words = request_words(prompt, SamplingParams(20, min_new_tokens=3), 0)
    assert (words["max_tokens"], words["min_tokens"]) == (18, 1)
    assert request_ids(prompt) == [5, 6, 7, 8]
    assert request_words(Prompt(1, 0, (5, 6), HALF, max_new_tokens=7), SamplingParams(20), 0)["max_tokens"] == 5


def test_seeds_are_of_the_sample_alone_and_never_repeat():
    prompts = [Prompt(id, sample, (5,), begun) for id in range(20) for sample in range(20) for begun in (None, HALF)]
    seeds = {request_seed(seed, prompt) for prompt in prompts for seed in (0, 1, -1)}
    assert len(seeds) == 3 * len(prompts) and all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(4, Prompt(1, 2, (5,))) == request_seed(4, Prompt(1, 2, (6, 7)))


def test_answers_come_back_in_our_records():
    assert chosen_log_probs([4, 5], [{4: Entry(-0.5)}, {9: Entry(-0.1), 5: Entry(-2.0)}]) == [-0.5, -2.0]
    plain = completion(Prompt(1, 2, (5,)), [4, 5], "stop", [-0.5, -2.0], None, 3)
    assert plain == Completion(1, 2, (5,), (4, 5), (-0.5, -2.0), FinishReason.STOP, None, (3, 3))
    cut = completion(Prompt(1, 2, (5,), HALF), [4], "length", [-0.5], [-0.2], 4)
    assert cut == Completion(1, 2, (5,), (7, 8, 4), (-1.0, -2.0, -0.5), FinishReason.LENGTH, (-1.0, -2.0, -0.2),
                             (3, 3, 4))
    with pytest.raises(RuntimeError, match="prompt id 1, sample 2 with 'error'"):
        completion(Prompt(1, 2, (5,)), [], "error", [], None, 3)


def test_a_share_is_taken_whole_and_what_nothing_was_done_with_comes_back_as_it_came():
    prompts = [Prompt(i // 3, i % 3, (i // 3,) * (i + 1)) for i in range(9)]
    params = SamplingParams(8)
    shares = [OwnShare(prompts, params, 2, replica) for replica in range(2)]
    taken = [_taken(share) for share in shares]
    assert sorted(taken[0] + taken[1]) == list(range(9))
    assert taken == [sorted(taken[0]), sorted(taken[1])] == [sorted(share.taken) for share in shares]
    assert unfinished(Prompt(1, 2, (5,))) == Completion(1, 2, (5,), (), (), FinishReason.INTERRUPTED, None, ())
    assert unfinished(Prompt(1, 2, (5,), HALF)) == Completion(1, 2, (5,), (7, 8), (-1.0, -2.0),
                                                              FinishReason.INTERRUPTED, None, (3, 3))


@pytest.mark.parametrize("engine", [Generator, VllmEngine])
def test_engines_have_the_interface(engine: type):
    for name in ("wake", "sleep", "generate"):
        wanted, given = (list(inspect.signature(getattr(of, name)).parameters.values())
                         for of in (GenerationEngine, engine))
        assert given[: len(wanted)] == wanted
        assert all(more.default is not inspect.Parameter.empty for more in given[len(wanted):])


def test_the_home_of_vllm_wants_whole_tensors():
    home = VllmHome(None, {"a": (4, 3), "b": (5,)}, torch.bfloat16, ranks=(1, 0))
    storages = home.take({})
    assert home.shard_map.shards(1) == home.shard_map.shards(0) and home.shard_map.ranks == (1, 0)
    assert home.taken_bytes == 34 == sum(tensor.nbytes for tensor in storages.values())
    for shard in home.shard_map.shards(0):
        shard.view(storages).fill_(1)
    assert {name: (tensor.shape, float(tensor.float().sum())) for name, tensor in home._given_away()} == {
        "a": ((4, 3), 12.0), "b": ((5,), 5.0)}
    assert not home.storages


def test_vllm_computes_what_our_decoder_does_under_each_version():
    python = os.environ.get(VLLM_PYTHON)
    if not python:
        pytest.skip(f"{VLLM_PYTHON} does not name an interpreter that has vLLM")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run((python, "-m", "tests.generation.vllm_child"), env=environment, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert "vLLM holds None" in told["asleep"] and "version 5, but vLLM holds 4" in told["stale"]
    for version in (3, 4):
        of = told[str(version)]
        assert of["free"] == of["again"], "an answer depends on what is beside it"
        assert of["greedy"] == of["our greedy"]
        assert max(of["free differs"], of["cut differs"], of["processed differs"]) < 1e-4
        assert of["processed is none"] and of["versions"] == [version]
        assert [len(ids) for ids, _ in of["cut"]][2] == 3
        assert all((ids[-1] in (4, 5)) == (reason == "stop") for ids, reason in of["cut"])
        length, versions, differs, kept = of["resumed"]
        assert (length, versions) == (12, [2] * 4 + [version] * 8) and kept and differs < 1e-4
    assert told["3"]["free"] != told["4"]["free"]
