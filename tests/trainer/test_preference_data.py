"""The preference block: what each of its keys changes, and the rows that the data block names."""

import json
from pathlib import Path

import pytest
import torch

from hybridflow.config.load import load_config
from hybridflow.config.schema import Config
from hybridflow.data.preference import LabelRows, Limits, TextLabel
from hybridflow.data.token_rows import Overlong
from hybridflow.trainer.preference_data import read_preferences, require_weighed
from hybridflow.trainer.preference_objective import bradley_terry_objective, dpo_objective, kto_objective
from tests.data.characters import CharacterTokenizer

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


@pytest.mark.parametrize(("labels", "keys", "told"), [
    ([True, True], ["undesirable_weight=2"], "undesirable_weight = 2.0: has no effect, since no training row"),
    ([False], ["desirable_weight=0"], "desirable_weight = 0.0: has no effect"),
    ([False], ["undesirable_weight=0"], "undesirable_weight = 0: every training row has the label false"),
    ([True, False], ["desirable_weight=0", "undesirable_weight=2"], None),
    ([True], ["desirable_weight=2"], None),
])
def test_weights_of_labels_are_of_rows_that_there_are(labels: list[bool], keys: list[str], told: str | None):
    config = load_config({}, [f"preference.{key}" for key in keys])
    limits = Limits(8, 8, Overlong.ERROR, 128)
    rows = LabelRows([TextLabel("ab", "c", label) for label in labels], CharacterTokenizer(), limits)
    if told is None:
        return require_weighed(config, rows)
    with pytest.raises(ValueError, match=f"^preference.{told}"):
        require_weighed(config, rows)


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
