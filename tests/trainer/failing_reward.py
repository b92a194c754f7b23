"""Rewards that fail: for every row, or for every other one."""


def never(data_source, solution_str, ground_truth, extra_info):
    return float("nan")


def sometimes(data_source, solution_str, ground_truth, extra_info):
    if len(solution_str) % 2:
        raise RuntimeError("odd")
    return float(len(solution_str))
