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
    """

    observed: tuple[tuple[int, int], ...] = ()
    calls: int = 0
    faults: int = 0
    cuts: int = 0

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
        return Talk((*self.observed, *observed), self.calls + 1, self.faults + reply.failed, self.cuts + reply.cut)

    def said(self, answer: tuple[int, ...]) -> Said:
        """What the model said in the answer with these ids."""
        return Said(len(self.observed) + 1, answer[self.turn_start:])

    def numbers(self) -> tuple[int, ...]:
        """Tokens that were not sampled, turns, calls, faults, cuts."""
        return (sum(stop - start for start, stop in self.observed), len(self.observed) + 1, self.calls, self.faults,
                self.cuts)


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

    def converse(self, generator: GenerationEngine, mesh: Mesh, requests: Sequence[Prompt],
                 first: Mapping[int, Completion], params: SamplingParams, *, seed: int, version: int | None = None,
                 ended: OnAnswer | None = None) -> tuple[dict[int, Completion], dict[int, Talk]]:
        """The answers that begin with the turns in `first`, by the place of their request, and what tools had to do
        with them. Every rank of a replica calls it with the same rows; replicas do not wait for each other.

        An answer for whose next turn there is no room ends, as others do at the length limit.

        Args:
            params: their max_new_tokens is that of a whole answer, with what tools say.
            version: as `GenerationEngine.generate` has it.
            ended: told of each whole answer.
        """
        rows, talks = dict(first), {row: Talk() for row in first}
        going = sorted(rows)
        for turn in range(1, self.max_turns + 1):
            able = [row for row in going if _room(requests[row], rows[row], params) > 1 and turn < self.max_turns]
            replies = self._replies(mesh, {row: rows[row].response_ids[talks[row].turn_start:] for row in able})
            fitting = [row for row, reply in replies.items()
                       if 0 < len(reply.ids) < _room(requests[row], rows[row], params)]
            for row, reply in replies.items():
                fits = row in fitting
                talks[row] = talks[row].after(reply, len(rows[row].response_ids) if fits else None)
                if reply.ids and not fits:
                    rows[row] = replace(rows[row], finish_reason=FinishReason.LENGTH)
            for row in sorted(set(going).difference(fitting)) if ended is not None else ():
                ended(row, rows[row].response_ids, talks[row].said(rows[row].response_ids))
            if not fitting:
                break
            prompts = [replace(requests[row], begun=_followed(rows[row], replies[row].ids)) for row in fitting]
            rows |= zip(fitting, generator.generate(prompts, params, seed, expected_version=version), strict=True)
            going = fitting
        return rows, talks

    def _replies(self, mesh: Mesh, turns: Mapping[int, tuple[int, ...]]) -> dict[int, Reply]:
        """What tools say to these turns, of those that call one; the same on every rank of the replica, of which one
        asks.
        """
        told: list[tuple[int, tuple[int, ...], bool, bool]] = []
        if turns and speaker(mesh.grid, mesh.coord.dp) == mesh.world.rank:
            answers = self.toolbox.answer([self.tokenizer.decode(ids) for ids in turns.values()])
            told = [(row, *self._ids(reply, ids[-1])) for (row, ids), reply in zip(turns.items(), answers, strict=True)
                    if reply is not None]
        if turns:
            told = [one for rank in share_json(mesh.world, told, mesh.model) for one in rank]
        return {row: Reply(tuple(ids), failed, cut) for row, ids, failed, cut in told}

    def _ids(self, reply: ToolReply, last: int) -> tuple[tuple[int, ...], bool, bool]:
        if reply.failed and self.ends_at_error:
            return (), True, False
        ids, cut = self.form.ids(reply.text, last)
        return ids, reply.failed, cut or reply.cut


def _room(request: Prompt, answer: Completion, params: SamplingParams) -> int:
    """Tokens that the answer may get yet."""
    return request.longest(params) - len(answer.response_ids)


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
    observed, turns, calls, faults, cuts = map(sum, zip(*numbers, strict=True))
    return {
        "rollout/turns_mean": turns / len(numbers),
        "rollout/turns_max": float(max(row[1] for row in numbers)),
        "rollout/tool_calls": float(calls),
        "rollout/tool_faults": float(faults),
        "rollout/observations_cut": float(cuts),
        "rollout/observation_fraction": observed / num_tokens,
    }
