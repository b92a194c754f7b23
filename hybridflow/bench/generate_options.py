"""The options of `bench generate` and `bench ragged`: what is measured, beside whom, and how often.

Owns their words and defaults. Imports nothing heavy: the command line reads this before it knows what to do.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MODELS = ("tiny", "small")
DTYPES = ("fp32", "bf16")
BATCHES = (1, 8, 32, 64)
PEERS = ("generate", "continuous", "vllm")
VLLM_PYTHON = "HYBRIDFLOW_VLLM_PYTHON"
EPILOGUE = """\
some cells:         python -m hybridflow bench generate --models tiny --batches 1,8 --dtypes fp32
beside vLLM too:    python -m hybridflow bench generate --vllm-python /path/of/its/environment/bin/python
without the rest:   python -m hybridflow bench generate --peers ""
"""


@dataclass(frozen=True)
class Options:
    """What to measure. Example: `Options(models=("tiny",), batches=(1, 8))`.

    Attributes:
        peers: contestants beside ours; vLLM takes part where `vllm_python` is given.
        rounds: in turns; a contestant that takes longer than `seconds` in a cell has had its turns.
        threads: of every contestant.
        vllm_python: the interpreter of an environment that has vLLM; None: nobody has it.
        json: the file that gets all figures; None: no file.
    """

    models: tuple[str, ...] = MODELS
    dtypes: tuple[str, ...] = DTYPES
    batches: tuple[int, ...] = BATCHES
    peers: tuple[str, ...] = PEERS
    new_tokens: int = 128
    rounds: int = 3
    seconds: float = 4.0
    threads: int = 2
    vllm_python: str | None = None
    json: Path | None = None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Options:
        """Of a parsed command line."""
        return cls(**{name: getattr(arguments, name) for name in cls.__dataclass_fields__})


def add_arguments(parser: argparse.ArgumentParser, environment: Mapping[str, str] = os.environ) -> None:
    """The options of `bench generate`."""
    default = Options(vllm_python=environment.get(VLLM_PYTHON))
    add = parser.add_argument
    add("--models", type=some(MODELS), default=default.models, metavar="A,B", help=f"of {', '.join(MODELS)}")
    add("--dtypes", type=some(DTYPES), default=default.dtypes, metavar="A,B", help=f"of {', '.join(DTYPES)}")
    add("--batches", type=_counts, default=default.batches, metavar="N,N", help="prompts at once (default 1,8,32,64)")
    add("--peers", type=some(PEERS), default=default.peers, metavar="A,B",
        help=f"of {', '.join(PEERS)}: transformers' generate, its continuous batching, vLLM")
    add("--new-tokens", type=count, default=default.new_tokens, metavar="N", help="after each prompt (default 128)")
    add("--rounds", type=count, default=default.rounds, metavar="N", help="of all contestants in turns (default 3)")
    add("--seconds", type=float, default=default.seconds, metavar="S",
        help="after so many a contestant has no more rounds in a cell (default 4)")
    add("--threads", type=count, default=default.threads, metavar="N", help="of each contestant (default 2)")
    add("--vllm-python", default=default.vllm_python, metavar="PATH",
        help=f"the interpreter of an environment that has vLLM (default: ${VLLM_PYTHON})")
    add("--json", type=Path, default=None, metavar="FILE", help="write all figures there")


def some(words: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of an option that takes several of `words`."""
    def read(text: str) -> tuple[str, ...]:
        chosen = tuple(filter(None, text.split(",")))
        wrong = [word for word in chosen if word not in words]
        if wrong:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: choose of {', '.join(words)}, with commas between")
        return chosen
    return read


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(count, text.split(",")))


def count(text: str) -> int:
    """The type of an option that takes a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)
