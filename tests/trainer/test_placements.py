"""The same algorithm on other ranks: rollouts, losses and gradient norms do not depend on which ranks a role has."""

import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from hybridflow.crew import Crew
from hybridflow.observe.metric_names import check_names
from hybridflow.parallel.world import World
from hybridflow.trainer.board import Board
from hybridflow.trainer.partial import Progress
from hybridflow.trainer.rollout_source import Experience
from tests.ranks import run_ranks
from tests.trainer.runs import make_tokenizer, started, tiny_config
from tests.trainer.test_rl import numbers, steps_on

SPLIT = "placement={actor: 0-1, reference: 0-1, critic: 2-3}"
PLACEMENTS = {
    "colocate": ("train.layout={tp: 2, pp: 2}",),
    "split": (SPLIT, "train.layout.tp=2", "model.critic.layout.pp=2", "generation.layout.tp=1"),
    "split, sharded": (SPLIT, "train.layout.pp=2", "model.critic.layout={tp: 1, cp: 2}", "train.zero_stage=2",
                       "generation.layout.tp=2", "train.offload.roles=true"),
    "standalone": ("placement={actor: '0', generation: '1', critic: '2', reference: '3'}",),
    "generation apart": ("placement={actor: 0-1, generation: 2-3, critic: 0-1, reference: 2-3}", "train.layout.tp=2",
                         "generation.layout.pp=2", "generation.reshard_check=all"),
    "generation on more ranks": ("placement={actor: 1-2, critic: 0-3}", "train.layout.pp=2",
                                 "model.critic.layout={tp: 2, pp: 2}", "placement.generation=0-3",
                                 "generation.balance=shared"),
    "backwards": ("placement={actor: 2-3, generation: '3', critic: 0-1, reference: '2'}",),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


ALONE = "placement={actor: 0-1, critic: 0-1, reference: 0-1, generation: 2-3}"


def listening(world: World, tokenizer: Path, folder: Path, placement: tuple[str, ...]) -> tuple[set[str], set[int]]:
    """The columns that are filled while others generate, and the rows of them that this rank has answered by then."""
    trainer, loader = started(world, tiny_config(tokenizer, folder, placement))
    streams = trainer.dataflow.source.next(next(loader), Board()).streamed
    trainer.close()
    return set(streams), {row for stream in streams.values() for row in stream.answers}


@pytest.mark.parametrize(("name", "columns"), [("colocate", set()), ("split", {"old_values"}),
                                               ("standalone", {"old_values", "ref_log_probs"})])
def test_roles_that_would_wait_work_on_answers_as_they_end(name: str, columns: set, tokenizer: Path, tmp_path: Path):
    ranks = run_ranks(4, listening, tokenizer, tmp_path, PLACEMENTS[name])
    assert all(found == columns for found, _ in ranks)
    assert len({row for _, rows in ranks for row in rows}) == (18 if columns else 0)


AHEAD = (ALONE, "train.layout.tp=2", "generation.overlap=one_step_off")


def ahead_by_hand(tokenizer: Path, folder: Path, steps: int) -> list[list[tuple[int, ...]]]:
    """Responses of each step of one process that answers every prompt under the weights of a step earlier."""
    trainer, loader = started(World.single(torch.device("cpu")), tiny_config(tokenizer, folder))
    sampler, dataflow = trainer.roles.sampler, trainer.dataflow
    made, found = None, []
    for _ in range(steps + 1):
        prompts = next(loader)
        rollout = sampler.sample(prompts, trainer.sampling, 3)
        if made is not None:
            board = Board()
            dataflow.learn_from(Experience(*made), Crew.whole(trainer.world), board)
            found.append((board.said, [sample.response for sample in made[1].samples]))
        made = prompts, rollout.batch
    trainer.close()
    return found


def ahead(world: World, tokenizer: Path, folder: Path, steps: int, keys: tuple[str, ...] = AHEAD) -> list[tuple]:
    trainer, loader = started(world, tiny_config(tokenizer, folder, keys))
    for _ in range(trainer.steps_ahead):
        trainer.start(next(loader))
    found = []
    for _ in range(steps):
        metrics = trainer.step(next(loader))
        found.append((metrics, dict(zip(trainer.batch.home[world.rank], (s.response for s in trainer.batch.samples)))))
    trainer.close()
    return found


@pytest.mark.parametrize("overlap", [(), ("generation.overlap=partial", "generation.max_staleness=1")], ids=str)
def test_one_step_off_learns_from_what_the_weights_before_have_made(overlap: tuple, tokenizer: Path, tmp_path: Path):
    by_hand, ranks = ahead_by_hand(tokenizer, tmp_path, 3), run_ranks(4, ahead, tokenizer, tmp_path, 3, AHEAD + overlap)
    for step, (said, responses) in enumerate(by_hand):
        rows = {row: ids for steps in ranks for row, ids in steps[step][1].items()}
        assert [rows[row] for row in range(len(responses))] == responses
        assert all(not steps[step][1] for steps in ranks[2:])  # rows are where the actor trains
        for metrics in (steps[step][0] for steps in ranks):
            assert {name: metrics[name] for name in numbers(said)} == pytest.approx(numbers(said), rel=1e-8, abs=1e-10)
            # Two optimizer steps are taken for each batch, and the first one is made by the weights that learn from it.
            assert metrics["rollout/staleness_mean"] == metrics["rollout/staleness_max"] == (2.0 if step else 0.0)
            check_names(metrics)


PARTIAL = (ALONE, "train.layout.tp=2", "generation.overlap=partial", "generation.max_staleness=3",
           "generation.max_new_tokens=40", "generation.max_rows=4", "train.optimizer.lr=1e-4")


def partial(world: World, tokenizer: Path, folder: Path, steps: int) -> list[tuple[dict, list[int], list[tuple]]]:
    """Of each step metrics, ids of its prompts, and of the rows at home the versions of their tokens. Generation stops
    as soon as it may, however long those who learn take with this model.
    """
    with patch.object(Progress, "is_enough", enough_once_awaited):
        return _partial(world, tokenizer, folder, steps)


def enough_once_awaited(progress: Progress) -> bool:
    if progress.due or progress.finished.fetch_add(0) < progress.wanted:
        return False
    until = time.monotonic() + 60
    while not progress.ready.fetch_add(0):
        assert time.monotonic() < until, "those who learn never say that they wait"
        time.sleep(0.001)
    return True


def _partial(world: World, tokenizer: Path, folder: Path, steps: int) -> list[tuple[dict, list[int], list[tuple]]]:
    trainer, loader = started(world, tiny_config(tokenizer, folder, PARTIAL))
    for _ in range(trainer.steps_ahead):
        trainer.start(next(loader))
    found = []
    for _ in range(steps):
        metrics = trainer.step(next(loader))
        versions = trainer.batch.columns.versions.split(trainer.batch.home_lengths(world.rank))
        found.append((metrics, [prompt.id for prompt in trainer.prompts], [tuple(row.tolist()) for row in versions]))
    trainer.close()
    return found


def test_partial_rollouts_go_on_under_newer_weights_up_to_their_bound(tokenizer: Path, tmp_path: Path):
    steps, updates = 6, 2
    ranks = run_ranks(4, partial, tokenizer, tmp_path, steps)
    learned = [prompt for _, prompts, _ in ranks[0] for prompt in prompts]
    assert len(set(learned)) == len(learned) == 6 * steps
    mixed = 0
    for step in range(steps):
        metrics = ranks[0][step][0]
        rows = [row for found in ranks for row in found[step][2]]
        assert len(rows) == 18 and all(row == tuple(sorted(row)) for row in rows)
        assert all(step * updates - row[0] <= 3 * updates for row in rows)
        assert metrics["rollout/staleness_max"] == max(step * updates - row[0] for row in rows)
        mixed += sum(row[0] != row[-1] for row in rows)
        check_names(metrics)
    assert mixed > 0  # some answers were interrupted and went on


def exported(world: World, tokenizer: Path, folder: Path, placement: tuple[str, ...]) -> None:
    trainer, _ = started(world, tiny_config(tokenizer, folder, (*placement, "train.total_steps=1")))
    trainer.export(folder / "export")
    trainer.close()


def test_an_actor_on_some_ranks_is_exported_whole(tokenizer: Path, tmp_path: Path):
    run_ranks(4, exported, tokenizer, tmp_path / "placed", PLACEMENTS["backwards"])
    exported(World.single(torch.device("cpu")), tokenizer, tmp_path / "alone", ())
    written = [(tmp_path / name / "export" / "model.safetensors").read_bytes() for name in ("placed", "alone")]
    assert written[0] == written[1]


def test_every_placement_takes_the_step_of_one_process(tokenizer: Path, tmp_path: Path):
    alone, answers = steps_on(World.single(torch.device("cpu")), tokenizer, tmp_path, (), 2)
    assert alone[0]["policy/grad_norm"] > 0 and alone[0]["critic/grad_norm"] > 0
    for name, placement in PLACEMENTS.items():
        ranks = run_ranks(4, steps_on, tokenizer, tmp_path, placement, 2)
        for step in range(2):
            assert {row: ids for _, rows in ranks for row, ids in rows[step].items()} == answers[step], name
            for metrics, _ in ranks:
                assert numbers(metrics[step]) == pytest.approx(numbers(alone[step]), rel=1e-8, abs=1e-10), name
                assert metrics[step]["policy/log_prob_gap_max"] < 1e-12
