"""Rows go where they are asked for, by the planner's bytes, and come home unchanged."""

import torch

from hybridflow.batch import Batch
from hybridflow.context import ContextPart
from hybridflow.micro_batch import MicroBatch, Sample, TokenColumns
from hybridflow.models.attention import PackedCausal
from hybridflow.packing import split_rows
from hybridflow.parallel.plan import TransferPlan
from hybridflow.parallel.world import World
from hybridflow.row_moves import move_rows, row_map
from tests.ranks import run_ranks

LENGTHS = (3, 1, 0, 4, 2, 2, 5, 1, 1, 3)


def table(rows: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([[100.0 * row + i, -row] for row in rows for i in range(LENGTHS[row])]).reshape(-1, 2)


def test_consecutive_rows_are_one_box():
    shards = row_map(LENGTHS, ((0, 1, 2, 3), (6, 4, 5)), 2).shards
    assert [s.box.shape for s in shards(0)] == [(8, 2)]
    assert [(s.box.lo[0], s.box.hi[0], s.offset) for s in shards(1)] == [(12, 17, 0), (8, 12, 10)]


def check_moves(world: World) -> None:
    home = tuple(split_rows(range(10), 4))
    for wanted in (((9, 0, 5), (), (1, 2, 3), (0, 9)), (tuple(range(10)),) * 4, ((), (), (), (7,))):
        moved = move_rows(world, LENGTHS, home, wanted, table(home[world.rank]))
        assert torch.equal(moved, table(wanted[world.rank]))
        back = move_rows(world, LENGTHS, (tuple(range(10)), (), (), ()), home, table(tuple(range(10)))
                         if world.rank == 0 else table(()))
        assert torch.equal(back, table(home[world.rank]))


def test_rows_arrive_wherever_they_are_wanted():
    run_ranks(4, check_moves)


def test_replicated_rows_are_not_sent_twice():
    home = tuple(split_rows(range(10), 4))
    plan = TransferPlan(row_map(LENGTHS, home, 1), row_map(LENGTHS, (tuple(range(10)),) * 4, 1))
    assert [plan.received_numel(rank) for rank in range(4)] == [
        sum(LENGTHS) - sum(LENGTHS[row] for row in rows) for rows in home]


def check_fetch(world: World) -> list[tuple[int, ...]]:
    home = ((0, 1), (2,), (), (3,))
    prompts, responses = [(1, 2), (3,), (4, 5, 6), (7,)], [(8,), (9, 10, 11), (12,), (13, 14)]
    mine = home[world.rank]
    columns = TokenColumns(advantages=torch.tensor([float(t) for row in mine for t in responses[row]]))
    batch = Batch(tuple(map(len, prompts)), tuple(map(len, responses)), (0, 0, 1, 1), home,
                  tuple(Sample(prompts[row], responses[row]) for row in mine), columns)
    rows = batch.fetch(world, ((1, 2),) * 2 + ((3, 0),) * 2)
    wanted = [1, 2] if world.rank < 2 else [3, 0]
    assert rows.samples == tuple(Sample(prompts[row], responses[row]) for row in wanted)
    assert rows.columns.advantages.tolist() == [t for row in wanted for t in responses[row]]
    assert [len(chunk.columns.advantages) for chunk in rows.runs((1, 1))] == [len(responses[row]) for row in wanted]
    computed = rows.columns.advantages * 2 if world.rank in (1, 2) else torch.empty(0)
    back = batch.deliver(world, ((), (1, 2), (3, 0), ()), computed).wait().squeeze(1)
    assert torch.equal(back, columns.advantages * 2)


def test_a_role_fetches_rows_and_brings_its_answer_home():
    run_ranks(4, check_fetch)


def check_take_and_join(world: World) -> None:
    home = ((0, 1), (2,), (), (3,))
    lengths = (1, 3, 0, 2)
    mine = home[world.rank]
    columns = TokenColumns(advantages=torch.tensor([10.0 * row + i for row in mine for i in range(lengths[row])]))
    samples = tuple(Sample((row,), tuple(range(lengths[row]))) for row in mine)
    batch = Batch((1,) * 4, lengths, (0, 0, 1, 1), home, samples, columns, torch.arange(4.0))
    some = batch.take(world.rank, (1, 2, 3))
    assert (some.response_lengths, some.groups, some.scores.tolist()) == ((3, 0, 2), (0, 1, 1), [1.0, 2.0, 3.0])
    assert some.home == ((0,), (1,), (), (2,))
    assert [sample.prompt[0] for sample in some.samples] == [row for row in mine if row]
    assert some.columns.advantages.tolist() == [10.0 * row + i for row in mine if row for i in range(lengths[row])]
    both = Batch.joined([some, batch])
    assert both.groups == (0, 1, 1, 2, 2, 3, 3) and both.home == ((0, 3, 4), (1, 5), (), (2, 6))
    assert both.samples == some.samples + batch.samples
    assert both.columns.advantages.tolist() == [*some.columns.advantages.tolist(), *columns.advantages.tolist()]
    rows = both.fetch(world, (tuple(range(7)),) * 4)
    assert [sample.prompt[0] for sample in rows.samples] == [1, 2, 3, 0, 1, 2, 3]
    assert rows.columns.advantages.tolist() == [10.0 * row + i for row in (1, 2, 3, 0, 1, 2, 3)
                                                for i in range(lengths[row])]


def test_rows_are_taken_out_and_batches_joined_where_they_are():
    run_ranks(4, check_take_and_join)


def test_packing_predicts_each_response_token_from_the_position_before_it():
    device = torch.device("cpu")
    packed = MicroBatch.pack([Sample((5, 6), (7, 8, 9)), Sample((1,), (2,))], device=device, multiple_of=4)
    assert packed.input_ids.tolist() == [5, 6, 7, 8, 9, 1, 2, 0]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
    assert packed.lengths == (5, 3)  # the last row takes the padding
    assert packed.target_index.tolist() == [1, 2, 3, 5] and packed.targets.tolist() == [7, 8, 9, 2]
    last = MicroBatch.pack_last_tokens([Sample((5, 6), (7,)), Sample((1,), (2,))], device=device, multiple_of=4)
    assert last.target_index.tolist() == [2, 4]


def test_a_replica_without_rows_still_has_a_token_to_run():
    empty = MicroBatch.pack([], device=torch.device("cpu"), multiple_of=2)
    assert empty.lengths == (2,)
    assert empty.num_tokens == 2 and empty.targets.numel() == 0 and empty.target_index.numel() == 0


def test_padding_adds_no_row_to_what_attention_computes():
    device, long = torch.device("cpu"), Sample((1,) * 100, (2,) * 41)
    alone = MicroBatch.pack([long], device=device, multiple_of=4)
    assert alone.lengths == (144,) and PackedCausal(alone.lengths, device).slots is None
    equal = MicroBatch.pack([Sample((1,), (2,))] * 4, device=device, multiple_of=4)
    assert equal.lengths == (2,) * 4 and PackedCausal(equal.lengths, device).slots is None


def test_context_ranks_share_the_tokens_of_a_row_and_know_where_their_answers_belong():
    device = torch.device("cpu")
    samples, columns = [Sample((5, 6), (7, 8, 9)), Sample((1,), (2, 3))], TokenColumns(weight=torch.arange(5.0))
    first, second = (MicroBatch.pack(samples, columns, device=device, multiple_of=3, cp=ContextPart(2, index))
                     for index in range(2))
    # Pieces [5 6] [7] [8] [9] and, where that turn stopped, [] [1] [2] [3].
    assert first.input_ids.tolist() == [5, 6, 9, 3, 0, 0] and first.position_ids.tolist() == [0, 1, 4, 2, 0, 0]
    assert second.input_ids.tolist() == [7, 8, 1, 2, 0, 0] and second.position_ids.tolist() == [2, 3, 0, 1, 0, 0]
    assert first.lengths == second.lengths == (5, 3) and first.num_tokens == second.num_tokens == 6
    assert first.target_index.tolist() == [1] and first.targets.tolist() == [7] and first.columns.weight.tolist() == [0]
    assert second.target_index.tolist() == [0, 1, 2, 3] and second.targets.tolist() == [8, 9, 2, 3]
    assert second.columns.weight.tolist() == [1, 2, 3, 4]
    assert first.answers_per_part == 4 and first.answer_places.tolist() == [0, 4, 5, 6, 7]
    empty = MicroBatch.pack([], device=device, multiple_of=2, cp=ContextPart(4, 3))
    assert empty.lengths == () and empty.num_tokens == 2 and empty.answers_per_part == 0


def test_the_score_of_a_row_is_read_where_its_last_token_lies():
    device, samples = torch.device("cpu"), [Sample((5, 6), (7, 8, 9)), Sample((1,), (2, 3)), Sample((4,), ())]
    parts = [MicroBatch.pack_last_tokens(samples, device=device, cp=ContextPart(2, index)) for index in range(2)]
    assert [part.targets.tolist() for part in parts] == [[9, 3, 4], []]
    assert all(part.input_ids[part.target_index].tolist() == part.targets.tolist() for part in parts)
    assert parts[0].answer_places.tolist() == [0, 1, 2]
