"""Prompts of equal rewards are replaced by others until there are enough, alike on any ranks."""

from pathlib import Path

import pytest
import torch

from hybridflow.observe.metric_names import check_names
from hybridflow.parallel.world import World
from hybridflow.trainer.board import Board
from tests.ranks import run_ranks
from tests.trainer.runs import make_tokenizer, started, tiny_config
from tests.trainer.test_rl import numbers

REWARD = Path(__file__).with_name("mostly_equal_reward.py")
KEYS = ("algorithm.name=dapo", "algorithm.kl={where: none, coef: 0.01}", f"reward.function={REWARD}:score",
        "generation.max_new_tokens=4")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def rounds_on(world: World, tokenizer: Path, folder: Path, overrides: tuple[str, ...]) -> list[tuple]:
    """Of two steps: metrics, ids of the prompts that were learned from, and scores of all their rows."""
    trainer, loader = started(world, tiny_config(tokenizer, folder, (*KEYS, *overrides)))
    found = []
    for _ in range(2):
        metrics = trainer.step(next(loader), loader.__next__)
        found.append((metrics, [prompt.id for prompt in trainer.prompts], trainer.batch.scores.tolist()))
    trainer.close()
    return found


def test_prompts_without_a_signal_are_replaced(tokenizer: Path, tmp_path: Path):
    alone = rounds_on(World.single(torch.device("cpu")), tokenizer, tmp_path, ("algorithm.resample_rounds=20",))
    for metrics, prompts, scores in alone:
        check_names(metrics)
        assert len(set(prompts)) == len(prompts) == 6 and metrics["rollout/rounds"] > 1
        assert metrics["rollout/samples"] == 18 * metrics["rollout/rounds"]
        assert metrics["rollout/prompts_with_signal"] >= 6
        groups = [scores[start:start + 3] for start in range(0, 18, 3)]
        assert all(len(set(group)) > 1 for group in groups)
    placement = "placement={actor: 0-1, generation: 0-1}"
    for layout in (("train.layout.tp=2", "generation.layout.pp=2"), ("train.layout.pp=2",)):
        for rank in run_ranks(2, rounds_on, tokenizer, tmp_path, ("algorithm.resample_rounds=20", placement, *layout)):
            for (metrics, prompts, scores), (wanted, other_prompts, other_scores) in zip(rank, alone, strict=True):
                assert prompts == other_prompts and scores == pytest.approx(other_scores)
                assert numbers(metrics) == pytest.approx(numbers(wanted), rel=1e-8, abs=1e-10)


def test_the_rounds_end_and_a_step_may_be_short(tokenizer: Path, tmp_path: Path):
    [(metrics, prompts, scores), _] = rounds_on(World.single(torch.device("cpu")), tokenizer, tmp_path,
                                                ("algorithm.resample_rounds=2",))
    assert metrics["rollout/rounds"] == 2 and 1 <= len(prompts) == metrics["rollout/prompts_with_signal"] < 6
    assert len(scores) == 3 * len(prompts)


def test_where_no_prompt_says_anything_the_last_round_is_kept(tokenizer: Path, tmp_path: Path):
    keys = ("algorithm.resample_rounds=2", f"reward.function={REWARD}:equal", "algorithm.entropy_coef=0",
            "algorithm.overlong_buffer=0")
    [(metrics, prompts, scores), _] = rounds_on(World.single(torch.device("cpu")), tokenizer, tmp_path, keys)
    assert metrics["rollout/prompts_with_signal"] == 0 and len(prompts) == 6 and set(scores) == {1.0}
    assert metrics["policy/grad_norm"] == 0.0


def test_without_further_prompts_those_without_a_signal_are_left_out(tokenizer: Path, tmp_path: Path):
    trainer, loader = started(World.single(torch.device("cpu")), tiny_config(tokenizer, tmp_path, KEYS))
    experience = trainer.dataflow.source.next(next(loader), Board())
    trainer.close()
    assert 0 < len(experience.prompts) < 6 and experience.batch.num_rows == 3 * len(experience.prompts)
