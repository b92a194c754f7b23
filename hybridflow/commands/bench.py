"""`hybridflow bench`: one figure, measured on processes of this host and checked while it is measured."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Figure:
    """What can be measured: `hybridflow.bench.NAME` has `main()`.

    Attributes:
        options: the module beside it that has `add_arguments(parser)` and EPILOGUE; `main` takes what was parsed then.
            It imports nothing heavy, since every command line is parsed with it. None: the figure has no options.
    """

    meaning: str
    options: str | None = None


FIGURES = {
    "pipeline": Figure("our 1F1B step beside torch.distributed.pipelining's and megatron-core's, same model and "
                       "micro-batches"),
    "bubble": Figure("the idle share of every schedule, with a layer that sleeps, beside the simulator's"),
    "memory": Figure("peak activation bytes and reduced bytes of a step by the number of accumulated micro-batches"),
    "reshard": Figure("weights from a training to a generation layout: ours, all-gather, megatron-core, DTensor, a "
                      "checkpoint"),
    "wire": Figure("a reshard between two hosts on a link of 1 Gbit/s, beside that link (needs root)"),
    "ragged": Figure("continuous against static batching where most responses are short and a few long"),
    "precision": Figure("the gradient of 512 micro-batches in bf16 beside fp32's, accumulated in fp32 and in bf16"),
    "generate": Figure("tokens a second of our generation beside transformers', vLLM's and this machine's limit",
                       "generate_options"),
    "step": Figure("CPU seconds of our GRPO and PPO steps beside TRL's, and beside their operations at this machine's "
                   "speed", "step_options"),
    "learn": Figure("what each algorithm adds to held-out accuracy on the quickstart's task, by its config",
                    "learn_options"),
    "overlap": Figure("a step in which some ranks generate while others train, beside the same one after another",
                      "overlap_options"),
}
HELP = "measure one figure on processes of this host, without a config"
EPILOGUE = """\
options of one:     python -m hybridflow bench FIGURE --help

The exit code is 1 where what was measured is wrong or misses its bound; nobody's time is reported where it is wrong.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The figures, each with its own options."""
    figures = parser.add_subparsers(dest="figure", required=True, metavar="FIGURE")
    for name, figure in FIGURES.items():
        options = _module(figure.options) if figure.options else None
        one = figures.add_parser(name, help=figure.meaning, description=figure.meaning,
                                 epilog=options.EPILOGUE if options else None,
                                 formatter_class=argparse.RawTextHelpFormatter)
        if options:
            options.add_arguments(one)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print one figure. Returns 0, or 1 where a check fails."""
    main = _module(arguments.figure).main
    return main(arguments) if FIGURES[arguments.figure].options else main()


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"hybridflow.bench.{name}")
