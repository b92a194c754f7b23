"""`reward_model`, `dpo` and `kto` from end to end on one process, and what they leave behind."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from hybridflow.cli import main
from hybridflow.config.load import load_config
from hybridflow.micro_batch import Sample
from hybridflow.observe.metric_log import read_metrics
from hybridflow.observe.metric_names import check_names
from hybridflow.observe.trace import Trace
from hybridflow.parallel.world import World
from hybridflow.trainer.build import Builder
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.preference import DpoTrainer, KtoTrainer, PreferenceTrainer, RewardModelTrainer
from hybridflow.trainer.preference_data import label_rows, pair_rows, read_preferences
from hybridflow.trainer.row_numbers import row_scores
from tests.ranks import run_ranks
from tests.trainer.runs import make_tokenizer

SPEC = ("model.path=null", "model.spec={hidden_size: 32, intermediate_size: 48, num_layers: 2, num_heads: 4, "
        "num_kv_heads: 2}")
SMALL = (*SPEC, "train.layout={tp: 1, pp: 1}", "data.size=64", "data.test_size=16", "preference.steps=3",
         "train.global_batch_size=6", "train.micro_batch_size=2", "train.forward_micro_batch_size=8",
         "train.optimizer={lr: 1.0e-2, warmup_steps: 0}", "evaluation={every_steps: 2, prompts: 8}")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def run(command: str, folder: Path, tokenizer: Path, *overrides: str) -> list[dict]:
    assert main([command, f"configs/{command}_tiny.yaml", *SMALL, f"logging.dir={folder}",
                 f"model.tokenizer={tokenizer}", "data.max_prompt_length=40", "generation.max_new_tokens=40",
                 *overrides]) == 0
    records = read_metrics(folder / "metrics.jsonl")
    for record in records:
        check_names(name for name in record if name not in ("step", "unix_time"))
    return records


def untimed(records: list[dict]) -> list[dict]:
    times = ("time/", "perf/", "unix", "reshard/")
    return [{name: value for name, value in record.items() if not name.startswith(times)} for record in records]


def test_a_reward_model_is_a_classifier_that_transformers_and_we_open(tmp_path, tokenizer, capsys):
    records = run("reward_model", tmp_path, tokenizer)
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert "eval/accuracy" not in records[0] and records[1]["preference/loss"] == pytest.approx(0.69, abs=0.1)
    assert [name for name in records[2] if name.startswith("eval/")] == [
        f"eval/preference_{name}" for name in ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward")]
    said = " ".join(capsys.readouterr().out.split())
    assert "3 updates of 6 pairs, 6 per replica (dp 1), 3 micro-batches of 2" in said
    assert "2 pairs trained, 8 rows scored" in said and "(4 rows of 80 tokens at once" in said
    assert "Held-out preference accuracy went from" in said and (tmp_path / "learning_curve.png").exists()

    folder = tmp_path / "export"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__ == "LlamaForSequenceClassification" and model.config.num_labels == 1
    config = load_config("configs/dpo_tiny.yaml", [*SMALL, f"model.tokenizer={tokenizer}",
                                                   f"model.reward_model.path={folder}"])
    role = Builder(Inputs.read(config), World.single(torch.device("cpu")), Trace(None)).rewards().parts[0].scorer.role
    rows = [Sample((5, 6, 7), (8, 2)), Sample((9,), (10, 11, 12, 2))]
    with torch.no_grad():
        theirs = [model(torch.tensor([[*row.prompt, *row.response]])).logits.item() for row in rows]
    assert row_scores(role, rows).tolist() == pytest.approx(theirs, abs=1e-5)
    more = run("reward_model", tmp_path / "again", tokenizer, "model.spec=null", f"model.path={folder}",
               "preference.steps=1", "checkpoint.export_at_end=false")
    # The head that is there is gone on with.
    assert more[0]["eval/preference_loss"] == pytest.approx(records[-1]["eval/preference_loss"], rel=1e-5)


@pytest.mark.parametrize(("command", "start"), [("dpo", 0.6931), ("kto", 0.5)])
def test_it_starts_at_the_reference_and_answers_held_out_prompts(tmp_path, tokenizer, command, start):
    records = run(command, tmp_path, tokenizer)
    assert records[0]["eval/preference_loss"] == pytest.approx(start, abs=1e-3)
    assert records[0]["eval/preference_accuracy"] == pytest.approx(0.5, abs=0.3)
    assert all(0 <= record["eval/accuracy"] <= 1 for record in (records[0], records[2], records[3]))
    assert records[1]["preference/loss"] == pytest.approx(start, abs=1e-3)
    assert records[3]["preference/loss"] < start and ("preference/kl" in records[1]) == (command == "kto")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert type(exported).__name__ == "LlamaForCausalLM"


def test_a_precomputed_reference_changes_no_number(tmp_path, tokenizer):
    file = write(tmp_path / "train.jsonl", PAIRS)
    keys = (*FILES, f"data.train_files=[{file}]", "evaluation.every_steps=null", "checkpoint.export_at_end=false",
            "preference={steps: 2, loss: ipo, nll_coef: 0.5, rejected: other}")
    asked = run("dpo", tmp_path / "a", tokenizer, *keys)
    known = run("dpo", tmp_path / "b", tokenizer, *keys, "preference.precompute_reference=true")
    for one, other in zip(untimed(asked), untimed(known), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert "preference/nll" in asked[0] and "time/reference" in asked[0]


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


PAIRS = [{"prompt": f"{i} + 1 = ", "chosen": str(i + 1), "rejected": str(i) * (i + 1), "gap": i} for i in range(12)]
LABELS = [{"prompt": f"{i} + 9 = ", "completion": str(i), "label": i % 3 == 0} for i in range(9)]
EQUAL = {"prompt": "0 + 0 = ", "chosen": "0", "rejected": "0"}
FILES = ("data.source=jsonl", "data.tasks=[{name: chain_sum}]", "data.size=4096", "data.test_size=256",
         "preference.rejected=other")


def test_files_of_pairs_and_of_labels(tmp_path, tokenizer, capsys):
    train, test = write(tmp_path / "train.jsonl", PAIRS[:8]), write(tmp_path / "test.jsonl", PAIRS[8:])
    mixed = write(tmp_path / "mixed.jsonl", [*PAIRS[:4], *LABELS, EQUAL])
    files = (*FILES, f"data.test_files=[{test}]", "checkpoint.export_at_end=false", "preference.steps=1")
    for command, file, keys in (("reward_model", train, ["preference.margin_key=gap"]),
                                ("kto", mixed, ["train.global_batch_size=5"])):
        records = run(command, tmp_path / command, tokenizer, *files, f"data.train_files=[{file}]", *keys)
        assert "eval/preference_accuracy" in records[0] and "eval/accuracy" not in records[0]  # nothing judges
    assert capsys.readouterr().out.count("1 training pair of equal answers says nothing and was left out.") == 1
    for file, message in ((mixed, "mixed.jsonl row 5: keys 'chosen' and 'rejected' are missing"),
                          (test, "4 of 4 training rows have a held-out prompt")):
        assert main(["dpo", "configs/dpo_tiny.yaml", *SMALL, *files, f"model.tokenizer={tokenizer}",
                     f"data.train_files=[{file}]", f"logging.dir={tmp_path / 'no'}"]) == 2
        assert message in capsys.readouterr().err


def test_answers_to_prompts_from_files_are_judged_by_a_function(tmp_path, tokenizer):
    train, test = write(tmp_path / "train.jsonl", PAIRS[:8]), write(tmp_path / "test.jsonl", PAIRS[8:])
    judge = Path(__file__).with_name("reward_of_length.py")
    records = run("dpo", tmp_path / "dpo", tokenizer, *FILES, f"data.train_files=[{train}]", "preference.steps=1",
                  f"data.test_files=[{test}]", f"reward.function={judge}:score", "checkpoint.export_at_end=false")
    assert all("eval/reward_mean" in record and record["eval/faults"] == 0 for record in records)


# --- whole steps on four ranks ----------------------------------------------------------------------------------------

LAYOUTS = ("{pp: 2}", "{cp: 2, tp: 2}")


def trained(world: World, command: str, tokenizer: Path, file: Path, layouts: tuple[str, ...]) -> list[list[dict]]:
    """Metrics of two steps and of the evaluation after them, for each layout."""
    told = []
    for layout in layouts:
        config = load_config(f"configs/{command}_tiny.yaml", [
            *SMALL, *FILES, f"data.train_files=[{file}]", f"model.tokenizer={tokenizer}", "train.mixed_precision=fp64",
            f"train.layout={layout}", "generation.max_new_tokens=40", "evaluation.every_steps=null"])
        inputs, split = Inputs.read(config, scores=False), read_preferences(config)
        rows = (label_rows if command == "kto" else pair_rows)(inputs, split.train)
        examples = [rows.example(row) for row in range(12)]
        trainer = trainer_of(command, inputs, world, examples[9:])
        told.append([trainer.step(examples[:5]), trainer.step(examples[5:9]), trainer.evaluator(())()])
    return told


def trainer_of(command: str, inputs: Inputs, world: World, held_out: list) -> PreferenceTrainer:
    if command == "dpo":
        return DpoTrainer(inputs, world, held_out, list)
    return {"kto": KtoTrainer, "reward_model": RewardModelTrainer}[command](inputs, world, held_out)


@pytest.mark.parametrize("command", ["dpo", "kto", "reward_model"])
def test_metrics_of_four_ranks_are_those_of_one(command, tokenizer, tmp_path):
    file = write(tmp_path / "train.jsonl", PAIRS)
    [alone] = trained(World.single(torch.device("cpu")), command, tokenizer, file, ("{tp: 1}",))
    if command == "dpo":  # the policy is still its reference: which reward of a pair is larger is up to rounding
        assert abs(alone[0]["preference/margin"]) < 1e-12
        alone[0]["preference/accuracy"] = pytest.approx(0.5, abs=0.5)
    assert len(alone[2]) >= 5
    for rank in run_ranks(4, trained, command, tokenizer, file, LAYOUTS):
        for layout in rank:
            for found, expected in zip(untimed(layout), untimed(alone), strict=True):
                assert found.keys() == expected.keys()
                assert all(value == pytest.approx(expected[name], rel=1e-6, abs=1e-9) if isinstance(
                    expected[name], float) else value == expected[name] for name, value in found.items()), found
