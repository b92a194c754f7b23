"""Rules between keys and with the world size (cases 26 and 27), each with a value that would work."""

import pytest

from hybridflow.config.check import checked_config
from hybridflow.config.command import Command
from hybridflow.config.faults import ConfigError
from hybridflow.config.load import load_config
from hybridflow.config.validate import validate
from tests.config.builders import SPEC, config


def faults(world_size, *overrides, command=Command.TRAIN, tree=None):
    return {fault.key: str(fault) for fault in validate(config(*overrides, tree=tree), world_size, command)}


def test_the_base_config_is_valid_on_many_worlds():
    assert [faults(world) for world in (1, 2, 3, 8)] == [{}, {}, {}, {}]


def test_remax_replaces_no_prompts_and_a_run_is_no_staler_than_long():
    assert "algorithm.resample_rounds" in faults(1, "algorithm.name=remax", "algorithm.resample_rounds=2")
    partial = ("generation.overlap=partial", "placement={actor: 0, generation: 1}", "train.total_steps=5")
    assert "generation.max_staleness" in faults(2, *partial, "generation.max_staleness=6")
    assert "generation.max_staleness" not in faults(2, *partial, "generation.max_staleness=5")


def test_what_partial_rollouts_and_ranks_that_only_generate_do_not_use():
    partial = ("generation.overlap=partial", "placement={actor: 0, critic: 0, generation: 1}")
    assert list(faults(2, *partial, "generation.balance=shared")) == ["generation.balance"]
    assert list(faults(2, *partial, "generation.layout.within_node=false")) == ["generation.layout.within_node"]
    assert faults(2, "generation.balance=shared", "generation.layout.within_node=false") == {}


def test_kto_learns_from_something():
    found = faults(1, "preference={desirable_weight: 0, undesirable_weight: 0}", command=Command.KTO)
    assert list(found) == ["preference.desirable_weight"]
    assert faults(1, "preference.desirable_weight=0", command=Command.KTO) == {}


def test_kto_needs_other_prompts_in_a_batch():
    for size, wrong in ((1, True), (2, False)):
        found = faults(1, f"train.global_batch_size={size}", "train.micro_batch_size=1", command=Command.KTO)
        assert ("train.global_batch_size" in found) is wrong


def test_a_world_of_8_cannot_have_tp_3():  # case 26
    message = faults(8, "train.layout.tp=3")["train.layout.tp"]
    assert message == "train.layout.tp = 3: world size 8 cannot be cut in tp 3 x pp 1; choose tp 1, 2, 4 or 8"


def test_choices_of_tp_take_pp_into_account():
    assert faults(8, "train.layout.tp=3", "train.layout.pp=2")["train.layout.tp"].endswith("choose tp 1, 2 or 4")
    assert faults(8, "train.layout.tp=2", "train.layout.pp=3")["train.layout.pp"].endswith("choose pp 1, 2 or 4")
    both = faults(8, "train.layout.tp=3", "train.layout.pp=5")["train.layout.tp"]
    assert both.endswith("choose tp and pp whose product is 1, 2, 4 or 8")
    assert "train.layout.tp" in faults(8, "train.layout.tp=0")


def test_dp_is_checked_if_given():
    assert faults(8, "train.layout.dp=4", "train.layout.tp=2") == {}
    assert "choose dp 4, or null" in faults(8, "train.layout.dp=2", "train.layout.tp=2")["train.layout.dp"]


def test_every_role_has_its_layout_checked_and_only_roles_that_exist():
    found = faults(4, "model.critic.layout.tp=3", "model.reference.layout.pp=3", "algorithm.kl.where=reward",
                   "generation.layout.tp=3")
    assert set(found) == {"model.critic.layout.tp", "model.reference.layout.pp", "generation.layout.tp"}
    assert "choose tp 1, 2 or 4" in found["generation.layout.tp"]
    found = faults(8, "generation.layout={tp: 4, pp: 4}", "train.layout.pp=3")
    assert list(found) == ["train.layout.pp", "generation.layout.tp"]
    assert "cannot be cut in tp 4 x pp 4; choose tp 1 or 2" in found["generation.layout.tp"]
    assert "choose pp 1, 2, 4 or 8" in faults(8, "generation.layout.pp=3")["generation.layout.pp"]
    few = faults(4, "generation.layout.pp=4", "model.spec.num_layers=3")["generation.layout.pp"]
    assert few.endswith("model.spec.num_layers 3 cannot fill 4 stages; choose pp 3 or less")
    assert list(faults(4, "generation.layout={pp: 2, layers_per_stage: [4]}")) == ["generation.layout.layers_per_stage"]


def test_the_same_bits_in_training_and_generation_ask_something_of_both():
    mode = "generation.batch_invariant=true"
    for precision in ("no", "bf16", "fp64"):
        assert faults(4, mode, f"train.mixed_precision={precision}", "train.layout.tp=2") == {}
    assert faults(4, mode, "train.mixed_precision=fp16")["train.mixed_precision"] == (
        "train.mixed_precision = fp16: has no batch-invariant arithmetic; choose no, bf16 or fp64, or "
        "generation.batch_invariant false")
    assert "choose packed or null" in faults(4, mode, "generation.weights=shared")["generation.weights"]
    assert "choose cp 1" in faults(4, mode, "train.layout.cp=2")["train.layout.cp"]
    reference = ("algorithm.kl.where=reward", "model.reference.layout.cp=2")
    assert list(faults(4, mode, *reference)) == ["model.reference.layout.cp"]
    assert faults(4, mode, "model.critic.layout.cp=2") == faults(4, *reference) == {}
    assert faults(4, mode, "train.layout.cp=2", "model.path=m", command=Command.GENERATE, tree={}) == {}


def test_what_vllm_cannot_do_is_told_at_once():
    vllm = "generation.engine=vllm"
    asked = ("generation.layout={tp: 2, pp: 2}", "generation.balance=shared", "generation.batch_invariant=true",
             "generation.weights=shared", "train.mixed_precision=fp64")
    keys = ["generation.layout.tp", "generation.layout.pp", "generation.balance", "generation.batch_invariant",
            "generation.weights", "train.mixed_precision"]
    for command in (Command.TRAIN, Command.API):
        told = faults(4, vllm, *asked, command=command)
        assert [key for key in keys if "vllm" in told[key]] == keys
    assert told["generation.layout.tp"] == ("generation.layout.tp = 2: vllm generates with a whole model on each rank; "
                                            "choose tp 1, or generation.engine own")
    answering = faults(4, vllm, *asked, "model.path=m", command=Command.GENERATE, tree={})
    assert list(answering) == [key for key in keys if key != "generation.weights"]
    for precision in ("no", "bf16", "fp16"):
        assert faults(4, vllm, f"train.mixed_precision={precision}", "generation.weights=packed",
                      "train.layout.tp=2") == {}


def test_shared_generation_weights_need_the_actor_in_place():
    shared, away = "generation.weights=shared", "train.offload.roles=true"
    assert faults(4, shared) == faults(4, away) == faults(4, away, "generation.weights=packed") == {}
    message = faults(4, shared, away)["generation.weights"]
    assert message == ("generation.weights = shared: generates with the training weights, which train.offload.roles "
                       "puts away meanwhile; choose packed or null, or train.offload.roles false")


def test_layers_per_stage():
    pp = "train.layout.pp=2"
    key = "train.layout.layers_per_stage"
    assert faults(2, pp, f"{key}=[1,3]") == {}
    for wrong in ("[4]", "[0,4]", "[2,3]", "[]"):
        assert key in faults(2, pp, f"{key}={wrong}"), wrong
    assert "train.layout.pp" in faults(8, "train.layout.pp=8")


def test_the_context_is_a_degree_like_the_others():
    assert faults(8, "train.layout.tp=2", "train.layout.cp=2", "train.layout.dp=2") == {}
    message = faults(8, "train.layout.cp=3")["train.layout.cp"]
    assert message == "train.layout.cp = 3: world size 8 cannot be cut in tp 1 x cp 3 x pp 1; choose cp 1, 2, 4 or 8"
    assert "choose dp 2, or null" in faults(8, "train.layout.tp=2", "train.layout.cp=2", "train.layout.dp=4")[
        "train.layout.dp"]
    assert "choose tp 1 or 2" in faults(8, "train.layout.tp=4", "train.layout.cp=4")["train.layout.tp"]
    assert set(faults(8, "train.layout.cp=0")) == {"train.layout.cp"}
    assert set(faults(8, "train.layout.cp=3", "train.layout.tp=3")) == {"train.layout.tp"}


@pytest.mark.parametrize(("schedule", "pp", "vpp", "choice"), [
    ("1f1b", 2, 1, None), ("gpipe", 2, 1, None), ("zb-h1", 2, 1, None), ("interleaved", 2, 2, None),
    ("interleaved", 1, 1, None), ("zb-v", 1, 1, None), ("zb-v", 2, 2, None),
    ("1f1b", 2, 2, "train.layout.vpp is 2; choose interleaved, or vpp 1"), ("gpipe", 2, 5, "is 5; choose vpp 1"),
    ("interleaved", 2, 1, "choose vpp 2 to 4, or train.schedule 1f1b"), ("zb-v", 2, 1, "choose vpp 2"),
    ("interleaved", 2, 5, "choose vpp 2 to 4"), ("interleaved", 4, 3, "choose vpp 2"), ("zb-v", 4, 3, "choose vpp 2"),
    ("interleaved", 1, 2, "choose vpp 1"), ("interleaved", 2, 0, "choose 1 or more"),
    ("1f1b", 16, 1, "choose pp 8 or less"),
    ("interleaved", 8, 2, "choose pp 4 or less, or train.schedule 1f1b with vpp 1"),
    ("zb-v", 8, 3, "choose pp 4 or less with vpp 2, or train.schedule 1f1b with vpp 1"),
    ("zb-v", 16, 2, "choose pp 4 or less, or train.schedule 1f1b with vpp 1 and pp 8 or less"),
])
def test_the_schedule_says_how_many_chunks_a_stage_has(schedule, pp, vpp, choice):
    tree = SPEC | {"model": {"spec": {"num_layers": 8}, "tokenizer": "words.model"}}
    read = config(f"train.schedule={schedule}", f"train.layout={{pp: {pp}, vpp: {vpp}}}", tree=tree)
    found = [str(fault) for fault in validate(read, 16)]
    assert len(found) == (choice is not None)
    assert choice is None or found[0].endswith(choice)


def test_a_misspelt_schedule_is_one_fault():
    with pytest.raises(ConfigError) as caught:
        checked_config(SPEC | {"model": {"spec": {}, "tokenizer": __file__}},
                       ["train.schedule=zbv", "train.layout={pp: 2, vpp: 2}"], 2, Command.TRAIN)
    assert [str(fault) for fault in caught.value.faults] == [
        "train.schedule = zbv: is not gpipe, 1f1b, interleaved, zb-h1 or zb-v; did you mean zb-v?"]


def test_recomputation_stops_within_a_chunk():
    key, most = "train.recompute_layers", "train.layout.pp=2"
    full = ("train.recompute=full", most)
    assert faults(2, *full, f"{key}=2") == {}
    assert faults(2, *full, f"{key}=3")[key].endswith("more than 2 layers; choose 1 or 2, or null for all")
    assert faults(2, *full, f"{key}=3", "train.layout.layers_per_stage=[1,3]") == {}
    assert faults(2, *full, f"{key}=3", "model.critic.layout={pp: 1}") == {}  # the critic's only chunk has 4

def test_who_only_scores_has_no_chunks_of_its_own():
    base = ["train.schedule=interleaved", "train.layout={pp: 2, vpp: 2}", "algorithm.kl.where=reward"]
    assert faults(2, *base) == {}  # the reference takes train.layout as it is
    assert faults(2, *base, "model.reference.layout.pp=2") == {}
    assert set(faults(2, *base, "model.reference.layout={pp: 2, vpp: 2}")) == {"model.reference.layout.vpp"}
    assert set(faults(2, *base, "model.critic.layout={pp: 2}")) == {"model.critic.layout.vpp"}  # it learns


def test_every_chunk_has_layers():
    base, key = ["train.schedule=interleaved", "train.layout={pp: 2, vpp: 2}"], "train.layout.layers_per_stage"
    assert faults(2, *base, f"{key}=[1,1,1,1]") == {}
    assert "each chunk of 2 stages x 2 chunks" in faults(2, *base, f"{key}=[2,2]")[key]
    message = faults(2, *base, "model.spec.num_layers=3")["train.layout.pp"]
    assert message.endswith("cannot fill 2 stages x 2 chunks of train.schedule interleaved; choose train.schedule "
                            "1f1b with vpp 1")


def test_a_token_budget_holds_the_longest_row():
    key = "train.micro_batch_tokens"
    assert faults(1, f"{key}=320") == {}
    assert faults(1, f"{key}=319")[key] == (
        f"{key} = 319: cannot hold the longest row, data.max_prompt_length 256 + generation.max_new_tokens 64 = 320 "
        "tokens; choose 320 or more")
    assert faults(8, f"{key}=320", "train.layout={tp: 8, sequence_parallel: true}") == {}
    cut = "train.layout={tp: 2, cp: 2, sequence_parallel: true}"
    assert faults(4, f"{key}=324", cut, "generation.max_new_tokens=65") == {}
    assert "padded to 324 in its layout; choose 324 or more" in faults(
        4, f"{key}=323", cut, "generation.max_new_tokens=65")[key]
    assert "a prompt of 1 + generation.max_new_tokens 64 = 65" in faults(1, f"{key}=64", command=Command.API)[key]
    assert faults(1, f"{key}=65", command=Command.API) == {}
    assert set(faults(1, "train.forward_micro_batch_tokens=319")) == {"train.forward_micro_batch_tokens"}
    assert set(faults(1, f"{key}=319", command=Command.SFT)) == {key}
    assert set(faults(1, f"{key}=320", command=Command.KTO)) == set()
    assert "which is 640 for a pair; choose 640 or more" in faults(1, f"{key}=639", command=Command.DPO)[key]
    assert faults(1, f"{key}=640", "train.forward_micro_batch_tokens=320", command=Command.REWARD_MODEL) == {}


def test_a_token_budget_is_judged_whatever_else_is_wrong():
    key = "train.micro_batch_tokens"
    found = faults(8, f"{key}=10", "train.micro_batch_size=8", "train.layout={tp: 3, sequence_parallel: true}",
                   "train.forward_micro_batch_tokens=5", "train.global_batch_size=99")
    assert set(found) == {key, "train.micro_batch_size", "train.forward_micro_batch_tokens", "train.layout.tp",
                          "train.global_batch_size"}
    assert found[key].endswith("= 320 tokens; choose 320 or more")  # the padding of tp 3 cannot be judged
    assert set(faults(1, f"{key}=10", "train.layout.cp=0")) == {key, "train.layout.cp"}


def test_the_command_line_switches_a_file_to_a_token_budget():
    file = SPEC | {"train": {"micro_batch_size": 8}}
    both = faults(1, "train.micro_batch_tokens=512", tree=file)
    assert list(both) == ["train.micro_batch_size"] and "with train.micro_batch_size=null" in both[
        "train.micro_batch_size"]
    assert faults(1, "train.micro_batch_tokens=512", "train.micro_batch_size=null", tree=file) == {}


def test_gradients_of_fp64_are_not_rounded_on_the_wire():
    bf16 = "train.reduce_dtype=bf16"
    assert faults(1, bf16) == {}
    assert set(faults(1, bf16, "train.mixed_precision=fp64")) == {"train.reduce_dtype"}


def test_accumulation_is_checked():
    base = ["train.global_batch_size=64", "train.micro_batch_size=4", "data.prompts_per_step=64"]
    assert faults(2, *base, "train.gradient_accumulation_steps=8") == {}
    message = faults(2, *base, "train.gradient_accumulation_steps=16")["train.gradient_accumulation_steps"]
    assert "4 x 16 x dp 2 = 128, but global_batch_size is 64" in message
    assert "choose gradient_accumulation_steps 8" in message and "global_batch_size 128" in message
    assert "micro_batch_size 8 x 16" in faults(1, "train.gradient_accumulation_steps=16")[
        "train.gradient_accumulation_steps"]  # 8 is what null means


def test_an_update_needs_that_many_rollouts():
    message = faults(1, "train.global_batch_size=65")["train.global_batch_size"]
    assert "64 prompts x 1 sample = 64 rollouts" in message and "choose 64 or less" in message
    assert faults(1, "train.global_batch_size=65", command=Command.SFT) == {}
    assert faults(1, "train.global_batch_size=50") == {}  # a short last update is fine


def test_models():
    assert "model.path" in faults(1, tree={"model": {"tokenizer": "a.model"}})
    assert "model.spec" in faults(1, tree={"model": {"spec": {}, "path": "folder"}})
    assert "model.tokenizer" in faults(1, tree={"model": {"spec": {}}})
    assert "model.tokenizer" in faults(1, tree={"model": {"spec": {}}}, command=Command.API)
    assert faults(1, tree={"model": {"path": "folder"}}) == {}
    assert "nothing to export" in faults(1, command=Command.EXPORT)["model.path"]
    for command in (Command.GENERATE, Command.COMPLETE):
        assert faults(1, command=command)["model.path"].endswith(
            "there is nothing to generate; give the folder of a trained model")


@pytest.mark.parametrize(("override", "key"), [
    ("model.spec.num_heads=3", "model.spec.num_heads"),
    ("model.spec.num_kv_heads=3", "model.spec.num_kv_heads"),
    ("model.spec.hidden_size=0", "model.spec.hidden_size"),
    ("model.spec.rope_theta=0", "model.spec.rope_theta"),
    ("model.spec.head_dim=5", "model.spec.head_dim"),
    ("model.spec={hidden_size: 20, num_heads: 4}", "model.spec.head_dim"),
    ("generation.temperature=0", "generation.temperature"),
    ("generation.min_new_tokens=65", "generation.min_new_tokens"),
    ("generation.min_p=1.5", "generation.min_p"),
    ("generation.repetition_penalty=0", "generation.repetition_penalty"),
    ("generation.max_step_tokens=0", "generation.max_step_tokens"),
    ("generation.kv_cache_mb=0", "generation.kv_cache_mb"),
    ("generation.stop=[a, '']", "generation.stop"),
    ("data.tasks=[]", "data.tasks"),
    ("data.tasks=[{weight: 0}]", "data.tasks[0].weight"),
    ("data.test_tasks=[{name: gcd}, {weight: -1}]", "data.test_tasks[1].weight"),
    ("evaluation.prompts=257", "evaluation.prompts"),
    ("data.test_size=0", "data.test_size"),
    ("logging.trace_step=0", "logging.trace_step"),
    ("logging.dir=''", "logging.dir"),
])
def test_single_rules(override, key):
    assert list(faults(1, override)) == [key]


def test_a_run_may_be_cut_short_of_what_its_file_asks_for():
    assert faults(1, "logging.trace_step=101") == {}


def test_generation_does_not_look_at_the_training_layout():
    model = ("model.path=folder", "model.spec=null", "train.layout.tp=2")
    assert faults(1, *model, command=Command.GENERATE) == {}
    assert list(faults(1, *model, "generation.layout.tp=2", command=Command.GENERATE)) == ["generation.layout.tp"]


def test_an_accuracy_to_stop_at_must_be_measured():
    stop, never = "sft.stop_at_accuracy=0.5", "evaluation.every_steps=null"
    assert faults(1, stop, command=Command.SFT) == {}
    assert "evaluation.every_steps" in faults(1, stop, never, command=Command.SFT)["sft.stop_at_accuracy"]


def test_greedy_generation_is_only_refused_in_training():
    assert faults(1, "generation.temperature=0", command=Command.GENERATE, tree={"model": {"path": "folder"}}) == {}


def test_grpo_needs_a_group():
    grpo = "algorithm.name=grpo"
    assert set(faults(1, grpo)) == {"generation.samples_per_prompt"}
    two = "generation.samples_per_prompt=2"
    assert faults(1, grpo, two) == {}
    assert faults(1, grpo, two, "algorithm.kl.where=reward") == {}  # the summed penalty comes off the row's reward
    assert faults(1, grpo, two, "algorithm.kl.where=loss", "algorithm.kl.estimator=k3") == {}


def test_generating_needs_held_out_prompts():
    gym, none = {"model": {"path": "folder"}}, "data.test_size=0"
    assert set(faults(1, none, tree=gym, command=Command.GENERATE)) == {"data.test_size"}
    assert faults(1, none, "evaluation.every_steps=null", tree=gym) == {}
    tree = {"model": {"path": "folder"}, "data": {"source": "jsonl", "train_files": ["a"]}}
    assert set(faults(1, tree=tree, command=Command.GENERATE)) == {"data.test_files"}
    assert faults(1, "data.test_files=[b]", tree=tree, command=Command.GENERATE) == {}
    assert faults(1, tree=tree, command=Command.COMPLETE) == {}  # it has prompts of its own


def test_files_need_names_and_a_judge():
    tree = {"model": {"path": "folder"}, "data": {"source": "jsonl"}}
    assert set(faults(1, tree=tree)) == {"data.train_files", "reward.function"}
    assert faults(1, "data.train_files=[a.jsonl]", "reward.function=a.py:score", tree=tree) == {}
    assert faults(1, "data.train_files=[a.jsonl]", "model.reward_model.path=b", tree=tree) == {}


def test_validate_reports_faults_of_all_kinds_together():
    found = faults(8, "train.layout.tp=3", "algorithm.gamma=2", "algorithm.kl.target=1", "data.tasks=[]")
    assert set(found) == {"train.layout.tp", "algorithm.gamma", "algorithm.kl.target", "data.tasks"}


def test_validate_does_not_change_its_config():
    before = load_config(SPEC)
    validate(before, 8)
    assert before == load_config(SPEC)
