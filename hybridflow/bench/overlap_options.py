"""The options of `bench overlap`. Imports nothing heavy: every command line reads this before it knows what to do."""

from __future__ import annotations

import argparse

DEVICE_MS = 20.0
ROUNDS = 5
EPILOGUE = """\
slower devices:     python -m hybridflow bench overlap --device-ms 40
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--device-ms", type=_positive, default=DEVICE_MS, metavar="MS",
                        help=f"milliseconds in which a stand-in device reads the weights (default {DEVICE_MS:.0f});\n"
                             "real compute on this machine should be small beside it")
    parser.add_argument("--rounds", type=_count, default=ROUNDS, metavar="N",
                        help=f"steps of each case that are timed, in turns (default {ROUNDS})")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of milliseconds")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)
