"""Case 28, short updates, and the table of layouts."""

from hybridflow.config.batch_math import BatchMath, layout_table, sft_line
from hybridflow.config.layouts import Role, generation_layout, role_layout, roles
from tests.config.builders import config

CASE_28 = ["data.prompts_per_step=1024", "generation.samples_per_prompt=5", "train.global_batch_size=1280",
           "train.layout.tp=2", "train.layout.pp=2", "train.micro_batch_size=4"]


def test_case_28():
    math = BatchMath.of(config(*CASE_28), 8)
    assert (math.updates_per_step, math.rollouts_per_update, math.rollouts_per_replica, math.micro_batches) == (
        4, 1280, 640, 160)
    assert math.line() == ("1024 prompts x 5 samples = 5120 rollouts per step; 4 updates per step, 1280 rollouts per "
                           "update, 640 per replica (dp 2), 160 micro-batches of 4")


def test_epochs_multiply_the_updates():
    math = BatchMath.of(config(*CASE_28, "train.epochs_per_rollout=3"), 8)
    assert math.updates_per_step == 12 and "12 updates per step (4 x 3 epochs)" in math.line()


def test_the_line_where_the_caller_brings_the_prompts():
    assert BatchMath.of(config(*CASE_28), 8).line_of_any_batch() == (
        "5 samples for each prompt of a batch; 1280 rollouts per update or what is left, 640 per replica (dp 2), "
        "160 micro-batches of 4")
    assert "; 3 epochs over" in BatchMath.of(config("train.epochs_per_rollout=3"), 1).line_of_any_batch()


def test_a_short_last_update_and_a_ragged_share_are_told():
    math = BatchMath(prompts_per_step=10, samples_per_prompt=1, rollouts_per_update=6, dp=4, micro_batch_size=1)
    assert (math.updates_per_step, math.last_update, math.rollouts_per_replica, math.micro_batches) == (2, 4, 2, 2)
    assert "(the last has 4)" in math.line()


def test_the_critic_has_its_own_replicas():
    read = config(*CASE_28, "model.critic.layout.tp=1", "model.critic.layout.pp=1")
    assert BatchMath.of(read, 8, Role.CRITIC).dp == 8
    assert BatchMath.of(read, 8, Role.ACTOR).dp == 2


def test_roles_follow_the_config():
    assert roles(config()) == (Role.ACTOR, Role.CRITIC)
    assert roles(config("algorithm.name=grpo", "algorithm.kl.where=loss")) == (Role.ACTOR, Role.REFERENCE)
    assert roles(config("model.reward_model.path=m")) == (Role.ACTOR, Role.CRITIC, Role.REWARD)


def test_layouts_are_completed():
    read = config("train.layout.tp=2", "train.layout.pp=2", "generation.layout.tp=2", "model.critic.layout.pp=4")
    actor, critic, generating = role_layout(read, Role.ACTOR, 8), role_layout(read, Role.CRITIC, 8), \
        generation_layout(read, 8)
    assert [(x.tp, x.pp, x.dp) for x in (actor, critic, generating)] == [(2, 2, 2), (1, 4, 2), (2, 1, 4)]


def test_the_table_has_a_line_for_each_role():
    table = layout_table(config(*CASE_28, "train.layout.layers_per_stage=[1,3]", "algorithm.kl.where=reward",
                                "model.reference.layout.tp=8", "train.forward_micro_batch_size=16"), 8)
    assert [" ".join(line.split()) for line in table.splitlines()] == [
        "role tp pp dp sequence parallel rows at once set by",
        "actor 2 2 [1, 3] 2 no 4 trained, 16 scored train.layout",
        "actor, generating 1 1 8 no - generation.layout",
        "critic 2 2 [1, 3] 2 no 4 trained, 16 scored train.layout",
        "reference 8 1 1 no 16 scored model.reference.layout",
    ]


def test_the_line_of_supervised_training():
    read = config("train.layout.tp=2", "sft.steps=100")
    assert sft_line(read, 4) == "100 updates of 64 pairs, 32 per replica (dp 2), 4 micro-batches of 8"
