"""Pairs made out of prompt records: the right answer, and a wrong one made from the seed.

Owns how a wrong answer comes about. Such pairs need no files, so that preference training can be tried on any
reasoning-gym task.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from enum import Enum

from hybridflow.data.preference import TextPreference
from hybridflow.data.records import PromptRecord

TRIES = 20  # other answers, or changes, that are looked at before a record is given up


class WrongAnswer(Enum):
    """Where the rejected answer of a record comes from."""

    OTHER = "other"  # the answer to another prompt of the same task
    PERTURBED = "perturbed"  # the right answer with one character changed, left out, doubled or exchanged


def preference_pairs(records: Sequence[PromptRecord], wrong: WrongAnswer, seed: int) -> tuple[TextPreference, ...]:
    """A pair for each record for which a wrong answer was found; a function of its arguments.

    Raises ValueError where no record has a wrong answer.
    """
    answers: dict[str, list[str]] = defaultdict(list)
    for record in records:
        answers[record.data_source].append(record.ground_truth)
    pairs = []
    for number, record in enumerate(records):
        draw = random.Random(f"{seed} wrong answer {number}")
        rejected = _wrong(record.ground_truth, answers[record.data_source], wrong, draw)
        if rejected is not None:
            pairs.append(TextPreference(record.prompt, record.ground_truth, rejected, origin=record.origin))
    if records and not pairs:
        raise ValueError(f"no wrong answer ({wrong.value}) was found for any of {len(records)} prompts, whose answers "
                         "do not differ; choose another preference.rejected")
    return tuple(pairs)


def _wrong(answer: str, answers: Sequence[str], wrong: WrongAnswer, draw: random.Random) -> str | None:
    for _ in range(TRIES):
        other = _pick(answers, draw) if wrong is WrongAnswer.OTHER else _perturbed(answer, _pick(answers, draw), draw)
        if other and other != answer:
            return other
    return None


def _perturbed(answer: str, source: str, draw: random.Random) -> str:
    """One change of `answer`; a new character is one of `source`. Draws by random() alone, see `epoch_order`."""
    if not answer or not source:
        return ""
    place = int(draw.random() * len(answer))
    before, here, after = answer[:place], answer[place], answer[place + 1:]
    return _pick((
        before + _pick(source, draw) + after,
        before + after,
        before + here + here + after,
        before + after[:1] + here + after[1:],
    ), draw)


def _pick(choices: Sequence[str], draw: random.Random) -> str:
    return choices[int(draw.random() * len(choices))]
