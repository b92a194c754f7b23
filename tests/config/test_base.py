"""A file that names a base changes that one's keys."""

from pathlib import Path

import pytest

from hybridflow.config.faults import ConfigError
from hybridflow.config.load import load_config


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def test_keys_of_a_file_stand_on_top_of_its_base(tmp_path):
    written(tmp_path, "inner/first.yaml", "train: {seed: 1, total_steps: 7, optimizer: {betas: [0.5, 0.6]}}")
    written(tmp_path, "second.yaml",
            "base: inner/first.yaml\ntrain: {seed: 2, optimizer: {betas: [0.1, 0.2], lr: 3.0}}")
    third = written(tmp_path, "third.yaml", "base: second.yaml\ntrain: {optimizer: {lr: 4.0}}")
    read = load_config(third, ["train.total_steps=9"]).train
    assert (read.seed, read.total_steps, read.optimizer.betas, read.optimizer.lr) == (2, 9, [0.1, 0.2], 4.0)


@pytest.mark.parametrize(("text", "rule"), [
    ("base: a.yaml", "base of itself"), ("base: b.yaml", "base of itself"), ("base: [b.yaml]", "is no path"),
    ("base: missing.yaml", "no such file"),
])
def test_a_base_that_is_none_is_told(tmp_path, text, rule):
    written(tmp_path, "b.yaml", "base: a.yaml")
    with pytest.raises(ConfigError, match=rule):
        load_config(written(tmp_path, "a.yaml", text))
