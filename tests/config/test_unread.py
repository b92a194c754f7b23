"""Keys that a command does not read: refused, or told where the config was written for another command."""

import pytest

from hybridflow.config.check import checked_config
from hybridflow.config.command import Command
from hybridflow.config.faults import ConfigError
from hybridflow.config.load import known_keys, to_yaml
from hybridflow.config.reading import read_any
from hybridflow.config.unread import UNREAD
from hybridflow.config.validate import validate
from tests.config.builders import config
from tests.config.test_files_and_shapes import write_model


def unread(command, *overrides):
    return {fault.key: str(fault) for fault in validate(config(*overrides), 1, command)}


@pytest.mark.parametrize(("command", "override"), [
    (Command.TRAIN, "sft.steps=5"),
    (Command.TRAIN, "sft.stop_at_accuracy=0.5"),
    (Command.SFT, "train.total_steps=5"),
    (Command.SFT, "algorithm.gamma=0.5"),
    (Command.SFT, "algorithm.kl.where=reward"),
    (Command.SFT, "generation.temperature=0.5"),
    (Command.SFT, "generation.min_p=0.5"),
    (Command.SFT, "generation.batch_invariant=true"),
    (Command.SFT, "train.forward_micro_batch_size=2"),
    (Command.SFT, "train.forward_micro_batch_tokens=400"),
    (Command.SFT, "logging.samples=0"),
    (Command.TRAIN, "preference.steps=5"),
    (Command.SFT, "preference.beta=0.5"),
    (Command.DPO, "sft.steps=5"),
    (Command.DPO, "train.total_steps=5"),
    (Command.DPO, "algorithm.kl.coef=0.5"),
    (Command.DPO, "generation.temperature=0.5"),
    (Command.DPO, "generation.samples_per_prompt=2"),
    (Command.DPO, "algorithm.loss_reduction=seq-mean-token-sum"),
    (Command.DPO, "preference.desirable_weight=2"),
    (Command.DPO, "preference.centre_coef=0.1"),
    (Command.KTO, "preference.loss=ipo"),
    (Command.KTO, "preference.nll_coef=1"),
    (Command.KTO, "preference.precompute_reference=true"),
    (Command.KTO, "algorithm.loss_reduction=seq-mean-token-sum"),
    (Command.REWARD_MODEL, "preference.beta=0.5"),
    (Command.REWARD_MODEL, "preference.nll_coef=0.5"),
    (Command.REWARD_MODEL, "model.reward_model.path=m"),
    (Command.REWARD_MODEL, "generation.max_rows=5"),
    (Command.REWARD_MODEL, "generation.layout.within_node=false"),
    (Command.REWARD_MODEL, "reward.timeout_s=5"),
    (Command.API, "preference.steps=5"),
    (Command.DPO, "data.streaming=true"),
    (Command.KTO, "data.mixture=[{task: gcd}]"),
    (Command.REWARD_MODEL, "evaluation.save_answers=true"),
    (Command.API, "data.streaming=true"),
    (Command.API, "data.mixture=[{task: gcd}]"),
    (Command.API, "data.size=5"),
    (Command.API, "data.shuffle=false"),
    (Command.API, "evaluation.every_steps=5"),
    (Command.API, "checkpoint.export_at_end=false"),
    (Command.API, "logging.trace_step=5"),
    (Command.API, "sft.steps=5"),
])
def test_it_is_refused(command, override):
    key = override.partition("=")[0]
    found = unread(command, override)
    assert list(found) == [key] and "has no effect" in found[key]


@pytest.mark.parametrize(("command", "overrides"), [
    (Command.SFT, ["algorithm.loss_reduction=constant-length", "algorithm.constant_length=5"]),
    (Command.SFT, ["train.forward_micro_batch_size=2", "model.reward_model.path=r"]),
    (Command.SFT, ["logging.trace_step=5", "sft.stop_at_accuracy=0.5"]),
    (Command.DPO, ["preference={loss: ipo, beta: 0.5, nll_coef: 0.1, precompute_reference: true}",
                   "algorithm.loss_reduction=constant-length", "algorithm.constant_length=5"]),
    (Command.DPO, ["model.reference.layout.tp=1", "train.forward_micro_batch_size=2", "reward.timeout_s=3",
                   "preference.label_smoothing=0.1", "preference.rejected=perturbed"]),
    (Command.KTO, ["preference={desirable_weight: 1.5, undesirable_weight: 0.5, beta: 0.5}",
                   "model.reference.layout.tp=1", "generation.max_rows=5"]),
    (Command.REWARD_MODEL, ["preference={margin_key: gap, centre_coef: 0.1}", "data.source=jsonl",
                            "data.train_files=[a]", "generation.max_new_tokens=9", "logging.trace_step=5"]),
    (Command.API, ["data.tasks=[{name: countdown}]", "logging.samples=0", "logging.wandb=offline"]),
    (Command.API, ["data.system_prompt=x", "data.chat_template_kwargs={a: 1}", "logging.verl_names=true"]),
    (Command.SFT, ["evaluation={samples_per_prompt: 4, temperature: 1.0}", "logging.verl_names=true"]),
])
def test_what_is_read_is_not_refused(command, overrides):
    assert unread(command, *overrides) == {}


def test_keys_that_depend_on_others():
    assert "data.tasks" in unread(Command.API, "data.tasks=[{name: gcd}]", "reward.function=a.py:f")
    assert "reward.timeout_s" in unread(Command.SFT, "reward.timeout_s=3", "evaluation.every_steps=null")
    assert unread(Command.SFT, "reward.timeout_s=3") == {}
    files = ("data.source=jsonl", "data.train_files=[a]", "generation.max_rows=5")
    assert "generation.max_rows" in unread(Command.DPO, *files)  # nothing judges answers, so that there are none
    assert unread(Command.DPO, *files, "model.reward_model.path=m") == {}
    assert "generation.max_rows" in unread(Command.KTO, "generation.max_rows=5", "evaluation.every_steps=null")


@pytest.mark.parametrize(("command", "overrides", "key"), [
    (Command.DPO, ["preference.loss=ipo", "preference.label_smoothing=0.1"], "preference.label_smoothing"),
    (Command.REWARD_MODEL, ["preference.margin_key=gap"], "preference.margin_key"),
    (Command.DPO, ["data.source=jsonl", "data.train_files=[a]", "preference.rejected=perturbed"],
     "preference.rejected"),
])
def test_keys_of_preferences_that_do_nothing_beside_others(command, overrides, key):
    assert list(unread(command, *overrides)) == [key]


def test_a_rate_cannot_decay_over_a_run_of_unknown_length():
    assert set(unread(Command.API, "train.optimizer.decay=linear")) == {"train.optimizer.decay"}
    assert set(unread(Command.API, "train.critic_optimizer.decay=cosine")) == {"train.critic_optimizer.decay"}
    assert unread(Command.TRAIN, "train.optimizer.decay=linear") == {}


@pytest.fixture
def file(tmp_path):
    """The file of a training run, with keys of every block."""
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(config(
        "train.total_steps=7", "algorithm.gamma=0.5", "data.prompts_per_step=80", "evaluation.every_steps=5",
        "logging.trace_step=2", "data.size=99",
        tree={"model": {"path": write_model(tmp_path / "model")}})))
    return path


@pytest.mark.parametrize("command", [Command.GENERATE, Command.COMPLETE, Command.EVALUATE, Command.EXPORT])
def test_a_training_runs_file_serves_other_commands_but_their_overrides_must_count(file, command):
    assert checked_config(file, [], 1, command).train.total_steps == 7
    assert checked_config(file, ["train.mixed_precision=bf16", "logging.dir=x"], 1, command).logging.dir == "x"
    with pytest.raises(ConfigError) as caught:
        checked_config(file, ["train.optimizer.lr=1", "algorithm={gamma: 0.25}"], 1, command)
    assert [fault.key for fault in caught.value.faults] == ["algorithm.gamma", "train.optimizer.lr"]


@pytest.mark.parametrize("command", [Command.GENERATE, Command.EXPORT])
def test_the_file_of_a_run_from_random_weights_serves_other_commands(tmp_path, command):
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(config(
        "train.layout={tp: 2, pp: 2, vpp: 2}", "train.schedule=interleaved", "generation.layout.tp=2",
        "model.spec.max_position_embeddings=320", f"model.tokenizer={__file__}")))
    trained = f"model.path={write_model(tmp_path / 'export')}"
    alone = "generation.layout.tp=1" if command is Command.GENERATE else "logging.dir=x"
    assert checked_config(path, [trained, alone], 1, command).model.spec.max_position_embeddings == 320
    assert checked_config(path, [f"model={{path: {tmp_path / 'export'}}}", alone], 1, command)
    for spec in ("model.spec.hidden_size=64", "model={spec: {hidden_size: 64}}"):
        with pytest.raises(ConfigError) as caught:
            checked_config(path, [trained, alone, spec], 1, command)
        assert [str(fault) for fault in caught.value.faults] == [
            "model.spec = {...}: has no effect where model.path is given; remove one of the two"]


def test_an_evaluation_is_asked_for_with_its_own_keys(file):
    asked = ["evaluation={samples_per_prompt: 4, temperature: 1.0, save_answers: true}", "reward.timeout_s=3",
             "data.system_prompt=x"]
    assert checked_config(file, asked, 1, Command.EVALUATE).evaluation.samples_per_prompt == 4
    with pytest.raises(ConfigError) as caught:
        checked_config(file, ["generation.temperature=0.5", "train.layout.tp=1", "train.layout.pp=2",
                              "train.forward_micro_batch_size=3"], 1, Command.EVALUATE)
    assert [fault.key for fault in caught.value.faults] == [
        "generation.temperature", "train.layout.pp", "train.forward_micro_batch_size"]
    with pytest.raises(ConfigError) as caught:
        checked_config(file, asked[:2], 1, Command.GENERATE)
    assert {fault.key for fault in caught.value.faults} == {
        "reward.timeout_s", "evaluation.samples_per_prompt", "evaluation.temperature", "evaluation.save_answers"}
    assert checked_config(file, asked[2:], 1, Command.COMPLETE).data.system_prompt == "x"


def test_prompts_of_a_file_are_not_the_datas(file):
    assert checked_config(file, ["data.size=9", "evaluation.prompts=3"], 1, Command.GENERATE).data.size == 9
    with pytest.raises(ConfigError) as caught:
        checked_config(file, ["data.size=9", "evaluation.prompts=3"], 1, Command.COMPLETE)
    assert [str(fault) for fault in caught.value.faults] == [
        f"{key}: has no effect in generate --prompts; remove it" for key in ("data.size = 9", "evaluation.prompts = 3")]


def test_one_process_exports_whole_unless_an_override_gives_a_layout(tmp_path):
    file = {"model": {"path": write_model(tmp_path / "model", num_hidden_layers=4)},
            "train": {"layout": {"tp": 2, "pp": 2}}}
    alone = checked_config(file, [], 1, Command.EXPORT).train.layout
    assert (alone.tp, alone.pp) == (1, 1)
    four = checked_config(file, [], 4, Command.EXPORT).train.layout
    assert (four.tp, four.pp) == (2, 2)  # a check that this layout reads and writes the model
    for world_size, overrides in ((2, []), (1, ["train.layout.pp=2"]), (1, ["train={layout: {tp: 2}}"])):
        with pytest.raises(ConfigError, match=f"world size {world_size} cannot be cut in tp 2"):
            checked_config(file, overrides, world_size, Command.EXPORT)


def test_a_training_runs_file_serves_init_trainer_with_notes(file):
    reading = read_any(file, 1)
    assert reading.config.algorithm.gamma == 0.5 and reading.config.data.size == 4096
    for key in ("data.size 99", "data.prompts_per_step 80", "evaluation.every_steps 5", "logging.trace_step 2"):
        assert any(note.startswith(f"{key} has no effect with init_trainer") for note in reading.notes)
    assert len(reading.notes) == 4


def test_the_table_names_keys_that_exist():
    known = set(known_keys())
    assert set(UNREAD) == set(Command)
    assert not {key for rules in UNREAD.values() for rule in rules for key in rule.keys} - known
