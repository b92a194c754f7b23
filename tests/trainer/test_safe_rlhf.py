"""Safe RLHF: costs, their critic, the multiplier and the pretraining loss, alike on any ranks and placement."""

from pathlib import Path

import pytest
import torch

from hybridflow.data.sft import SftLoader, TextPair
from hybridflow.observe.metric_names import check_names
from hybridflow.parallel.world import World
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.prompts import read_records, training_prompts
from hybridflow.trainer.rl import RLTrainer
from tests.ranks import run_ranks
from tests.trainer.runs import make_tokenizer, tiny_config
from tests.trainer.test_rl import numbers

COST = Path(__file__).with_name("costs.py")
KEYS = ("algorithm.name=safe_rlhf", f"cost.function={COST}:cost",
        "algorithm.safe={multiplier: 0.5, multiplier_lr: 0.3}")
PAIRS = [TextPair(f"{a}+{a}=", str(a + a)) for a in range(9)]
PTX = ("algorithm.safe.pretrain_coef=0.7", "algorithm.safe.pretrain_batch_size=5")
LAYOUTS = [
    ("train.layout={tp: 2, pp: 2}", "model.cost_critic.layout.cp=2"),
    ("placement={actor: 0-1, generation: 0-1, reference: 0-1, critic: '2', cost_critic: '3'}", "train.layout.pp=1",
     "train.micro_batch_tokens=300"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def steps_on(world: World, tokenizer: Path, folder: Path, overrides: tuple[str, ...], steps: int = 2) -> list[dict]:
    config = tiny_config(tokenizer, folder, (*KEYS, *overrides))
    inputs, pretraining = Inputs.read(config), None
    if config.algorithm.safe.pretrain_coef:
        pretraining = SftLoader(PAIRS, inputs.tokenizer, config.algorithm.safe.pretrain_batch_size, 0)
    trainer = RLTrainer(inputs, world, pretraining=pretraining)
    loader = training_prompts(config, read_records(config), trainer.tokenizer, trainer.model.vocab_size)
    found = [trainer.step(next(loader)) for _ in range(steps)]
    trainer.close()
    return found


def alone(tokenizer: Path, folder: Path, *overrides: str) -> list[dict]:
    return steps_on(World.single(torch.device("cpu")), tokenizer, folder, overrides)


@pytest.mark.parametrize("ptx", [(), PTX], ids=["plain", "ptx"])
def test_ranks_take_the_step_of_one_process(ptx: tuple[str, ...], tokenizer: Path, tmp_path: Path):
    expected = alone(tokenizer, tmp_path, *ptx)
    check_names(expected[0])
    assert expected[0]["cost_critic/grad_norm"] > 0 and expected[0]["cost/std"] > 0
    assert expected[0]["cost/extra_letters"] > 0
    assert ("policy/pretrain_loss" in expected[0]) is bool(ptx)
    for layout in LAYOUTS:
        for told in run_ranks(4, steps_on, tokenizer, tmp_path, (*ptx, *layout)):
            for metrics, wanted in zip(told, expected, strict=True):
                assert numbers(metrics) == pytest.approx(numbers(wanted), rel=1e-8, abs=1e-10), layout
                assert metrics["policy/log_prob_gap_max"] < 1e-12


def test_the_multiplier_follows_the_cost(tokenizer: Path, tmp_path: Path):
    for limit, rises in ((-5.0, True), (5.0, False)):
        first, second = alone(tokenizer, tmp_path, f"algorithm.safe.cost_limit={limit}")
        assert first["cost/multiplier"] == pytest.approx(0.5)
        assert (second["cost/multiplier"] > 0.5) is rises


def test_a_failing_cost_function_is_told_as_such(tokenizer: Path, tmp_path: Path):
    broken = tmp_path / "broken.py"
    broken.write_text("def cost(data_source, solution_str, ground_truth, extra_info):\n    raise ValueError('no')\n")
    config = tiny_config(tokenizer, tmp_path, (*KEYS, f"cost.function={broken}:cost"))
    trainer = RLTrainer(Inputs.read(config), World.single(torch.device("cpu")))
    trainer.step(next(training_prompts(config, read_records(config), trainer.tokenizer, trainer.model.vocab_size)))
    trainer.close()
    assert trainer.trouble.startswith("18 of 18 costs failed (18 raised); first: row 0"), trainer.trouble


def test_every_key_changes_the_step(tokenizer: Path, tmp_path: Path):
    plain = alone(tokenizer, tmp_path)
    for keys in (("algorithm.safe.multiplier=2.0",), PTX):
        assert alone(tokenizer, tmp_path, *keys)[0]["policy/grad_norm"] != plain[0]["policy/grad_norm"], keys
    slower = alone(tokenizer, tmp_path, "algorithm.safe.multiplier_lr=0.01")
    assert slower[1]["cost/multiplier"] != plain[1]["cost/multiplier"]
    more = alone(tokenizer, tmp_path, *PTX, "algorithm.safe.pretrain_batch_size=2")
    assert more[0]["policy/pretrain_loss"] != alone(tokenizer, tmp_path, *PTX)[0]["policy/pretrain_loss"]
