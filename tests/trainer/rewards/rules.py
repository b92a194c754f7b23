"""Reward functions for tests of what a run makes of them; loaded by path."""

import time


def score(data_source, solution_str, ground_truth, extra_info):
    if "x" in solution_str:
        raise ValueError("x is no\nletter")
    if "n" in solution_str:
        return float("nan")
    return {"score": float(solution_str == ground_truth), "length": len(solution_str),
            "big": 10**400, "nan": float("nan"), "inf": float("inf"), "word": "w"}


def brevity(data_source, solution_str, ground_truth, extra_info):
    """Takes no "z"; the response's end is among its tokens."""
    if "z" in solution_str:
        raise ValueError("z")
    return -float(extra_info["response_tokens"])


def together(data_sources, solution_strs, ground_truths, extra_infos):
    """One call for all rows: each is told how many there were."""
    if "raise" in data_sources:
        raise RuntimeError("as a whole")
    return [float("nan") if "n" in solution else {"score": float(len(solution_strs)), "rank": 1}
            for solution in solution_strs]


def voted(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "pred": solution_str.upper(), "length": -1}


def slow(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.05)
    return float(len(solution_str))
