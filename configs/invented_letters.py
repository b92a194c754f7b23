"""A cost for safe_rlhf_tiny.yaml: letters that an answer has made up."""


def cost(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, object]) -> float:
    """The share of the answer's letters that are not in the word; 1 where it has none."""
    letters = solution_str.strip()
    return sum(letter not in ground_truth for letter in letters) / len(letters) if letters else 1.0
