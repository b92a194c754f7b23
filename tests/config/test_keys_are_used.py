"""Case 27: no dead knobs. Each key of the schema is read by code outside of the config package.

An attribute of that name is looked for, so a key with a common name could slip through; the tests of the parts that
use a key show that it changes something.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hybridflow
from hybridflow.config.hints import block_of
from hybridflow.config.load import known_keys
from hybridflow.config.schema import Config

PACKAGE = Path(hybridflow.__file__).parent
# Numbers and names that config/ itself turns into what the rest reads (layouts, batch numbers, decoder shapes).
USED_IN_CONFIG = (PACKAGE / "config" / "batch_math.py", PACKAGE / "config" / "shapes.py",
                  PACKAGE / "config" / "layouts.py")
ONLY_CHECKED = {"train.gradient_accumulation_steps", "train.layout.dp"}  # derived; a wrong value is refused


def attributes(files: Iterator[Path]) -> set[str]:
    return {node.attr for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute)}


@pytest.fixture(scope="module")
def read_elsewhere() -> set[str]:
    files = [file for file in PACKAGE.rglob("*.py") if "config" not in file.relative_to(PACKAGE).parts[:1]]
    return attributes(iter([*files, *USED_IN_CONFIG]))


def leaves() -> list[str]:
    blocks = {key.rpartition(".")[0] for key in known_keys()}
    return [key for key in known_keys() if key not in blocks]


@pytest.mark.parametrize("key", [key for key in leaves() if key not in ONLY_CHECKED])
def test_key_is_read(key, read_elsewhere):
    assert key.rpartition(".")[2] in read_elsewhere


def test_the_walk_finds_leaves():
    assert block_of(Config) is Config and "train.optimizer.lr" in leaves() and "train" not in leaves()
