"""Our metrics under verl's names, by verl's formulas, so that the curves of both can be laid over each other.

Owns the map, as data, with what still differs. It measures nothing: every value follows from metrics of the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Metrics = Mapping[str, float]

STEP, RANKS = "step", "ranks"  # what a formula may need beside metrics: the step's number, and the world's size
SAMPLES, PROMPT, RESPONSE = "rollout/samples", "rollout/prompt_tokens_mean", "rollout/response_tokens_mean"
SAME = "-"


@dataclass(frozen=True)
class VerlMetric:
    """One row of the map.

    Attributes:
        name: verl's.
        needs: our metrics (or STEP, RANKS) that `formula` takes, in its order; without one of them the row is left out.
        written: the formula in words; "" where it is the one metric.
        differs: how verl's own value differs from this; SAME where it does not.
        unless: a metric in whose presence the formula does not hold.
    """

    name: str
    needs: tuple[str, ...]
    formula: Callable[..., float]
    written: str = ""
    differs: str = SAME
    unless: str | None = None


def _same(name: str, ours: str, differs: str = SAME, unless: str | None = None) -> VerlMetric:
    return VerlMetric(name, (ours,), lambda value: value, "", differs, unless)


def _all_tokens(samples: float, prompt: float, response: float) -> float:
    return samples * (prompt + response)


FAILED = "rows whose reward failed are left out here; verl knows no such rows"
BY_UPDATE = "ours is a mean over optimizer steps; verl's over its micro-batches, unless its loss is a token mean"
PHASES = {"gen": "generate", "update_weights": "reshard", "reward": "reward", "old_log_prob": "log_probs",
          "ref": "reference", "values": "values", "update_critic": "update_critic", "update_actor": "update_actor",
          "step": "step", "testing": "evaluate"}
PHASES_DIFFER = {
    "gen": "the reshard is apart, as verl's update_weights",
    "update_weights": "after an update the reshard flies within its last step, and is timed there",
    "old_log_prob": "absent where a step has one update: then no pass is needed",
    "step": "both leave evaluation and exports out",
}
_TIMES = tuple(_same(f"timing_s/{name}", f"time/{ours}", PHASES_DIFFER.get(name, SAME))
               for name, ours in PHASES.items())
_PER_TOKEN = (
    VerlMetric("timing_per_token_ms/gen", ("time/generate", SAMPLES, RESPONSE),
               lambda seconds, samples, response: 1000 * seconds / (samples * response),
               "1000 time/generate / response tokens"),
    *(VerlMetric(f"timing_per_token_ms/{name}", (f"time/{PHASES[name]}", SAMPLES, PROMPT, RESPONSE),
                 lambda seconds, *counts: 1000 * seconds / _all_tokens(*counts),
                 f"1000 time/{PHASES[name]} / (prompt and response tokens)")
      for name in ("ref", "values", "update_critic", "update_actor")),
)
_PERF = (
    VerlMetric("perf/total_num_tokens", (SAMPLES, PROMPT, RESPONSE), _all_tokens,
               "rollout/samples (prompt_tokens_mean + response_tokens_mean)",
               "both count a prompt once for each of its rollouts"),
    _same("perf/time_per_step", "time/step", PHASES_DIFFER["step"]),
    VerlMetric("perf/throughput", (SAMPLES, PROMPT, RESPONSE, "time/step", RANKS),
               lambda samples, prompt, response, seconds, ranks:
               _all_tokens(samples, prompt, response) / (seconds * ranks),
               "perf/total_num_tokens / (time/step x ranks)", "perf/tokens_per_second is of all ranks together"),
)
_ACTOR = (
    _same("actor/pg_loss", "policy/surrogate_loss", BY_UPDATE),
    _same("actor/kl_loss", "policy/kl_loss", BY_UPDATE),
    _same("actor/entropy", "policy/entropy", "verl's is of the pass for old log-probs, ours of the updates"),
    _same("actor/pg_clipfrac", "policy/clip_fraction", BY_UPDATE),
    _same("actor/pg_clipfrac_lower", "policy/dual_clip_fraction", BY_UPDATE),
    _same("actor/ppo_kl", "policy/approx_kl", "verl's is the k1 estimate, mean(old - new), which may be negative; ours "
          "is k3, of the same expectation and less variance"),
    _same("actor/grad_norm", "policy/grad_norm"),
    _same("actor/lr", "policy/lr", "verl's moves once a step, ours once an update"),
    _same("actor/reward_kl_penalty_coeff", "policy/kl_coef"),
    VerlMetric("actor/reward_kl_penalty", ("policy/kl_reference", "policy/kl_coef"), lambda kl, coef: kl,
               "policy/kl_reference, where the KL is in the reward", "verl averages the rows' means, ours are tokens'"),
)
_CRITIC = (
    _same("critic/vf_loss", "critic/loss", BY_UPDATE),
    _same("critic/vf_clipfrac", "critic/clip_fraction", BY_UPDATE),
    _same("critic/vpred_mean", "critic/value_mean", "ours is before the first update, verl's a mean over all updates"),
    _same("critic/vf_explained_var", "critic/explained_variance",
          "verl adds 1e-5 to the variance of the returns, and takes all of the step; ours the first update's tokens"),
    *(_same(f"critic/score/{moment}", f"reward/{moment}", FAILED) for moment in ("mean", "max", "min")),
    VerlMetric("critic/rewards/mean", ("reward/mean", "policy/kl_coef", "policy/kl_reference", RESPONSE),
               lambda reward, coef, kl, response: reward - coef * kl * response,
               "reward/mean - policy/kl_coef x policy/kl_reference x response_tokens_mean", FAILED),
    *(_same(f"critic/rewards/{moment}", f"reward/{moment}",
            FAILED + "; with a KL in the reward there is the mean alone", unless="policy/kl_coef")
      for moment in ("mean", "max", "min")),
    *(_same(f"critic/advantages/{moment}", f"advantage/trained_{moment}", FAILED)
      for moment in ("mean", "max", "min")),
    *(_same(f"critic/returns/{moment}", f"critic/target_{moment}", "without a critic verl repeats the advantages here")
      for moment in ("mean", "max", "min")),
    *(_same(f"critic/values/{moment}", f"critic/old_value_{moment}", FAILED) for moment in ("mean", "max", "min")),
)
_LENGTHS = (
    *(_same(f"response_length/{moment}", f"rollout/response_tokens_{moment}") for moment in ("mean", "max", "min")),
    _same("response_length/clip_ratio", "rollout/response_limit_fraction"),
    *(_same(f"prompt_length/{moment}", f"rollout/prompt_tokens_{moment}") for moment in ("mean", "max", "min")),
    _same("prompt_length/clip_ratio", "rollout/prompt_limit_fraction"),
)
_TRAINING = (
    _same("training/global_step", STEP),
    _same("training/epoch", "data/epoch"),
    *(_same(f"training/rollout_probs_diff_{moment}", f"policy/prob_gap_{moment}",
            "only where old log-probs are computed: several updates a step") for moment in ("mean", "max", "std")),
    _same("rollout_corr/kl", "policy/rollout_kl"),
    _same("rollout_corr/k3_kl", "policy/rollout_kl_k3"),
    _same("rollout_corr/rollout_is_mean", "policy/correction_weight",
          "verl's is of the weights before they are bounded"),
    _same("rollout_corr/rollout_is_eff_sample_size", "policy/correction_ess",
          "verl's is always over tokens, of weights that are bounded on both sides"),
)
VERL_METRICS = (*_TIMES, *_PER_TOKEN, *_PERF, *_ACTOR, *_CRITIC, *_LENGTHS, *_TRAINING)

# Held-out metrics, whose names hold a data source and a number: the end of ours before "@", and verl's ending, where it
# belongs, and what differs.
EVALUATIONS = {
    "mean": ("mean@{k}", "core", SAME),
    "std": ("std@{k}", "aux", SAME),
    "best_redrawn": ("best@{k}/mean", "core",
                     "verl estimates this expectation from 1000 bootstrap draws, ours is exact"),
    "maj_redrawn": ("maj@{k}/mean", "core", "as best; verl has it where the reward function reports pred"),
}


def verl_metrics(step: int, metrics: Metrics, num_ranks: int) -> dict[str, float]:
    """What can be said of a step under verl's names; names that we have too are left to us.

    Example: `verl_metrics(3, {"reward/mean": 0.5}, 4)` has critic/score/mean, critic/rewards/mean and
    training/global_step.
    """
    known = {**metrics, STEP: float(step), RANKS: float(num_ranks)}
    found = {row.name: row.formula(*(known[name] for name in row.needs)) for row in VERL_METRICS
             if row.unless not in known and all(name in known for name in row.needs) and row.name not in metrics}
    return found | _evaluation(metrics)


def _evaluation(metrics: Metrics) -> dict[str, float]:
    """verl's core metrics are those of the most answers; fewer are val-aux."""
    named = [(name, *_parsed(name)) for name in metrics if name.startswith("eval/") and "@" in name]
    most = max((k for *_, k in named), default=0)
    found = {}
    for name, source, kind, k in named:
        if source and kind in EVALUATIONS and (kind == "mean" or k > 1):
            ending, place, _ = EVALUATIONS[kind]
            area = f"val-{place if k == most else 'aux'}"
            found[f"{area}/{source}/reward/{ending.format(k=k)}"] = metrics[name]
    return found


def _parsed(name: str) -> tuple[str, str, int]:
    """Source ("" over all), kind and k of a held-out metric. Example: "eval/a/b/best@4" has ("a/b", "best", 4)."""
    path, _, k = name.removeprefix("eval/").rpartition("@")
    source, _, kind = path.rpartition("/")
    return source, kind, int(k)


def describe() -> str:
    """The map in Markdown, for the documentation."""
    rows = [f"| `{row.name}` | {_ours(row)} | {row.differs} |" for row in VERL_METRICS]
    rows += [f"| `val-{place}/<source>/reward/{ending.format(k='k')}` | `eval/<source>/{kind}@k` | {differs} |"
             for kind, (ending, place, differs) in EVALUATIONS.items()]
    return "\n".join(["| verl's name | from ours | what differs |", "| --- | --- | --- |", *rows])


def _ours(row: VerlMetric) -> str:
    ours = row.written or f"`{row.needs[0]}`"
    return f"{ours}, without `{row.unless}`" if row.unless else ours
