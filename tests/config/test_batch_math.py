"""Case 28, short updates, and the table of layouts."""

from hybridflow.config.batch_math import BatchMath, layout_table, offline_line, scored_at_once, trained_at_once
from hybridflow.config.command import Command
from hybridflow.config.layouts import Role, generation_layout, role_layout, roles, token_multiple
from hybridflow.packing import MicroBatching
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
    math = BatchMath(prompts_per_step=10, samples_per_prompt=1, rollouts_per_update=6, dp=4,
                     micro_batching=MicroBatching(rows=1))
    assert (math.updates_per_step, math.last_update, math.rollouts_per_replica, math.micro_batches) == (2, 4, 2, 2)
    assert "(the last has 4)" in math.line()
    assert math.uneven_line() == (
        "The last update of each pass over the rollouts learns from 4 of them, the others from 6, since "
        "train.global_batch_size 6 does not divide 10; 5 and 10 do.")
    assert BatchMath(10, 1, 5, 4, MicroBatching(rows=1)).uneven_line() is None


def test_what_not_all_have_is_said_to_be_the_most():
    for update, dp, rows, line in (
        (8, 2, 4, "4 per replica (dp 2), 1 micro-batch of 4"),
        (8, 2, 8, "4 per replica (dp 2), 1 micro-batch of at most 8"),
        (8, 1, 3, "8 per replica (dp 1), 3 micro-batches of at most 3"),
        (7, 2, 4, "at most 4 per replica (dp 2), 1 micro-batch of at most 4"),
        (5, 2, 2, "at most 3 per replica (dp 2), at most 2 micro-batches of at most 2"),
        (1, 2, 1, "at most 1 per replica (dp 2), 1 micro-batch of at most 1"),
    ):
        assert BatchMath(update, 1, update, dp, MicroBatching(rows=rows)).share_line() == line
    assert BatchMath(1, 1, 1, 1, MicroBatching(rows=1)).line().startswith(
        "1 prompt x 1 sample = 1 rollout per step; 1 update per step, 1 rollout per update, 1 per replica")
    assert str(MicroBatching(rows=1)) == "1 row"


def test_the_critic_has_its_own_replicas():
    read = config(*CASE_28, "model.critic.layout.tp=1", "model.critic.layout.pp=1")
    assert BatchMath.of(read, 8, Role.CRITIC).dp == 8
    assert BatchMath.of(read, 8, Role.ACTOR).dp == 2


def test_roles_follow_the_config():
    assert roles(config()) == (Role.ACTOR, Role.CRITIC)
    assert roles(config("algorithm.name=grpo", "algorithm.kl.where=loss")) == (Role.ACTOR, Role.REFERENCE)
    assert roles(config("model.reward_model.path=m")) == (Role.ACTOR, Role.CRITIC, Role.REWARD)


def test_a_token_budget_says_only_what_can_be_known():
    budget = [*CASE_28[:-1], "train.micro_batch_tokens=8192"]
    math = BatchMath.of(config(*budget), 8)
    assert math.micro_batches is None and math.updates_per_step == 4
    assert math.line().endswith("1280 rollouts per update, shared out by tokens (dp 2), micro-batches of at most 8192 "
                                "tokens")


def test_scoring_runs_at_once_what_training_does_where_nothing_else_is_said():
    rows, tokens, forward = "train.micro_batch_size=3", "train.micro_batch_tokens=700", "train.forward_micro_batch"
    for overrides, trained, scored in (
        ([], MicroBatching(rows=8), MicroBatching(rows=8)),
        ([rows], MicroBatching(rows=3), MicroBatching(rows=3)),
        ([tokens], MicroBatching(tokens=700), MicroBatching(tokens=700)),
        ([rows, f"{forward}_size=9"], MicroBatching(rows=3), MicroBatching(rows=9)),
        ([tokens, f"{forward}_size=9"], MicroBatching(tokens=700), MicroBatching(rows=9)),
        ([rows, f"{forward}_tokens=900"], MicroBatching(rows=3), MicroBatching(tokens=900)),
        ([tokens, f"{forward}_tokens=900"], MicroBatching(tokens=700), MicroBatching(tokens=900)),
    ):
        read = config(*overrides)
        assert (trained_at_once(read), scored_at_once(read)) == (trained, scored), overrides


def test_context_ranks_share_rows_and_do_not_divide_them():
    read = config(*CASE_28, "train.layout.cp=2", "train.layout.sequence_parallel=true")
    assert BatchMath.of(read, 8).dp == 1 and BatchMath.of(read, 16).rollouts_per_replica == 640
    assert token_multiple(read.train.layout) == 4


def test_layouts_are_completed():
    read = config("train.layout.tp=2", "train.layout.pp=2", "generation.layout.tp=2", "model.critic.layout.pp=4")
    actor, critic, generating = role_layout(read, Role.ACTOR, 8), role_layout(read, Role.CRITIC, 8), \
        generation_layout(read, 8)
    assert [(x.tp, x.pp, x.dp) for x in (actor, critic, generating)] == [(2, 2, 2), (1, 4, 2), (2, 1, 4)]


def test_the_table_has_a_line_for_each_role():
    table = layout_table(config(*CASE_28, "train.layout.layers_per_stage=[1,3]", "algorithm.kl.where=reward",
                                "model.reference.layout.tp=8", "train.forward_micro_batch_size=16"), 8)
    assert [" ".join(line.split()) for line in table.splitlines()] == [
        "role ranks tp cp pp dp sequence parallel at once set by",
        "actor 0-7 2 1 2 [1, 3] 2 no 4 rows trained, 16 rows scored train.layout",
        "actor, generating 0-7 1 1 1 8 no - generation.layout",
        "critic 0-7 2 1 2 [1, 3] 2 no 4 rows trained, 16 rows scored train.layout",
        "reference 0-7 8 1 1 1 no 16 rows scored model.reference.layout",
    ]
    table = layout_table(config("train.layout={cp: 2, pp: 2, vpp: 2}", "train.micro_batch_tokens=999"), 8)
    assert " ".join(table.splitlines()[1].split()) == (
        "actor 0-7 1 2 2 x 2 chunks 2 no 999 tokens trained, 999 tokens scored train.layout")


def test_the_table_of_supervised_training_has_the_roles_that_it_needs():
    def cells(*overrides):
        table = layout_table(config("train.micro_batch_size=1", *overrides), 2, Command.SFT)
        return [" ".join(line.split()) for line in table.splitlines()[1:]]

    actor = "actor 0-1 1 1 1 2 no 1 row trained train.layout"
    assert cells() == [actor, "actor, generating 0-1 1 1 1 2 no - generation.layout"]
    assert cells("evaluation.every_steps=null") == [actor]
    assert cells("model.reward_model.path=m")[-1] == "reward 0-1 1 1 1 2 no 1 row scored train.layout"


def test_the_line_of_supervised_training():
    read = config("train.layout.tp=2", "sft.steps=100", "preference.steps=1")
    share = "32 per replica (dp 2), 4 micro-batches of 8"
    assert offline_line(read, 4, Command.SFT) == f"100 updates of 64 pairs, {share}"
    assert offline_line(read, 4, Command.DPO) == f"1 update of 64 pairs, {share}"
    assert offline_line(read, 4, Command.KTO) == f"1 update of 64 answers, {share}"


def test_the_tables_of_preference_training():
    def cells(command, *overrides):
        sizes = ("train.micro_batch_size=2", "train.forward_micro_batch_size=9")
        table = layout_table(config(*sizes, *overrides), 1, command)
        return [" ".join(line.split()) for line in table.splitlines()[1:]]

    answering = "actor, generating 0 1 1 1 1 no - generation.layout"
    reference = "reference 0 1 1 1 1 no 9 rows scored train.layout"
    actor = "actor 0 1 1 1 1 no 2 pairs trained, 9 rows scored train.layout"
    assert cells(Command.DPO) == [actor, answering, reference]
    assert cells(Command.KTO)[0] == actor.replace("pairs", "rows")
    assert cells(Command.REWARD_MODEL) == [actor]
    files = ("data.source=jsonl", "data.train_files=[a]")
    assert cells(Command.DPO, *files) == [actor, reference]  # nothing judges answers
    assert cells(Command.DPO, *files, "model.reward_model.path=m")[1:] == [
        answering, reference, "reward 0 1 1 1 1 no 9 rows scored train.layout"]
