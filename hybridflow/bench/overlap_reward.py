"""The reward of `bench overlap`: the share of digits in an answer, so that a random model has something to learn."""


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, object]) -> float:
    """In [0, 1]; 0 for no answer."""
    return sum(character.isdigit() for character in solution_str) / max(len(solution_str), 1)
