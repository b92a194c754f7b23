"""The preference block: what each of its keys changes, and the rows that the data block names."""

import json
from pathlib import Path

import pytest
import torch

from hybridflow.config.load import load_config
from hybridflow.config.schema import Config
from hybridflow.trainer.preference_data import read_preferences
from hybridflow.trainer.preference_objective import bradley_terry_objective, dpo_objective, kto_objective

ZERO = torch.zeros(())
OBJECTIVES = {"dpo": dpo_objective, "kto": lambda config: kto_objective(config, ZERO),
              "reward_model": bradley_terry_objective}
GYM = ("data.size=24", "data.test_size=4")


@pytest.mark.parametrize(("command", "override"), [
    ("dpo", "beta=0.7"), ("dpo", "loss=ipo"), ("dpo", "label_smoothing=0.2"),
    ("kto", "beta=0.7"), ("kto", "desirable_weight=2"), ("kto", "undesirable_weight=2"),
    ("reward_model", "centre_coef=0.2"),
])
def test_a_key_changes_the_loss(command: str, override: str):
    make = OBJECTIVES[command]
    assert make(load_config({}, [f"preference.{override}"])) != make(Config())
    assert make(Config()) == make(load_config({}, ["preference.steps=7"]))


def test_wrong_answers_are_made_as_the_config_says():
    tree = {"data": {"tasks": [{"name": "spell_backward", "template": "{metadata[word]}="}]}}
    other, again, perturbed, seeded = (read_preferences(load_config(tree, [*GYM, *keys])) for keys in (
        [], [], ["preference.rejected=perturbed"], ["preference.rejected=perturbed", "train.seed=1"]))
    assert other == again and len(other.train) == 24 and len(other.prompts) == 4
    answers = {row.chosen for row in other.train}
    assert {row.rejected for row in other.train} <= answers and not {row.rejected for row in perturbed.train} <= answers
    assert perturbed.train != seeded.train
    assert [record.prompt for record in other.prompts] == [row.prompt for row in other.test]
    assert not {row.prompt for row in other.train} & {row.prompt for row in other.test}


def test_margins_and_held_out_prompts_come_from_files(tmp_path: Path):
    rows = [{"prompt": f"{i}", "chosen": "a", "rejected": "b", "gap": i} for i in range(4)]
    for name, part in (("train", rows[:2]), ("test", rows[2:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    keys = ["data.source=jsonl", f"data.train_files=[{tmp_path}/train.jsonl]",
            f"data.test_files=[{tmp_path}/test.jsonl]"]
    split = read_preferences(load_config({}, [*keys, "preference.margin_key=gap"]))
    assert [row.margin for row in (*split.train, *split.test)] == [0, 1, 2, 3]
    assert [row.margin for row in read_preferences(load_config({}, keys)).train] == [0, 0]
    assert [(record.prompt, record.ground_truth) for record in split.prompts] == [("2", "a"), ("3", "a")]
