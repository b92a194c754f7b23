"""Files that a config names, and models that do not fit their layouts."""

import json

import pytest

from hybridflow.config.check import checked_config
from hybridflow.config.command import Command
from hybridflow.config.faults import ConfigError
from hybridflow.config.files import missing_files
from hybridflow.config.shapes import shape_faults, spec_decoder
from tests.config.builders import config


def missing(*overrides, command=Command.TRAIN, tree=None):
    return {fault.key for fault in missing_files(config(*overrides, tree=tree), command)}


def write_model(folder, **changes):
    folder.mkdir()
    shape = {"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
             "num_hidden_layers": 2, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps(shape | changes))
    return str(folder)


def test_missing_files_of_each_kind():
    tree = {"model": {"path": "m", "critic": {"path": "c"}, "reward_model": {"path": "r"}, "tokenizer": "t"},
            "data": {"source": "jsonl", "train_files": ["a"], "test_files": ["b"]}, "reward": {"function": "f.py:g"}}
    everything = {"model.path", "model.critic.path", "model.reward_model.path", "model.tokenizer",
                  "data.train_files[0]", "data.test_files[0]", "reward.function"}
    assert missing(tree=tree) == everything
    assert missing(tree=tree, command=Command.API) == everything - {"data.train_files[0]", "data.test_files[0]"}
    assert missing(tree=tree, command=Command.EXPORT) == {"model.path"}


def test_a_file_in_the_way_of_the_run_folder():
    for command in Command:
        assert "logging.dir" in missing(f"logging.dir={__file__}/run", command=command)
        assert "logging.dir" not in missing("logging.dir=not/there/yet", command=command)


def test_sft_makes_its_tokenizer_under_one_name():
    size = "sft.tokenizer_vocab_size=64"
    assert missing(command=Command.SFT) == missing(size, command=Command.SFT) == {"model.tokenizer"}
    assert missing(size, "model.tokenizer=runs/tokenizer.model", command=Command.SFT) == set()
    (fault,) = missing_files(config(size, "model.tokenizer=runs/words.model"), Command.SFT)
    assert str(fault).endswith("called tokenizer.model; choose runs/tokenizer.model")
    assert missing(size, f"model.tokenizer={__file__}", command=Command.SFT) == set()  # it is there already


def test_sft_may_be_judged_by_a_reward_model_or_function():
    assert missing(f"model.tokenizer={__file__}", "model.reward_model.path=r", "reward.function=f.py:g",
                   command=Command.SFT) == {"model.reward_model.path", "reward.function"}


def test_reward_functions(tmp_path, monkeypatch):
    file = tmp_path / "score.py"
    file.write_text("")
    tokenizer = f"model.tokenizer={file}"
    assert missing(tokenizer, f"reward.function={file}:score") == set()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert missing(tokenizer, "reward.function='~/score.py:score'") == set()
    for wrong in ("score", "score.py", f"{file}:", f"{file}:a b", f"{tmp_path}/none.py:score"):
        assert missing(tokenizer, f"reward.function='{wrong}'") == {"reward.function"}, wrong


def shapes(world_size, *overrides, tree=None, command=Command.TRAIN):
    return [str(fault) for fault in shape_faults(config(*overrides, tree=tree), world_size, command)]


def test_a_spec_that_fits_has_no_fault():
    assert shapes(8, "train.layout.tp=4", "train.layout.pp=2", "generation.layout.tp=2") == []


def test_each_layout_is_held_against_its_model(tmp_path):
    critic = write_model(tmp_path / "critic", num_attention_heads=2)
    found = "\n".join(shapes(4, "model.spec.num_heads=4", f"model.critic.path={critic}", "train.layout.tp=4"))
    assert "train.layout = tp 4 pp 1 dp 1: model.critic.path: tp 4 must divide num_heads 2" in found
    assert "model.spec" not in found
    found = "\n".join(shapes(8, "generation.layout.tp=8"))
    assert "generation.layout = tp 8 pp 1 dp 1: model.spec: tp 8 must divide num_heads 4" in found


def test_each_chunk_has_a_layer_of_a_folders_model(tmp_path):
    tree = {"model": {"path": write_model(tmp_path / "model")},
            "train": {"schedule": "interleaved", "layout": {"pp": 2, "vpp": 2}}}
    (found,) = shapes(2, tree=tree)
    assert "pp 2 x vpp 2 = 4 chunks must be at most num_layers 2" in found
    (found,) = shapes(4, "generation.layout.pp=4", tree={"model": tree["model"]})
    assert "generation.layout = tp 1 pp 4 dp 1: model.path: pp 4 must be at most num_layers 2" in found


def test_recomputation_stops_within_a_chunk_of_a_folders_model(tmp_path):
    tree = {"model": {"path": write_model(tmp_path / "model")}}
    (found,) = shapes(1, "train.recompute=full", "train.recompute_layers=3", tree=tree)
    assert found == "train.recompute_layers = 3: no chunk has more than 2 layers; choose 1 or 2, or null for all"
    assert shapes(1, "train.recompute=full", "train.recompute_layers=2", tree=tree) == []
    critic = write_model(tmp_path / "critic", num_hidden_layers=3)
    assert shapes(1, "train.recompute=full", "train.recompute_layers=3", f"model.critic.path={critic}", tree=tree) == []


def test_every_model_has_positions_for_the_longest_sequence(tmp_path):
    (found,) = shapes(1, "model.spec.max_position_embeddings=319")
    assert found == ("model.spec.max_position_embeddings = 319: is below data.max_prompt_length 256 + "
                     "generation.max_new_tokens 64; choose 320 or more")
    assert shapes(1, "model.spec.max_position_embeddings=320") == []
    short = {"model": {"path": write_model(tmp_path / "actor"),
                       "critic": {"path": write_model(tmp_path / "critic", max_position_embeddings=100)}}}
    (found,) = shapes(1, tree=short)
    assert found.startswith("model.critic.path") and "its max_position_embeddings 100 is below" in found
    assert shapes(1, tree=short, command=Command.SFT) == []  # has no critic
    assert shapes(1, tree=short, command=Command.API) == []  # has its own prompts
    (found,) = shapes(1, "generation.max_new_tokens=101", tree=short, command=Command.API)
    assert found.endswith("100 is below generation.max_new_tokens 101; choose a lower one")


def test_critic_and_reward_model_know_the_actors_tokens(tmp_path):
    models = {name: write_model(tmp_path / name, vocab_size=size) for name, size in (("a", 64), ("b", 63), ("c", 65))}
    for other, wrong in (("b", True), ("c", False)):
        tree = {"model": {"path": models["a"], "critic": {"path": models[other]}}}
        assert any("its vocabulary of 63 is smaller than the actor's of 64" in found
                   for found in shapes(1, tree=tree)) == wrong
        tree = {"model": {"path": models["a"], "reward_model": {"path": models[other]}}}
        assert any(found.startswith("model.reward_model.path") for found in shapes(1, tree=tree)) == wrong
    assert shapes(1, f"model.critic.path={models['b']}") == []  # a spec's vocabulary is the tokenizer's


def test_batch_invariant_sums_are_cut_alike_in_training_and_generation():
    heads = ("generation.batch_invariant=true", "model.spec.num_heads=12", "model.spec.intermediate_size=720",
             "model.spec.hidden_size=144", "model.spec.num_kv_heads=12")
    assert shapes(12, *heads, "train.layout.tp=4", "generation.layout.tp=2") == []
    assert shapes(12, *heads, "train.layout.tp=3", "generation.layout.tp=3") == []
    (found,) = shapes(12, *heads, "train.layout.tp=3")
    assert found == ("train.layout.tp = 3: sums over tensor ranks have the bits of generation.layout.tp 1 only where "
                     "both divide 4 (generation.batch_invariant); choose tp 1")
    reference = ("algorithm.kl.where=reward", "model.reference.layout.tp=6")
    assert [found.split(" = ")[0] for found in shapes(12, *heads, *reference)] == ["model.reference.layout.tp"]
    assert shapes(12, *heads[1:], "train.layout.tp=3") == shapes(12, *heads, "train.layout.tp=3", command=Command.SFT) \
        == []


def test_a_folder_that_is_not_supported_is_a_fault(tmp_path):
    folder = write_model(tmp_path / "model", model_type="mamba")
    (found,) = shapes(1, tree={"model": {"path": folder}})
    assert found.startswith("model.path") and "mamba" in found


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_spec_becomes_a_decoder(family):
    spec = config(f"model.spec.family={family}", "model.spec.num_heads=4", "model.spec.rope_theta=5e5").model.spec
    assert spec is not None
    decoder = spec_decoder(spec, vocab_size=99)
    assert (decoder.family.value, decoder.vocab_size, decoder.head_dim, decoder.num_kv_heads) == (family, 99, 32, 4)
    assert (decoder.qkv_bias, decoder.qk_norm) == (family == "qwen2", family == "qwen3")
    assert decoder.rope.theta == 5e5


def test_checked_config_reports_shapes_only_when_nothing_else_is_wrong(tmp_path):
    folder = write_model(tmp_path / "model")
    tree = {"model": {"path": folder}, "train": {"layout": {"pp": 4}}}
    with pytest.raises(ConfigError, match="pp 4 must be at most num_layers 2"):
        checked_config(tree, [], 4, Command.TRAIN)
    with pytest.raises(ConfigError) as caught:
        checked_config(tree, ["sede=1"], 4, Command.TRAIN)
    assert [fault.key for fault in caught.value.faults] == ["sede"]


def test_checked_config_joins_faults_of_reading_values_and_files():
    tree = {"model": {"path": "nowhere"}, "train": {"layout": {"tp": 3}, "seed": "x"}, "tensor_parallel_szie": 2}
    with pytest.raises(ConfigError) as caught:
        checked_config(tree, ["oops"], 8, Command.TRAIN)
    assert {fault.key for fault in caught.value.faults} == {
        "oops", "tensor_parallel_szie", "train.seed", "train.layout.tp", "model.path"}
