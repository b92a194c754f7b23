"""Who generates which prompts: every prompt once, samples together, replicas even, and a slow replica with less."""

import itertools
import random

import pytest

from hybridflow.generation.records import Prompt, SamplingParams
from hybridflow.generation.work_source import OwnShare, PinnedShare, SharedQueue, dealt, portions
from hybridflow.parallel.shared_count import SharedCount
from tests.ranks import run_ranks


def prompts_of(lengths: list[int], samples: int = 1) -> list[Prompt]:
    return [Prompt(i, j, (i, *range(length - 1))) for i, length in enumerate(lengths) for j in range(samples)]


def most(new_tokens: int) -> SamplingParams:
    return SamplingParams(new_tokens)


def drained(source, rows: int) -> list[list[int]]:
    """What a replica takes that asks for so many rows each time."""
    return list(iter(lambda: source.take(rows), []))


def test_a_portion_has_all_samples_of_a_prompt():
    found = portions(prompts_of([5, 9, 2] * 4, samples=3), most(10), 2)
    assert [len(portion.indices) for portion in found] == [3] * 12
    assert [portion.prompt_tokens for portion in found] == [9] * 4 + [5] * 4 + [2] * 4
    assert found[0].indices == (3, 4, 5) and found[0].cost == 9 + 30
    short = [Prompt(0, 0, (1, 2), max_new_tokens=3), Prompt(0, 1, (1, 2), max_new_tokens=30)]
    assert portions(short, most(10), 1)[0].cost == 2 + 3 + 10


def test_equal_prompts_are_samples_of_one_wherever_they_stand():
    same = [Prompt(0, 0, (1, 2)), Prompt(1, 0, (3,)), Prompt(2, 0, (1, 2))]
    assert portions(same, most(4), 1)[0].indices == (0, 2)


@pytest.mark.parametrize(("lengths", "samples", "replicas"), [([6], 16, 4), ([9, 2, 30], 8, 2), ([3, 3], 1, 4)])
def test_samples_of_few_prompts_are_dealt_out_too(lengths: list[int], samples: int, replicas: int):
    shares = dealt(portions(prompts_of(lengths, samples), most(64), replicas), replicas)
    rows = sorted(sum(len(portion.indices) for portion in share) for share in shares)
    assert sum(rows) == len(lengths) * samples and rows[-1] - rows[0] <= 2


def test_the_replica_with_least_gets_the_next_prompt():
    """Costs 20, 16, 13, 12, 11: dealt out by number they would be 20 + 13 + 11 and 16 + 12."""
    shares = dealt(portions(prompts_of([10, 6, 3, 2, 1]), most(10), 2), 2)
    assert [[portion.cost for portion in share] for share in shares] == [[20, 12], [16, 13, 11]]


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("kind", [OwnShare, SharedQueue])
def test_every_prompt_is_handed_out_once_in_samples_that_fit(kind: type, rows: int):
    rng = random.Random(rows)
    lengths = [rng.randint(1, 40) for _ in range(13)]
    prompts = prompts_of(lengths, samples=4)
    count = SharedCount(None, "")
    own = [(replica,) for replica in range(3)] if kind is OwnShare else [(count,)] * 3
    sources = [kind(prompts, most(20), 3, *extra) for extra in own]
    taken = [[] for _ in sources]
    asking = set(range(3))
    while asking:
        replica = rng.choice(sorted(asking))
        answer = sources[replica].take(rows)
        assert len(answer) <= rows
        taken[replica].append(answer)
        if not answer:
            asking.discard(replica)
    assert sorted(itertools.chain(*itertools.chain(*taken))) == list(range(len(prompts)))
    if rows >= 4:  # then no prompt is cut between two answers
        cuts = [{index // 4 for index in answer} for answer in itertools.chain(*taken) if answer]
        assert sum(map(len, cuts)) == 13


def test_own_shares_do_not_depend_on_when_they_are_taken():
    prompts = prompts_of([5, 30, 2, 2, 17], samples=3)
    for replica in range(2):
        at_once = OwnShare(prompts, most(8), 2, replica)
        (whole,) = drained(at_once, at_once.most_rows)
        assert whole == list(itertools.chain(*drained(OwnShare(prompts, most(8), 2, replica), 2)))
        lengths = [len(prompts[index].ids) for index in whole]
        assert lengths == sorted(lengths, reverse=True)


def test_without_prompts_nothing_is_left():
    assert OwnShare([], most(8), 2, 1).take(4) == [] == SharedQueue([], most(8), 2, SharedCount(None, "")).take(4)


def test_one_replica_does_not_take_all_where_all_have_room():
    source = SharedQueue(prompts_of([5] * 20, samples=2), most(8), 4, SharedCount(None, ""))
    assert source.most_rows == 10


def counted(world, calls: int) -> list[int]:
    first, second = world.count(), world.count()
    found = [first.fetch_add(amount) for amount in range(1, calls + 1)]
    second.fetch_add(1)
    world.barrier()
    return [*found, first.fetch_add(0), second.fetch_add(0)]


def test_ranks_count_together():
    results = run_ranks(4, counted, 20)
    assert [result[-2:] for result in results] == [[4 * 210, 4]] * 4
    starts = [(start, start + amount) for result in results for amount, start in enumerate(result[:-2], start=1)]
    starts.sort()
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(starts)) and starts[0][0] == 0


def test_what_has_begun_goes_on_where_it_is_and_the_rest_evens_the_loads():
    prompts = [Prompt(id, sample, (id,) * (id + 1)) for id in range(5) for sample in range(2)]
    pins = [1, 1, None, None, 1, 1, None, None, None, None]
    shares = [PinnedShare(prompts, SamplingParams(8), pins, 2, replica) for replica in range(2)]
    taken = [share.take(99) for share in shares]
    assert {0, 1, 4, 5} <= set(taken[1]) and sorted(taken[0] + taken[1]) == list(range(10))
    assert taken[0] == sorted(taken[0]) and taken[1] == sorted(taken[1])
    assert abs(len(taken[0]) - len(taken[1])) <= 2 and all(place % 2 == 0 for share in taken for place in share[::2])
    assert all(share.take(1) == [] for share in shares)
    again = PinnedShare(prompts, SamplingParams(8), [None] * 10, 1, 0)
    assert [again.take(3), again.take(3), again.take(9)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
