"""Reward functions with the signatures that verl's users write; loaded by path, unchanged."""

import numpy


def compute_score(data_source, solution_str, ground_truth, extra_info=None, sandbox_fusion_url=None, **kwargs):
    """As verl's own dispatcher: a default for extra_info, and whatever comes."""
    assert not kwargs and extra_info["index"] >= 0
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}


def only_some(solution_str, ground_truth, **kwargs):
    assert set(kwargs) == {"data_source", "extra_info"}
    return 1 if solution_str == ground_truth else 0


def by_position(data_source, solution_str, ground_truth, extra_info=None, /):
    return len(solution_str)


def other_order(extra_info, ground_truth, solution_str, data_source):
    return numpy.float32(len(solution_str) + 10 * len(ground_truth))


class Scorer:
    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        return 0.5


scorer = Scorer()


def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    """As verl's batch reward manager calls it."""
    assert len({len(data_sources), len(solution_strs), len(ground_truths), len(extra_infos)}) == 1
    if "die" in solution_strs:
        raise SystemExit(3)
    if "spin" in solution_strs:
        while True:
            pass
    if "short" in solution_strs:
        return [1.0]
    if "text" in solution_strs:
        return "1.0"
    results = [{"score": float(solution == truth), "rows": len(solution_strs)} for solution, truth in
               zip(solution_strs, ground_truths)]
    results = [float("nan") if solution == "nan" else None if solution == "none" else result
               for solution, result in zip(solution_strs, results)]
    return numpy.array([1.0, 0.0]) if "array" in solution_strs else results


def batched_by_position(data_sources, solution_strs, ground_truths, extra_infos, /):
    return (len(solution) for solution in solution_strs)


def anything(**kwargs):
    return [1.0] * len(kwargs["solution_strs"]) if "solution_strs" in kwargs else 0.25
