import heapq
import random

import numpy as np
import pytest

from hybridflow.generation.runner import Chunk
from hybridflow.generation.scheduler import Request, Scheduler
from tests.generation.scheduling import Driver, alone


def scheduler(num_blocks=64, max_rows=8, max_step_tokens=256, num_groups=1, max_length=640) -> Scheduler:
    return Scheduler(num_blocks=num_blocks, max_rows=max_rows, max_step_tokens=max_step_tokens, num_groups=num_groups,
                     max_length=max_length)


def ids(count: int, start: int = 0) -> tuple[int, ...]:
    return tuple(range(start, start + count))


def copies(request: Request, count: int) -> list[Request]:
    """`count` samples of a prompt."""
    return [Request(request.index + i, request.ids, request.max_new_tokens, request.begun) for i in range(count)]


def mixed(seed: int, count: int) -> list[Request]:
    """Prompts with and without common prefixes, one or several samples of each, some begun."""
    rng = random.Random(seed)
    prefixes = [tuple(rng.randrange(1000) for _ in range(length)) for length in (16, 17, 40, 64)]
    requests: list[Request] = []
    while len(requests) < count:
        tail = tuple(rng.randrange(1000) for _ in range(rng.choice([1, 5, 15, 16, 17, 32, 60])))
        prompt = (rng.choice(prefixes) if rng.random() < 0.5 else ()) + tail
        begun = tuple(rng.randrange(1000) for _ in range(rng.choice([0, 0, 0, 3, 20])))
        request = Request(len(requests), prompt, rng.choice([1, 2, 10, 16, 17, 50]), begun)
        requests += copies(request, rng.choice([1, 1, 3, 8]))
    return requests[:count]


def longest_blocks(requests: list[Request]) -> int:
    return max((len(r.ids) + len(r.begun) + r.max_new_tokens + 14) // 16 for r in requests)


def check_all(driver: Driver, requests: list[Request]) -> None:
    assert driver.responses == {r.index: alone(r, driver.stop_every) for r in requests}
    assert driver.scheduler.is_idle and driver.scheduler.pool.num_used == 0
    assert driver.scheduler.free_rows == len(driver.scheduler.tables)


@pytest.mark.parametrize("num_groups", [1, 2, 3, 4])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("spare", [0, 3, 200])
def test_every_sequence_gets_what_it_gets_alone(num_groups, lag, spare):
    for seed in range(3):
        rng = random.Random(f"{seed} {num_groups} {lag} {spare}")
        requests = mixed(rng.randrange(10**6), 32)
        plans = scheduler(longest_blocks(requests) + spare, rng.choice([1, 3, 7, 16, 40]), rng.choice([1, 16, 40, 200]),
                          num_groups, max_length=208)
        driver = Driver(plans, num_groups, lag, stop_every=rng.choice([0, 7, 50]))
        plans.add(requests[:16])
        driver.run(most_plans=rng.choice([3, 10, 50]))
        plans.add(requests[16:])
        driver.run()
        check_all(driver, requests)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_running_out_of_blocks_preempts_and_changes_nothing(num_groups, lag):
    for seed in range(2):
        rng = random.Random(seed)
        requests = []
        for i in range(6):
            prompt = tuple(rng.randrange(1000) for _ in range(rng.randrange(1, 40)))
            requests += copies(Request(3 * i, prompt, rng.randrange(60, 120)), 3)
        plans = scheduler(longest_blocks(requests) + 2, 16, 64, num_groups, max_length=160)
        driver = Driver(plans, num_groups, lag, stop_every=500)
        plans.add(requests)
        driver.run()
        check_all(driver, requests)
        assert plans.stats.preempted > 0


def test_2000_mixed_requests_leak_no_block():
    requests = mixed(5, 2000)
    plans = scheduler(220, 64, 512, 2, max_length=208)
    driver = Driver(plans, 2, 1, stop_every=10)
    for first in range(0, 2000, 250):
        plans.add(requests[first : first + 250])
        driver.run(most_plans=len(driver.plans) + 50)
    driver.run()
    check_all(driver, requests)
    assert plans.pool.num_kept + plans.pool.num_free == 220
    plans.drop_cache()
    assert plans.pool.num_free == 220


def test_the_same_calls_make_the_same_plans():
    traces = []
    for _ in range(2):
        plans = scheduler(30, 12, 64, 2)
        driver = Driver(plans, 2, 1, stop_every=30)
        plans.add(mixed(3, 80))
        driver.run()
        traces.append([(p.group, p.chunks, p.slots.tolist(), p.positions.tolist(), p.copies, table)
                       for p, table in zip(driver.plans, driver.tables, strict=True)])
    assert traces[0] == traces[1]


def test_samples_of_a_prompt_share_its_blocks_and_fork_the_last():
    plans = scheduler()
    plans.add(copies(Request(0, ids(20), 4), 3))
    driver = Driver(plans)
    driver.run(most_plans=1)
    plan = driver.plans[0]
    assert plan.chunks == (Chunk(0, 20, 0, 0),) and plan.num_decode == 0
    assert plan.sample_at.tolist() == [19, 19, 19] and plan.sample_slots.tolist() == [0, 1, 2]
    assert plan.copies == ((1, 2), (1, 3))
    assert plans.tables[:3, :2].tolist() == [[0, 1], [0, 2], [0, 3]]
    driver.run(most_plans=2)
    assert driver.plans[1].num_decode == 3 and driver.plans[1].positions.tolist() == [20, 20, 20]
    assert driver.plans[1].chunks == () and driver.plans[1].copies == ()


def test_eight_samples_of_512_tokens_use_one_copy_of_its_32_blocks():
    requests = copies(Request(0, ids(512), 20), 8)
    plans = scheduler(num_blocks=200, max_step_tokens=2048)
    plans.add(requests)
    driver = Driver(plans)
    driver.run(most_plans=1)
    assert plans.used_blocks == 32 and driver.plans[0].copies == ()
    driver.run(most_plans=2)
    assert plans.used_blocks == 32 + 8
    driver.run()
    check_all(driver, requests)
    assert plans.stats.peak_blocks == 32 + 2 * 8 and plans.stats.prefill_tokens == 512


def test_samples_that_find_no_row_find_the_blocks_later():
    requests = copies(Request(0, ids(40), 5), 6)
    plans = scheduler(max_rows=2)
    plans.add(requests)
    driver = Driver(plans)
    driver.run()
    check_all(driver, requests)
    assert plans.stats.prefill_tokens == 40 + 8 + 8 and plans.stats.prefix_hit_tokens == 2 * 32


def test_a_prompt_of_whole_blocks_computes_its_last_block_again():
    plans = scheduler()
    driver = Driver(plans)
    for index in range(2):
        plans.add([Request(index, ids(32), 3)])
        driver.run()
    assert plans.stats.prefill_tokens == 32 + 16 and plans.stats.prefix_hit_tokens == 16


def test_the_next_turn_of_a_conversation_finds_prompt_and_response():
    plans = scheduler()
    driver = Driver(plans)
    first = Request(0, ids(20), 30)
    plans.add([first])
    driver.run()
    plans.add([Request(1, first.ids + tuple(driver.responses[0]) + ids(5), 2)])
    driver.run()
    assert plans.stats.prefix_hit_tokens == 48  # 49 of the 50 tokens were computed: the last one was never fed back
    assert driver.responses[1] == alone(Request(1, first.ids + tuple(driver.responses[0]) + ids(5), 2))


def test_a_long_prompt_goes_in_chunks_of_blocks_beside_decoding_rows():
    plans = scheduler(max_step_tokens=40)
    driver = Driver(plans)
    plans.add([Request(0, ids(5), 10), Request(1, ids(100, 50), 2)])
    driver.run()
    assert [plan.chunks for plan in driver.plans[:4]] == [
        (Chunk(0, 5, 0, 0), Chunk(5, 32, 1, 0)), (Chunk(1, 32, 1, 32),), (Chunk(1, 36, 1, 64),), ()]
    assert [plan.num_decode for plan in driver.plans[:5]] == [0, 1, 1, 2, 1]
    assert max(len(plan.slots) for plan in driver.plans) <= 40


def test_nobody_passes_a_prompt_that_waits_for_the_budget():
    plans = scheduler(num_blocks=99, max_rows=16, max_step_tokens=20)
    plans.add([*copies(Request(0, (1,), 4), 8), Request(8, ids(60), 2), Request(9, ids(5), 2)])
    driver = Driver(plans)
    driver.run()
    assert [[chunk.count for chunk in plan.chunks] for plan in driver.plans] == [
        [1, 16], [], [], [], [16], [16], [12, 5], []]


def test_prompts_of_one_step_do_not_use_each_others_blocks_but_the_next_step_does():
    plans = scheduler(max_step_tokens=80)
    plans.add([Request(i, (*ids(32), i), 2) for i in range(4)])
    driver = Driver(plans)
    driver.run()
    assert [(chunk.start, chunk.count) for plan in driver.plans[:2] for chunk in plan.chunks] == [
        (0, 33), (0, 33), (32, 1), (32, 1)]


def test_the_youngest_is_preempted_and_the_oldest_never_waits():
    plans = scheduler(num_blocks=6)
    plans.add([Request(i, ids(10, 100 * i), 60) for i in range(3)])
    driver = Driver(plans)
    driver.run()
    assert all(plan.sequences[0].request.index == 0 for plan in driver.plans[:60])
    check_all(driver, [Request(i, ids(10, 100 * i), 60) for i in range(3)])
    assert 0 < plans.stats.preempted < 10


def test_a_step_in_flight_forbids_preemption_until_it_is_committed():
    plans = scheduler(num_blocks=4, max_rows=2)
    plans.add([Request(i, ids(14, 100 * i), 40) for i in range(2)])
    while (plan := plans.plan()).positions[-1] != 31:
        plans.commit(plan, [1] * len(plan.sequences), [False] * len(plan.sequences))
    assert len(plan.sequences) == 2 and plans.pool.num_available == 0
    assert plans.plan() is None and plans.plan() is None and plans.num_running == 2
    plans.commit(plan, [1, 1], [False, False])
    assert len(plans.plan().sequences) == 1 and plans.num_waiting == 1 and plans.stats.preempted == 1


def test_tokens_behind_the_end_are_dropped():
    plans = scheduler()
    plans.add([Request(0, ids(3), 10), Request(1, ids(3), 2)])
    first = plans.plan()
    second = plans.plan()
    assert plans.plan().num_decode == 1  # request 1 has all its samples planned
    ended = plans.commit(first, [7, 8], [True, False])
    assert [(s.request.index, s.response) for s in ended] == [(0, [7])]
    ended = plans.commit(second, np.array([9, 9]), np.array([True, False]))
    assert [(s.request.index, s.response) for s in ended] == [(1, [8, 9])]
    assert plans.num_running == 0 and not plans.is_idle  # the third plan is in flight


def test_stop_gives_back_what_there_is_and_frees_all():
    requests = [*copies(Request(0, ids(40), 50), 2), Request(2, ids(300), 10), Request(3, ids(4), 9)]
    plans = scheduler(max_rows=3, max_step_tokens=64)
    plans.add(requests)
    driver = Driver(plans, lag=1)
    driver.run(most_plans=4)
    late, tokens = driver.in_flight[-1]
    stopped = plans.stop()
    assert [sequence.request.index for sequence in stopped] == [0, 1, 2, 3]
    for sequence in stopped[:2]:
        assert 0 < len(sequence.response) < 4
        assert sequence.response == alone(sequence.request)[: len(sequence.response)]
    assert [sequence.response for sequence in stopped[2:]] == [[], []]
    assert plans.is_idle and plans.used_blocks == 0 and plans.free_rows == 3
    assert plans.commit(late, tokens, [False] * len(tokens)) == [] and plans.plan() is None
    resumed = [Request(s.request.index, s.request.ids, s.request.max_new_tokens - len(s.response), tuple(s.response))
               for s in stopped]
    plans.drop_cache()  # new weights
    assert plans.pool.num_free == plans.pool.num_blocks
    driver = Driver(plans)
    plans.add(resumed)
    driver.run()
    for sequence in stopped:
        assert sequence.response + driver.responses[sequence.request.index] == alone(sequence.request)


def test_after_new_weights_running_sequences_offer_nothing():
    plans = scheduler()
    driver = Driver(plans)
    plans.add([Request(0, ids(40), 30)])
    driver.run(most_plans=5)
    plans.drop_cache()
    driver.run()
    assert plans.pool.num_kept == 0
    plans.add([Request(1, ids(40), 3)])
    driver.run()
    assert plans.stats.prefix_hit_tokens == 0 and plans.pool.num_kept == 2


def test_groups_share_what_waits():
    plans = scheduler(num_blocks=200, max_rows=32, max_step_tokens=2048, num_groups=4)
    plans.add([Request(i, ids(10 * (12 - i), 100 * i), 20) for i in range(12)])  # longest first
    all_plans = [plans.plan(group) for group in range(4)]
    assert [len(plan.sequences) for plan in all_plans] == [3, 3, 3, 3]
    tokens = [len(plan.slots) for plan in all_plans]
    assert max(tokens) - min(tokens) <= 40 and sum(tokens) == 780
    owners = {sequence.request.index: plan.group for plan in all_plans for sequence in plan.sequences}
    for plan in all_plans:
        plans.commit(plan, [1] * 3, [False] * 3)
    for group in range(4):
        assert {owners[s.request.index] for s in plans.plan(group).sequences} == {group}


def test_a_group_that_lost_its_rows_is_the_one_to_fill():
    plans = scheduler(num_groups=2)
    plans.add([Request(i, ids(5, 10 * i), 50) for i in range(4)])
    one, other = plans.plan(0), plans.plan(1)
    plans.commit(one, [1, 1], [False, False])
    plans.commit(other, [1, 1], [True, True])
    plans.add([Request(i, ids(5, 10 * i), 50) for i in range(4, 6)])
    assert plans.plan(0).chunks == () and len(plans.plan(1).chunks) == 2


def test_what_can_never_fit_is_refused_and_nothing_is_added():
    plans = scheduler(num_blocks=4)
    with pytest.raises(ValueError, match=r"generation\.kv_cache_mb: the cache has 4 blocks .* request 8 \(prompt 60, "
                                         r"max_new_tokens 6\) needs 5 .* at least 1\.25 times as large"):
        plans.add([Request(7, ids(60), 5), Request(8, ids(60), 6)])
    assert plans.is_idle
    plans.add([Request(7, ids(60), 5)])
    driver = Driver(plans)
    driver.run()
    check_all(driver, [Request(7, ids(60), 5)])


def test_wanted_rows():
    plans = scheduler(num_blocks=4, max_rows=4)
    assert plans.wanted_rows == 4
    plans.add([Request(i, ids(20, 100 * i), 9) for i in range(3)])
    assert plans.wanted_rows == 1
    plan = plans.plan()
    assert len(plan.sequences) == 1 and plans.num_waiting == 2
    plans.commit(plan, [3], [False])
    plan = plans.plan()
    assert plans.num_waiting == 2 and plans.wanted_rows == 0  # blocks lack
    plans.commit(plan, [3], [True])
    assert plans.wanted_rows == 2


def list_scheduling(lengths: list[int], rows: int) -> int:
    """Steps if each response takes the row that is free first."""
    ends = [0] * rows
    for length in lengths:
        heapq.heappush(ends, heapq.heappop(ends) + length)
    return max(ends)


def test_ragged_lengths_cost_what_the_lengths_predict():
    rng = random.Random(0)
    lengths = [256 if i % 10 == 0 else 16 for i in range(2560)]
    rng.shuffle(lengths)
    static = sum(max(lengths[first : first + 32]) for first in range(0, len(lengths), 32))
    plans = scheduler(num_blocks=32 * 18, max_rows=32, max_step_tokens=4096)
    plans.add([Request(i, (i, 1, 2), length) for i, length in enumerate(lengths)])
    steps = 0
    while (plan := plans.plan()) is not None:
        plans.commit(plan, np.zeros(len(plan.sequences)), np.zeros(len(plan.sequences), bool))
        steps += 1
    assert steps == list_scheduling(lengths, 32)
    predicted = static / (sum(lengths) / 32)  # 6 times: nearly every batch of 32 has a long response
    assert predicted > 5 and static / steps == pytest.approx(predicted, rel=0.1)


def test_the_oldest_is_never_preempted_and_nobody_enters_while_it_waits_for_a_block():
    plans = scheduler(num_blocks=4, max_rows=3, num_groups=2)
    plans.add([Request(i, ids(14, 100 * i), 40) for i in range(2)])
    for _ in range(19):
        one, other = plans.plan(0), plans.plan(1)
        plans.commit(one, [1], [False])
        if other.positions[-1] != 31:
            plans.commit(other, [1], [False])
    assert one.positions.tolist() == [31] and plans.pool.num_available == 0
    assert plans.plan(0) is None and plans.num_running == 2 and plans.stats.preempted == 0
    plans.add([Request(2, (1,), 2)])
    plans.commit(other, [1], [True])
    assert plans.pool.num_available == 2 and plans.plan(1) is None and plans.num_waiting == 1
    assert plans.plan(0).positions.tolist() == [32] and plans.stats.preempted == 0
    assert plans.plan(1) is None  # the last block is left to request 0
