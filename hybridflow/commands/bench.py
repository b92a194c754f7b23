"""`hybridflow bench`: one figure, measured on processes of this host and checked while it is measured."""

from __future__ import annotations

import argparse
import importlib

FIGURES = {
    "pipeline": "our 1F1B step beside torch.distributed.pipelining's and megatron-core's, same model and micro-batches",
    "bubble": "the idle share of every schedule, with a layer that sleeps, beside the simulator's",
    "memory": "peak activation bytes and reduced bytes of a step by the number of accumulated micro-batches",
    "reshard": "weights from a training to a generation layout: ours, all-gather, megatron-core, DTensor, a checkpoint",
    "wire": "a reshard between two hosts on a link of 1 Gbit/s, beside that link (needs root)",
    "precision": "the gradient of 512 micro-batches in bf16 beside fp32's, accumulated in fp32 and in bf16",
}
HELP = "measure one figure on processes of this host, without a config"
EPILOGUE = "\n".join(f"{name:<12}{meaning}" for name, meaning in FIGURES.items()) + """

The exit code is 1 where what was measured is wrong or misses its bound; nobody's time is reported then.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("figure", choices=tuple(FIGURES), help="what to measure")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print one figure. Returns 0, or 1 where a check fails."""
    return importlib.import_module(f"hybridflow.bench.{arguments.figure}").main()
