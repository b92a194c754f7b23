"""`generate` with a file of prompts: what comes out of what goes in, what is refused, and what SIGTERM leaves."""

import json
import os
import signal
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridflow.cli import main
from hybridflow.data.tokenizer import open_tokenizer
from hybridflow.generation.session import Session
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.weights import canonical_shapes
from tests.trainer.runs import VOCAB, make_tokenizer

SHAPE = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 2}
CHAT = [{"role": "system", "content": "1"}, {"role": "user", "content": "2 + 2 ="}]
PROMPTS = [{"id": "a", "prompt": "7 + 8 = "}, {"prompt": CHAT, "id": 4}, {"prompt_ids": [1, 260, 261]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random model with its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    make_tokenizer(path)
    generator = torch.Generator().manual_seed(0)
    shapes = canonical_shapes(ModelConfig.from_hf_dict(SHAPE), Head.LANGUAGE_MODEL)
    save_file({name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()},
              path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(SHAPE))
    return path


@pytest.fixture
def ask(folder, tmp_path):
    """Runs the command on some prompts; its exit code and its lines."""
    (tmp_path / "run.yaml").write_text(json.dumps({"model": {"path": str(folder)}}))

    def ask(prompts, *overrides, name="out"):
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
        out = tmp_path / "made" / f"{name}.jsonl"
        code = main(["generate", str(tmp_path / "run.yaml"), "--prompts", str(tmp_path / "prompts.jsonl"), "--out",
                     str(out), "generation.max_new_tokens=8", *overrides])
        return code, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else None
    return ask


def test_every_prompt_gets_its_samples_in_order(ask, folder):
    tokenizer = open_tokenizer(folder)
    code, lines = ask(PROMPTS, "generation.samples_per_prompt=2", "train.mixed_precision=fp64")
    assert code == 0 and [(line["id"], line["sample"]) for line in lines] == [
        ("a", 0), ("a", 1), (4, 0), (4, 1), (2, 0), (2, 1)]
    assert [lines[i]["prompt"] for i in (0, 2, 4)] == ["7 + 8 = ", CHAT, tokenizer.decode([1, 260, 261])]
    assert lines[0]["prompt_ids"] == tokenizer.encode_prompt("7 + 8 = ") and lines[4]["prompt_ids"] == [1, 260, 261]
    for line in lines:
        ids, stopped = line["response_ids"], line["finish_reason"] == "stop"
        assert 1 <= len(ids) <= 8 and stopped == (ids[-1] == 2) and (stopped or len(ids) == 8)
        assert line["text"] == tokenizer.decode(ids[:-1] if stopped else ids)
        assert len(line["log_probs"]) == len(ids) and "processed_log_probs" not in line
    assert lines[0]["response_ids"] != lines[1]["response_ids"]
    _, other = ask([*PROMPTS[::-1], {"prompt": "9", "id": 9}], "generation.samples_per_prompt=2",
                   "train.mixed_precision=fp64", name="other")
    mine = {(line["id"], line["sample"]): line for line in other}
    for line in lines[:4]:  # with ids of their own
        assert mine[line["id"], line["sample"]]["response_ids"] == line["response_ids"]


def test_processed_log_probs_are_there_where_they_differ(ask):
    _, lines = ask(PROMPTS, "generation.top_k=5", "generation.min_new_tokens=8", "generation.repetition_penalty=1.3")
    for line in lines:
        assert len(line["response_ids"]) == 8 and 2 not in line["response_ids"]
        assert len(line["processed_log_probs"]) == 8
        assert all(own > raw for own, raw in zip(line["processed_log_probs"], line["log_probs"]))


def pairs(text):
    """Neighbouring characters, but for the first and the last."""
    return [text[i : i + 2] for i in range(1, len(text) - 2)]


def test_a_stop_string_ends_an_answer_and_is_cut_off(ask, folder):
    tokenizer = open_tokenizer(folder)
    many = "generation.samples_per_prompt=8"
    _, lines = ask(PROMPTS, many, name="whole")
    stop = next(pair for line in lines for pair in pairs(tokenizer.decode(line["response_ids"]))
                if len(tokenizer.encode(pair)) > 1 and "\ufffd" not in pair)
    _, ended = ask(PROMPTS, many, f"generation.stop={json.dumps([stop])}", name="ended")
    found = [line for line in ended if line["finish_reason"] == "stop" and line["response_ids"][-1] != 2]
    assert found
    for line in found:
        text = tokenizer.decode(line["response_ids"])
        assert line["text"] == text[: text.index(stop)] and stop not in tokenizer.decode(line["response_ids"][:-1])


def test_bad_lines_are_all_told_before_anything_starts(ask, capsys):
    code, lines = ask([{"promt": "a"}, {"prompt": "a"}, {"prompt_ids": [VOCAB]}, {"prompt": "1" * 60}])
    assert code == 2 and lines is None
    told = capsys.readouterr().err
    assert "3 bad lines" in told and "line 1: has neither" in told and "ids are 0 to 272" in told
    assert "line 4: has " in told and "the model has positions for 56" in told


def test_what_cannot_be_read_or_written_is_told(ask, folder, tmp_path, capsys):
    config = {"model": {"path": str(folder)}}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    arguments = ["generate", str(tmp_path / "run.yaml"), "--prompts"]
    assert main([*arguments, str(tmp_path / "none.jsonl")]) == 2
    assert "no such file of prompts" in capsys.readouterr().err
    assert main([*arguments, str(tmp_path / "none.jsonl"), "--out", str(tmp_path)]) == 2
    assert "is a folder; give a file" in capsys.readouterr().err
    assert main([*arguments, str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "run.yaml" / "x" / "y")]) == 2
    assert "run.yaml is a file" in capsys.readouterr().err
    assert main([*arguments, str(tmp_path / "none.jsonl"), "data.size=5"]) == 2
    assert "data.size = 5: has no effect in generate --prompts" in capsys.readouterr().err


def test_sigterm_leaves_what_there_is_and_asks_to_be_called_again(ask, capsys):
    before, steps, run = signal.getsignal(signal.SIGTERM), count(1), Session.step

    def step(self, *arguments):
        if next(steps) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return run(self, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Session, "step", step)
        code, lines = ask(PROMPTS, "generation.min_new_tokens=8")
    assert code == 75 and signal.getsignal(signal.SIGTERM) == before
    assert [line["finish_reason"] for line in lines] == ["interrupted"] * 3
    assert all(1 <= len(line["response_ids"]) == len(line["log_probs"]) < 8 for line in lines)
    assert "interrupted: answers that are not finished say so" in capsys.readouterr().out
    _, whole = ask(PROMPTS, "generation.min_new_tokens=8", name="whole")
    for part, line in zip(lines, whole):
        assert line["response_ids"][: len(part["response_ids"])] == part["response_ids"]
