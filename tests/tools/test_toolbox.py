"""Calls that are found in turns, and what tools in a file say to them in workers that can be killed."""

from pathlib import Path

import pytest

from hybridflow.tools.detect import call_ends, call_in_json, call_in_tags, may_call
from hybridflow.tools.toolbox import ToolBox, ToolReply

FILE = str(Path(__file__).with_name("calculator.py"))


def answers(box, turns):
    for row, turn in enumerate(turns):
        box.submit(row, turn)
    replies = box.collect(range(len(turns)))
    return [replies.get(row) for row in range(len(turns))]


def test_calls_in_tags():
    assert call_in_tags("so <tool>add: 2 3</tool>") == ("add", "2 3")
    assert call_in_tags("<tool>a: 1</tool> no, <tool> add :2:3 </tool>") == ("add", "2:3")
    assert call_in_tags("<tool>add: 2 3") is None and call_in_tags("add: 2</tool>") is None
    with pytest.raises(ValueError, match="<tool>name: argument</tool>, not <tool>add 2</tool>"):
        call_in_tags("<tool>add 2</tool>")


def test_calls_in_json():
    assert call_in_json('<tool_call>\n{"name": "minus", "arguments": {"a": 5}}\n</tool_call>') == ("minus", {"a": 5})
    assert call_in_json('<tool_call>{"name": "now"}</tool_call>') == ("now", {})
    assert call_in_json("a < b") is None
    for wrong in ("{name", '{"name": 3}', '{"name": "a", "arguments": [1]}', "[" * 100000):
        with pytest.raises(ValueError, match="JSON|a call is"):
            call_in_json(f"<tool_call>{wrong}</tool_call>")


def test_the_ends_of_calls():
    assert call_ends("tags") == ("</tool>",) and call_ends("json") == ("</tool_call>",) and call_ends("a.py:f") == ()
    assert not may_call("tags", "<tool>") and may_call("tags", "</tool>") and may_call("a.py:f", "")


def test_tools_answer_and_fail_without_a_silent_observation():
    box = ToolBox(FILE, "tags", timeout_s=1.5)
    try:
        assert box.names == ("add", "fails", "spins", "dies", "silent", "long", "minus", "half", "length",
                             "every_turn")
        turns = ["<tool>add: 2 3</tool>", "no call", "<tool>fails: money</tool>", "<tool>ad: 1</tool>",
                 "<tool>silent: a</tool>", "<tool>dies: a</tool>", "<tool>spins: a</tool>", "<tool>add</tool>",
                 "<tool>_hidden: a</tool>", "<tool>long: 9000</tool>", "<tool>half: a</tool>", "<tool>add: 4</tool>"]
        replies = answers(box, turns)
    finally:
        box.close()
    assert replies[:2] == [ToolReply("5"), None] and replies[-1] == ToolReply("4")
    assert replies[9].cut and len(replies[9].text) == 10_000 and not replies[9].failed
    words = {2: "no money", 3: "did you mean add?", 4: "the tool silent gave nothing", 5: "ended with status 3",
             6: "still running after 1.5 s", 7: "a call is", 8: "there is no tool '_hidden'",
             10: "surrogates not allowed"}
    for place, said in words.items():
        assert replies[place].failed and replies[place].text.startswith("error: ") and said in replies[place].text


def test_arguments_by_name_and_a_rule_of_ones_own():
    box = ToolBox(FILE, "json", timeout_s=5.0)
    assert answers(box, ['<tool_call>{"name": "minus", "arguments": {"a": 5, "b": 3}}</tool_call>'])[0].text == "2"
    box.close()
    box = ToolBox(FILE, f"{FILE}:every_turn", timeout_s=5.0)
    assert answers(box, ["four"]) == [ToolReply("4 letters")]
    box.close()


def test_files_that_are_no_tools(tmp_path: Path):
    (tmp_path / "empty.py").write_text("import math\n")
    (tmp_path / "wrong.py").write_text("import nothing_of_this_name\n")
    for name, call, words in (("empty.py", "tags", "defines no function"), ("wrong.py", "tags", "nothing_of_this_name"),
                              ("empty.py", "tags", "tools.file = ")):
        with pytest.raises(ValueError, match=words):
            ToolBox(str(tmp_path / name), call, timeout_s=5.0)
    with pytest.raises(ValueError, match="has no function 'nowhere'"):
        ToolBox(FILE, f"{FILE}:nowhere", timeout_s=5.0)
