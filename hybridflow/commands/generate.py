"""`hybridflow generate`: answers to held-out prompts, or to those of a file, as JSON lines, sampled as the config says.

Owns the form of an answer's line. How answers are found is generation's, what a file of prompts is `prompt_lines`'.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from hybridflow.commands.job import EXIT_TRY_AGAIN, Job
from hybridflow.config.schema import Config
from hybridflow.data.prompt_lines import read_prompt_lines
from hybridflow.data.records import prompt_text
from hybridflow.exchange import share_json
from hybridflow.gathering import Gathering
from hybridflow.generation.interrupt import Interrupt
from hybridflow.generation.records import Completion, FinishReason, Prompt
from hybridflow.observe.trace import Trace
from hybridflow.parallel.world import World
from hybridflow.response_text import answer_text
from hybridflow.trainer.build import Builder
from hybridflow.trainer.inputs import Inputs, require_cache
from hybridflow.trainer.prompts import FILES_DIFFER, RunData, held_out_prompts, read_records, require_equal
from hybridflow.trainer.rollout import complete


@dataclass(frozen=True)
class Asked:
    """A prompt and what its answers' lines say of it. Example: `Asked(0, (1, 52), {"id": "a7", "prompt": "2 + 3 ="})`.

    Attributes:
        stream: of the random draws, with the seed and the number of the sample.
        before, after: of the answer's own keys.
        sample: which sample the first answer is.
    """

    stream: int
    ids: tuple[int, ...]
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    sample: int = 0


@dataclass(frozen=True)
class Task:
    """What to ask, and where to write the answers.

    Attributes:
        text_key: of an answer's text.
        aloud: whether answers are printed too.
    """

    asked: Sequence[Asked]
    out: Path
    text_key: str
    aloud: bool


def prepare(config: Config, prompts_file: Path | None = None, out: Path | None = None) -> Job:
    """Read everything that the config names, and the prompts; the job then answers them on all launched ranks.

    Args:
        prompts_file: of prompts as `prompt_lines` reads them; None asks evaluation.prompts held-out prompts.
        out: file of the answers; None is logging.dir/generations.jsonl.
    """
    path, gathering = Path(config.logging.dir) / "generations.jsonl" if out is None else out, Gathering()
    gathering.read(_require_place, path, prompts_file)
    records = gathering.read(read_records, config) if prompts_file is None else None
    inputs = gathering.read(Inputs.read, config, scores=False)
    gathering.finish()
    assert inputs is not None
    asked = _held_out(inputs, records) if records is not None else _of_file(inputs, prompts_file)
    require_cache(config, inputs.model, max(len(one.ids) for one in asked))
    own = prompts_file is not None
    return partial(_run, inputs, Task(asked, path, "text" if own else "response", aloud=not own))


def _held_out(inputs: Inputs, records: RunData) -> list[Asked]:
    prompts = held_out_prompts(inputs.config, records, inputs.tokenizer, inputs.model.vocab_size)
    return [Asked(prompt.id, prompt.ids, {"row": row, "prompt": prompt_text(prompt.record.prompt)},
                  {"ground_truth": prompt.record.ground_truth}) for row, prompt in enumerate(prompts)]


def _of_file(inputs: Inputs, path: Path) -> list[Asked]:
    model = inputs.model
    room = model.max_position_embeddings - inputs.config.generation.max_new_tokens
    return [Asked(line.stream, line.ids, {"id": line.id, "prompt": line.prompt}, {}, line.sample)
            for line in read_prompt_lines(path, inputs.tokenizer, model.vocab_size, room)]


def _require_place(path: Path, prompts_file: Path | None) -> None:
    """
    Raises:
        ValueError: a file cannot be written there, or it is the file of prompts.
    """
    if prompts_file is not None and path.resolve() == prompts_file.resolve():
        raise ValueError(f"--out {path}: is the file of prompts, which would be lost; give another")
    if path.is_dir():
        raise ValueError(f"--out {path}: is a folder; give a file")
    there = path if path.exists() else next(folder for folder in path.absolute().parents if folder.exists())
    if there != path and not there.is_dir():
        raise ValueError(f"--out {path}: {there} is a file, so that no folder can be made there")
    try:  # asking is not enough: a file system may refuse what permissions allow
        with path.open("ab") if there == path else tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(f"--out {path}: {there} cannot be written to ({error.strerror}); give a file in a folder of "
                         "your own") from None


def _run(inputs: Inputs, task: Task) -> int:
    with Interrupt() as interrupt, closing(World.from_env(inputs.config.train.timeout_s)) as world:
        require_equal(world, [[one.stream, one.ids] for one in task.asked], FILES_DIFFER)
        rows = _answers(inputs, task, world, interrupt)
        if world.rank == 0:
            _write(task, [line for _, line in rows])
        whole = len(rows) == len(task.asked) * inputs.config.generation.samples_per_prompt
        stopped = not whole or any(line["finish_reason"] == FinishReason.INTERRUPTED.value for _, line in rows)
        if stopped and world.rank == 0:
            print("interrupted: answers that are not finished say so, and those not begun are not there")
    return EXIT_TRY_AGAIN if stopped else 0


def _answers(inputs: Inputs, task: Task, world: World, interrupt: Interrupt) -> list[tuple[int, dict[str, Any]]]:
    """Lines of all answers that have a token, in order of the prompts, with their places; the same on every rank."""
    config, builder = inputs.config, Builder(inputs, world, Trace())
    samples = config.generation.samples_per_prompt
    generator, mesh = builder.generator()
    requests = [Prompt(one.stream, one.sample + i, one.ids) for one in task.asked for i in range(samples)]
    found = complete(generator, mesh, requests, builder.sampling(), seed=config.train.seed, balance=builder.balance,
                     interrupt=interrupt.asked)
    mine = {}
    if (mesh.coord.tp, mesh.coord.pp) == (0, 0):  # one rank speaks for its replica
        mine = {row: _line(inputs, task, task.asked[row // samples], one) for row, one in found.items()
                if one.response_ids}
    told = share_json(world, list(mine.items()))
    return sorted(((row, line) for lines in told for row, line in lines), key=itemgetter(0))


def _line(inputs: Inputs, task: Task, asked: Asked, answer: Completion) -> dict[str, Any]:
    line = {**asked.before, "sample": answer.sample, "prompt_ids": list(answer.prompt_ids),
            task.text_key: answer_text(inputs.tokenizer, answer.response_ids, inputs.ends),
            "response_ids": list(answer.response_ids), "log_probs": list(answer.log_probs)}
    if answer.processed_log_probs is not None:
        line["processed_log_probs"] = list(answer.processed_log_probs)
    return line | {"finish_reason": answer.finish_reason.value, **asked.after}


def _write(task: Task, lines: Sequence[Mapping[str, Any]]) -> None:
    task.out.parent.mkdir(parents=True, exist_ok=True)
    with task.out.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
            if task.aloud:
                print(f"{line['prompt']!r} -> {line[task.text_key]!r}")
    print(f"{len(lines)} answers in {task.out}")
