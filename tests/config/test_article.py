"""The seed article's dict as it stands, with N = M x S over all data-parallel ranks, and what is not honoured."""

from copy import deepcopy

import pytest

from hybridflow.config.article import is_article
from hybridflow.config.faults import ConfigError
from hybridflow.config.layouts import Role, roles
from hybridflow.config.load import load_config, to_yaml
from hybridflow.config.reading import read_any
from hybridflow.config.words import AlgorithmName, MixedPrecision
from tests.config.builders import config

ARTICLE = {
    "train": {"total_steps": 1000, "global_batch_size": 256, "micro_batch_size": 8, "gradient_accumulation_steps": 32,
              "zero_stage": 2, "fsdp": True, "mixed_precision": "bf16"},
    "model": {"actor": "actor", "critic": "critic", "reward_model": "reward"},
    "rl_algorithm": {"type": "PPO", "clip_eps": 0.1, "entropy_coef": 0.01, "value_loss_coef": 0.5},
}


@pytest.fixture
def article(tmp_path):
    """The article's dict with three local folders, each with a small model's config.json."""
    tree = deepcopy(ARTICLE)
    for name in tree["model"]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(
            '{"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,'
            ' "num_hidden_layers": 2, "num_attention_heads": 4}')
        tree["model"][name] = str(folder)
    return tree


def faults_of(tree, world_size=4, algorithm=None):
    with pytest.raises(ConfigError) as caught:
        read_any(tree, world_size, algorithm)
    return {fault.key: str(fault) for fault in caught.value.faults}


def test_the_article_as_it_stands_on_four_ranks(article):
    reading = read_any(article, 4, "ppo")
    train, algorithm, model = reading.config.train, reading.config.algorithm, reading.config.model
    assert (train.total_steps, train.global_batch_size) == (1000, 256)
    assert (train.micro_batch_size, train.gradient_accumulation_steps) == (2, 32)  # 8 over 4 replicas
    assert (train.zero_stage, train.mixed_precision) == (2, MixedPrecision.BF16)
    assert (model.path, model.critic.path, model.reward_model.path) == tuple(article["model"].values())
    assert algorithm.name is AlgorithmName.PPO
    assert (algorithm.clip.low, algorithm.clip.high) == (0.1, 0.1)
    assert (algorithm.entropy_coef, algorithm.value_loss_coef) == (0.01, 0.5)


def test_the_notes_say_how_it_was_read(article):
    notes = "\n".join(read_any(article, 4).notes)
    assert "read over all data-parallel ranks, as N = M x S (256 = 8 x 32)" in notes
    assert "each of the 4 replicas takes 2 at once" in notes
    assert "train.fsdp true is not honoured" in notes and "train.zero_stage" not in notes
    assert "clip_eps 0.1 is both" in notes


@pytest.mark.parametrize(("world", "micro"), [(1, 8), (2, 4), (8, 1)])
def test_the_optimizer_step_is_the_same_on_any_number_of_ranks(article, world, micro):
    train = read_any(article, world).config.train
    assert (train.micro_batch_size, train.gradient_accumulation_steps, train.global_batch_size) == (micro, 32, 256)


def test_dp_1_is_exact(article):
    article["train"]["layout"] = {"tp": 2, "pp": 2}
    assert read_any(article, 4).config.train.micro_batch_size == 8


def test_a_micro_batch_that_cannot_be_shared_out(article):
    assert "choose a multiple of 3" in faults_of(article, 3)["train.micro_batch_size"]


def test_n_must_be_m_x_s(article):
    article["train"]["global_batch_size"] = 128
    message = faults_of(article)["train.gradient_accumulation_steps"]
    assert "128 is not micro_batch_size 8 x 32 = 256" in message and "choose global_batch_size 256" in message


def test_n_must_be_a_multiple_of_m(article):
    article["train"] |= {"global_batch_size": 20, "gradient_accumulation_steps": None}
    assert "not a multiple of micro_batch_size 8; choose global_batch_size 24" in faults_of(article)[
        "train.global_batch_size"]
    article["train"]["global_batch_size"] = 24
    assert "(24 = 8 x 3)" in "\n".join(read_any(article, 4).notes)


@pytest.mark.parametrize(("ours", "key"), [
    ({"name": "grpo"}, "rl_algorithm.type"), ({"clip": {"low": 0.3}}, "rl_algorithm.clip"),
    ({"entropy_coef": 0.5}, "rl_algorithm.entropy_coef"),
])
def test_two_blocks_must_not_contradict(article, ours, key):
    assert "but the algorithm block says" in faults_of(article | {"algorithm": ours})[key]
    assert read_any(article | {"algorithm": {"name": "ppo"}}, 4).config.algorithm.name is AlgorithmName.PPO


def test_n_may_be_left_out(article):
    del article["train"]["global_batch_size"]
    assert read_any(article, 4).config.train.global_batch_size == 256


def test_what_can_be_honoured_gets_no_such_note(article):
    article["train"].update(fsdp=False, zero_stage=0, mixed_precision="no")
    reading = read_any(article, 4)
    assert reading.config.train.zero_stage == 0
    assert "not honoured" not in "\n".join(reading.notes)


@pytest.mark.parametrize(("stage", "fsdp", "read"), [
    (0, False, 0), (1, False, 1), (2, False, 2), (3, False, 2), (0, True, 2), (1, True, 2), (2, True, 2),
    (None, True, 2),
])
def test_sharding_is_honoured_as_far_as_it_goes(article, stage, fsdp, read):
    article["train"].update(zero_stage=stage, fsdp=fsdp)
    if stage is None:
        del article["train"]["zero_stage"]
    reading = read_any(article, 4)
    assert reading.config.train.zero_stage == read
    assert ("zero_stage 3 is not honoured" in "\n".join(reading.notes)) == (stage == 3)


@pytest.mark.parametrize(("written", "read"), [("float16", "fp16"), (True, "bf16"), ("float32", "no"), (None, "no")])
def test_other_names_of_precisions(article, written, read):
    article["train"]["mixed_precision"] = written
    reading = read_any(article, 4)
    assert reading.config.train.mixed_precision.value == read
    assert any("mixed_precision" in note for note in reading.notes)


def test_models_may_be_blocks_and_may_be_missing(article):
    article["model"] = {"actor": {"name": article["model"]["actor"]},
                        "critic": {"path": article["model"]["critic"], "layout": {"tp": 2}}, "reward_model": None}
    model = read_any(article, 4).config.model
    assert model.critic.layout is not None and model.critic.layout.tp == 2
    assert model.reward_model.path is None


def test_our_own_keys_may_stand_beside_the_articles(article):
    article |= {"generation": {"max_new_tokens": 8}, "algorithm": {"kl": {"where": "reward"}}}
    article["rl_algorithm"]["gamma"] = 0.9
    article["train"]["optimizer"] = {"lr": 0.5}
    read = read_any(article, 4).config
    assert (read.generation.max_new_tokens, read.algorithm.gamma, read.train.optimizer.lr) == (8, 0.9, 0.5)
    assert read.algorithm.clip.low == 0.1


def test_keys_without_effect_are_noted(article):
    article |= {"evaluation": {"every_steps": 3}, "data": {"size": 9, "prompts_per_step": 5}}
    article["rl_algorithm"]["type"] = "grpo"
    article["generation"] = {"samples_per_prompt": 2}
    reading = read_any(article, 4)
    notes = "\n".join(reading.notes)
    for text in ("evaluation.every_steps 3 has no effect", "data.size 9 has no effect with init_trainer",
                 "\nmodel.critic /", "has no effect without a critic",
                 "rl_algorithm.value_loss_coef 0.5 has no effect without a critic"):
        assert text in notes
    assert reading.config.model.critic.path is None and reading.config.data.size == 4096


def test_an_algorithm_may_bring_a_kl_of_its_own(article):
    assert "no reference model is held" in "\n".join(read_any(article, 4).notes)
    article["rl_algorithm"]["type"] = "rloo"
    article["generation"] = {"samples_per_prompt": 2}
    reading = read_any(article, 4, "rloo")
    notes = "\n".join(reading.notes)
    assert "no reference model is held" not in notes and Role.REFERENCE in roles(reading.config)
    assert "rl_algorithm.clip_eps 0.1 has no effect with this policy loss, which has no ratio" in notes


def test_faults_speak_the_articles_names_and_come_all_at_once(article):
    article["rl_algorithm"] |= {"clip_esp": 1, "clip_eps": 2.0, "type": "dpo"}
    article["train"] |= {"fspd": True, "mixed_precision": "int8"}
    article["model"] |= {"actor": "nowhere", "refernce": {}}
    found = faults_of(article)
    assert set(found) == {"rl_algorithm.clip_esp", "rl_algorithm.clip_eps", "rl_algorithm.type", "train.fspd",
                          "train.mixed_precision", "model.actor", "model.refernce"}
    assert "did you mean rl_algorithm.clip_eps?" in found["rl_algorithm.clip_esp"]


@pytest.mark.parametrize(("change", "key"), [
    ({"train": 3}, "train"),
    ({"train": {"fsdp": "perhaps"}}, "train.fsdp"),
    ({"model": {"actor": {"path": "a", "name": "b"}}}, "model.actor.name"),
    ({"model": {"actor": {"dropout": 1}}}, "model.actor.dropout"),
    ({"model": {"actor": "a", "path": "b"}}, "model.actor"),
])
def test_misshapen_articles(change, key):
    assert key in faults_of({**ARTICLE, **change})


def test_the_algorithm_named_by_the_caller_must_not_contradict(article):
    assert "algorithm='grpo'" in faults_of(article, algorithm="grpo")["rl_algorithm.type"]
    del article["rl_algorithm"]["type"]
    assert read_any(article, 4, "ppo").config.algorithm.name is AlgorithmName.PPO
    with pytest.raises(ConfigError, match="grpo"):
        read_any(config(), 1, "grpo")
    tree = {"model": {"path": article["model"]["actor"]}, "generation": {"samples_per_prompt": 2}}
    assert read_any(tree, 1, "grpo").config.algorithm.name is AlgorithmName.GRPO


def test_the_callers_dict_is_left_alone(article):
    before = deepcopy(article)
    read_any(article, 4)
    assert article == before


def test_a_config_a_path_and_a_dict_are_read_the_same(tmp_path, article):
    tree = {"model": {"path": article["model"]["actor"]}, "train": {"seed": 4}}
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(load_config(tree)))
    readings = [read_any(source, 1) for source in (tree, file, str(file), load_config(tree))]
    assert [reading.config for reading in readings] == [load_config(tree)] * 4
    assert all(reading.notes == () for reading in readings)
    assert not is_article(tree)


def test_a_config_object_is_checked():
    with pytest.raises(ConfigError, match="choose tp 1, 2 or 4"):
        read_any(config("train.layout.tp=3"), 4)
