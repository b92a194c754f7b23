"""The loop of turns with a generator that speaks by rule: ids as sampled, masks, limits, ranks of a replica alike."""

from dataclasses import dataclass, field, replace

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.records import PromptRecord
from hybridflow.generation.blocks import BLOCK_TOKENS
from hybridflow.generation.records import Completion, FinishReason, Prompt, SamplingParams
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.world import World
from hybridflow.tools.observation import ObservationForm
from hybridflow.tools.toolbox import ToolReply
from hybridflow.trainer.rollout import begin
from hybridflow.trainer.turns import Said, TurnLoop, said
from tests.generation.test_engine import full_log_probs, make_generator
from tests.ranks import run_ranks
from tests.trainer.test_rollout import RuleGenerator

PARAMS = SamplingParams(max_new_tokens=30)
STOP, CALL = 1, 2


class Letters:
    """A token a letter, from 100 on; ids below are no letters."""

    def encode(self, text: str) -> list[int]:
        return [100 + ord(letter) for letter in text]

    def encode_literally(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids) -> str:
        return "".join(chr(i - 100) if i >= 100 else f"[{i}]" for i in ids)

    def turn_between(self, role: str) -> None:
        return None


@dataclass
class EchoBox:
    """A turn that ends with CALL is a call: the observation is the number in the middle of the turn."""

    asked: list[str] = field(default_factory=list)
    running: dict[int, str] = field(default_factory=dict)

    def submit(self, row, turn):
        assert row not in self.running
        self.running[row] = turn

    def collect(self, rows):
        replies = self.answer([self.running.pop(row) for row in rows])
        return {row: reply for row, reply in zip(rows, replies) if reply is not None}

    def answer(self, turns):
        self.asked += turns
        return [ToolReply(f"{turn[-6:-3]}") if turn.endswith("[2]") else None for turn in turns]


@dataclass
class FailingBox(EchoBox):
    """Second calls fail."""

    def answer(self, turns):
        replies = super().answer(turns)
        return [reply and replace(reply, failed=not turn.startswith(chr(0))) for turn, reply in zip(turns, replies)]


class Fives(Letters):
    """One token for all letters."""

    def encode(self, text: str) -> list[int]:
        return [5] * len(text)


class SureBox(EchoBox):
    """Every turn is a call."""

    def answer(self, turns):
        return [ToolReply("a") for _ in turns]


class Speaker(RuleGenerator):
    """Speaks turns of 3 tokens: its place in the answer, the sample's number, and CALL or STOP. Sample j calls in its
    first j turns. Log-probs are -place.
    """

    def generate(self, prompts, params, seed, expected_version=None, *, source=None, interrupt=None, ended=None):
        if source is None:
            return [self.spoken(prompt) for prompt in prompts]
        while taken := self.told(source):
            source.taken += taken
        return [self.spoken(prompts[row]) for row in sorted(source.taken)]

    def spoken(self, prompt) -> Completion:
        old = prompt.begun
        ids = () if old is None else old.response_ids
        turns = sum(token in (STOP, CALL) for token in ids)
        new = (len(ids) + 100, prompt.sample + 50, CALL if turns < prompt.sample else STOP)
        log_probs = tuple(-float(place) for place in range(len(ids), len(ids) + 3))
        return Completion(prompt.id, prompt.sample, prompt.ids, ids + new,
                          log_probs if old is None else old.log_probs + log_probs, FinishReason.STOP,
                          versions=(4,) * 3 if old is None else old.versions + (4,) * 3)


def prompts_of(number: int) -> list[TokenisedPrompt]:
    return [TokenisedPrompt(i, (7, i), PromptRecord("", "", "", origin="")) for i in range(number)]


def loop(limit: int = 5, **settings) -> TurnLoop:
    form = ObservationForm.of(Letters(), "<{observation}>", "tool", limit=limit)
    return TurnLoop(**{"toolbox": EchoBox(), "form": form, "tokenizer": Letters(), "max_turns": 3, **settings})


def talked(world: World, layout: Layout, turns: TurnLoop, params=PARAMS, ranks=(0,)):
    mesh = Mesh(Grid(layout, ranks), world)
    rollout = begin(Speaker(mesh, False), mesh, prompts_of(2), params, samples=4, seed=0, version=None,
                    dtype=torch.float64, turns=turns).finish()
    return rollout


def alone(turns: TurnLoop, params=PARAMS):
    return talked(World.single(torch.device("cpu")), Layout(), turns, params)




def answer(sample: int, turns: int) -> tuple[tuple[int, ...], list[float]]:
    """What Speaker says with `turns` turns, and its mask, written out."""
    ids, mask = [], []
    for turn in range(turns):
        spoken = [len(ids) + 100, sample + 50, CALL]
        ids, mask = ids + spoken, mask + [1.0] * 3
        if turn < turns - 1:
            text = Letters().decode(spoken)[-6:-3]
            heard = Letters().encode(f"<{text}>")
            ids, mask = ids + heard, mask + [0.0] * len(heard)
    if turns > sample:
        ids[-1] = STOP
    return tuple(ids), mask


def test_ids_are_as_sampled_and_what_tools_say_is_masked():
    turns = loop()
    rollout = alone(turns)
    batch = rollout.batch
    want = [answer(sample, min(sample + 1, 3)) for _ in range(2) for sample in range(4)]
    assert [sample.response for sample in batch.samples] == [ids for ids, _ in want]
    assert batch.columns.loss_mask.tolist() == [flag for _, mask in want for flag in mask]
    assert batch.sampled_lengths == tuple(int(sum(mask)) for _, mask in want)
    sampled = [(-float(place) if flag else 0.0) for _, mask in want for place, flag in enumerate(mask)]
    assert batch.columns.rollout_log_probs.tolist() == sampled
    assert [(one.turns, one.last) for one in said(batch)] == [
        (min(row % 4 + 1, 3), ids[-3:]) for row, (ids, _) in enumerate(want)]
    assert len(turns.toolbox.asked) == 8 + 6 + 0 and rollout.finished == 8  # nobody asks after the third turn
    metrics = rollout.metrics()
    assert metrics["rollout/turns_mean"] == 2.25 and metrics["rollout/turns_max"] == 3.0
    assert metrics["rollout/tool_calls"] == 10.0 and metrics["rollout/tool_faults"] == 0.0
    assert metrics["rollout/observation_fraction"] == batch.columns.loss_mask.eq(0).double().mean().item()


def test_limits():
    rollout = alone(loop(limit=2))
    assert rollout.metrics()["rollout/observations_cut"] == 10.0
    assert max(rollout.batch.response_lengths) == 3 + 4 + 3 + 4 + 3
    rollout = alone(loop(), replace(PARAMS, max_new_tokens=12))  # one observation of 5 and two turns, no more
    assert max(rollout.batch.response_lengths) == 11 and rollout.metrics()["rollout/tool_calls"] == 6.0 + 0.0
    rollout = alone(loop(), replace(PARAMS, max_new_tokens=8))  # no token is left behind the observation
    assert set(rollout.batch.response_lengths) == {3} and rollout.finished == 2
    assert rollout.metrics()["rollout/tool_calls"] == rollout.metrics()["rollout/observations_lost"] == 6.0


def test_errors_are_read_or_end_the_answer():
    """Sample 3 fails from its second turn on, which the box tells by its first token."""
    prompts, params = [replace(one, ids=(7,)) for one in prompts_of(1)], replace(PARAMS, max_new_tokens=60)
    for ends, turns in ((False, [1, 2, 3, 3]), (True, [1, 2, 2, 2])):
        mesh = Mesh(Grid(Layout(), (0,)), World.single(torch.device("cpu")))
        rollout = begin(Speaker(mesh, False), mesh, prompts, params, samples=4, seed=0, version=None,
                        dtype=torch.float64, turns=loop(ends_at_error=ends, toolbox=FailingBox())).finish()
        assert [one.turns for one in said(rollout.batch)] == turns
        assert rollout.metrics()["rollout/tool_faults"] == 2.0


def test_the_end_of_an_answer_is_told_once():
    told: list[tuple[int, tuple[int, ...], Said]] = []
    mesh = Mesh(Grid(Layout(), (0,)), World.single(torch.device("cpu")))
    speaks = Speaker(mesh, False)
    requests = [Prompt(prompt.id, sample, prompt.ids) for prompt in prompts_of(2) for sample in range(4)]
    going = loop().begin(mesh, requests, PARAMS)
    rows, _ = going.go_on(speaks, dict(enumerate(speaks.generate(requests, PARAMS, 0))), seed=0,
                          ended=lambda *answer: told.append(answer))
    ids = [rows[row].response_ids for row in range(8)]
    assert sorted(told, key=lambda one: one[0]) == [(row, ids[row], Said(min(row % 4 + 1, 3), ids[row][-3:]))
                                                    for row in range(8)]


def test_what_was_generated_is_not_computed_again():
    """Weights, blocks and prefixes are still there when an answer goes on."""
    generator = make_generator()
    mesh = Mesh(Grid(Layout(), (0,)), World.single(torch.device("cpu")))
    params = SamplingParams(max_new_tokens=80, stop_ids=(1, 2, 3))
    requests = [Prompt(3, sample, tuple(range(35))) for sample in range(2)]
    first = dict(enumerate(generator.generate(requests, replace(params, max_new_tokens=40), 5)))
    before = replace(generator.scheduler.stats)
    turns = TurnLoop(SureBox(), ObservationForm(Fives(), (6,) * 9, (7,) * 9, limit=1), Letters(), max_turns=2)
    rows, talks = turns.begin(mesh, requests, params).go_on(generator, first, seed=5)
    known = sum((34 + len(first[row].response_ids)) // BLOCK_TOKENS * BLOCK_TOKENS for row in (0, 1))
    computed = sum(35 + talks[row].observed[0][1] for row in (0, 1))
    stats = generator.scheduler.stats
    assert stats.prefix_hit_tokens - before.prefix_hit_tokens == known
    assert stats.prefill_tokens - before.prefill_tokens == computed - known
    for row, completion in rows.items():
        start, stop = talks[row].observed[0]
        want = full_log_probs(generator, completion)
        assert completion.log_probs[:start] == pytest.approx(want[:start], abs=1e-9)
        assert completion.log_probs[start:stop] == (0.0,) * (stop - start)
        assert completion.log_probs[stop:] == pytest.approx(want[stop:], abs=1e-9)


def test_a_turn_end_that_was_sampled_does_not_come_twice():
    form = ObservationForm(Letters(), (CALL, 9), (8,), limit=5)
    assert form.ids("a", CALL) == ((9, 197, 8), False) and form.ids("a", STOP) == ((CALL, 9, 197, 8), False)


def on_ranks(world: World, layout: Layout) -> tuple[Batch, int, dict[str, float]]:
    turns = loop()
    rollout = talked(world, layout, turns, ranks=(2, 0, 3, 1))
    return rollout.batch, len(turns.toolbox.asked), rollout.metrics()


@pytest.mark.parametrize("layout", [Layout(dp=4), Layout(tp=2, pp=2), Layout(tp=2, dp=2), Layout(pp=2, dp=2)], ids=str)
def test_ranks_of_a_replica_agree_and_one_of_them_asks(layout: Layout):
    whole = alone(loop())
    found = run_ranks(4, on_ranks, layout)
    rows = {row: sample for rank, (batch, _, _) in enumerate(found)
            for row, sample in zip(batch.home[rank], batch.samples)}
    assert [rows[row] for row in range(8)] == list(whole.batch.samples)
    assert sum(asked for _, asked, _ in found) == 14 and sum(asked > 0 for _, asked, _ in found) <= layout.dp
    for rank, (batch, _, metrics) in enumerate(found):
        assert batch.sampled_lengths == whole.batch.sampled_lengths and metrics == whole.metrics()
        mask = [flag for row in batch.home[rank] for flag in answer(row % 4, min(row % 4 + 1, 3))[1]]
        assert batch.columns.loss_mask.tolist() == mask
