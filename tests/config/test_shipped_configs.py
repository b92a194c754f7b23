"""The files in configs/ are valid on the ranks they are written for, and say what their comments promise."""

from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.config.batch_math import BatchMath
from hybridflow.config.command import Command
from hybridflow.config.layouts import generation_layout
from hybridflow.config.load import load_config
from hybridflow.config.validate import validate
from hybridflow.trainer.prompts import read_records

CONFIGS = Path(__file__).parents[2] / "configs"
CHANGED = ("dr_grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "gspo", "cispo", "safe_rlhf")
ALONE = ("train.layout.tp=1", "train.layout.pp=1")


@pytest.mark.parametrize(("name", "world_size", "command", "overrides"), [
    ("ppo_tiny", 4, Command.TRAIN, ()),
    ("ppo_tiny", 1, Command.TRAIN, ALONE),
    ("ppo_split", 4, Command.TRAIN, ()),
    ("ppo_standalone", 4, Command.TRAIN, ()),
    ("grpo_tiny", 4, Command.TRAIN, ()),
    ("grpo_tiny", 1, Command.TRAIN, ALONE),
    ("grpo_one_step_off", 4, Command.TRAIN, ()),
    ("grpo_partial", 4, Command.TRAIN, ()),
    *((f"{name}_tiny", 4, Command.TRAIN, ()) for name in CHANGED),
    ("sft_tiny", 1, Command.SFT, ()),
    ("sft_tiny", 4, Command.SFT, ()),
    ("dpo_tiny", 4, Command.DPO, ()),
    ("kto_tiny", 4, Command.KTO, ()),
    ("reward_model_tiny", 4, Command.REWARD_MODEL, ()),
    ("ppo_7b", 4, Command.TRAIN, ()),
    ("multi_node", 32, Command.TRAIN, ()),
])
def test_shipped_configs_are_valid(name, world_size, command, overrides):
    assert validate(load_config(CONFIGS / f"{name}.yaml", overrides), world_size, command) == []


def test_every_shipped_config_is_listed_above():
    assert {file.stem for file in CONFIGS.glob("*.yaml")} == {
        "ppo_tiny", "ppo_split", "ppo_standalone", "grpo_tiny", "grpo_one_step_off", "grpo_partial", "sft_tiny",
        "critic_free_tiny", *(f"{name}_tiny" for name in CHANGED), "dpo_tiny", "kto_tiny", "reward_model_tiny",
        "ppo_7b", "multi_node"}


@pytest.mark.parametrize("name", ["ppo_split", "ppo_standalone"])
def test_a_placement_changes_ranks_and_layouts_alone(name):
    placed, base = load_config(CONFIGS / f"{name}.yaml"), load_config(CONFIGS / "ppo_tiny.yaml")
    assert placed.placement != base.placement
    model, train = replace(placed.model, critic=base.model.critic), replace(placed.train, layout=base.train.layout)
    assert replace(placed, placement=base.placement, model=model, train=train, logging=base.logging) == base


def test_the_quickstart_trains_at_tp2_pp2_and_generates_at_tp1_dp4():
    config = load_config(CONFIGS / "ppo_tiny.yaml")
    layout, generating = config.train.layout, generation_layout(config, 4)
    assert (layout.tp, layout.pp, generating.tp, generating.dp) == (2, 2, 1, 4)


def test_ppo_7b_is_the_article_with_n_equal_to_m_x_s():
    config = load_config(CONFIGS / "ppo_7b.yaml")
    math = BatchMath.of(config, 4)
    assert (math.rollouts_per_update, math.micro_batching.rows, math.micro_batches, math.dp) == (256, 8, 32, 1)


def test_the_warm_start_and_reinforcement_learning_agree():
    sft, ppo, grpo = (load_config(CONFIGS / f"{name}.yaml") for name in ("sft_tiny", "ppo_tiny", "grpo_tiny"))
    assert sft.data.test_tasks == ppo.data.tasks == grpo.data.tasks and not ppo.data.test_tasks
    assert ppo.model.path == grpo.model.path == f"{sft.logging.dir}/export"
    assert ppo.model.tokenizer == grpo.model.tokenizer == sft.model.tokenizer
    for name in ("dpo_tiny", "kto_tiny", "reward_model_tiny"):
        preference = load_config(CONFIGS / f"{name}.yaml")
        assert preference.data.tasks == ppo.data.tasks and preference.model == ppo.model


def test_the_comments_count_right():
    sft, ppo, grpo = (load_config(CONFIGS / f"{name}.yaml") for name in ("sft_tiny", "ppo_tiny", "grpo_tiny"))
    assert round(sft.data.size * sft.data.tasks[0].weight) == 82
    assert (BatchMath.of(ppo, 4).updates_per_step, BatchMath.of(ppo, 4).micro_batches) == (4, 2)
    assert BatchMath.of(grpo, 4).updates_per_step == 1 and BatchMath.of(grpo, 4).dp == 2


def test_reinforcement_learning_is_tested_on_words_that_no_warm_start_has_seen():
    prompts = []
    for name in ("sft_tiny", "ppo_tiny", "grpo_tiny"):
        records = read_records(load_config(CONFIGS / f"{name}.yaml"))
        prompts.append([{record.prompt for record in part} for part in (records.train, records.test)])
    trained, tested = (set().union(*parts) for parts in zip(*prompts))
    assert not trained & tested and {len(prompt) for prompt in tested} == {len("words=")}
    assert [len(tests) for _, tests in prompts] == [128, 128, 128]
