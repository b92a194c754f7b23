"""A contestant of a bench in a process of its own: it loads a model and answers calls until its input ends.

Owns the worker's end of the pipe and the clocks around a call. Run as `python -m hybridflow.bench.generate_worker NAME
FOLDER PRECISION THREADS`, in whichever environment has the contestant's library.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any, Protocol

CLASSES = {  # module of this package and class; `Contestant` is what those of `bench generate` have
    "ours": "generate_ours:Ours",
    "generate": "generate_transformers:Generate",
    "continuous": "generate_transformers:Continuous",
    "vllm": "generate_vllm:Vllm",
    "machine": "generate_floor:Machine",
    "step ours grpo": "step_ours:Grpo",
    "step ours ppo": "step_ours:Ppo",
    "step trl grpo": "step_trl_grpo:Grpo",
    "step trl ppo": "step_trl_ppo:Ppo",
}


class Contestant(Protocol):
    """Who generates. It is made with the folder of a model, the word of a precision and a number of threads."""

    def sample(self, prompts: list[list[int]], new_tokens: int, seed: int) -> int:
        """Draw so many tokens after each prompt at temperature 1, whatever they are. Returns how many were drawn."""

    def greedy(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """The most probable tokens after each prompt, one after another."""


def main() -> None:
    """Say that the model is there, then answer `{"call": method, "args": [...]}`, a line each, by
    `{"value": ..., "wall": seconds, "cpu": seconds of all threads}`.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print what they like
    name, folder, precision, threads = sys.argv[1:]
    module, cls = CLASSES[name].split(":")
    contestant = getattr(importlib.import_module(f"hybridflow.bench.{module}"), cls)(folder, precision, int(threads))
    print(json.dumps({"value": None}), file=answers)
    for line in sys.stdin:
        print(json.dumps(timed(contestant, **json.loads(line))), file=answers)
    answers.flush()
    os._exit(0)  # engines leave threads behind that the interpreter's own way out waits for


def timed(contestant: Contestant, call: str, args: list[Any]) -> dict[str, Any]:
    """The answer of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    value = getattr(contestant, call)(*args)
    return {"value": value, "wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


if __name__ == "__main__":
    main()
