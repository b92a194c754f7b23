"""A cost that the policy can lower: the share of letters in the answer."""


def cost(data_source, solution_str, ground_truth, extra_info):
    letters = sum(character.isalpha() for character in solution_str)
    return {"score": letters / max(len(solution_str), 1) - 0.2, "letters": letters}
