"""`hybridflow reshard`: what moving a model's weights from one layout to another costs, and the move itself.

Needs no other ranks and no weights, so that a cluster's layouts can be weighed on a laptop. Owns the options of this
command; `reshard_inputs` checks them.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

HELP = "count (and with --run move) the weights that go from a training to a generation layout"
EPILOGUE = """\
bytes of every rank:    python -m hybridflow reshard --model configs/sft_tiny.yaml model.spec.vocab_size=512 \\
                            --from tp=4,pp=2 --to tp=2,pp=1 --world 8
a run's own layouts:    ... --model runs/x/config.yaml --world 64 --ranks-per-node 8
move real tensors:      ... --from tp=2,pp=2 --to tp=1 --world 4 --run
other ranks generate:   ... --from tp=2 --from-ranks 0-1 --to tp=1 --to-ranks 2-7 --world 8
a Hugging Face model:   ... --model models/Llama-3.1-405B/config.json --from tp=8,pp=16 --to tp=8 --world 16384 \\
                            --ranks-per-node 8
degrees: tp, pp, vpp, dp (else what is left), and in --from cp
Beside --from and --to, the layers_per_stage of train.layout and generation.layout in the YAML file count, and a
train.schedule of zb-v (V order of chunks); degrees of keys on the command line must not say other than the options.
In flight and peak extra bytes (JSON: in_flight_bytes, peak_extra_bytes) are upper bounds: the bucket, or all that a
rank sends and receives if that is less. What --run counts is in `run`: buffer_bytes, extra_bytes.
"""
EXIT_FAULT = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys that differ from the YAML file")
    parser.add_argument("--model", type=Path, required=True, metavar="CONFIG",
                        help="YAML file of a run, or a Hugging Face folder, or its config.json")
    parser.add_argument("--from", dest="train", metavar="DEGREES",
                        help="training layout, such as tp=4,pp=2; else train.layout of the YAML file")
    parser.add_argument("--to", dest="generate", metavar="DEGREES",
                        help="generation layout, such as tp=2; else generation.layout of the YAML file")
    parser.add_argument("--world", metavar="N", help="ranks; else as few as the layouts need")
    parser.add_argument("--from-ranks", metavar="RANKS", help="ranks that train, such as 0-3 or 0,2,4; else all")
    parser.add_argument("--to-ranks", metavar="RANKS", help="ranks that generate; else all")
    nodes = parser.add_mutually_exclusive_group()
    nodes.add_argument("--nodes", metavar="N", help="nodes, of equally many ranks; else one")
    nodes.add_argument("--ranks-per-node", metavar="N", help="ranks of a node")
    parser.add_argument("--across-nodes", action="store_true",
                        help="let tensor groups of generation span nodes where fewer bytes move so")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
                        help="of the weights (default bfloat16)")
    parser.add_argument("--bucket-mb", metavar="MIB", help="most in flight on a rank; else "
                        "generation.reshard_bucket_mb")
    parser.add_argument("--run", action="store_true",
                        help="move real tensors on processes of this host, and check them")
    parser.add_argument("--json", action="store_true",
                        help="print JSON: received_bytes and lower_bound_bytes, in total and of every rank, and more")


def run(arguments: argparse.Namespace) -> int:
    """Report on a move. Returns 0; 1 where --run brought a wrong element or a rank failed; 2 for faults, all printed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks share this host's cores
    from hybridflow.commands.reshard_inputs import checked
    try:
        task = checked(arguments)
    except ValueError as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_FAULT
    from hybridflow.local_ranks import RankError
    from hybridflow.reshard.move import move
    from hybridflow.reshard.report import as_json, as_text
    from hybridflow.reshard.volumes import Volumes

    volumes = Volumes.of(task)
    try:
        moved = move(task) if arguments.run else None
    except RankError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    print((as_json if arguments.json else as_text)(task, volumes, moved))
    return 1 if moved is not None and moved.wrong else 0
