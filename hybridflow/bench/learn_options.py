"""The options of `bench learn`, and which algorithms there are. Imports nothing heavy: every command line reads this
before it knows what to do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hybridflow.bench.generate_options import count, some

PREFERENCE = ("dpo", "kto", "reward_model")  # commands of their own; the others are algorithms of `train`
ALGORITHMS = ("ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "gspo",
              "cispo", "safe_rlhf", *PREFERENCE)
RANKS = 4  # that the configs are written for
EPILOGUE = """\
From the folder that has configs/, for instance
                    python -m hybridflow bench learn --algorithms grpo,rloo,dpo
Runs stay in --dir, with their logs and metrics. On two cores all take about a quarter of an hour.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add = parser.add_argument
    add("--algorithms", type=some(ALGORITHMS), default=ALGORITHMS, metavar="A,B",
        help=f"of {', '.join(ALGORITHMS)}\n(default: all)")
    add("--ranks", type=count, default=RANKS, metavar="N", help=f"processes of each run (default {RANKS})")
    add("--dir", type=Path, default=Path("runs/learn"), metavar="DIR",
        help="where runs go, each in a folder of its own, replaced (default runs/learn)")
