"""Every key has a line of meaning, and README.md's table is the schema's."""

from pathlib import Path

from hybridflow.config.describe import key_lines, key_table, markdown_table
from hybridflow.config.recipe import algorithm_table

README = Path(__file__).parents[2] / "README.md"


def test_every_key_has_a_default_and_a_meaning():
    lines = {line.key: line for line in key_lines()}
    assert lines["train.zero_stage"].default == "1"
    assert lines["algorithm.loss_reduction"].default == "null"
    assert lines["data.tasks[].weight"].default == "1.0"
    assert lines["train.layout.dp"].default == "null"
    assert all(line.meaning.endswith(".") for line in lines.values())


def test_the_table_for_a_terminal():
    assert "train.seed = 0\n    Seeds everything" in key_table()


def test_readme_has_the_table_of_algorithms():
    assert algorithm_table() in README.read_text(encoding="utf-8"), \
        "write it anew: python -c 'from hybridflow.config.recipe import algorithm_table; print(algorithm_table())'"


def test_readme_has_the_table():
    assert markdown_table() in README.read_text(encoding="utf-8"), \
        "write it anew: python -c 'from hybridflow.config.describe import markdown_table; print(markdown_table())'"
