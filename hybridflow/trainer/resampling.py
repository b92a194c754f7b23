"""Prompts whose samples all have the same reward say nothing: others are answered in their place (DAPO,
arXiv 2503.14476, section 3.2).

Owns the rounds of generation and scoring, and which prompts are kept. What has a signal is `algorithms.dapo`'s to say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hybridflow.algorithms.dapo import groups_with_signal
from hybridflow.batch import Batch
from hybridflow.crew import Crew
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.trainer.board import Board, Metrics
from hybridflow.trainer.judging import RewardSource, judged, score_moments
from hybridflow.trainer.rollout_source import Experience, More, OnPolicy

ADD_UP = ("reward/truncated", "rollout/samples", "rollout/tool_calls", "rollout/tool_faults",
          "rollout/observations_cut", "rollout/observations_lost")


class Resampling:
    """Generates and scores until as many prompts as a step has say something, or the rounds are over. Where none says
    anything the last round is learned from as it is.
    """

    steps_ahead = 0

    def __init__(self, inner: OnPolicy, rewards: RewardSource, crew: Crew, rounds: int) -> None:
        self._inner, self._rewards, self._crew, self._rounds = inner, rewards, crew, rounds

    def start(self, prompts: Sequence[TokenisedPrompt]) -> None:
        """See `OnPolicy`."""
        self._inner.start(prompts)

    def rest(self) -> None:
        """See `OnPolicy`."""
        self._inner.rest()

    def next(self, prompts: Sequence[TokenisedPrompt], board: Board, more: More | None = None) -> Experience:
        """As `RolloutSource.next`; without `more` prompts there is one round."""
        wanted, kept, boards, scores = len(prompts), [], [], []
        for number in range(self._rounds):
            boards.append(Board())
            experience = self._inner.next(prompts, boards[-1])
            batch, metrics = self._scored(experience)
            boards[-1].said |= metrics
            scores.append(batch.scores)
            experience = replace(experience, batch=batch)
            kept.append(self._informative(experience))
            if sum(len(one.prompts) for one in kept) >= wanted or more is None or number == self._rounds - 1:
                break
            prompts = more()
        self._tell(board, boards, torch.cat(scores), sum(len(one.prompts) for one in kept))
        return _joined([one for one in kept if one.prompts] or [experience], wanted, self._crew.rank)

    def _scored(self, experience: Experience) -> tuple[Batch, Metrics]:
        scores, metrics = judged(self._rewards, experience.batch, experience.prompts, self._crew, experience.early)
        return replace(experience.batch, scores=scores), metrics

    def _informative(self, experience: Experience) -> Experience:
        batch = experience.batch
        assert batch.scores is not None
        groups = set(groups_with_signal(batch.scores, torch.tensor(batch.groups, device=batch.scores.device)).tolist())
        return _only(experience, sorted(groups), self._crew.rank)

    def _tell(self, board: Board, rounds: Sequence[Board], scores: Tensor, num_kept: int) -> None:
        """Scores and faults are those of all rounds, other metrics their means."""
        told: dict[str, list[float]] = defaultdict(list)
        for one in rounds:
            for name, value in one.said.items():
                told[name].append(value)
        for name, values in told.items():
            adds_up = name.startswith("reward/faults") or name in ADD_UP
            board.said[name] = sum(values) if adds_up else sum(values) / len(values)
        board.said |= score_moments(scores) | {"rollout/rounds": float(len(rounds)),
                                               "rollout/prompts_with_signal": float(num_kept)}
        board.summed |= rounds[0].summed  # of the reshard: there is one, before the first round
        board.largest |= rounds[0].largest
        board.trouble = self._rewards.last_fault


def _only(experience: Experience, groups: Sequence[int], rank: int) -> Experience:
    """The rows of these groups alone."""
    wanted, batch = set(groups), experience.batch
    rows = [row for row, group in enumerate(batch.groups) if group in wanted]
    return Experience([experience.prompts[group] for group in groups], batch.take(rank, rows))


def _joined(parts: Sequence[Experience], wanted: int, rank: int) -> Experience:
    """All of them, but no more than `wanted` prompts."""
    prompts = [prompt for part in parts for prompt in part.prompts]
    whole = Experience(prompts, Batch.joined([part.batch for part in parts]))
    return whole if len(prompts) <= wanted else _only(whole, range(wanted), rank)
