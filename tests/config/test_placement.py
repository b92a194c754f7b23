"""Ranks of roles: how they are written, what layouts become on them, and what is refused."""

import pytest

from hybridflow.config.batch_math import layout_table, ranges
from hybridflow.config.check import checked_config
from hybridflow.config.command import Command
from hybridflow.config.layouts import Role, generation_layout, generation_ranks, parsed_ranks, role_layout, role_ranks
from hybridflow.config.load import load_config
from hybridflow.config.model_schema import PlacementConfig
from hybridflow.config.validate import validate

BASE = {"model": {"tokenizer": "t.model", "spec": {"num_layers": 4}}}
SPLIT = ("placement={actor: 0-1, reference: 0-1, critic: '2,3'}", "algorithm.kl.where=reward")


def faults(world_size: int, *overrides: str) -> dict[str, str]:
    return {fault.key: str(fault) for fault in validate(load_config(BASE, overrides), world_size)}


@pytest.mark.parametrize(("text", "ranks"), [
    ("0", (0,)), ("0-3", (0, 1, 2, 3)), ("5-7,0", (0, 5, 6, 7)), (" 1 , 3 - 4 ", (1, 3, 4)),
    ("", None), ("3-1", None), ("0,0", None), ("0-2,1", None), ("a", None), ("-1", None), ("1.5", None),
    ("0-9999999999", None),
])
def test_ranks_are_read(text, ranks):
    assert parsed_ranks(text) == ranks
    if ranks:
        assert parsed_ranks(ranges(ranks)) == ranks


def test_layouts_fill_the_ranks_of_their_role():
    read = load_config(BASE, (*SPLIT, "placement.generation=2-3", "model.critic.layout.pp=2"))
    assert role_ranks(read, Role.ACTOR, 4) == (0, 1) and role_ranks(read, Role.CRITIC, 4) == (2, 3)
    assert role_layout(read, Role.ACTOR, 4).dp == 2 and role_layout(read, Role.CRITIC, 4).dp == 1
    assert generation_ranks(read, 4) == (2, 3) and generation_layout(read, 4).dp == 2
    lines = [" ".join(line.split()) for line in layout_table(read, 4).splitlines()]
    assert lines[1].startswith("actor 0-1 1 1 1 2") and lines[2].startswith("actor, generating 2-3 1 1 1 2")
    assert lines[3].startswith("critic 2-3 1 1 2 1") and lines[4].startswith("reference 0-1 1 1 1 2")
    assert not faults(4, *SPLIT)


def test_generation_is_where_the_actor_is_unless_it_is_placed():
    assert generation_ranks(load_config(BASE, SPLIT), 4) == (0, 1)
    assert generation_ranks(load_config(BASE, ()), 4) == (0, 1, 2, 3)


@pytest.mark.parametrize(("overrides", "key", "parts"), [
    (("placement.actor=a-b",), "placement.actor", ("no list of different ranks", "0-3")),
    (("placement.critic=2-4",), "placement.critic", ("ranks 0 to 3", "start 5")),
    (("placement={actor: 0-1, critic: 1-2}",), "placement", ("ranks 3 without any work",)),
    ((*SPLIT, "train.layout.tp=4"), "train.layout.tp", ("number of ranks of placement.actor, 2", "tp 4", "tp 1 or 2")),
    ((*SPLIT, "train.layout.dp=4"), "train.layout.dp", ("ranks of placement.actor, 2", "choose dp 2")),
    ((*SPLIT, "placement.generation=2", "generation.layout.tp=2"), "generation.layout.tp",
     ("number of ranks of placement.generation, 1", "tp 1")),
    ((*SPLIT, "placement.generation=2-3", "generation.weights=shared"), "generation.weights", ("choose packed",)),
    ((*SPLIT, "generation.engine=vllm"), "placement.generation", ("vllm generates on every rank",)),
    (("placement.reward=0",), "placement.reward", ("has no effect without a reward model",)),
])
def test_what_does_not_go_is_told(overrides, key, parts):
    found = faults(4, *overrides)
    assert key in found and all(part in found[key] for part in parts), found


def test_commands_that_place_nothing_have_the_whole_world(tmp_path):
    tree = {"model": {"path": str(tmp_path)}, "placement": {"actor": "0", "critic": "0-3"}}
    (tmp_path / "config.json").write_text("{}")
    try:
        read = checked_config(tree, (), 1, Command.GENERATE)
    except ValueError as error:  # of the folder's model, which is none
        assert "placement" not in str(error)
    else:
        assert read.placement == PlacementConfig()
