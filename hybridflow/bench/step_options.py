"""The options of `bench step`: which algorithms, beside whom, and how often.

Owns their words and defaults. Imports nothing heavy: the command line reads this before it knows what to do.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridflow.bench.generate_options import count, some

ALGORITHMS = ("grpo", "ppo")
TRL_PYTHON = "HYBRIDFLOW_TRL_PYTHON"
TRL_PPO_PYTHON = "HYBRIDFLOW_TRL_PPO_PYTHON"
EPILOGUE = """\
How TRL is got, in an environment of its own:
                    python -m venv trl && trl/bin/pip install torch==2.13.0 transformers==5.24.0 trl==1.16.0
                    python -m hybridflow bench step --trl-python trl/bin/python
That version has no PPO; 1.8.0, in another environment, is the last in which we found it (trl.experimental.ppo):
                    python -m hybridflow bench step --trl-python ... --trl-ppo-python trl_1.8.0/bin/python
Without them our side and the limit are measured alone.
"""


@dataclass(frozen=True)
class Options:
    """What to measure. Example: `Options(algorithms=("grpo",), rounds=3)`.

    Attributes:
        rounds: steps of each contestant, in turns.
        threads: of every contestant.
        trl_python, trl_ppo_python: interpreters of environments that have TRL with GRPO, and with PPO; None: nobody has
            them.
        json: the file that gets all figures; None: no file.
    """

    algorithms: tuple[str, ...] = ALGORITHMS
    rounds: int = 7
    threads: int = 1
    trl_python: str | None = None
    trl_ppo_python: str | None = None
    json: Path | None = None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Options:
        """Of a parsed command line."""
        return cls(**{name: getattr(arguments, name) for name in cls.__dataclass_fields__})

    def peer_python(self, algorithm: str) -> str | None:
        """Who runs TRL's step; None: nobody."""
        return {"grpo": self.trl_python, "ppo": self.trl_ppo_python}[algorithm]


def add_arguments(parser: argparse.ArgumentParser, environment: Mapping[str, str] = os.environ) -> None:
    """The options of `bench step`."""
    default = Options(trl_python=environment.get(TRL_PYTHON), trl_ppo_python=environment.get(TRL_PPO_PYTHON))
    add = parser.add_argument
    add("--algorithms", type=some(ALGORITHMS), default=default.algorithms, metavar="A,B",
        help=f"of {', '.join(ALGORITHMS)}")
    add("--rounds", type=count, default=default.rounds, metavar="N", help="steps of each, in turns (default 7)")
    add("--threads", type=count, default=default.threads, metavar="N", help="of each contestant (default 1)")
    add("--trl-python", default=default.trl_python, metavar="PATH",
        help=f"the interpreter of an environment that has TRL's GRPO (default: ${TRL_PYTHON})")
    add("--trl-ppo-python", default=default.trl_ppo_python, metavar="PATH",
        help=f"the interpreter of an environment that has TRL's PPO (default: ${TRL_PPO_PYTHON})")
    add("--json", type=Path, default=None, metavar="FILE", help="write all figures there")
