"""Reading: types, unknown keys, overrides, interpolation, words; every fault at once; round trip."""

from dataclasses import FrozenInstanceError

import numpy
import pytest

from hybridflow.config.data_schema import TaskConfig
from hybridflow.config.faults import ConfigError, shown
from hybridflow.config.load import known_keys, load_config, to_yaml
from hybridflow.config.schema import Config
from hybridflow.config.words import AlgorithmName, Decay, MixedPrecision, ScheduleName, WandbMode
from tests.config.builders import config


def faults_of(tree, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(tree, overrides)
    return {fault.key: fault for fault in caught.value.faults}


def test_an_empty_config_is_the_defaults():
    assert load_config({}) == Config()


def test_a_file_and_overrides(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train:\n  seed: 3\n  optimizer: {lr: 1e-4}\n")
    read = load_config(file, ["train.layout.tp=2", "train.optimizer.betas=[0.8,0.9]", "logging.dir=/tmp/a=b"])
    assert (read.train.seed, read.train.optimizer.lr, read.train.layout.tp) == (3, 1e-4, 2)
    assert read.train.optimizer.betas == [0.8, 0.9]
    assert read.logging.dir == "/tmp/a=b"


def test_configs_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        config().train.seed = 4


def test_optional_blocks():
    assert config().model.critic.layout is None
    read = config("model.critic.layout.tp=2")
    assert read.model.critic.layout is not None and (read.model.critic.layout.tp, read.model.critic.layout.pp) == (2, 1)
    assert config("model.critic.layout=null").model.critic.layout is None


def test_lists_of_blocks():
    tree = {"data": {"tasks": [{"name": "chain_sum", "config": {"max_terms": 3}}, {"name": "gcd"}]}}
    read = load_config(tree, ["data.tasks[1].weight=2.5", "data.tasks.0.config.max_terms=4"])
    assert [task.weight for task in read.data.tasks] == [1.0, 2.5]
    assert read.data.tasks[0].config == {"max_terms": 4}


def test_stop_takes_ids_and_strings():
    assert config("generation.stop=[2,'\\n',9]").generation.stop == [2, "\\n", 9]


@pytest.mark.parametrize(("key", "word", "meant"), [
    ("algorithm.name", "GRPO", AlgorithmName.GRPO),
    ("train.schedule", "1f1b", ScheduleName.ONE_F_ONE_B),
    ("train.mixed_precision", "no", MixedPrecision.NO),  # a bare no is false in YAML
    ("train.mixed_precision", "fp64", MixedPrecision.FP64),
    ("logging.wandb", "off", WandbMode.OFF),
    ("train.critic_optimizer.decay", "linear", Decay.LINEAR),
    ("train.critic_optimizer.decay", "null", None),
])
def test_words(key, word, meant):
    value = config(f"{key}={word}")
    for part in key.split("."):
        value = getattr(value, part)
    assert value is meant


@pytest.mark.parametrize(("key", "meant"), [
    ("tensor_parallel_szie", "train.layout.tp"),  # case 26
    ("train.micro_batch_sze", "train.micro_batch_size"),
    ("train.lr", "train.optimizer.lr"),
    ("train.learning_rate", "train.optimizer.lr"),
    ("kl_coef", "algorithm.kl.coef"),
    ("algorithm.clip.hihg", "algorithm.clip.high"),
    ("modle", "model"),
    ("generation.layout.sequence_parallel", "train.layout.sequence_parallel"),
])
def test_an_unknown_key_names_the_nearest(key, meant):
    fault = faults_of({}, f"{key}=2")[key]
    assert fault.rule == "unknown key"
    assert meant in fault.choice


def test_an_unknown_key_with_nothing_near_lists_the_block():
    assert "seed" in faults_of({"train": {"qqqq": 1}})["train.qqqq"].choice


@pytest.mark.parametrize(("override", "described"), [
    ("train.total_steps=many", "an integer"),
    ("train.total_steps=1.5", "an integer"),
    ("train.total_steps=null", "an integer"),
    ("train.optimizer.lr=fast", "a number"),
    ("train.layout.sequence_parallel=maybe", "true or false"),
    ("train.layout.sequence_parallel=2", "true or false"),
    ("model.path=[a]", "a text or null"),
    ("train.layout.layers_per_stage=[1,x]", "a list, each an integer"),
    ("train.layout=4", "a block of keys"),
    ("data.tasks=[{weight: heavy}]", "a number"),
    ("data.tasks=chain_sum", "a list, each a block of keys"),
    ("data.tasks={name: gcd}", "a list, each a block of keys"),
    ("data.tasks=[gcd]", "a list, each a block of keys"),
    ("data.tasks=null", "a list, each a block of keys"),
    ("train=null", "a block of keys"),
    ("algorithm.name=null", "ppo, grpo, dr_grpo"),
    # The name inside the code is no word of a config.
    ("train.schedule=ONE_F_ONE_B", "gpipe, 1f1b, interleaved, zb-h1 or zb-v"),
    ("train.zero_stage=true", "an integer"),
])
def test_wrong_types_are_described(override, described):
    (fault,) = faults_of({}, override).values()
    assert described in str(fault)


def test_a_wrong_word_names_the_nearest():
    assert faults_of({}, "train.schedule=1f2b")["train.schedule"].choice == (
        "did you mean 1f1b?")


def test_interpolation_reaches_defaults_and_missing_names_are_faults():
    assert load_config({"logging": {"dir": "runs/seed${train.seed}"}}, ["train.seed=7"]).logging.dir == "runs/seed7"
    assert load_config({"sft": {"steps": "${train.total_steps}"}}).sft.steps == Config().train.total_steps
    assert "cannot be resolved" in faults_of({"data": {"size": "${nope}"}})["data.size"].rule


def test_overrides_that_cannot_be_read():
    found = faults_of({}, "train.seed", "=3", "data.tasks.7.weight=1")
    assert set(found) == {"train.seed", "=3", "data.tasks.7.weight"}


def test_an_override_of_an_element_changes_the_default_list():
    (task,) = load_config({}, ["data.tasks[0].weight=2", "data.tasks.0.config.max_terms=3"]).data.tasks
    assert (task.name, task.weight, task.config) == ("chain_sum", 2.0, {"max_terms": 3})


def test_a_list_in_the_place_of_a_block():
    assert set(faults_of({"train": [1], "data": {"size": "${train.seed}"}})) == {"train", "data.size"}


def test_all_faults_are_reported_at_once():
    found = faults_of({"tensor_parallel_szie": 2, "train": {"seed": "x"}, "data": {"tasks": [{"wieght": 1}]}}, "foo")
    assert set(found) == {"foo", "tensor_parallel_szie", "train.seed", "data.tasks[0].wieght"}


def test_an_unknown_block_is_named_down_to_its_key():
    assert str(faults_of({}, "trian.layout.tp=2")["trian.layout.tp"]).endswith("did you mean train.layout.tp?")
    assert faults_of({}, "trian.layout.foo=2")["trian.layout.foo"].choice == "did you mean train?"


def test_numbers_of_numpy_are_numbers():
    read = load_config({"train": {"seed": numpy.int64(3), "optimizer": {"lr": numpy.float32(0.5)}}})
    assert (read.train.seed, read.train.optimizer.lr) == (3, 0.5)
    with pytest.raises(ConfigError, match="object"):
        load_config({"train": {"seed": object()}})


def test_values_are_shown_as_yaml_has_them():
    assert (shown(None), shown(True), shown(AlgorithmName.PPO)) == ("null", "true", "ppo")
    assert shown([TaskConfig("gcd")]).startswith("[{'name': 'gcd', 'weight': 1.0")


def test_every_line_of_the_message_has_key_value_and_rule():
    with pytest.raises(ConfigError, match=r"2 faults") as caught:
        load_config({"train": {"seed": "x", "sede": 1}})
    lines = str(caught.value).splitlines()
    assert lines[1:] == ["  train.seed = x: is not an integer",
                         "  train.sede = 1: unknown key; did you mean train.seed?"]


def test_files_that_are_no_config(tmp_path):
    bad, listed, single = (tmp_path / f"{name}.yaml" for name in ("bad", "list", "single"))
    bad.write_text("train: {seed: 1")
    listed.write_text("- 1\n")
    single.write_text("5\n")
    for file, words in ((tmp_path / "none.yaml", "no such file"), (bad, "not YAML"), (listed, "a list"),
                        (single, "a single value"), (tmp_path, "is a folder")):
        with pytest.raises(ConfigError, match=words):
            load_config(file)


def test_the_same_key_twice_in_a_file_is_a_fault(tmp_path):
    file = tmp_path / "twice.yaml"
    file.write_text("train: {seed: 1, seed: 2}\n")
    with pytest.raises(ConfigError, match="duplicate key"):
        load_config(file)


def test_an_empty_file_is_the_defaults(tmp_path):
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing\n")
    assert load_config(file) == Config()


def test_what_is_saved_reads_back_equal(tmp_path):
    file = tmp_path / "resolved.yaml"
    first = config("algorithm.name=grpo", "train.mixed_precision=no", "logging.wandb=off", "model.critic.layout.tp=2",
                   "generation.stop=[1,a]", "data.tasks=[{name: gcd, config: {a: {b: 1}}}]")
    file.write_text(to_yaml(first))
    assert load_config(file) == first


def test_known_keys_are_dotted_and_unique():
    keys = list(known_keys())
    assert len(keys) == len(set(keys)) and {"train", "train.optimizer.lr", "model.critic.layout.tp"} <= set(keys)
