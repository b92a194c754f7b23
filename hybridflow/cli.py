"""The command line: `python -m hybridflow COMMAND CONFIG [key=value ...]`.

A thin table of commands. It reads and checks the config before anything heavy is imported and before any process group
exists; a command's own module reads what the config names, and then does the rest.
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from hybridflow import __version__
from hybridflow.commands.job import Job
from hybridflow.config.check import checked_config
from hybridflow.config.command import Command
from hybridflow.config.describe import key_table
from hybridflow.config.faults import ConfigError
from hybridflow.parallel.place import launched_place

EXIT_CONFIG = 2  # argparse's own code for a wrong command line
EXIT_REWARD = 3  # a reward failed whose policy ends the run
EXIT_INTERRUPTED = 130  # as shells have it: 128 and the number of the signal
EXIT_UNREAD = 141
OTHERS_WAIT_S = 10.0
HELP = {
    Command.TRAIN: "reinforcement learning: generate, score, train, again",
    Command.SFT: "supervised warm start on the answers of the data",
    Command.DPO: "direct preference optimisation on pairs of answers",
    Command.KTO: "Kahneman-Tversky optimisation on good and bad answers",
    Command.REWARD_MODEL: "a reward model from pairs of answers",
    Command.GENERATE: "answer held-out prompts and print the answers, or answer those of a file",
    Command.EVALUATE: "answer held-out prompts and score the answers, without training",
    Command.EXPORT: "write the model in Hugging Face's format",
}
# Commands with options of their own: each module has HELP, EPILOGUE, add_arguments and run.
TOOLS = ("schedule", "reshard", "verify", "bench")
EPILOGUE = """\
one process:       python -m hybridflow train configs/ppo_tiny.yaml
four processes:    torchrun --standalone --nproc-per-node 4 -m hybridflow train configs/ppo_tiny.yaml
change a key:      ... train.layout.tp=2 train.layout.pp=2 generation.temperature=0.7 logging.dir=runs/hot
every key:         python -m hybridflow keys
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0; 2 for a fault in the command line, launch or config; 3 where a reward
    failed whose policy is to end the run; 75; 130; 141.
    """
    arguments = parsed(argv)
    try:
        code = run(arguments)
        sys.stdout.flush()  # so that a reader who has gone is met here
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # another pipe's is no reason to be silent
        if not _reader_has_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes at its end
        return EXIT_UNREAD


def _reader_has_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more, as after `| head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are always told
    return any(event & select.POLLERR for _, event in poll.poll(0))


def run(arguments: argparse.Namespace) -> int:
    """Run the command of a parsed command line; the exit code as `main`'s."""
    if arguments.command == "keys":
        print(key_table())
        return 0
    if arguments.command == "metrics":
        _print_metrics(arguments.verl)
        return 0
    if arguments.command in TOOLS:
        return _tool(arguments.command).run(arguments)
    command, options = Command(arguments.command), {}
    if command is Command.GENERATE:
        options = {"prompts_file": arguments.prompts, "out": arguments.out}
        command = command if arguments.prompts is None else Command.COMPLETE
    try:
        place = launched_place(os.environ)
    except ValueError as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_CONFIG
    try:
        config = checked_config(arguments.config, arguments.overrides, place.size, command)
    except ConfigError as error:
        report(error, place.rank)
        return EXIT_CONFIG
    try:
        job = importlib.import_module(f"hybridflow.commands.{arguments.command}").prepare(config, **options)
    except ValueError as error:  # of what the config names: data, tokenizer, model folders, reward function
        report(error, place.rank)
        return EXIT_CONFIG
    return _done(job, place.rank)


def _done(job: Job, rank: int) -> int:
    """Run a job. A reward that ends it does so on every rank at once; rank 0 says why, and the others wait so as not to
    end it first. What a user's loss must not return may be seen on some ranks only.
    """
    # Their modules bring torch, which config faults must not wait for.
    from hybridflow.algorithms.users_own import WrongReturn
    from hybridflow.rewards.policy import RewardFailed

    try:
        return job() or 0
    except WrongReturn as error:
        report(error, rank)
        return EXIT_CONFIG
    except RewardFailed as error:
        if rank > 0:
            time.sleep(OTHERS_WAIT_S)
        else:
            print(error, file=sys.stderr, flush=True)
        return EXIT_REWARD


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a command line, on which options may stand anywhere, also before a `key=value`."""
    top = parser()
    arguments, rest = top.parse_known_args(argv)
    if rest and ("overrides" not in arguments or any(word.startswith("-") for word in rest)):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    return arguments


def parser() -> argparse.ArgumentParser:
    """The command line of every command."""
    top = argparse.ArgumentParser(prog="hybridflow", epilog=EPILOGUE, formatter_class=argparse.RawTextHelpFormatter,
                                  description="3D-parallel RL post-training of language models.")
    top.add_argument("--version", action="version", version=f"hybridflow {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, meaning in HELP.items():
        one = commands.add_parser(command.value, help=meaning, description=meaning, epilog=EPILOGUE,
                                  formatter_class=argparse.RawTextHelpFormatter)
        one.add_argument("config", metavar="CONFIG", help="YAML file; it names only what differs from the defaults")
        one.add_argument("overrides", nargs="*", metavar="key=value", help="keys that differ from the file")
        if command is Command.GENERATE:
            one.add_argument("--prompts", type=Path, metavar="FILE", help='JSON lines with "prompt" (text, or chat '
                             'messages) or "prompt_ids", and "id" if you like; else held-out prompts are answered')
            one.add_argument("--out", type=Path, metavar="FILE", help="JSON lines of the answers (default: "
                             "generations.jsonl in logging.dir)")
    for tool in TOOLS:
        module = _tool(tool)
        module.add_arguments(commands.add_parser(tool, help=module.HELP, description=module.HELP,
                                                 epilog=module.EPILOGUE, formatter_class=argparse.RawTextHelpFormatter))
    commands.add_parser("keys", help="print every key of a config with its default and meaning")
    metrics = commands.add_parser("metrics", help="print every metric of a run with its unit and meaning")
    metrics.add_argument("--verl", action="store_true", help="those that logging.verl_names adds, and how they differ")
    return top


def _print_metrics(verl: bool) -> None:
    from hybridflow.observe import metric_names, verl_names  # bring torch, which config faults must not wait for

    print(verl_names.describe() if verl else metric_names.describe())


def _tool(name: str) -> ModuleType:
    return importlib.import_module(f"hybridflow.commands.{name}")


def report(error: ValueError, rank: int) -> None:
    """Print a config's faults once. Rank 0 speaks; its end ends the others, who wait so as not to end it first.

    Who is still there after the wait has a fault that rank 0 has not, such as a file missing on its node alone.
    """
    if rank > 0:
        time.sleep(OTHERS_WAIT_S)
    print(f"rank {rank}: {error}" if rank > 0 else error, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
