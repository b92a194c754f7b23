"""A reward that looks at all that is said of turns."""


def score(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0.3 * extra_info["num_turns"] + 0.1 * len(extra_info["last_answer"]) - 0.01 * len(solution_str),
            "shares": float(solution_str.endswith(extra_info["last_answer"]))}
