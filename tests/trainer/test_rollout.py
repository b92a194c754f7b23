"""Prompts to replicas and rows to homes, with a generator that answers by rule, and late if it is told to."""

import time

import pytest
import torch
import torch.distributed as dist

from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.records import PromptRecord
from hybridflow.generation.records import Completion, FinishReason, SamplingParams
from hybridflow.generation.work_source import Balance
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.trainer.rollout import begin
from tests.ranks import run_ranks

PARAMS = SamplingParams(max_new_tokens=8)
SAMPLES = 3


class RuleGenerator:
    """Answers sample j with tokens j; a replica takes two rows at once. A slow one is not done with its first ones
    before all others are handed out.
    """

    def __init__(self, mesh: Mesh, is_slow: bool) -> None:
        self.mesh, self.is_slow = mesh, is_slow

    def generate(self, prompts, params, seed, expected_version=None, *, source, interrupt=None, ended=None):
        while taken := self.told(source):
            source.taken += taken
            while self.is_slow and source._handed_out.fetch_add(0) < len(source._portions):
                time.sleep(0.002)
        return [answer_of(prompts[row]) for row in sorted(source.taken)]

    def told(self, source) -> list[int]:
        group = self.mesh.model
        mine = [source.take(2)] if group.index == group.size - 1 else [None]
        if group.size > 1:
            dist.broadcast_object_list(mine, group.ranks[-1], group=group.process_group)
        return mine[0]


def answer_of(prompt) -> Completion:
    length = prompt.id % 7 + 1
    reason = FinishReason.STOP if prompt.sample == 1 else FinishReason.LENGTH
    return Completion(prompt.id, prompt.sample, prompt.ids, (prompt.sample,) * length, (-float(prompt.id),) * length,
                      reason)


def prompts_of(number: int) -> list[TokenisedPrompt]:
    """The last one is the first once more, id and all."""
    ids = [*range(number - 1), 0]
    return [TokenisedPrompt(i, tuple(range(i % 5 + 1)), PromptRecord("", "", "", origin="")) for i in ids]


def answered(world, layout: Layout, balance: Balance, number: int, slow: int | None = None) -> list[int]:
    """The rows at home here, after checking all that the batch says of them."""
    # An order of ranks in which no group is a run of neighbours.
    mesh = Mesh(Grid(layout, (2, 0, 3, 1)), world)
    prompts = prompts_of(number)
    generator = RuleGenerator(mesh, mesh.coord.dp == slow)
    rollout = begin(generator, mesh, prompts, PARAMS, samples=SAMPLES, seed=0, version=None, dtype=torch.float64,
                    balance=balance).finish()
    batch, home = rollout.batch, rollout.batch.home[world.rank]
    assert rollout.finished == number and batch.num_rows == number * SAMPLES
    assert sorted(row for rows in batch.home for row in rows) == list(range(number * SAMPLES))
    assert list(batch.groups) == [row // SAMPLES for row in range(number * SAMPLES)]
    want = [prompts[group].id % 7 + 1 for group in batch.groups]
    assert list(batch.response_lengths) == want
    assert [sample.response for sample in batch.samples] == [(row % SAMPLES,) * want[row] for row in home]
    assert [sample.prompt for sample in batch.samples] == [prompts[row // SAMPLES].ids for row in home]
    told = [-float(prompts[row // SAMPLES].id) for row in home for _ in range(want[row])]
    assert batch.columns.rollout_log_probs.tolist() == told
    return list(home)


LAYOUTS = [Layout(dp=4), Layout(tp=2, dp=2), Layout(pp=2, dp=2), Layout(tp=2, pp=2)]


@pytest.mark.parametrize("balance", Balance)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_row_is_answered_once_and_at_home_in_its_replica(layout: Layout, balance: Balance):
    homes = run_ranks(4, answered, layout, balance, 9)
    grid = Grid(layout, (2, 0, 3, 1))
    for line in grid.lines(lambda at: (at.dp,)):
        sizes = [len(homes[rank]) for rank in line]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fewer_prompts_than_ranks(layout: Layout):
    for balance in Balance:
        run_ranks(4, answered, layout, balance, 1)


def test_a_slow_replica_gets_fewer_prompts_of_the_shared_queue():
    homes = run_ranks(4, answered, Layout(dp=4), Balance.SHARED, 12, 1)
    slow = homes[Grid(Layout(dp=4), (2, 0, 3, 1)).ranks[1]]
    assert len(slow) <= SAMPLES  # of the prompt that it had begun
    own = run_ranks(4, answered, Layout(dp=4), Balance.OWN, 12)
    assert [len(home) for home in own] == [9] * 4


def test_own_shares_are_the_same_in_every_run():
    for layout in LAYOUTS:
        assert run_ranks(4, answered, layout, Balance.OWN, 7) == run_ranks(4, answered, layout, Balance.OWN, 7)
