"""A user's tools as a rank sees them: texts of turns in, what the tools say out, faults counted.

Owns what is asked and what a fault is. Where tools run (worker processes that are killed when they are late) is
`rewards`'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridflow.rewards.function import RewardFunction
from hybridflow.rewards.records import RewardRequest
from hybridflow.tools import calling
from hybridflow.tools.detect import may_call


@dataclass(frozen=True)
class ToolReply:
    """What a tool says. Example: `ToolReply("5")`.

    Attributes:
        text: never empty; of a failed call the error.
        failed: the turn calls no tool that there is, or the tool raised, gave nothing, ran too long or took its process
            down.
        cut: the text was longer.
    """

    text: str
    failed: bool = False
    cut: bool = False


class ToolBox:
    """The tools of one file. Not for several threads at once. Close it in the end."""

    def __init__(self, file: str, call: str, *, timeout_s: float) -> None:
        """Start a worker and let it load the file.

        Args:
            call: "tags", "json" or file.py:function: how a turn calls a tool (`detect`).
            timeout_s: seconds that a call may take; the first one of a worker imports the file too.

        Raises:
            ValueError: the file does not import, or has no function; or that of `call` is not there.
        """
        self._call, self._asked = call, {"file": file, "call": call}
        self._workers = RewardFunction.load(f"{Path(calling.__file__)}:{calling.answer_turn.__name__}",
                                            timeout_s=timeout_s)
        listed = self._workers.score([RewardRequest("", "", None, {**self._asked, "list": True})])
        if (fault := listed.row_faults[0]) is not None:
            self.close()
            raise ValueError(f"tools.file = {file}, tools.call = {call}: {fault.message}")
        self.names = tuple(listed.extras[0]["names"].split(", "))

    def answer(self, turns: Sequence[str]) -> list[ToolReply | None]:
        """What the tools say that these turns call; None where a turn calls none."""
        replies: list[ToolReply | None] = [None] * len(turns)
        places = [place for place, text in enumerate(turns) if may_call(self._call, text)]
        result = self._workers.score([RewardRequest("", turns[place], None, self._asked) for place in places])
        for place, extras, fault in zip(places, result.extras, result.row_faults, strict=True):
            if fault is not None:
                replies[place] = ToolReply(f"error: {' '.join(fault.message.split())}", failed=True)
            elif extras["called"]:
                replies[place] = ToolReply(extras["text"], cut=extras["cut"])
        return replies

    def close(self) -> None:
        """End the workers."""
        self._workers.close()
