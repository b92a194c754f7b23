"""`hybridflow verify`: that every layout, schedule and cut of a batch gives the answers and steps of one process."""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial

HELP = "check on this host that no layout, schedule or micro-batch changes an answer or a step; for after a change"
EPILOGUE = """\
four ranks:         python -m hybridflow verify
eight:              python -m hybridflow verify --world 8
some of them:       python -m hybridflow verify --only zb-v
"""
EXIT_FAULT = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--world", type=_ranks, default=4, metavar="N", help="ranks on this host (default 4)")
    parser.add_argument("--only", default="", metavar="TEXT", help="those combinations whose line has this in it")
    parser.add_argument("--list", action="store_true", help="print the combinations and run none")


def run(arguments: argparse.Namespace) -> int:
    """Verify. Returns 0; 1 where a combination differs or a rank fails; 2 where no combination is meant."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the ranks share this host's cores
    from hybridflow.local_ranks import LocalRanks
    from hybridflow.verify.combinations import matching, selection
    from hybridflow.verify.matrix import PRELOAD, TIMEOUT_S, report, verify

    combinations = matching(selection(arguments.world), arguments.only)
    if not combinations:
        print(f"--only {arguments.only!r} is in no combination of {arguments.world} ranks; --list prints them",
              file=sys.stderr)
        return EXIT_FAULT
    if arguments.list:
        print("\n".join(map(str, combinations)))
        return 0
    start = time.monotonic()
    with LocalRanks(arguments.world, PRELOAD, TIMEOUT_S) as ranks:
        wrong = report(verify(ranks, combinations), len(combinations), partial(print, flush=True))
    print(f"{time.monotonic() - start:.0f} s on {arguments.world} processes of this host")
    return 1 if wrong else 0


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks from 1 to 64")
    return int(text)
