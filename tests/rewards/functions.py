"""Reward functions as users write them, good and bad; loaded by path, never imported by a test."""

import os
import re
import signal
import sys
import time


def score(data_source, solution_str, ground_truth, extra_info):
    print("a reward that prints")
    if solution_str == "raise":
        raise RuntimeError("no number in the text")
    if solution_str == "spin":
        while True:
            pass
    if solution_str == "nan":
        return float("nan")
    return 1.0 if solution_str == ground_truth else 0.0


def odd(data_source, solution_str, ground_truth, extra_info):
    return {
        "text": "1.0", "none": None, "list": [1.0], "inf": float("inf"), "huge": 1e30, "int": 2, "bool": True,
        "dict": {"score": 0.5, "format": 1, "note": "fine", "what": [1]}, "bad dict": {"reward": 1.0},
        "text dict": {"score": "1.0"}, "nan dict": {"score": float("nan")},
    }[solution_str]  # fmt: skip


def meets(data_source, solution_str, ground_truth, extra_info):
    """Waits for as many rows as it is told to, which leave their names in a folder."""
    open(f"{ground_truth}/{extra_info['index']}", "w").close()
    while len(os.listdir(ground_truth)) < int(solution_str):
        time.sleep(0.01)
    return 1.0


def violent(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "exit":
        sys.exit(0)
    if solution_str == "die":
        os._exit(7)
    if solution_str == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "deep":
        return violent(data_source, solution_str, ground_truth, extra_info)
    if solution_str == "regex":  # spins in C without ever giving the interpreter lock away
        re.match(r"(a+)+$", "a" * 64 + "b")
    if solution_str == "sleep":
        time.sleep(1000)
    return 1.0


def worker_id(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "die":
        os._exit(7)
    return float(os.getpid())


def with_alarm(data_source, solution_str, ground_truth, extra_info):
    """Its own time limit by a signal, which works on the main thread only."""
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("own limit")))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(1000)
    except TimeoutError:
        return 0.75
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def by_keywords(solution_str, ground_truth, **others):
    return float(others["extra_info"]["index"])


def positional(source, solution, truth, info):
    return 1.0


def too_many(data_source, solution_str, ground_truth, extra_info, tokenizer):
    return 1.0


async def asynchronous(data_source, solution_str, ground_truth, extra_info):
    return 1.0
