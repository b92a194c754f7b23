"""The metrics of a run: what each name means.

Owns the table, as data. It computes nothing and logs nothing. A metric that is not in the table is refused in tests
and announced once in a run (`metric_log`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from hybridflow.observe.phases import Phase


@dataclass(frozen=True)
class MetricInfo:
    """One row of the table. A `*` in a name stands for any characters.

    `over` is the denominator: what the value is a mean over, or "-" where it is no mean.
    Example: `MetricInfo("reward/mean", "reward", "Mean reward of the rollouts.", "samples of the step, all ranks")`.
    """

    name: str
    unit: str
    meaning: str
    over: str


_SAMPLES = "samples of the step, all ranks"
_TOKENS = "trained response tokens of the step, all ranks"
_UPDATES = "optimizer steps of the step"
_PROMPTS = "held-out prompts with a reward"
_ABLE = "held-out prompts with k rewards"

_REWARD = (
    MetricInfo("reward/mean", "reward", "Reward of the rollouts.", _SAMPLES),
    MetricInfo("reward/std", "reward", "Standard deviation of the rollouts' rewards.", _SAMPLES),
    MetricInfo("reward/min", "reward", "Least reward of a rollout.", "-"),
    MetricInfo("reward/max", "reward", "Greatest reward of a rollout.", "-"),
    MetricInfo("reward/faults_*", "count", "Rollouts that the reward function failed on, by kind of fault. "
               "They are counted here and never become a silent 0.", "-"),
    MetricInfo("reward/overlong_mean", "reward", "What a response loses for coming near the length limit "
               "(algorithm.overlong_buffer), at most 0; reward/mean is without it.", _SAMPLES),
    MetricInfo("reward/part_*", "reward", "Score of one part of a mixture, before its weight.",
               "samples that the part scored"),
    MetricInfo("reward/truncated", "count", "Rollouts longer than a reward model can read, whose beginning it did not "
               "see; not told where there are none.", "-"),
    MetricInfo("reward/extra_*", "as given", "Further numbers that the reward function returned.",
               "samples for which it returned the number"),
)
_ROLLOUT = (
    MetricInfo("rollout/samples", "count", "Rollouts made in the step, all ranks.", "-"),
    MetricInfo("rollout/prompt_tokens_mean", "tokens", "Length of a prompt.", _SAMPLES),
    MetricInfo("rollout/response_tokens_mean", "tokens", "Length of a response, the stop token and what tools said "
               "included.", _SAMPLES),
    MetricInfo("rollout/response_tokens_max", "tokens", "Length of the longest response.", "-"),
    MetricInfo("rollout/response_tokens_min", "tokens", "Length of the shortest response.", "-"),
    MetricInfo("rollout/response_limit_fraction", "fraction", "Rollouts as long as generation.max_new_tokens, whether "
               "or not a stop token is the last.", _SAMPLES),
    MetricInfo("rollout/prompt_tokens_max", "tokens", "Length of the longest prompt.", "-"),
    MetricInfo("rollout/prompt_tokens_min", "tokens", "Length of the shortest prompt.", "-"),
    MetricInfo("rollout/prompt_limit_fraction", "fraction", "Prompts as long as data.max_prompt_length.", _SAMPLES),
    MetricInfo("rollout/turns_mean", "turns", "Turns of the model in an answer (with tools.file).", _SAMPLES),
    MetricInfo("rollout/turns_max", "turns", "The most of any answer.", "-"),
    MetricInfo("rollout/tool_calls", "count", "Calls of tools in the step's answers.", "-"),
    MetricInfo("rollout/tool_faults", "count", "Of these, those that failed: no such tool, raised, gave nothing, ran "
               "too long, crashed.", "-"),
    MetricInfo("rollout/observations_cut", "count", "Observations longer than tools.max_observation_tokens.", "-"),
    MetricInfo("rollout/observations_lost", "count", "Observations, errors too, that left no room within "
               "generation.max_new_tokens for a turn behind them: the answer ended at the call.", "-"),
    MetricInfo("rollout/observation_fraction", "fraction", "Tokens that tools said, with what stands around them; they "
               "are trained nowhere.", "response tokens of the step, all ranks"),
    MetricInfo("rollout/finished_fraction", "fraction", "Rollouts that ended at a stop token, not at the length limit.",
               _SAMPLES),
)
_POLICY = (
    MetricInfo("policy/loss", "loss", "The actor's loss with every term in it, under the configured reduction.",
               _UPDATES),
    MetricInfo("policy/surrogate_loss", "loss", "The clipped surrogate alone, without KL and entropy terms.", _UPDATES),
    MetricInfo("policy/clip_fraction", "fraction", "Tokens whose ratio was clipped.", _TOKENS),
    MetricInfo("policy/dual_clip_fraction", "fraction", "Tokens held by the dual clip (advantage below 0).",
               _TOKENS),
    MetricInfo("policy/kl_loss", "loss", "The KL term of the actor's loss, before its coefficient.", _UPDATES),
    MetricInfo("rollout/staleness_mean", "versions", "Weight versions by which a token is behind those that learn from "
               "it first. Only where generation overlaps training.", _TOKENS),
    MetricInfo("rollout/rounds", "count", "Rounds of generation of the step (algorithm.resample_rounds).", "-"),
    MetricInfo("rollout/prompts_with_signal", "count", "Prompts of all rounds whose samples had different rewards.",
               "-"),
    MetricInfo("reward/greedy_mean", "reward", "Reward of the greedy answers to the step's prompts (remax).",
               "greedy answers with a reward"),
    MetricInfo("rollout/carried", "rows", "Answers that have begun and are not learned from yet (generation.overlap "
               "partial).", "-"),
    MetricInfo("rollout/staleness_max", "versions", "The most of any token.", "-"),
    MetricInfo("policy/approx_kl", "nats", "KL from the policy that made the rollouts to the updated one (k3).",
               _TOKENS),
    MetricInfo("policy/entropy", "nats", "Entropy of the next-token distribution at the sampling temperature.",
               _TOKENS),
    MetricInfo("policy/kl_reference", "nats", "KL from the policy to the reference, by the configured estimator.",
               _TOKENS),
    MetricInfo("policy/kl_coef", "reward/nat", "Coefficient of the KL to the reference.", "-"),
    MetricInfo("policy/ratio_mean", "ratio", "Probability under the updated policy over that under the old one.",
               _TOKENS),
    MetricInfo("policy/log_prob_gap_mean", "nats", "Absolute difference of a token's log-prob as generated and in the "
               "training layout, before any update.", _TOKENS),
    MetricInfo("policy/log_prob_gap_max", "nats", "Greatest such gap of a token. Rounding: a few 1e-7 of the "
               "largest logit in fp32.", "-"),
    MetricInfo("policy/correction_weight", "ratio", "Importance weight of the policy term (algorithm.correction), "
               "bounded or masked.", _TOKENS),
    MetricInfo("policy/correction_fraction", "fraction", "Tokens whose ratio of trainer to generator was out of "
               "bounds: truncated or masked.", _TOKENS),
    MetricInfo("policy/correction_ess", "fraction", "Effective sample size of those weights, (sum w)^2 / (n sum w^2).",
               "trained tokens; responses where the correction is by sequence"),
    MetricInfo("policy/rollout_kl", "nats", "KL from the generator's distribution to the actor's before the step's "
               "updates (k1), where old log-probs are computed.", _TOKENS),
    MetricInfo("policy/rollout_kl_k3", "nats", "The same by the k3 estimator.", _TOKENS),
    MetricInfo("policy/prob_gap_mean", "probability", "Absolute difference of a token's probability as generated and "
               "under the actor, where old log-probs are computed.", _TOKENS),
    MetricInfo("policy/prob_gap_max", "probability", "Greatest such difference.", "-"),
    MetricInfo("policy/prob_gap_std", "probability", "Standard deviation of such differences.", _TOKENS),
    MetricInfo("policy/grad_norm", "norm", "Global L2 norm of the actor's gradient, before clipping.", _UPDATES),
    MetricInfo("policy/lr", "1", "The actor's learning rate at the last optimizer step.", "-"),
    MetricInfo("policy/loss_scale", "1", "The actor's loss scale for the next optimizer step (fp16).", "-"),
)
_CRITIC = (
    MetricInfo("critic/loss", "loss", "The critic's loss, under the configured reduction.", _UPDATES),
    MetricInfo("critic/clip_fraction", "fraction", "Tokens whose value was clipped.", _TOKENS),
    MetricInfo("critic/value_mean", "return", "Value predicted before the update.", _TOKENS),
    MetricInfo("critic/return_mean", "return", "Return that the critic is trained towards.", _TOKENS),
    MetricInfo("critic/old_value_mean", "return", "Value of the step's rollouts.", _TOKENS),
    MetricInfo("critic/old_value_min", "return", "Least value of a token.", "-"),
    MetricInfo("critic/old_value_max", "return", "Greatest value of a token.", "-"),
    MetricInfo("critic/target_mean", "return", "Return that the step's rollouts are trained towards.", _TOKENS),
    MetricInfo("critic/target_min", "return", "Least return of a token.", "-"),
    MetricInfo("critic/target_max", "return", "Greatest return of a token.", "-"),
    MetricInfo("critic/explained_variance", "fraction", "1 - var(return - value) / var(return). 1 is perfect, 0 is no "
               "better than the mean return. Absent where the return does not vary.", _TOKENS),
    MetricInfo("critic/value_error", "return squared", "Squared error of the values, before the coefficient.", _TOKENS),
    MetricInfo("critic/grad_norm", "norm", "Global L2 norm of the critic's gradient, before clipping.", _UPDATES),
    MetricInfo("critic/lr", "1", "The critic's learning rate at the last optimizer step.", "-"),
    MetricInfo("critic/loss_scale", "1", "The critic's loss scale for the next optimizer step (fp16).", "-"),
)
_COST = (
    MetricInfo("cost/mean", "cost", "Cost of the rollouts (safe_rlhf).", _SAMPLES),
    MetricInfo("cost/std", "cost", "Standard deviation of the rollouts' costs.", _SAMPLES),
    MetricInfo("cost/min", "cost", "Least cost of a rollout.", "-"),
    MetricInfo("cost/max", "cost", "Greatest cost of a rollout.", "-"),
    MetricInfo("cost/faults_*", "count", "Rollouts that the cost function failed on, by kind of fault.", "-"),
    MetricInfo("cost/extra_*", "as given", "Further numbers that the cost function returned.",
               "samples for which it returned the number"),
    MetricInfo("cost/multiplier", "1", "Lagrange multiplier of the step, which weighs the cost.", "-"),
    *(replace(info, name=f"cost_critic/{info.name.removeprefix('critic/')}",
              meaning=info.meaning.replace("critic's", "cost critic's")) for info in _CRITIC),
    MetricInfo("policy/pretrain_loss", "nats", "Cross-entropy of the pretraining pairs, before its coefficient.",
               _UPDATES),
)
_DATA = (
    MetricInfo("data/epoch", "count", "Times that all training rows have been gone through; in a mixture the rows of "
               "every source.", "-"),
    MetricInfo("data/epoch_*", "count", "The same of one source of a mixture.", "-"),
    MetricInfo("data/dropped", "count", "Training rows left out because they are too long: of all rows, of streamed "
               "ones of those met so far.", "-"),
    MetricInfo("data/truncated", "count", "Training rows cut because they are too long, counted in the same way.", "-"),
)
_ADVANTAGE = (
    MetricInfo("advantage/mean", "reward", "Advantage before normalisation.", _TOKENS),
    MetricInfo("advantage/std", "reward", "Standard deviation of the advantages before normalisation.", _TOKENS),
    MetricInfo("advantage/trained_mean", "reward", "Advantage as the loss has it.", _TOKENS),
    MetricInfo("advantage/trained_min", "reward", "Least advantage of a token, as the loss has it.", "-"),
    MetricInfo("advantage/trained_max", "reward", "Greatest advantage of a token, as the loss has it.", "-"),
)
_SUPERVISED = (
    MetricInfo("sft/loss", "nats", "Cross-entropy of the target tokens.", "target tokens of the step, all ranks"),
    MetricInfo("sft/grad_norm", "norm", "Global L2 norm of the gradient, before clipping.", "-"),
    MetricInfo("sft/lr", "1", "Learning rate of the step.", "-"),
    MetricInfo("sft/loss_scale", "1", "Loss scale for the next step (fp16).", "-"),
)
_PAIRS = "pairs of the step, all ranks"
_PREFERRED = "pairs, or answers of that kind in kto"
_PREFERENCE = (
    MetricInfo("preference/loss", "loss", "The loss, with every term in it.", "pairs (kto: answers) of the step"),
    MetricInfo("preference/accuracy", "fraction", "Pairs whose chosen answer has the higher reward; equal ones count "
               "half. Rewards are scores, or beta times the log-ratio to the reference.", _PAIRS),
    MetricInfo("preference/margin", "reward", "Reward of good answers less that of bad ones.", _PREFERRED),
    MetricInfo("preference/chosen_reward", "reward", "Reward of chosen (good) answers.", _PREFERRED),
    MetricInfo("preference/rejected_reward", "reward", "Reward of rejected (bad) answers.", _PREFERRED),
    MetricInfo("preference/nll", "nats", "Negative log-prob of the tokens of chosen answers, before nll_coef.",
               "as algorithm.loss_reduction says"),
    MetricInfo("preference/kl", "nats", "KL from the policy to the reference as kto estimates it, not below 0.",
               "answers of the step, each with another's prompt"),
    MetricInfo("preference/grad_norm", "norm", "Global L2 norm of the gradient, before clipping.", "-"),
    MetricInfo("preference/lr", "1", "Learning rate of the step.", "-"),
    MetricInfo("preference/loss_scale", "1", "Loss scale for the next step (fp16).", "-"),
    MetricInfo("eval/preference_accuracy", "fraction", "As preference/accuracy on held-out pairs; kto: how often a "
               "good answer is above a bad one, over all such couples.", "held-out pairs"),
    MetricInfo("eval/preference_*", "as in training", "The same name of preference/ on held-out rows.",
               "held-out pairs, or answers"),
)
_RUN = (
    MetricInfo("eval/accuracy", "fraction", "Held-out answers that are right (full reward); greedy ones by default.",
               "held-out answers with a reward"),
    MetricInfo("eval/faults", "count", "Held-out answers whose reward failed; they are in no mean.", "-"),
    MetricInfo("eval/reward_mean", "reward", "Reward of answers to held-out prompts; of greedy ones by default.",
               "held-out answers with a reward"),
    MetricInfo("eval/*mean@*", "reward", "Mean reward of a prompt's n answers: `eval/<data source>/mean@n`, and over "
               "all sources `eval/mean@n`.", _PROMPTS),
    MetricInfo("eval/*std@*", "reward", "Standard deviation of the rewards of a prompt's n answers.", _PROMPTS),
    MetricInfo("eval/*best_redrawn@*", "reward", "Expected greatest reward of k draws, with replacement, of the n "
               "answers (logging.verl_names).", _ABLE),
    MetricInfo("eval/*maj_redrawn@*", "reward", "Expected reward of the most voted of k draws, with replacement "
               "(logging.verl_names).", _ABLE),
    MetricInfo("eval/*best@*", "reward", "Expected greatest reward of k of the n answers; of rewards 0 and 1 pass@k.",
               _ABLE),
    MetricInfo("eval/*maj@*", "reward", "Expected reward of the answer that most of k of the n answers vote for.",
               _ABLE),
    MetricInfo("time/step", "s", "Wall time of the step on rank 0, evaluation left out.", "-"),
    *(MetricInfo(f"time/{phase.value}", "s", f"Wall time of the phase `{phase.value}` on rank 0, phases inside it left "
                 "out.", "-") for phase in Phase if phase is not Phase.EVALUATE),
    MetricInfo("time/evaluate", "s", "Wall time of the evaluation on rank 0, everything in it included.", "-"),
    MetricInfo("perf/tokens_per_second", "tokens/s", "Prompt and response tokens of the step's samples, all ranks; the "
               "prompt counts once a sample.", "time/step"),
    MetricInfo("perf/samples_per_second", "samples/s", "Samples of the step, all ranks.", "time/step"),
    MetricInfo("reshard/received_bytes", "bytes", "Weight bytes received in the step's reshards, all ranks.", "-"),
    MetricInfo("reshard/lower_bound_bytes", "bytes", "Weight bytes that ranks need and do not hold when the reshard "
               "starts, all ranks: what no reshard can undercut. After an update, with what each training shard needs.",
               "-"),
    MetricInfo("reshard/seconds", "s", "Wall time of the step's reshards, the slowest rank's; after an update with the "
               "optimizer's step, whose buckets travel as soon as they are stepped.", "-"),
    MetricInfo("train/reduced_bytes", "bytes", "Gradient bytes put into reductions since the start, all ranks: once an "
               "optimizer step, however many micro-batches it has.", "-"),
    MetricInfo("train/skipped_steps", "count", "Optimizer steps skipped since the start, because the gradient norm was "
               "not finite or no token was trained.", "-"),
)

METRICS: tuple[MetricInfo, ...] = (*_REWARD, *_ROLLOUT, *_POLICY, *_CRITIC, *_COST, *_DATA, *_ADVANTAGE, *_SUPERVISED,
                                   *_PREFERENCE, *_RUN)


def find_metric(name: str) -> MetricInfo | None:
    """The row that covers `name`; None where the table has none."""
    for info in METRICS:
        if info.name == name or ("*" in info.name and fnmatchcase(name, info.name)):
            return info
    return None


def check_names(names: Iterable[str]) -> None:
    """Refuse metrics that the table does not know.

    Raises:
        ValueError: a name is not in the table; all such names and the nearest known ones are listed.
    """
    unknown = [name for name in names if find_metric(name) is None]
    if unknown:
        raise ValueError("; ".join(unknown_sentence(name) for name in unknown))


def unknown_sentence(name: str) -> str:
    """What to tell someone who logs `name`, which the table does not know."""
    near = difflib.get_close_matches(name, [info.name for info in METRICS], n=1)
    hint = f"did you mean {near[0]!r}? Else" if near else "if it is meant,"
    return f"metric {name!r} is not in the table: {hint} add it to hybridflow/observe/metric_names.py"


def describe() -> str:
    """The table in Markdown, for the documentation."""
    rows = [f"| `{info.name}` | {info.unit} | {info.meaning} | {info.over} |" for info in METRICS]
    return "\n".join(["| metric | unit | meaning | over |", "| --- | --- | --- | --- |", *rows])
