"""Rewards that differ between the samples of a few prompts alone."""


def score(data_source, solution_str, ground_truth, extra_info):
    return float(int(ground_truth) % 4 == 0 and sum(solution_str.encode()) % 2)


def equal(data_source, solution_str, ground_truth, extra_info):
    return 1.0
