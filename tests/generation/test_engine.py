import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from hybridflow.generation import engine
from hybridflow.generation.blocks import BLOCK_TOKENS
from hybridflow.generation.engine import StaleWeightsError
from hybridflow.generation.random import stream_keys, uniforms
from hybridflow.generation.records import Begun, Completion, FinishReason, Prompt, SamplingParams
from hybridflow.generation.sampling import Sampler
from hybridflow.models.attention import PackedCausal
from tests.generation.small_model import (
    CONFIG,
    CONFIGS,
    assert_same,
    full_log_probs,
    give_weights,
    make_generator,
    make_prompts,
)

LENGTHS = [1, 9, 2, 40, 41, 9, 17, 70]
PARAMS = SamplingParams(max_new_tokens=24, temperature=0.8, stop_ids=(2, 9))


# Weights are 15 times as large as a real start: fp32 training alone is up to 2e-5 away from fp64 here.
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 3e-5)])
@pytest.mark.parametrize("family", CONFIGS)
def test_cached_log_probs_equal_the_full_forward(family, dtype, tolerance):
    generator = make_generator(config=CONFIGS[family], dtype=dtype, max_batch_rows=9)
    for completion in generator.generate(make_prompts(LENGTHS, samples=3), PARAMS, seed=1):
        want = full_log_probs(generator, completion, PARAMS.temperature)
        assert completion.log_probs == pytest.approx(want, rel=0, abs=tolerance)


def test_log_probs_equal_the_full_forward_past_the_first_growth_of_the_cache():
    generator = make_generator()
    params = SamplingParams(max_new_tokens=400)
    for completion in generator.generate(make_prompts([30, 3]), params, seed=1):
        assert len(completion.response_ids) == 400
        assert completion.log_probs == pytest.approx(full_log_probs(generator, completion), rel=0, abs=1e-9)


def test_unwritten_memory_is_never_read(poisoned_memory):
    generator = make_generator(max_batch_rows=9)
    for completion in generator.generate(make_prompts(LENGTHS, samples=3), PARAMS, seed=4):
        assert completion.log_probs == pytest.approx(full_log_probs(generator, completion, 0.8), rel=0, abs=1e-9)


def test_token_i_is_draw_i_of_its_own_stream():
    """A sampler without a cache or a batch: the whole sequence again for every token."""
    generator, sampler = make_generator(), Sampler(replace(PARAMS, top_k=20), CONFIG.vocab_size)
    for prompt in make_prompts([1, 9], samples=2):
        completion, = generator.generate([prompt], replace(PARAMS, top_k=20), seed=11)
        key = stream_keys(11, np.array([prompt.id]), np.array([prompt.sample]))
        ids = list(prompt.ids)
        for i, token in enumerate(completion.response_ids):
            with torch.no_grad():
                hidden = generator.trained.forward_hidden(torch.tensor(ids), torch.arange(len(ids)),
                                                          PackedCausal((len(ids),), torch.device("cpu")))
                logits = generator.trained.logits(hidden[-1:])
            draw = torch.from_numpy(uniforms(key, np.array([i])))
            assert sampler.choose(logits, draw, torch.tensor([i])).tokens.item() == token
            ids.append(token)


@pytest.mark.parametrize("limits", [dict(max_batch_rows=1), dict(max_batch_rows=3), dict(max_batch_rows=10),
                                    dict(max_batch_rows=64, max_step_tokens=30)])
def test_tokens_do_not_depend_on_the_batch_or_the_order(limits):
    prompts = make_prompts(LENGTHS, samples=3)
    want = make_generator().generate(prompts, PARAMS, seed=5)
    order = random.Random(0).sample(range(len(prompts)), len(prompts))
    got = make_generator(**limits).generate([prompts[i] for i in order], PARAMS, seed=5)
    assert_same(got, [want[i] for i in order])


def test_samples_of_a_prompt_equal_separate_requests():
    generator = make_generator()
    prompts = make_prompts([12, 5], samples=4)
    together = generator.generate(prompts, PARAMS, seed=6)
    apart = [generator.generate([prompt], PARAMS, seed=6)[0] for prompt in prompts]
    assert_same(together, apart)
    assert len({completion.response_ids for completion in together[:4]}) == 4  # and they differ from one another


def test_equal_prompts_with_different_ids_share_a_prefill_and_not_their_draws():
    first, second = make_generator().generate([Prompt(1, 0, (3, 4)), Prompt(2, 0, (3, 4))],
                                              SamplingParams(max_new_tokens=20), seed=0)
    assert first.response_ids != second.response_ids


def test_the_seed_decides():
    generator = make_generator()
    runs = [generator.generate(make_prompts([5]), SamplingParams(max_new_tokens=20), seed) for seed in (0, 1, 0)]
    assert runs[0] == runs[2] != runs[1]


class CountedRunner:
    """Passes everything on and notes how many tokens each step had, and how many logits were asked for."""

    drawer = None  # so that logits are asked for

    def __init__(self, inner):
        self.inner, self.tokens, self.logit_rows = inner, [], []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def run(self, batch, x):
        self.tokens.append(len(batch.ids))
        return self.inner.run(batch, x)

    def logits(self, hidden):
        self.logit_rows.append(len(hidden))
        return self.inner.logits(hidden)


@pytest.mark.parametrize("max_batch_rows", [4, 7, 100])
def test_no_work_is_done_for_finished_rows_nor_twice_for_a_prompt(max_batch_rows):
    """Every token is fed once, the last of a response never, and a prompt once for all its samples that find a row
    together: one that is late computes what is behind the last full block."""
    generator = make_generator(max_batch_rows=max_batch_rows)
    generator.runner = runner = CountedRunner(generator.runner)
    prompts = make_prompts(LENGTHS, samples=2)
    completions = generator.generate(prompts, PARAMS, seed=7)
    responses = sum(len(completion.response_ids) - 1 for completion in completions)
    assert len({len(completion.response_ids) for completion in completions}) > 4
    late = sum(runner.tokens) - sum(LENGTHS) - responses
    assert 0 <= late <= (0 if max_batch_rows == 100 else len(LENGTHS) * BLOCK_TOKENS)
    assert sum(runner.logit_rows) == len(prompts) + responses


def test_case_15_neighbours_of_any_length_change_nothing():
    """Rows whose caches start at column 0, 1 and 7: equal log-probs for the same prompt."""
    generator = make_generator()
    params = SamplingParams(max_new_tokens=10)
    alone = generator.generate([Prompt(50, 0, (5, 6, 7))], params, seed=0)
    for pads in (0, 1, 7):
        longer = Prompt(1, 0, tuple(range(3 + pads)))
        assert_same(generator.generate([longer, Prompt(50, 0, (5, 6, 7))], params, seed=0)[1:], alone)


def with_forced_tokens(tokens, config=CONFIG):
    """A generator whose greedy response is `tokens`, whatever the prompt of length 1 is."""
    generator = make_generator(config=config)

    class Forced(CountedRunner):
        def logits(self, hidden):
            logits = super().logits(hidden)
            logits[:, tokens[len(self.tokens) - 1]] = 1e3
            return logits

    generator.runner = Forced(generator.runner)
    return generator


@pytest.mark.parametrize("forced, stops, response, reason", [
    ([5, 2, 2, 2], (2,), (5, 2), FinishReason.STOP),
    ([5, 6, 7, 8], (2,), (5, 6, 7, 8), FinishReason.LENGTH),
    ([5, 9, 2, 2], (2, 9), (5, 9), FinishReason.STOP),
    ([5, 2, 9, 2], (2, 9), (5, 2), FinishReason.STOP),
    ([5, 6, 7, 2], (2, 9), (5, 6, 7, 2), FinishReason.STOP),
    ([2, 6, 7, 2], (2, 9), (2,), FinishReason.STOP),
    ([2, 2, 2, 2], (), (2, 2, 2, 2), FinishReason.LENGTH),
])
def test_case_18_the_first_stop_token_ends_the_response_and_is_in_it(forced, stops, response, reason):
    params = SamplingParams(max_new_tokens=4, temperature=0, stop_ids=stops)
    completion, = with_forced_tokens(forced).generate([Prompt(0, 0, (1,))], params, seed=0)
    assert completion.response_ids == response
    assert completion.finish_reason is reason
    assert len(completion.log_probs) == len(response)


def test_case_19_new_weights_and_the_same_prompt_equal_a_fresh_engine():
    generator, prompts = make_generator(seed=0), make_prompts(LENGTHS)
    before = generator.generate(prompts, PARAMS, seed=1)
    give_weights(make_generator(seed=1).trained, generator.stage)
    generator.wake(1)
    after = generator.generate(prompts, PARAMS, seed=1)
    fresh = make_generator(seed=1).generate(prompts, PARAMS, seed=1)
    assert_same([replace(c, versions=()) for c in after], [replace(c, versions=()) for c in fresh], tolerance=0.0)
    assert all(set(c.versions) == {1} and len(c.versions) == len(c.response_ids) for c in after)
    assert [c.response_ids for c in after] != [c.response_ids for c in before]


def test_stale_weights_are_an_error():
    generator, prompts = make_generator(), make_prompts([3])
    generator.sleep()
    for version in (0, None):
        with pytest.raises(StaleWeightsError, match=f"expects weight version {version}, but the stage holds None"):
            generator.generate(prompts, PARAMS, seed=1, expected_version=version)
    give_weights(generator.trained, generator.stage)
    generator.wake(4)
    generator.generate(prompts, PARAMS, seed=1, expected_version=4)
    with pytest.raises(StaleWeightsError, match="expects weight version 5, but the stage holds 4"):
        generator.generate(prompts, PARAMS, seed=1, expected_version=5)


def test_greedy_takes_the_most_probable_token_and_its_log_prob_under_one():
    generator = make_generator()
    params = SamplingParams(max_new_tokens=8, temperature=0)
    one, two = generator.generate(make_prompts([6], samples=2), params, seed=3)
    assert one.response_ids == two.response_ids
    assert one.log_probs == pytest.approx(full_log_probs(generator, one), rel=0, abs=1e-9)
    for i in range(len(one.response_ids)):
        rivals = [replace(one, response_ids=(*one.response_ids[:i], other)) for other in range(0, 37, 6)]
        assert all(full_log_probs(generator, rival)[i] <= one.log_probs[i] + 1e-9 for rival in rivals)


def test_log_probs_are_raw_under_top_k_and_top_p():
    generator = make_generator()
    params = replace(PARAMS, top_k=5, top_p=0.8)
    for completion in generator.generate(make_prompts(LENGTHS), params, seed=2):
        want = full_log_probs(generator, completion, params.temperature)
        assert completion.log_probs == pytest.approx(want, rel=0, abs=1e-9)


def test_one_token_responses_and_no_prompts():
    generator = make_generator()
    assert generator.generate([], PARAMS, seed=0) == []
    completion, = generator.generate([Prompt(3, 2, (1, 4))], SamplingParams(max_new_tokens=1), seed=0)
    assert isinstance(completion, Completion) and len(completion.response_ids) == 1
    assert (completion.prompt_id, completion.sample, completion.prompt_ids) == (3, 2, (1, 4))


def test_all_faults_of_a_request_are_named_at_once():
    long = Prompt(8, 0, (1,) * 500)
    foreign = [Prompt(1, 0, (3, 37)), Prompt(2, 0, (-1,)), Prompt(2**63, 0, (1,))]
    with pytest.raises(ValueError) as error:
        make_generator().generate([Prompt(7, 0, ()), long, *foreign], replace(PARAMS, stop_ids=(37,)), seed=0)
    for part in ("stop id 37 is not in the vocabulary of 37", "prompt id 7 is empty",
                 "prompt id 1 has token 37, which is not in the vocabulary of 37", "prompt id 2 has token -1",
                 "prompt id 9223372036854775808, sample 0: both must be numbers of 64 bits",
                 "prompt id 8 has 500 tokens; with max_new_tokens 24 it may have 488 (max_position_embeddings 512)"):
        assert part in str(error.value)


def test_weights_that_are_not_numbers_are_named():
    generator = make_generator()
    with torch.no_grad():
        next(generator.stage.parameters()).fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="prompt id 100, sample 0: the log-prob of response token 0 is NaN"):
        generator.generate(make_prompts([4]), PARAMS, seed=0)


def test_a_call_that_failed_leaves_nothing_behind():
    generator, prompts = make_generator(), make_prompts(LENGTHS, samples=2)
    want = make_generator().generate(prompts, PARAMS, seed=5)
    calls = iter(range(100))

    def fails() -> bool:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        generator.generate(prompts, PARAMS, seed=5, interrupt=fails)
    assert generator.scheduler.used_blocks == 0 and generator.scheduler.is_idle
    assert_same(generator.generate(prompts, PARAMS, seed=5), want)
    assert generator.scheduler.stats.prefix_hit_tokens == 0


def test_limits_are_checked():
    with pytest.raises(ValueError, match="max_batch_rows is 0; it must be at least 1; max_step_tokens is -1"):
        make_generator(max_batch_rows=0, max_step_tokens=-1)


BLOCK_BYTES = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 8 * BLOCK_TOKENS


@pytest.mark.parametrize("blocks", [9, 12, 20])
def test_running_out_of_blocks_preempts_and_changes_no_token(blocks):
    """A row of 70 + 60 tokens takes 9 blocks, all of them together over 80."""
    prompts, params = make_prompts(LENGTHS, samples=2), SamplingParams(max_new_tokens=60)
    want = make_generator().generate(prompts, params, seed=5)
    generator = make_generator(max_cache_bytes=blocks * BLOCK_BYTES)
    assert_same(generator.generate(prompts, params, seed=5), want)
    assert generator.scheduler.stats.peak_blocks <= blocks and generator.scheduler.stats.preempted > 0
    assert generator.scheduler.used_blocks == 0


def test_a_cache_too_small_for_a_prompt_is_refused():
    with pytest.raises(ValueError, match="generation.kv_cache_mb: the cache has 5 blocks of 16 tokens, but request"):
        make_generator(max_cache_bytes=5 * BLOCK_BYTES).generate(make_prompts(LENGTHS), PARAMS, seed=0)


def test_samples_of_a_prompt_use_one_copy_of_its_blocks():
    config = replace(CONFIG, max_position_embeddings=1024)
    generator = make_generator(config=config)
    completions = generator.generate(make_prompts([512], samples=8), SamplingParams(max_new_tokens=17), seed=0)
    assert len(completions) == 8
    assert generator.scheduler.stats.peak_blocks == 512 // BLOCK_TOKENS + 8  # a block of its own for each response
    assert generator.scheduler.stats.prefill_tokens == 512


def test_a_common_prefix_is_computed_once_until_the_weights_change():
    generator = make_generator()
    system = tuple(range(32))
    prompts = [Prompt(i, 0, (*system, i, i + 1)) for i in range(4)]
    want = [make_generator().generate([prompt], PARAMS, seed=3)[0] for prompt in prompts]
    assert_same([generator.generate([prompt], PARAMS, seed=3)[0] for prompt in prompts], want)
    stats = generator.scheduler.stats
    assert stats.prefix_hit_tokens == 3 * 32 and stats.prefill_tokens == 4 * 34 - 3 * 32
    give_weights(generator.trained, generator.stage)
    generator.wake(1)
    generator.generate(prompts[:1], PARAMS, seed=3)
    assert generator.scheduler.stats.prefix_hit_tokens == 3 * 32


def test_an_interrupted_rollout_goes_on_where_it_was():
    prompts = make_prompts(LENGTHS, samples=2)
    want = make_generator().generate(prompts, PARAMS, seed=5)
    generator, calls = make_generator(max_batch_rows=6), iter(range(1000))
    rows, rounds = prompts, 0
    done: dict[tuple[int, int], Completion] = {}
    while rows:
        rounds += 1
        give_weights(generator.trained, generator.stage)
        generator.wake(rounds)
        for row, completion in zip(rows, generator.generate(rows, PARAMS, 5, interrupt=lambda: next(calls) % 5 == 4)):
            done[row.id, row.sample] = completion
        rows = [replace(row, begun=Begun.of(done[row.id, row.sample])) for row in rows
                if done[row.id, row.sample].finish_reason is FinishReason.INTERRUPTED]
        assert generator.scheduler.used_blocks == 0
    got = [done[prompt.id, prompt.sample] for prompt in prompts]
    assert_same([replace(c, versions=()) for c in got], [replace(c, versions=()) for c in want])
    assert rounds > 3
    assert all(list(c.versions) == sorted(c.versions) and len(c.versions) == len(c.response_ids) for c in got)
    assert any(len(set(c.versions)) > 1 for c in got)


def test_a_lagging_host_changes_no_token(monkeypatch):
    """On a device the host learns of a stop token only after the next step has begun."""
    prompts = make_prompts(LENGTHS, samples=3)
    want = make_generator().generate(prompts, PARAMS, seed=5)
    monkeypatch.setattr(engine, "Exchange", lagging(engine.Exchange))
    assert_same(make_generator(max_batch_rows=7).generate(prompts, PARAMS, seed=5), want)


def lagging(exchange):
    def made(*args):
        new = exchange(*args)
        new.lag = 1
        return new
    return made


def test_two_thousand_requests_leak_nothing():
    """Prompts and limits of all lengths, siblings, common prefixes, on a cache that is too small for all at once."""
    draw = random.Random(0)
    system = tuple(draw.randrange(37) for _ in range(40))
    generator = make_generator(dtype=torch.float32, max_batch_rows=32, max_step_tokens=256,
                               max_cache_bytes=30 * BLOCK_BYTES // 2)
    left = 2000
    while left:
        prompts = []
        for id in range(min(left, 500) // 2):
            own = tuple(draw.randrange(37) for _ in range(draw.choice([1, 3, 16, 30])))
            ids = (*system[: draw.choice([0, 16, 40])], *own)
            prompts += [Prompt(left + id, sample, ids, max_new_tokens=draw.choice([1, 4, 36])) for sample in (0, 1)]
        completions = generator.generate(prompts, SamplingParams(max_new_tokens=36), seed=left)
        assert [(c.prompt_id, c.sample) for c in completions] == [(p.id, p.sample) for p in prompts]
        assert all(c.finish_reason is not FinishReason.INTERRUPTED for c in completions)
        assert all(1 <= len(c.response_ids) <= p.max_new_tokens for c, p in zip(completions, prompts))
        scheduler = generator.scheduler
        assert scheduler.used_blocks == 0 and scheduler.free_rows == 32 and scheduler.is_idle
        left -= len(prompts)
    assert generator.scheduler.stats.preempted > 0 and generator.scheduler.stats.prefix_hit_tokens > 0
