"""Generation over several ranks equals one process, token for token, in every layout."""

import time
from dataclasses import replace

import pytest
import torch

from hybridflow.generation.records import Begun, FinishReason, SamplingParams
from hybridflow.generation.work_source import OwnShare, SharedQueue
from hybridflow.kernels.native_build import Unavailable, native_library
from hybridflow.parallel.mesh import Layout
from tests.generation.small_model import CONFIG, CONFIGS, assert_same, full_log_probs, make_generator, make_prompts
from tests.ranks import run_ranks

AVAILABLE = native_library()
PARAMS = SamplingParams(max_new_tokens=12, temperature=0.9, top_p=0.95, stop_ids=(2, 9))
PROMPTS = make_prompts([1, 9, 2, 40, 17], samples=2)
DEEP = {name: replace(config, num_layers=5) for name, config in CONFIGS.items()}  # on no number of stages even
LAYOUTS = [Layout(tp=2), Layout(pp=2), Layout(dp=2), Layout(tp=4), Layout(pp=4), Layout(tp=2, pp=2),
           Layout(tp=2, dp=2), Layout(pp=2, dp=2)]
# Rows and blocks so few that rows wait, prompts come in chunks, and running ones have to give their blocks back.
TIGHT = dict(max_batch_rows=6, max_step_tokens=24)


def tight_cache(blocks: int, layout: Layout) -> dict[str, int]:
    """Limits under which the smallest cache of a replica has so many blocks (of 16 tokens, in fp64)."""
    layers = -(-DEEP["llama"].num_layers // layout.pp)
    kv_heads = max(1, CONFIG.num_kv_heads // layout.tp)
    return TIGHT | {"max_cache_bytes": blocks * 2 * layers * 16 * kv_heads * CONFIG.head_dim * 8}


def replica_of(rank: int, layout: Layout) -> int:
    return rank // layout.tp % layout.dp


def in_every_family(world, layout):
    """Completions of this replica's share, of the first family twice: then with what is left in the cache."""
    found = {}
    for family, config in DEEP.items():
        generator = make_generator(world, layout, config=config, **TIGHT)
        mine = PROMPTS[replica_of(world.rank, layout)::layout.dp]
        found[family] = generator.generate(mine, PARAMS, seed=3)
        if len(found) == 1:
            assert_same(generator.generate(mine, PARAMS, seed=3), found[family])
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tokens_do_not_depend_on_the_layout(layout):
    results = run_ranks(layout.size, in_every_family, layout)
    for family, config in DEEP.items():
        want = make_generator(config=config).generate(PROMPTS, PARAMS, seed=3)
        assert any(c.finish_reason is FinishReason.STOP for c in want) and any(len(c.response_ids) == 12 for c in want)
        first: dict[int, list] = {}
        for rank, result in enumerate(results):
            replica = replica_of(rank, layout)
            assert_same(result[family], want[replica::layout.dp])
            assert result[family] == first.setdefault(replica, result[family])  # bit for bit within a replica


def bits(world, layout, dtype):
    mine = PROMPTS[replica_of(world.rank, layout)::layout.dp]
    return make_generator(world, layout, config=DEEP["llama"], dtype=dtype, batch_invariant=True, **TIGHT).generate(
        mine, PARAMS, seed=3)


@pytest.mark.skipif(isinstance(AVAILABLE, Unavailable), reason=str(AVAILABLE))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bits_do_not_depend_on_the_layout_in_batch_invariant_mode(layout):
    for dtype in (torch.float64, torch.bfloat16):
        one = make_generator(config=DEEP["llama"], dtype=dtype, batch_invariant=True)
        want = one.generate(PROMPTS, PARAMS, seed=3)
        for rank, completions in enumerate(run_ranks(layout.size, bits, layout, dtype)):
            assert completions == want[replica_of(rank, layout)::layout.dp]


def gap(world, layout, dtype):
    """How far log-probs are from the full forward in the same layout."""
    generator = make_generator(world, layout, dtype=dtype)
    completions = generator.generate(PROMPTS[replica_of(world.rank, layout)::layout.dp], PARAMS, seed=3)
    return max(abs(a - b) for completion in completions for a, b in
               zip(completion.log_probs, full_log_probs(generator, completion, PARAMS.temperature), strict=True))


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=4), Layout(tp=2, dp=2)], ids=str)
def test_log_probs_are_those_of_the_full_forward(layout):
    assert max(run_ranks(layout.size, gap, layout, torch.float64)) < 1e-9


def test_fp32_log_probs_over_tensor_ranks():
    assert max(run_ranks(2, gap, Layout(tp=2), torch.float32)) < 3e-5


def few_rows(world, layout):
    generator = make_generator(world, layout, config=DEEP["llama"])
    return [generator.generate(PROMPTS[:rows], PARAMS, seed=3) for rows in range(4)]


@pytest.mark.parametrize("layout", [Layout(pp=4), Layout(tp=2, pp=2)], ids=str)
def test_fewer_rows_than_groups(layout):
    want = make_generator(config=DEEP["llama"]).generate(PROMPTS, PARAMS, seed=3)
    for result in run_ranks(4, few_rows, layout):
        for rows, completions in enumerate(result):
            assert_same(completions, want[:rows])


LONG = SamplingParams(max_new_tokens=20, temperature=0.9)


def out_of_blocks(world, layout):
    generator = make_generator(world, layout, config=DEEP["llama"], **tight_cache(5, layout))
    completions = generator.generate(PROMPTS, LONG, seed=3)
    return completions, generator.scheduler.stats.preempted, generator.scheduler.used_blocks


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=4), Layout(tp=2, pp=2)], ids=str)
def test_stages_agree_on_who_gives_blocks_back(layout):
    want = make_generator(config=DEEP["llama"]).generate(PROMPTS, LONG, seed=3)
    results = run_ranks(layout.size, out_of_blocks, layout)
    for completions, preempted, used in results:
        assert_same(completions, want)
        assert preempted == results[0][1] > 0 and used == 0


def interrupted(world, layout):
    """What was generated before and after an interruption that only the leader is asked for."""
    generator = make_generator(world, layout, config=DEEP["llama"], **TIGHT)
    asked = iter(range(100))
    leads = world.rank == layout.size - layout.tp
    first = generator.generate(PROMPTS, LONG, seed=3, interrupt=lambda: leads and next(asked) == 12)
    assert generator.scheduler.is_idle and generator.scheduler.used_blocks == 0
    begun = [replace(prompt, begun=Begun(c.response_ids, c.log_probs, c.processed_log_probs, c.versions))
             if c.finish_reason is FinishReason.INTERRUPTED else None for prompt, c in zip(PROMPTS, first)]
    rest = iter(generator.generate([prompt for prompt in begun if prompt is not None], LONG, seed=3))
    return first, [c if prompt is None else next(rest) for prompt, c in zip(begun, first)]


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(pp=4), Layout(tp=2, pp=2)], ids=str)
def test_all_ranks_stop_at_the_same_token_and_can_go_on(layout):
    want = make_generator(config=DEEP["llama"]).generate(PROMPTS, LONG, seed=3)
    results = run_ranks(layout.size, interrupted, layout)
    for first, whole in results:
        assert first == results[0][0]
        assert 0 < sum(len(c.response_ids) for c in first) < sum(len(c.response_ids) for c in want)
        assert_same(whole, want)


def busy_turns(world, layout):
    """Of each turn whether its group had something to run."""
    generator = make_generator(world, layout, config=DEEP["llama"])
    generator.generate(PROMPTS[:1], PARAMS, seed=3)
    plan, turns = generator.scheduler.plan, []

    def recorded(group):
        turns.append(plan(group))
        return turns[-1]

    generator.scheduler.plan = recorded
    generator.generate(PROMPTS, LONG, seed=3)
    return [step is not None for step in turns]


@pytest.mark.parametrize("pp", [2, 4])
def test_every_stage_is_busy_from_its_first_to_its_last_turn(pp):
    """Turn t is at tick t + s on stage s. Each of pp groups has a turn for each token, with none between that has
    nothing to run, so that a stage idles in pp - 1 ticks alone: until the first turn comes, and once the last is gone.
    """
    for turns in run_ranks(pp, busy_turns, Layout(pp=pp)):
        assert turns == [True] * LONG.max_new_tokens * pp + [False] * pp  # then the last choices are heard of


def from_a_source(world, layout, is_shared, slow=None):
    """What this replica took and answered, for more prompts than it has rows. The slow one makes its second step when
    all prompts are handed out.
    """
    generator = make_generator(world, layout, config=DEEP["llama"], **TIGHT)
    prompts = make_prompts([1, 9, 2, 40, 17, 3, 8, 30, 5], samples=3)
    replica = replica_of(world.rank, layout)
    count = world.count()
    source = (SharedQueue(prompts, PARAMS, layout.dp, count) if is_shared
              else OwnShare(prompts, PARAMS, layout.dp, replica))
    steps = iter(range(1000))

    def stay_behind():
        while replica == slow and next(steps) > 1 and source._handed_out.fetch_add(0) < len(source._portions):
            time.sleep(0.002)
        return False

    completions = generator.generate(prompts, PARAMS, seed=3, source=source, interrupt=stay_behind)
    return sorted(source.taken), completions, generator.scheduler.used_blocks


@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("layout", [Layout(dp=4), Layout(tp=2, pp=2), Layout(tp=2, dp=2), Layout(pp=2, dp=2)], ids=str)
def test_replicas_answer_every_prompt_once(layout, is_shared):
    prompts = make_prompts([1, 9, 2, 40, 17, 3, 8, 30, 5], samples=3)
    want = make_generator(config=DEEP["llama"]).generate(prompts, PARAMS, seed=3)
    results = run_ranks(layout.size, from_a_source, layout, is_shared)
    taken: dict[int, list[int]] = {}
    for rank, (indices, completions, used) in enumerate(results):
        assert_same(completions, [want[i] for i in indices])
        assert indices == taken.setdefault(replica_of(rank, layout), indices) and used == 0
    assert sorted(i for indices in taken.values() for i in indices) == list(range(len(prompts)))


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2, dp=2)], ids=str)
def test_a_slow_replica_is_left_with_what_it_had_begun(layout):
    """Its six rows, and at most two more samples of a prompt that it has one of; half would be 13."""
    taken = {replica_of(rank, layout): indices for rank, (indices, _, _) in
             enumerate(run_ranks(layout.size, from_a_source, layout, True, 0))}
    assert len(taken[0]) <= TIGHT["max_batch_rows"] + 2
    assert sorted(taken[0] + taken[1]) == list(range(27))
