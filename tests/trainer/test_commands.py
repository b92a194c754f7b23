"""The commands from end to end on one process: warm start, PPO, generate, export, and what they leave behind."""

import json
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from hybridflow.cli import main
from hybridflow.data.tokenizer import open_tokenizer
from hybridflow.observe.metric_log import read_metrics
from hybridflow.observe.metric_names import check_names

TASK = "data.tasks=[{name: spell_backward, template: '{metadata[word]}=', config: {min_word_len: 3, max_word_len: 3}}]"
DATA = (TASK, "data.size=64", "data.test_size=16", "data.max_prompt_length=16", "generation.max_new_tokens=5",
        "evaluation.prompts=16", "logging.progress=true")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished warm start in sft/ and a finished PPO run in ppo/."""
    root = tmp_path_factory.mktemp("runs")
    small = "{hidden_size: 32, intermediate_size: 48, num_layers: 2, num_heads: 4, num_kv_heads: 2}"
    assert main(["sft", "configs/sft_tiny.yaml", *DATA, f"model.spec={small}", f"logging.dir={root}/sft",
                 f"model.tokenizer={root}/tokenizer.model", "sft.tokenizer_vocab_size=300", "sft.steps=4",
                 "train.global_batch_size=16", "train.micro_batch_size=8", "evaluation.every_steps=2",
                 "train.optimizer.warmup_steps=1"]) == 0
    assert main(["train", "configs/ppo_tiny.yaml", *DATA, f"model.path={root}/sft/export", f"logging.dir={root}/ppo",
                 "model.tokenizer=null", "train.layout={tp: 1, pp: 1}", "train.total_steps=2",
                 "data.prompts_per_step=8", "generation.samples_per_prompt=2", "train.global_batch_size=8",
                 "train.micro_batch_size=4", "evaluation.every_steps=1", "logging.trace_step=1",
                 "logging.tensorboard=true", "logging.wandb=offline", "train.optimizer.warmup_steps=0"]) == 0
    return root


def test_supervised_training_starts_with_its_layout_and_its_activations(runs: Path, tmp_path: Path, capsys):
    assert main(["sft", str(runs / "sft" / "config.yaml"), f"logging.dir={tmp_path}", "sft.steps=1",
                 "checkpoint.export_at_end=false", "evaluation.every_steps=null", "sft.stop_at_accuracy=null"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 update of 16 pairs, 16 per replica (dp 1), 2 micro-batches of 8" in said
    assert "actor 0 1 1 1 1 no 8 rows trained train.layout" in said and "critic" not in said
    assert "Activations of the actor: at most" in said and "8 rows of 21 tokens at once" in said


def test_a_reward_whose_policy_is_error_ends_the_run_with_one_message(runs: Path, tmp_path: Path, capfd):
    rule = Path(__file__).with_name("failing_reward.py")
    assert main(["train", str(runs / "ppo" / "config.yaml"), f"logging.dir={tmp_path}", f"reward.function={rule}:never",
                 "reward.on_fault.not_finite=error", "evaluation.every_steps=null", "logging.trace_step=null"]) == 3
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "reward" in line]
    assert line == ("the reward of row 0 (data source 'spell_backward') failed, and reward.on_fault ends the run: the "
                    "score is nan")


def test_a_users_loss_that_is_not_finite_ends_the_run_with_one_message(runs: Path, tmp_path: Path, capfd):
    own = tmp_path / "own.py"
    own.write_text("def loss(log_probs, columns, rows, clip):\n"
                   "    total = (columns.weight * log_probs).sum() * (float('nan') if rows.count > 2 else 1.0)\n"
                   "    return total, {'policy_loss': total.detach().double()}\n")
    assert main(["train", str(runs / "ppo" / "config.yaml"), f"logging.dir={tmp_path}", "logging.trace_step=null",
                 f"algorithm.policy_loss={own}:loss", "evaluation.every_steps=null"]) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"algorithm.policy_loss = {own}:loss: returned the loss nan for "), said
    assert "Traceback" not in said


def test_a_run_leaves_metrics_samples_curve_trace_and_config(runs: Path):
    records = read_metrics(runs / "ppo" / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2]
    for record in records:
        check_names(name for name in record if name not in ("step", "unix_time"))
        assert 0 <= record["eval/accuracy"] <= 1
    assert records[1]["policy/log_prob_gap_max"] <= 1e-5 and records[2]["rollout/samples"] == 16
    assert (runs / "ppo" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((runs / "ppo" / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"step", "generate", "reshard", "update_actor", "update_critic", "F0.0", "B0.0", "STEP"} <= names
    assert len((runs / "ppo" / "samples.jsonl").read_text().splitlines()) >= 2
    assert list((runs / "ppo").glob("**/*.wandb")) and list((runs / "ppo" / "tensorboard").iterdir())


def test_the_resolved_config_starts_the_same_run_again(runs: Path, tmp_path: Path):
    assert main(["train", str(runs / "ppo" / "config.yaml"), f"logging.dir={tmp_path}"]) == 0
    first, again = (read_metrics(folder / "metrics.jsonl") for folder in (runs / "ppo", tmp_path))
    times = ("time/", "perf/", "unix", "reshard/")
    untimed = [{name: value for name, value in record.items() if not name.startswith(times)}
               for record in (*first, *again)]
    assert untimed[:3] == untimed[3:]


def test_the_config_of_a_run_serves_to_ask_and_to_export_it(runs: Path, tmp_path: Path, capsys):
    for run in ("sft", "ppo"):  # the first started from model.spec
        trained, asked = runs / run, tmp_path / run
        keys = [str(trained / "config.yaml"), f"model.path={trained}/export", f"logging.dir={asked}"]
        assert main(["generate", *keys]) == 0 and (asked / "generations.jsonl").exists()
        assert main(["export", *keys]) == 0 and (asked / "export" / "config.json").exists()
        assert "read at tp 1 x pp 1" in capsys.readouterr().out


def test_a_model_is_evaluated_without_training(runs: Path, tmp_path: Path):
    keys = [str(runs / "ppo" / "config.yaml"), f"model.path={runs}/ppo/export"]
    assert main(["evaluate", *keys, f"logging.dir={tmp_path / 'greedy'}"]) == 0
    greedy = json.loads((tmp_path / "greedy" / "evaluation.json").read_text())
    last = read_metrics(runs / "ppo" / "metrics.jsonl")[-1]
    assert {name: greedy[name] for name in ("eval/accuracy", "eval/reward_mean")} == {
        name: last[name] for name in ("eval/accuracy", "eval/reward_mean")}
    assert not (tmp_path / "greedy" / "evaluations.jsonl").exists()
    sampled = "evaluation={samples_per_prompt: 3, temperature: 1.0, save_answers: true}"
    assert main(["evaluate", *keys, f"logging.dir={tmp_path / 'three'}", sampled]) == 0
    three = json.loads((tmp_path / "three" / "evaluation.json").read_text())
    check_names(three)
    assert three["eval/mean@3"] == three["eval/spell_backward/mean@3"] <= three["eval/spell_backward/best@3"]
    lines = [json.loads(line) for line in (tmp_path / "three" / "evaluations.jsonl").read_text().splitlines()]
    assert len(lines) == 48 and len({(line["prompt"], line["answer"]) for line in lines}) > 16
    assert three["eval/reward_mean"] == pytest.approx(sum(line["reward"] for line in lines) / 48)
    shape = transformers.LlamaConfig(vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                     num_attention_heads=2, max_position_embeddings=128, num_labels=1, pad_token_id=0)
    transformers.LlamaForSequenceClassification(shape).save_pretrained(tmp_path / "judge")
    judge = [f"model.reward_model.path={tmp_path}/judge", "train.layout.tp=1", f"logging.dir={tmp_path / 'judged'}"]
    assert main(["evaluate", *keys, *judge]) == 0
    judged = json.loads((tmp_path / "judged" / "evaluation.json").read_text())
    assert "eval/accuracy" not in judged and judged["eval/reward_mean"] == judged["eval/spell_backward/mean@1"] != 0


def test_a_run_on_a_mixture_that_is_streamed_cut_and_logged_as_verl_logs(runs: Path, tmp_path: Path):
    rows = [{"data_source": "words", "prompt": word, "reward_model": {"ground_truth": word[::-1]},
             "ability": "spelling", "extra_info": {"index": i}}
            for i, word in enumerate(("abc=", "a long one: def=", "xyz="))]
    (tmp_path / "words.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "held.jsonl").write_text(json.dumps(rows[0] | {"prompt": "bca="}))
    (tmp_path / "exact.py").write_text("def score(data_source, solution_str, ground_truth, extra_info):\n"
                                       "    right = solution_str == ground_truth\n"
                                       "    return {'score': float(right), 'pred': solution_str[:1]}\n")
    tree = yaml.safe_load((runs / "ppo" / "config.yaml").read_text())
    tree["data"] = {
        "source": "mixture", "streaming": True, "shuffle_buffer": 2, "overlong": "truncate_left", "prompts_per_step": 8,
        "max_prompt_length": 5, "test_files": [f"{tmp_path}/held.jsonl"],
        "mixture": [{"files": [f"{tmp_path}/words.jsonl"], "weight": 3},
                    {"task": "spell_backward", "template": "{metadata[word]}=", "size": 16,
                     "config": {"min_word_len": 3, "max_word_len": 3}}]}
    tree["evaluation"] = {"samples_per_prompt": 2, "temperature": 1.0, "save_answers": True, "every_steps": 1}
    tree["logging"] = {"dir": f"{tmp_path}/run", "verl_names": True}
    tree["reward"] = {"function": f"{tmp_path}/exact.py:score"}
    tree["train"]["total_steps"] = 1
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    before, first = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert before["eval/words/mean@2"] == before["val-core/words/reward/mean@2"]
    assert first["critic/score/mean"] == first["reward/mean"] and first["training/global_step"] == 1
    assert first["perf/total_num_tokens"] == first["rollout/samples"] * (
        first["rollout/prompt_tokens_mean"] + first["rollout/response_tokens_mean"])
    for verl, ours in (("critic/advantages/max", "advantage/trained_max"),
                       ("critic/values/min", "critic/old_value_min"), ("critic/returns/mean", "critic/target_mean"),
                       ("rollout_corr/kl", "policy/rollout_kl"),
                       ("prompt_length/clip_ratio", "rollout/prompt_limit_fraction"),
                       ("response_length/min", "rollout/response_tokens_min"), ("timing_s/gen", "time/generate")):
        assert first[verl] == first[ours]
    assert first["data/truncated"] >= 1 and first["data/dropped"] == 0 and "time/evaluate" in first
    kept = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["step"], line["sample"]) for line in kept] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(line["vote"] == line["answer"][:1] for line in kept)


def test_the_export_opens_in_transformers_with_the_same_logits_and_greedy_text(runs: Path, tmp_path: Path):
    folder = runs / "ppo" / "export"
    greedy = ["generation.temperature=0", f"model.path={folder}", f"logging.dir={tmp_path}", "model.spec=null",
              f"model.tokenizer={folder}"]
    assert main(["generate", "configs/sft_tiny.yaml", *DATA, *greedy]) == 0
    answers = [json.loads(line) for line in (tmp_path / "generations.jsonl").read_text().splitlines()]
    assert len(answers) == 16
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM"
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), open_tokenizer(folder)
    for answer in answers:
        assert theirs(answer["prompt"]).input_ids == answer["prompt_ids"] == ours.encode_prompt(answer["prompt"])
        ids = torch.tensor([answer["prompt_ids"]])
        made = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=ours.eos_id, pad_token_id=0)
        assert made[0, ids.shape[1]:].tolist() == answer["response_ids"]
        with torch.no_grad():
            log_probs = model(torch.tensor([answer["prompt_ids"] + answer["response_ids"]])).logits[0].log_softmax(-1)
        scored = log_probs[ids.shape[1] - 1:-1].gather(1, torch.tensor(answer["response_ids"])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer["log_probs"]), scored, rtol=0, atol=1e-4)
        assert answer["finish_reason"] == ("stop" if answer["response_ids"][-1] == ours.eos_id else "length")


def test_export_keeps_every_bit_and_changes_dtype_when_asked(runs: Path, tmp_path: Path):
    folder = runs / "ppo" / "export"
    for name, keys in (("same", []), ("bf16", ["train.mixed_precision=bf16"])):
        assert main(["export", "configs/sft_tiny.yaml", f"model.path={folder}", "model.spec=null",
                     f"model.tokenizer={folder}", f"logging.dir={tmp_path / name}", *keys]) == 0
    before = load_file(folder / "model.safetensors")
    same, half = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("same", "bf16"))
    assert before.keys() == same.keys() == half.keys()
    assert all(torch.equal(before[name], same[name]) for name in before)
    assert all(torch.equal(before[name].bfloat16(), half[name]) for name in before)
