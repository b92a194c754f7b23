"""The run in a few sentences, printed at its end.

Owns the words. It reads the records of metrics.jsonl and computes no metric.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybridflow.observe.metric_log import MetricRecord
from hybridflow.observe.phases import Phase
from hybridflow.observe.progress import duration

# Steps at either end of the run that "from ... to ..." is a mean over: one step's reward is noise.
END_STEPS = 5
NUM_PHASES_NAMED = 3
ROUNDING = 0.01  # phases are the longest of any rank, so that their sum may be a little more than a step


def summarise(records: Sequence[MetricRecord]) -> str:
    """Sentences on outcome, drift, speed and trouble; what the run did not log is not spoken of.

    Example: "12 steps took 24 s. Mean reward went from 0.310 to 0.902 (means of the first and last 5 steps). ..."
    """
    if not records:
        return "No step was finished."
    sentences = [
        _length(records),
        _went(records, "reward/mean", "Mean reward"),
        _measured(records, "eval/accuracy", "Held-out accuracy"),
        _went(records, "sft/loss", "The supervised loss"),
        _went(records, "preference/loss", "The preference loss"),
        _measured(records, "eval/preference_accuracy", "Held-out preference accuracy"),
        _drift(records),
        _speed(records),
        _phases(records),
        _trouble(records),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _values(records: Sequence[MetricRecord], metric: str) -> list[float]:
    """The finite values of `metric`, in order of steps."""
    return [record[metric] for record in records if metric in record and record[metric] is not None]


def _total(records: Sequence[MetricRecord], prefix: str) -> float:
    """The sum of the finite values of all metrics that begin so."""
    return math.fsum(value for record in records for name, value in record.items()
                     if name.startswith(prefix) and value is not None)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _length(records: Sequence[MetricRecord]) -> str:
    made = sum(record["step"] > 0 for record in records)  # step 0 is what was measured before training
    steps = "1 step" if made == 1 else f"{made} steps"
    seconds = math.fsum(_values(records, "time/step")) + math.fsum(_values(records, "time/evaluate"))
    return f"{steps} took {duration(seconds)}." if seconds > 0 else f"The run made {steps}."


def _went(records: Sequence[MetricRecord], metric: str, words: str) -> str:
    values = _values(records, metric)
    if not values:
        return ""
    if len(values) == 1:
        return f"{words} was {values[0]:.3f}."
    if len(values) < 2 * END_STEPS:
        return f"{words} went from {values[0]:.3f} to {values[-1]:.3f}."
    first, last = _mean(values[:END_STEPS]), _mean(values[-END_STEPS:])
    return f"{words} went from {first:.3f} to {last:.3f} (means of the first and last {END_STEPS} steps)."


def _measured(records: Sequence[MetricRecord], metric: str, words: str) -> str:
    """From the first to the last evaluation, and where it was best."""
    evaluated = [record for record in records if metric in record and record[metric] is not None]
    if not evaluated:
        return ""
    first, last = evaluated[0][metric], evaluated[-1][metric]
    best = max(evaluated, key=lambda record: record[metric])
    top = best[metric]
    if len(evaluated) == 1:
        return f"{words} was {last:.3f}."
    where = "" if top == last else f", and was best at step {best['step']} ({top:.3f})"
    return f"{words} went from {first:.3f} to {last:.3f}{where}."


def _drift(records: Sequence[MetricRecord]) -> str:
    kl, gap = _values(records, "policy/kl_reference"), _values(records, "policy/log_prob_gap_max")
    parts = []
    if kl:
        parts.append(f"the KL to the reference ended at {kl[-1]:.4f} nats per token")
    if gap:
        parts.append(f"generation and training log-probs differed by {max(gap):.1e} at most")
    sentence = ", and ".join(parts)
    return sentence[:1].upper() + sentence[1:] + "." if sentence else ""


def _speed(records: Sequence[MetricRecord]) -> str:
    rates, seconds = _values(records, "perf/tokens_per_second"), _values(records, "time/step")
    if not rates or len(rates) != len(seconds):
        return ""
    tokens = math.fsum(rate * taken for rate, taken in zip(rates, seconds, strict=True))
    return f"Throughput was {tokens / math.fsum(seconds):,.0f} tokens/s over the run."


def _phases(records: Sequence[MetricRecord]) -> str:
    total = math.fsum(_values(records, "time/step"))
    shares = {phase: math.fsum(_values(records, f"time/{phase.value}")) for phase in Phase if phase != Phase.EVALUATE}
    longest = sorted((p for p in shares if shares[p] > 0), key=lambda p: -shares[p])[:NUM_PHASES_NAMED]
    if not longest:
        return ""
    # What goes on beside other steps, or while the model is evaluated, may take longer than the steps by themselves.
    named = ", ".join(f"{phase.value.replace('_', ' ')} {min(shares[phase] / total, 1.0):.0%}" for phase in longest)
    if math.fsum(shares.values()) > total * (1.0 + ROUNDING):
        return f"Ranks worked side by side; of a step's time they were busy with {named}."
    return f"Most time of a step went to {named}."


def _trouble(records: Sequence[MetricRecord]) -> str:
    skipped = _values(records, "train/skipped_steps")
    rewards, costs = _total(records, "reward/faults_"), _total(records, "cost/faults_")
    tools, calls = _total(records, "rollout/tool_faults"), _total(records, "rollout/tool_calls")
    nulls = sum(value is None for record in records for value in record.values())
    parts = []
    if skipped and skipped[-1] > 0:
        parts.append(f"optimizer steps skipped (gradient norm not finite, or nothing to train on): {skipped[-1]:.0f}")
    if rewards > 0:
        parts.append(f"rollouts that the reward function failed on: {rewards:.0f}")
    if costs > 0:
        parts.append(f"rollouts that the cost function failed on: {costs:.0f}")
    if tools > 0:
        parts.append(f"calls of tools that failed: {tools:.0f} of {calls:.0f}")
    if nulls > 0:
        parts.append(f"logged values that were not finite: {nulls}")
    return f"Look into this: {'; '.join(parts)}." if parts else ""
