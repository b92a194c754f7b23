"""The Python interface: the article's dict as it stands, with a small local model, and every form of batch."""

import json
from pathlib import Path

import pytest
from torch.utils.data import default_collate

from hybridflow.api import Trainer, init_trainer
from hybridflow.config.faults import ConfigError
from hybridflow.config.reading import read_any
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.records import PromptRecord
from hybridflow.observe.trace import Trace
from hybridflow.parallel.collectives import Pending
from hybridflow.parallel.comm_hook import CommHook, GradBucket, plain
from hybridflow.parallel.world import World
from hybridflow.trainer.build import Builder
from hybridflow.trainer.export import export_role
from hybridflow.trainer.inputs import Inputs
from tests.ranks import run_ranks
from tests.trainer.runs import make_tokenizer, tiny_config

ROWS = [{"data_source": "sums", "prompt": f"{a} + {a} = ", "reward_model": {"ground_truth": str(2 * a)},
         "extra_info": {"a": a}} for a in range(8)]
REWARD = f"{Path(__file__).parent / 'trainer' / 'reward_of_length.py'}:score"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with its tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("model")
    config = tiny_config(make_tokenizer(folder / "tokenizer"), folder, ("train.mixed_precision=no",))
    inputs = Inputs.read(config, scores=False)
    export_role(folder / "export", Builder(inputs, World.single(), Trace()).actor(1, 1.0), inputs.tokenizer)
    return folder / "export"


def article(model: Path, folder: Path, **train: object) -> dict:
    """The nested dict of the article, with a small local model; the blocks after it are ours."""
    return {
        "train": {"total_steps": 2, "global_batch_size": 256, "micro_batch_size": 8, "gradient_accumulation_steps": 32,
                  "zero_stage": 2, "fsdp": False, "mixed_precision": "bf16", **train},
        "model": {"actor": str(model), "critic": str(model), "reward_model": None},
        "rl_algorithm": {"type": "ppo", "clip_eps": 0.2, "entropy_coef": 0.01, "value_loss_coef": 0.5},
        "generation": {"max_new_tokens": 4},
        "reward": {"function": REWARD},
        "logging": {"dir": str(folder)},
    }


def check_result(result: dict[str, float]) -> None:
    assert result["value_loss"] > 0 and result["entropy"] > 0 and result["grad_norm"] > 0
    assert result["policy_loss"] == result["policy/surrogate_loss"]
    assert result["rollout/samples"] == 8


def test_the_articles_dict_trains(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    config = article(model, tmp_path) | {"evaluation": {"prompts": 5}}
    trainer = init_trainer(config=config, data_loader=[ROWS], algorithm="ppo")
    try:
        check_result(trainer.train_step(ROWS))
        assert trainer.config.train.micro_batch_size == 8 and trainer.config.algorithm.clip.high == 0.2
        printed = capfd.readouterr().out
        assert "train.micro_batch_size 8 is read over all data-parallel ranks" in printed
        assert "zero_stage" not in printed and trainer.config.train.zero_stage == 2  # as it stands
        assert ("1 sample for each prompt of a batch; 256 rollouts per update or what is left, "
                "256 per replica (dp 1), 32 micro-batches of 8\n") in printed
        assert "evaluation.prompts 5 has no effect with init_trainer" in printed
        trainer.export(tmp_path / "export")
        assert (tmp_path / "export" / "model.safetensors").is_file()
    finally:
        trainer.close()


def ranks_step(world: World, config: dict, batch: list) -> dict[str, float]:
    trainer = Trainer(world, Inputs.read(read_any(config, world.size).config), [])
    result = trainer.train_step(batch)
    trainer.trainer.close()
    return result | {"micro_batch_size": trainer.config.train.micro_batch_size}


def test_the_articles_dict_on_four_ranks_is_the_same_step(model: Path, tmp_path: Path):
    config = article(model, tmp_path, mixed_precision="fp64")
    alone = ranks_step(World.single(), config, ROWS)
    layout = {"tp": 1, "pp": 2}
    for result in run_ranks(4, ranks_step, article(model, tmp_path, mixed_precision="fp64", layout=layout), ROWS):
        assert result["micro_batch_size"] == 4  # 8 over the two data-parallel ranks
        for name in ("policy_loss", "value_loss", "loss", "entropy", "grad_norm", "reward"):
            assert result[name] == pytest.approx(alone[name], rel=1e-8)


def gradients_halved(bucket: GradBucket) -> Pending:
    bucket.grads.mul_(0.5)
    return plain(bucket)


def test_a_communication_hook_reduces_gradients(model: Path, tmp_path: Path):
    """Four replicas whose hook halves what they send take steps of half the norm; and one thing decides the wire."""
    norms = [run_ranks(4, first_norm, article(model, tmp_path, mixed_precision="no"), hook)[0]
             for hook in (None, gradients_halved)]
    assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-5)
    config = article(model, tmp_path, reduce_dtype="bf16")
    with pytest.raises(ValueError, match="remove one of the two"):
        init_trainer(config=config, data_loader=[], algorithm="ppo", comm_hook=gradients_halved)


def first_norm(world: World, config: dict, hook: CommHook | None) -> float:
    reading = read_any(config, world.size, "ppo")
    return Trainer(world, Inputs.read(reading.config), [], comm_hook=hook).train_step(ROWS)["grad_norm"]


def test_every_form_of_batch_is_the_same_batch(model: Path, tmp_path: Path):
    config = article(model, tmp_path, mixed_precision="no")
    columns = {"prompt": [row["prompt"] for row in ROWS], "ground_truth": [str(2 * a) for a in range(8)],
               "data_source": ["sums"] * 8}
    records = [PromptRecord("sums", row["prompt"], row["reward_model"]["ground_truth"]) for row in ROWS]
    results = []
    for batch in (ROWS, columns, default_collate(ROWS), records, columns["prompt"]):
        trainer = init_trainer(config=config, data_loader=[])
        results.append(trainer.train_step(batch))
        trainer.close()
    assert len({result["policy/grad_norm"] for result in results}) == 1


def test_fit_takes_total_steps_from_the_loader(model: Path, tmp_path: Path):
    trainer = init_trainer(config=article(model, tmp_path, mixed_precision="no"), data_loader=[ROWS, ROWS, ROWS])
    check_result(trainer.fit())
    assert (tmp_path / "learning_curve.png").is_file()
    check_result(trainer.train_step(ROWS))  # more steps may follow
    trainer.data_loader = []
    with pytest.raises(ValueError, match="ended after 0 batches"):
        trainer.fit()
    trainer.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    short = init_trainer(config=article(model, tmp_path, mixed_precision="no"), data_loader=[ROWS])
    with pytest.raises(ValueError, match="ended after 1 batches; train.total_steps is 2"):
        short.fit()
    short.close()


def ranks_different_steps(world: World, config: dict, batches: list) -> str:
    trainer = Trainer(world, Inputs.read(read_any(config, world.size).config), [])
    try:
        trainer.train_step(batches[world.rank])
    except ValueError as error:
        return str(error)
    finally:
        trainer.trainer.close()
    return ""


def test_every_rank_must_pass_the_same_batch(model: Path, tmp_path: Path):
    told = run_ranks(2, ranks_different_steps, article(model, tmp_path, mixed_precision="no"), [ROWS, ROWS[::-1]])
    assert told == ["ranks [1] have other prompts than rank 0: pass the same batch on every rank"] * 2


def test_a_run_leaves_samples_and_what_its_sinks_write(model: Path, tmp_path: Path):
    config = article(model, tmp_path, mixed_precision="no")
    config["logging"] |= {"samples": 2, "tensorboard": True, "wandb": "offline"}
    trainer = init_trainer(config=config, data_loader=[])
    trainer.train_step(ROWS)
    trainer.close()
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(sample["step"], sample["prompt"], sample["truth"]) for sample in samples] == [
        (1, "0 + 0 = ", "0"), (1, "1 + 1 = ", "2")]
    assert list(tmp_path.glob("**/*.wandb")) and list((tmp_path / "tensorboard").iterdir())


def test_what_is_wrong_is_named(model: Path, tmp_path: Path):
    config = article(model, tmp_path)
    config["train"]["micro_batch_sze"] = config["train"].pop("micro_batch_size")
    config["rl_algorithm"]["clip_epsilon"] = 0.1
    with pytest.raises(ConfigError, match=r"(?s)clip_epsilon.*did you mean.*micro_batch_sze.*did you mean"):
        init_trainer(config=config, data_loader=[], algorithm="ppo")
    trainer = init_trainer(config=article(model, tmp_path, mixed_precision="no"), data_loader=[])
    record = PromptRecord("", "a", "")
    for batch, why in (([], "no prompts"), ({"question": ["a"]}, "needs prompt"), ([{"prompt": "a"}], "batch item 0"),
                       ({"prompt": ["a", "b"], "ground_truth": ["1"]}, "differ in length"),
                       ("hello", "not str 'hello'"), (None, "not NoneType"), (["a", 5], "batch item 1: is a int"),
                       (["a", ""], "batch item 1: key 'prompt' must not be empty"), (["\ud800"], "item 0: .* half"),
                       (["a", "1" * 500], "batch item 1: has 501 tokens; .* may have 124"),
                       ([TokenisedPrompt(0, (5, 999), record)], "batch item 0: token id 999 at position 1"),
                       ([TokenisedPrompt(0, (-1,), record)], "batch item 0: token id -1 at position 0"),
                       ([TokenisedPrompt(0, (), record)], "batch item 0: has no tokens")):
        with pytest.raises(ValueError, match=why):
            trainer.train_step(batch)
    trainer.close()


def test_the_tasks_scorer_needs_something_to_compare_with(model: Path, tmp_path: Path):
    config = article(model, tmp_path, mixed_precision="no")
    del config["reward"]
    trainer = init_trainer(config=config, data_loader=[])
    with pytest.raises(ValueError, match="batch item 8: has no ground truth"):
        trainer.train_step([*ROWS, "1 + 1 = "])
    assert trainer.train_step(ROWS)["rollout/samples"] == 8
    trainer.close()
