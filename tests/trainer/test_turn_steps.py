"""Steps on answers of several turns: on every layout those of one process, and those of a dense computation in which
what tools said is context and nothing else.
"""

from pathlib import Path

import numpy
import pytest
import torch
import transformers

from hybridflow.observe.metric_names import check_names
from hybridflow.parallel.world import World
from hybridflow.trainer.inputs import Inputs
from tests.engine.models import canonical_grads
from tests.ranks import run_ranks
from tests.trainer.runs import make_tokenizer, run_steps, started, tiny_config
from tests.trainer.test_placements import PLACEMENTS
from tests.trainer.test_rl import LAYOUTS, numbers

CALCULATOR = Path(__file__).parents[1] / "tools" / "calculator.py"
REWARD = Path(__file__).with_name("reward_of_turns.py")
# Turns end at any of these, and every turn calls a tool.
KEYS = (f"tools.file={CALCULATOR}", f"tools.call={CALCULATOR}:every_turn", "tools.max_turns=3",
        "tools.max_observation_tokens=6", "tools.wrapper='={observation};'", "generation.max_new_tokens=26",
        f"generation.stop={list(range(3, 90))}",
        f"reward.function={REWARD}:score")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def steps_on(world: World, tokenizer: Path, folder: Path, overrides: tuple[str, ...], steps: int) -> tuple:
    return run_steps(world, tiny_config(tokenizer, folder, (*KEYS, *overrides)), steps)


def test_the_config_says_how_tools_are_called(tokenizer: Path, tmp_path: Path):
    def read(*overrides: str) -> Inputs:
        inputs = Inputs.read(tiny_config(tokenizer, tmp_path, overrides))
        inputs.close_tools()
        inputs.rewards[0].scorer.close()
        return inputs

    plain, tags = read(), read(f"tools.file={CALCULATOR}")
    given = read(f"tools={{file: {CALCULATOR}, call: json, max_turns: 3, max_observation_tokens: 2, timeout_s: 3, "
                 "on_error: end, wrapper: '={observation}!'}")
    assert plain.turns is None and plain.ends.strings == ()
    assert tags.ends.strings == ("</tool>",) and given.ends.strings == ("</tool_call>",)
    assert (tags.turns.max_turns, tags.turns.ends_at_error) == (4, False)
    assert (given.turns.max_turns, given.turns.ends_at_error) == (3, True)
    text = plain.tokenizer.decode(given.turns.form.ids("12345", 0)[0])
    assert text == "=12!" and plain.tokenizer.decode(tags.turns.form.ids("12345", 0)[0]) == "\n<result>12345</result>\n"
    with pytest.raises(ValueError, match=r"tools.file = .*reward_of_turns.py, tools.call = .*no function 'find'"):
        read(f"tools={{file: {REWARD}, call: '{REWARD}:find'}}")


RUNS = {
    "ppo, context ranks": (4, ("algorithm.lam=0.9",), LAYOUTS[5]),
    "ppo, roles that answer meanwhile": (4, ("algorithm.lam=0.9",), PLACEMENTS["standalone"]),
    "gspo": (2, ("algorithm.name=gspo", "algorithm.correction.level=sequence", "algorithm.overlong_buffer=20",
                 "algorithm.kl={where: loss, estimator: k3, coef: 0.1}"),
             ("generation.layout.pp=2", "train.layout.tp=2")),
}


@pytest.mark.parametrize("run", RUNS)
def test_every_layout_takes_the_step_of_one_process(run: str, tokenizer: Path, tmp_path: Path):
    size, algorithm, layout = RUNS[run]
    alone, answers = steps_on(World.single(torch.device("cpu")), tokenizer, tmp_path, algorithm, 2)
    check_names(alone[0])
    assert alone[0]["rollout/turns_max"] == 3 and alone[0]["rollout/tool_faults"] == 0
    assert 0.1 < alone[0]["rollout/observation_fraction"] < 0.9 and alone[0]["reward/extra_shares"] == 1.0
    ranks = run_ranks(size, steps_on, tokenizer, tmp_path, (*algorithm, *layout), 2)
    for step in range(2):
        assert {row: ids for _, rows in ranks for row, ids in rows[step].items()} == answers[step]
        for metrics, _ in ranks:
            assert numbers(metrics[step]) == pytest.approx(numbers(alone[step]), rel=1e-8, abs=1e-10)
            assert metrics[step]["policy/log_prob_gap_max"] < 1e-12


def gae(rewards, values, gamma: float, lam: float) -> list[float]:
    """Of the tokens of one answer that were sampled, as if there were no others."""
    found, following, value = [], 0.0, 0.0
    for reward, now in zip(rewards[::-1], values[::-1]):
        following = reward + gamma * value - now + gamma * lam * following
        value = now
        found.append(following)
    return found[::-1]


def test_what_tools_say_is_context_and_nothing_else(tokenizer: Path, tmp_path: Path):
    keys = (*KEYS, "algorithm.name=ppo", "algorithm.lam=0.9", "algorithm.gamma=0.97", "algorithm.kl.where=none",
            "algorithm.kl.coef=0.0", "algorithm.normalise_advantages=false", "train.global_batch_size=18",
            "train.optimizer.clip_grad_norm=null", "algorithm.value_clip=null",
            "evaluation={samples_per_prompt: 2, temperature: 1.0, save_answers: true}")
    trainer, loader = started(World.single(torch.device("cpu")), tiny_config(tokenizer, tmp_path, keys))
    trainer.export(tmp_path / "start")
    metrics = trainer.step(next(loader))
    batch, grads = trainer.batch, canonical_grads(trainer.roles.actor.trainer)
    asks = trainer.evaluator(next(loader)[:2])
    assert asks()["eval/faults"] == 0
    trainer.close()
    assert all(one.answer.strip().endswith(one.vote) for one in asks.answers)  # the last turn votes
    assert any(len(one.vote) < len(one.answer.strip()) for one in asks.answers)
    masks = [mask.numpy() for mask in batch.columns.loss_mask.split(batch.response_lengths)]
    assert [int(mask.sum()) for mask in masks] == list(batch.sampled_lengths)
    values = batch.columns.old_values.split(batch.response_lengths)
    advantages, squares = [], 0.0
    for row, mask in enumerate(masks):
        kept = mask > 0
        rewards = [0.0] * (kept.sum() - 1) + [batch.scores[row].item()]
        advantages.append(numpy.zeros(len(mask)))
        advantages[-1][kept] = gae(rewards, values[row].numpy()[kept], 0.97, 0.9)
        squares += (advantages[-1] ** 2).sum()
    assert batch.columns.advantages.numpy() == pytest.approx(numpy.concatenate(advantages), abs=1e-9)
    total = sum(batch.sampled_lengths)
    assert metrics["critic/loss"] == pytest.approx(0.5 * squares / total, rel=1e-9)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for sample, mask, advantage in zip(batch.samples, masks, advantages):
        ids = torch.tensor([*sample.prompt, *sample.response])
        scores = (model(ids[None]).logits[0, len(sample.prompt) - 1:-1] / 0.8).log_softmax(-1)
        own = scores.gather(1, torch.tensor(sample.response)[:, None])[:, 0]
        entropy = -(scores.exp() * scores).sum(-1)
        for place in numpy.flatnonzero(mask):
            ratio = (own[place] - own[place].detach()).exp()
            loss = loss - (ratio * advantage[place] + 0.01 * entropy[place]) / total
    loss.backward()
    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=1e-9)
    names = dict(model.named_parameters())
    for box, grad in grads.items():  # they are added up in fp32
        assert grad.numpy() == pytest.approx(names[box.name].grad.numpy()[box.slices], rel=1e-5, abs=1e-8), box
