"""Answers of several turns: the model speaks, a tool that it calls says something, the model goes on.

Owns the loop, and which tokens of an answer nobody sampled. An answer stays one sequence: ids as they were sampled,
observations encoded alone between them, nothing encoded anew. Draws go on with the position in the answer, so that they
depend on seed, prompt, sample and position alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hybridflow.batch import Batch
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.exchange import share_json
from hybridflow.generation.engines.interface import GenerationEngine
from hybridflow.generation.records import Begun, Completion, FinishReason, Prompt, SamplingParams
from hybridflow.parallel.mesh import Mesh
from hybridflow.tools.observation import ObservationForm
from hybridflow.tools.toolbox import ToolBox, ToolReply
from hybridflow.trainer.row_stream import speaker


@dataclass(frozen=True)
class Said:
    """What the model said in one answer: the number of its turns, and the ids of the last one."""

    turns: int
    last: tuple[int, ...]


# Of a request, its place among the prompts, the ids of its whole answer, and what is said in it where tools are.
OnAnswer = Callable[[int, tuple[int, ...], Said | None], None]


@dataclass(frozen=True)
class Reply:
    """What stands behind a turn that called a tool. `ids` is empty where the call ends the answer."""

    ids: tuple[int, ...]
    failed: bool
    cut: bool


@dataclass(frozen=True)
class Talk:
    """What tools had to do with one answer. Example: `Talk(((4, 9),), calls=1)`: tokens 4 to 8 are an observation.

    Attributes:
        observed: where observations stand in the answer, (start, stop) each; a turn of the model follows every one.
        calls, faults, cuts: tools called; of them those that failed; observations that were cut.
        lost: observations that had no room, with which the answer ended.
    """

    observed: tuple[tuple[int, int], ...] = ()
    calls: int = 0
    faults: int = 0
    cuts: int = 0
    lost: int = 0

    def mask(self, length: int) -> list[float]:
        """Of an answer of so many tokens: 1.0 where a token was sampled, 0.0 where a tool said it."""
        mask = [1.0] * length
        for start, stop in self.observed:
            mask[start:stop] = [0.0] * (stop - start)
        return mask

    @property
    def turn_start(self) -> int:
        """Where the last turn begins."""
        return self.observed[-1][1] if self.observed else 0

    def after(self, reply: Reply, length: int | None) -> Talk:
        """With a call that got this reply; the answer goes on behind it from `length` tokens (None: it does not)."""
        observed = () if length is None else ((length, length + len(reply.ids)),)
        lost = length is None and bool(reply.ids)
        return Talk((*self.observed, *observed), self.calls + 1, self.faults + reply.failed, self.cuts + reply.cut,
                    self.lost + lost)

    def said(self, answer: tuple[int, ...]) -> Said:
        """What the model said in the answer with these ids."""
        return Said(len(self.observed) + 1, answer[self.turn_start:])

    def numbers(self) -> tuple[int, ...]:
        """Tokens that were not sampled, turns, calls, faults, cuts, lost observations."""
        return (sum(stop - start for start, stop in self.observed), len(self.observed) + 1, self.calls, self.faults,
                self.cuts, self.lost)


NUM_NUMBERS = len(Talk().numbers())


def said(batch: Batch) -> Iterator[Said | None]:
    """Of every row at home here, before advantages are known; None where no tools were there to be called."""
    mask = batch.columns.loss_mask
    if batch.sampled_lengths is None or mask is None:
        yield from (None for _ in batch.samples)
        return
    ends = [0, *accumulate(len(sample.response) for sample in batch.samples)]
    flags = (mask != 0).tolist()
    for sample, start in zip(batch.samples, ends):
        own = flags[start:start + len(sample.response)]
        first = max((place + 1 for place, sampled in enumerate(own) if not sampled), default=0)
        turns = sum(now and not before for before, now in zip([False, *own], own))
        yield Said(turns, sample.response[first:])


@dataclass(frozen=True)
class TurnLoop:
    """Example: `TurnLoop(toolbox, form, tokenizer, max_turns=4)`.

    Attributes:
        form: of observations.
        max_turns: of the model, in one answer; a call in the last one is not followed.
        ends_at_error: a failed call ends the answer; else the model reads the error.
    """

    toolbox: ToolBox
    form: ObservationForm
    tokenizer: Tokenizer
    max_turns: int
    ends_at_error: bool = False

    def begin(self, mesh: Mesh, requests: Sequence[Prompt], params: SamplingParams) -> Conversations:
        """Answers to these requests, none of which has a turn yet. `params`: their max_new_tokens is that of a whole
        answer, with what tools say.
        """
        return Conversations(self, mesh, requests, params)

    def ids(self, reply: ToolReply, last: int) -> Reply:
        """What stands behind a turn whose last id is `last`."""
        if reply.failed and self.ends_at_error:
            return Reply((), True, False)
        ids, cut = self.form.ids(reply.text, last)
        return Reply(ids, reply.failed, cut or reply.cut)


class Conversations:
    """Answers on their way. Every rank of a replica makes the same calls on the same rows, and one of them asks the
    tools; replicas do not wait for each other.
    """

    def __init__(self, loop: TurnLoop, mesh: Mesh, requests: Sequence[Prompt], params: SamplingParams) -> None:
        self._loop, self._mesh, self._requests, self._params = loop, mesh, requests, params
        self._asks = speaker(mesh.grid, mesh.coord.dp) == mesh.world.rank
        self._talks: dict[int, Talk] = {}
        self._asked: set[int] = set()  # rows whose last turn the tools have been given

    def turn_ended(self, row: int, ids: tuple[int, ...]) -> None:
        """The last turn of a row has ended: what it calls runs while others are still generated."""
        talk = self._talks.setdefault(row, Talk())
        if self._asks and row not in self._asked and self._may_go_on(row, len(ids)):
            self._asked.add(row)
            self._loop.toolbox.submit(row, self._loop.tokenizer.decode(ids[talk.turn_start:]))

    def go_on(self, generator: GenerationEngine, first: Mapping[int, Completion], *, seed: int,
              version: int | None = None,
              ended: OnAnswer | None = None) -> tuple[dict[int, Completion], dict[int, Talk]]:
        """The answers that begin with the turns in `first`, by the place of their request, and what tools had to do
        with them. An answer for whose next turn there is no room ends, as others do at the length limit.

        Args:
            version: as `GenerationEngine.generate` has it.
            ended: told of each whole answer.
        """
        rows, going = dict(first), sorted(first)
        while going:
            replies = self._replies(rows, going)
            fitting = [row for row, reply in replies.items() if 0 < len(reply.ids) < self._room(row, rows[row])]
            for row, reply in replies.items():
                length = len(rows[row].response_ids) if row in fitting else None
                self._talks[row] = self._talks[row].after(reply, length)
                if reply.ids and row not in fitting:
                    rows[row] = replace(rows[row], finish_reason=FinishReason.LENGTH)
            for row in sorted(set(going).difference(fitting)) if ended is not None else ():
                ended(row, rows[row].response_ids, self._talks[row].said(rows[row].response_ids))
            prompts = [replace(self._requests[row], begun=_followed(rows[row], replies[row].ids)) for row in fitting]
            if fitting:
                found = generator.generate(prompts, self._params, seed, expected_version=version,
                                           ended=lambda place, ids, rows=fitting: self.turn_ended(rows[place], ids))
                rows |= zip(fitting, found, strict=True)
            going = fitting
        return rows, self._talks

    def _replies(self, rows: Mapping[int, Completion], going: Sequence[int]) -> dict[int, Reply]:
        """What tools say to the last turns of these rows, of those that call one and may go on; the same on every rank
        of the replica.
        """
        for row in going:
            self.turn_ended(row, rows[row].response_ids)  # where the engine has not said so
        told: list[tuple[int, tuple[int, ...], bool, bool]] = []
        if self._asks:
            for row, reply in self._loop.toolbox.collect(sorted(self._asked)).items():
                of_row = self._loop.ids(reply, rows[row].response_ids[-1])
                told.append((row, of_row.ids, of_row.failed, of_row.cut))
            self._asked.clear()
        told = [one for rank in share_json(self._mesh.world, told, self._mesh.model) for one in rank]
        return {row: Reply(tuple(ids), failed, cut) for row, ids, failed, cut in told}

    def _may_go_on(self, row: int, length: int) -> bool:
        """Whether a turn may follow the one that ends an answer of this length."""
        room = self._requests[row].longest(self._params) - length
        return len(self._talks[row].observed) + 1 < self._loop.max_turns and room > 1

    def _room(self, row: int, answer: Completion) -> int:
        """Tokens that the answer may get yet."""
        return self._requests[row].longest(self._params) - len(answer.response_ids)


def _followed(answer: Completion, ids: tuple[int, ...]) -> Begun:
    """An answer with an observation behind it, to go on from. Of tokens that nobody sampled log-probs are 0 (they are
    in no sum), and the version is that of the token before.
    """
    none = (0.0,) * len(ids)
    processed = None if answer.processed_log_probs is None else (*answer.processed_log_probs, *none)
    return Begun((*answer.response_ids, *ids), (*answer.log_probs, *none), processed,
                 (*answer.versions, *answer.versions[-1:] * len(ids)))


def with_talks(batch: Batch, talks: Mapping[int, Talk], numbers: Sequence[tuple[int, ...]], rank: int) -> Batch:
    """The batch with what tools said masked: it is trained nowhere. `numbers` are those of all rows, `talks` those of
    the rows at home on `rank`, which is mine.
    """
    mask = [flag for row, length in zip(batch.home[rank], batch.home_lengths(rank), strict=True)
            for flag in talks[row].mask(length)]
    like = batch.columns.rollout_log_probs
    assert like is not None
    sampled = tuple(length - row[0] for length, row in zip(batch.response_lengths, numbers, strict=True))
    return replace(batch.with_columns(loss_mask=like.new_tensor(mask)), sampled_lengths=sampled)


def talk_metrics(numbers: Sequence[tuple[int, ...]], num_tokens: int) -> dict[str, float]:
    """Of the answers of a step, whose responses have `num_tokens` tokens together."""
    observed, turns, calls, faults, cuts, lost = map(sum, zip(*numbers, strict=True))
    return {
        "rollout/turns_mean": turns / len(numbers),
        "rollout/turns_max": float(max(row[1] for row in numbers)),
        "rollout/tool_calls": float(calls),
        "rollout/tool_faults": float(faults),
        "rollout/observations_cut": float(cuts),
        "rollout/observations_lost": float(lost),
        "rollout/observation_fraction": observed / num_tokens,
    }
