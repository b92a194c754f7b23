"""A request for a response, and what a scheduler knows of it while it waits, runs and ends.

Owns no decision: the scheduler moves sequences from state to state.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from hybridflow.generation.prefix_cache import ROOT


@dataclass(frozen=True)
class Request:
    """One response to make. Example: `Request(index=3, ids=(5, 9, 4), max_new_tokens=64)`.

    Attributes:
        index: the caller's name for it; the scheduler does not look at it.
        ids: the prompt, at least one token.
        max_new_tokens: how many may be sampled yet, at least 1 (what is left, if it was begun).
        begun: response tokens sampled earlier, which it goes on after.
    """

    index: int
    ids: tuple[int, ...]
    max_new_tokens: int
    begun: tuple[int, ...] = ()


class State(Enum):
    """WAITING for a row; PREFILLING (has a row, its prompt is not in the cache yet); DECODING (sampled in every step of
    its group); SAMPLED (its last sample is planned, not committed); ENDED (has given everything back)."""

    WAITING = auto()
    PREFILLING = auto()
    DECODING = auto()
    SAMPLED = auto()
    ENDED = auto()


class Sequence:
    """A request on its way.

    Attributes:
        serial: its age: lower is older. It keeps it when it is preempted.
        slot: its row of the tables while it has one, else -1.
        group: whose steps it is in while it has a row.
        prompt: the tokens that a prefill computes: prompt, begun response, and what was sampled before a preemption.
        cached: tokens whose keys and values are written once the steps planned so far have run.
        response: sampled and committed tokens, without the begun ones.
        blocks: of its positions, in order.
        num_registered: how many of its first blocks the prefix cache knows by content.
        node: of the last of these in the prefix cache; None if the weights changed under it, so that it offers no more.
    """

    __slots__ = ("blocks", "cached", "group", "node", "num_registered", "prompt", "request", "response", "serial",
                 "slot", "state")

    def __init__(self, request: Request, serial: int) -> None:
        self.request = request
        self.serial = serial
        self.state = State.WAITING
        self.slot = -1
        self.group = -1
        self.prompt = request.ids + request.begun
        self.cached = 0
        self.response: list[int] = []
        self.blocks: list[int] = []
        self.num_registered = 0
        self.node: int | None = ROOT

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that are known: prompt, begun and committed response."""
        return self.request.ids + self.request.begun + tuple(self.response)

    @property
    def num_tokens(self) -> int:
        return len(self.request.ids) + len(self.request.begun) + len(self.response)

    @property
    def outstanding(self) -> int:
        """Samples that are planned and not committed."""
        if self.state in (State.DECODING, State.SAMPLED):
            return self.cached + 1 - self.num_tokens
        return 0

    @property
    def num_unplanned(self) -> int:
        """Samples that may be planned yet."""
        return self.request.max_new_tokens - len(self.response) - self.outstanding
