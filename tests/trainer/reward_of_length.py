"""A reward with something to learn from at random weights: the share of digits in the answer."""


def score(data_source, solution_str, ground_truth, extra_info):
    digits = sum(character.isdigit() for character in solution_str)
    return {"score": digits / max(len(solution_str), 1) + 0.1 * len(solution_str), "digits": digits}
