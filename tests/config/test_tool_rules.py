"""The tools block: what it must be, what else it rules out, and files that are not there."""

import pytest

from hybridflow.config.command import Command
from hybridflow.config.files import missing_files
from hybridflow.config.validate import validate
from tests.config.builders import config


@pytest.mark.parametrize(("overrides", "key", "words"), [
    (["tools.wrapper=result"], "tools.wrapper", "must have {observation} in it once"),
    (["tools.call=jason"], "tools.call", "did you mean json?"),
    (["generation.overlap=partial"], "generation.overlap", "interrupts answers"),
    (["generation.engine=vllm"], "generation.engine", "choose own"),
])
def test_what_is_refused(overrides, key, words):
    found = {fault.key: str(fault) for fault in validate(config("tools.file=a.py", *overrides), 1)}
    assert words in found[key]


def test_what_is_not_refused():
    keys = ("tools={file: a.py, call: 'b.py:find', max_turns: 3, on_error: end, wrapper: '<r>{observation}</r>'}",
            "generation.overlap=none")
    for command in (Command.TRAIN, Command.API):
        assert not [fault for fault in validate(config(*keys), 1, command) if fault.key.startswith(("tools", "gen"))]


def test_files_that_are_missing(tmp_path):
    wanted = config(f"tools={{file: {tmp_path}/a.py, call: '{tmp_path}/b.py:find'}}")
    assert [fault.key for fault in missing_files(wanted, Command.TRAIN) if fault.key.startswith("tools")] == [
        "tools.file", "tools.call"]
    (tmp_path / "a.py").touch()
    (tmp_path / "b.py").touch()
    assert not [fault for fault in missing_files(wanted, Command.TRAIN) if fault.key.startswith("tools")]
