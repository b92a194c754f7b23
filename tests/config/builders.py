"""Small valid configs for the tests of this folder."""

from typing import Any

from hybridflow.config.load import Tree, load_config
from hybridflow.config.schema import Config

SPEC: Tree = {"model": {"spec": {"num_layers": 4}, "tokenizer": "words.model"}}


def config(*overrides: str, tree: dict[str, Any] | None = None) -> Config:
    """A config that is valid on one rank, with overrides."""
    return load_config(tree or SPEC, overrides)
