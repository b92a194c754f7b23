"""A user's tools as a rank sees them: texts of turns in, what the tools say out, faults counted.

Owns what is asked and what a fault is. Where tools run (worker processes that are killed when they are late) is
`rewards`'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridflow.rewards.function import RewardFunction
from hybridflow.rewards.records import RewardRequest, RowFault
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
    """The tools of one file. Close it in the end."""

    def __init__(self, file: str, call: str, *, timeout_s: float) -> None:
        """Start a worker and let it load the file.

        Args:
            call: "tags", "json" or file.py:function: how a turn calls a tool (`detect`).
            timeout_s: seconds that a call may take; the first one of a worker imports the file too.

        Raises:
            ValueError: the file does not import, or has no function; or that of `call` is not there.
        """
        self._call, self._asked = call, {"file": file, "call": call}
        self._running: set[int] = set()
        self._workers = RewardFunction.load(f"{Path(calling.__file__)}:{calling.answer_turn.__name__}",
                                            timeout_s=timeout_s)
        listed = self._workers.score([RewardRequest("", "", None, {**self._asked, "list": True})])
        if (fault := listed.row_faults[0]) is not None:
            self.close()
            raise ValueError(f"tools.file = {file}, tools.call = {call}: {fault.message}")
        self.names = tuple(listed.extras[0]["names"].split(", "))

    def submit(self, row: int, turn: str) -> None:
        """Let what the last turn of a row calls run, while other rows are still being generated. Returns at once."""
        if may_call(self._call, turn):
            self._workers.submit(row, RewardRequest("", turn, None, self._asked))
            self._running.add(row)

    def collect(self, rows: Sequence[int]) -> dict[int, ToolReply]:
        """Wait for what the tools say to turns of these rows that were submitted; of those that call one."""
        wanted = [row for row in rows if row in self._running]
        self._running.difference_update(wanted)
        replies: dict[int, ToolReply] = {}
        for row, outcome in self._workers.collect(wanted).items():
            if isinstance(outcome, RowFault):
                replies[row] = ToolReply(f"error: {' '.join(outcome.message.split())}", failed=True)
            elif outcome.extras["called"]:
                replies[row] = ToolReply(outcome.extras["text"], cut=outcome.extras["cut"])
        return replies

    def close(self) -> None:
        """End the workers."""
        self._workers.close()
