"""A whole step is that of one process: the same rollouts, losses and gradient norms on every mixture of layouts."""

from pathlib import Path

import pytest
import torch
import transformers

from hybridflow.observe.metric_names import check_names
from hybridflow.parallel.world import World
from tests.ranks import run_ranks
from tests.trainer.runs import VOCAB, make_tokenizer, run_steps, tiny_config

TIMES = ("time/", "perf/", "reshard/", "train/reduced")  # depend on layout or machine
LAYOUTS = [
    ("train.layout.tp=2", "train.layout.pp=2", "generation.layout={tp: 1, pp: 2}", "generation.weights=shared"),
    ("train.layout.tp=2", "train.layout.pp=1", "generation.layout.tp=2", "train.zero_stage=0",
     "model.critic.layout={tp: 1, pp: 2}", "model.reference.layout={tp: 4, pp: 1}"),
    ("train.layout.tp=4", "generation.layout.tp=4", "train.layout.sequence_parallel=true",
     "model.critic.layout={tp: 1, pp: 4}"),
    ("train.layout.pp=4", "generation.layout={tp: 2, pp: 2, layers_per_stage: [3, 1]}", "generation.weights=shared",
     "train.schedule=gpipe",
     "train.forward_micro_batch_size=3"),
    ("train.layout.tp=1", "generation.layout.tp=1", "train.micro_batch_size=2", "train.zero_stage=1",
     "generation.weights=shared", "generation.layout.within_node=false", "generation.balance=shared"),
    ("train.layout={tp: 1, pp: 2, vpp: 2, cp: 2}", "generation.layout.tp=2", "train.schedule=zb-v",
     "train.recompute=selective", "train.offload.roles=true",
     "model.critic.layout={tp: 2, cp: 2, sequence_parallel: true}", "model.reference.layout={tp: 1, pp: 2, cp: 2}"),
    ("train.layout={tp: 2, pp: 2, vpp: 2}", "generation.layout.tp=1", "train.schedule=interleaved",
     "train.micro_batch_tokens=250", "train.recompute=full", "train.recompute_layers=1", "train.reduce_bucket_mb=1",
     "model.critic.layout={tp: 2, pp: 1}"),
    ("train.layout={tp: 1, pp: 2}", "generation.layout.pp=4", "train.schedule=zb-h1", "train.zero_stage=2",
     "train.micro_batch_size=1", "train.forward_micro_batch_tokens=200",
     "train.offload={optimizer: true, roles: true}"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def steps_on(world: World, tokenizer: Path, folder: Path, overrides: tuple[str, ...], steps: int) -> tuple:
    return run_steps(world, tiny_config(tokenizer, folder, overrides), steps)


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    """What must not depend on the layout; the log-prob gap is rounding itself."""
    return {name: value for name, value in metrics.items() if not name.startswith(TIMES) and "gap" not in name}


@pytest.mark.parametrize("algorithm", [
    ("algorithm.name=ppo",),
    ("algorithm.name=grpo", "algorithm.kl={where: loss, estimator: k3, coef: 0.1}",
     "algorithm.loss_reduction=seq-mean-token-mean"),
])
def test_every_layout_takes_the_step_of_one_process(algorithm: tuple[str, ...], tokenizer: Path, tmp_path: Path):
    alone, answers = steps_on(World.single(torch.device("cpu")), tokenizer, tmp_path, algorithm, 2)
    check_names(alone[0])
    assert alone[0]["reward/std"] > 0 and alone[0]["policy/grad_norm"] > 0 and alone[0]["reward/extra_digits"] > 0
    for layout in LAYOUTS:
        if "grpo" in algorithm[0]:
            layout = tuple(key for key in layout if "critic" not in key)
        ranks = run_ranks(4, steps_on, tokenizer, tmp_path, (*algorithm, *layout), 2)
        for step in range(2):
            assert {row: ids for _, rows in ranks for row, ids in rows[step].items()} == answers[step], layout
            for metrics, _ in ranks:
                assert numbers(metrics[step]) == pytest.approx(numbers(alone[step]), rel=1e-8, abs=1e-10), layout
                assert metrics[step]["policy/log_prob_gap_max"] < 1e-12


def test_one_update_per_rollout_has_ratio_one(tokenizer: Path, tmp_path: Path):
    """Case 6: ratio exactly 1, KL 0 and nothing clipped, whatever the micro-batch sizes of scoring and training."""
    keys = ("train.global_batch_size=18", "train.micro_batch_size=1", "train.forward_micro_batch_size=18")
    metrics, _ = steps_on(World.single(torch.device("cpu")), tokenizer, tmp_path, keys, 2)
    for step in metrics:
        assert step["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-15)
        assert step["policy/approx_kl"] == 0.0 and step["policy/clip_fraction"] == 0.0


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(layout[:3]))
def test_log_prob_gap_in_fp32_is_rounding(layout: tuple[str, ...], tokenizer: Path, tmp_path: Path):
    keys = ("train.mixed_precision=no", "data.prompts_per_step=32", "train.global_batch_size=96",
            "train.micro_batch_size=16")
    layout = tuple(f"{key}0" if key.startswith("train.micro_batch_tokens") else key for key in layout)  # more, too
    for metrics, _ in run_ranks(4, steps_on, tokenizer, tmp_path, (*layout, *keys), 1):
        assert 0 < metrics[0]["policy/log_prob_gap_max"] <= 1e-5


FAILING = Path(__file__).with_name("failing_reward.py")


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_step_in_which_every_reward_failed_is_skipped_and_counted(world_size: int, tokenizer: Path, tmp_path: Path):
    """Case 7: nothing trained, loss 0 with a live graph, no NaN, no hang; actor and critic count their steps."""
    keys = (f"reward.function={FAILING}:never", f"train.layout.pp={min(world_size, 2)}")
    for metrics, _ in run_ranks(world_size, steps_on, tokenizer, tmp_path, keys, 2):
        assert metrics[0]["reward/faults_not_finite"] == 18 and "reward/mean" not in metrics[0]
        assert metrics[0]["policy/loss"] == metrics[0]["critic/loss"] == metrics[0]["policy/grad_norm"] == 0.0
        assert [step["train/skipped_steps"] for step in metrics] == [4.0, 8.0]


def test_rows_whose_reward_failed_are_left_out_alike_in_every_layout(tokenizer: Path, tmp_path: Path):
    keys = (f"reward.function={FAILING}:sometimes",)
    alone, _ = steps_on(World.single(torch.device("cpu")), tokenizer, tmp_path, keys, 2)
    assert 0 < alone[0]["reward/faults_raised"] < 18 and alone[0]["policy/grad_norm"] > 0
    for metrics, _ in run_ranks(4, steps_on, tokenizer, tmp_path, (*keys, *LAYOUTS[0]), 2):
        for step in range(2):
            assert numbers(metrics[step]) == pytest.approx(numbers(alone[step]), rel=1e-8, abs=1e-10)


def test_a_reward_model_scores_in_a_layout_of_its_own(tokenizer: Path, tmp_path: Path):
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                     num_attention_heads=2, max_position_embeddings=128, num_labels=1, pad_token_id=0)
    transformers.LlamaForSequenceClassification(shape).save_pretrained(tmp_path / "reward")
    keys = ("reward.function=null", f"model.reward_model.path={tmp_path / 'reward'}")
    alone, _ = steps_on(World.single(torch.device("cpu")), tokenizer, tmp_path, keys, 1)
    assert alone[0]["reward/std"] > 0
    layout = (*LAYOUTS[0], "model.reward_model.layout={tp: 1, pp: 2}")
    for metrics, _ in run_ranks(4, steps_on, tokenizer, tmp_path, (*keys, *layout), 1):
        assert numbers(metrics[0]) == pytest.approx(numbers(alone[0]), rel=1e-8, abs=1e-10)
