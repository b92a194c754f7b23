"""The algorithm of a config with nothing left open: what is null is the recipe's, and what it needs of a run.

Pure. The recipes are `algorithms.recipes`, estimators and losses `algorithms.registry`; whether a user's file is right
is looked at where the run starts.
"""

from __future__ import annotations

from dataclasses import replace

from hybridflow.algorithms.recipes import RECIPES, Recipe
from hybridflow.algorithms.registry import ADVANTAGES, POLICY_LOSSES, Need, PolicyLossEntry
from hybridflow.config.algorithm_schema import AlgorithmConfig, ClipConfig, KLConfig
from hybridflow.config.schema import Config
from hybridflow.config.words import AlgorithmName, KLWhere

# What a policy loss of a user's file may read: PPO's bounds.
USERS_LOSS = POLICY_LOSSES["ppo"]
# Needs for which a recipe must bring the roles; a critic and groups come with any.
OF_ONE_RECIPE = frozenset({Need.GREEDY_ANSWER, Need.COST})


def recipe_of(algorithm: AlgorithmConfig) -> Recipe:
    """The recipe that the block names."""
    return RECIPES[algorithm.name.value]


def with_recipe(config: Config) -> Config:
    """The config with the algorithm's own values where the block says null. Keys that have no effect stay null, and so
    the result is as valid as what it was made of. Doing it twice changes nothing.
    """
    return replace(config, algorithm=_resolved(config.algorithm, config.generation.max_new_tokens))


def _resolved(algorithm: AlgorithmConfig, max_new_tokens: int) -> AlgorithmConfig:
    recipe = recipe_of(algorithm)
    kl, clip, buffer = algorithm.kl, algorithm.clip, algorithm.overlong_buffer
    where = recipe.kl_where if kl.where is None else kl.where
    estimator = recipe.kl_estimator if kl.estimator is None and where is not KLWhere.NONE else kl.estimator
    low, high = _clip(algorithm)
    if buffer is None and recipe.overlong_fraction is not None:
        buffer = max(int(recipe.overlong_fraction * max_new_tokens), 1)
    whiten = algorithm.normalise_advantages
    return replace(
        algorithm, advantage=advantage_of(algorithm), policy_loss=policy_loss_of(algorithm),
        clip=ClipConfig(low if clip.low is None else clip.low, high if clip.high is None else clip.high, clip.dual),
        kl=KLConfig(where, estimator, kl.coef, kl.target),
        loss_reduction=algorithm.loss_reduction or recipe.reduction,
        normalise_advantages=recipe.whiten if whiten is None else whiten, overlong_buffer=buffer,
        resample_rounds=resample_rounds_of(algorithm))


def advantage_of(algorithm: AlgorithmConfig) -> str:
    """Its estimator: a name of the table, or file.py:function."""
    return algorithm.advantage or recipe_of(algorithm).advantage


def policy_loss_of(algorithm: AlgorithmConfig) -> str:
    """Its policy loss: a name of the table, or file.py:function."""
    return algorithm.policy_loss or recipe_of(algorithm).policy_loss


def loss_entry(algorithm: AlgorithmConfig) -> PolicyLossEntry:
    """What its policy loss reads; of a user's file it may be everything."""
    return POLICY_LOSSES.get(policy_loss_of(algorithm), USERS_LOSS)


def needs_of(algorithm: AlgorithmConfig) -> frozenset[Need]:
    """What its estimator needs. A user's has whatever the named algorithm's own estimator needs."""
    named = advantage_of(algorithm)
    return ADVANTAGES[named if named in ADVANTAGES else recipe_of(algorithm).advantage].needs


def resample_rounds_of(algorithm: AlgorithmConfig) -> int:
    """Rounds in which prompts without a signal are replaced; 0: none are."""
    rounds = algorithm.resample_rounds
    return recipe_of(algorithm).resample_rounds if rounds is None else rounds


def reads_option(algorithm: AlgorithmConfig, option: str) -> bool:
    """Whether its estimator reads a field of `AdvantageOptions`; a user's may read any."""
    entry = ADVANTAGES.get(advantage_of(algorithm))
    return entry is None or option in entry.options


def kl_where_of(algorithm: AlgorithmConfig) -> KLWhere:
    """Where its KL penalty is."""
    return recipe_of(algorithm).kl_where if algorithm.kl.where is None else algorithm.kl.where


def choices_of_advantage(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """The estimators of the table that this algorithm can have: those whose needs it or any algorithm brings."""
    own = ADVANTAGES[recipe_of(algorithm).advantage].needs
    return tuple(name for name, entry in ADVANTAGES.items() if entry.needs & OF_ONE_RECIPE <= own)


def algorithm_line(config: Config) -> str:
    """What the start of a run says of its algorithm: "grpo (arXiv 2402.03300): advantage grpo; policy loss ppo..."."""
    algorithm = with_recipe(config).algorithm
    clip, kl, correction = algorithm.clip, algorithm.kl, algorithm.correction
    assert algorithm.loss_reduction is not None and kl.where is not None
    parts = [f"advantage {algorithm.advantage}" + (", whitened" if algorithm.normalise_advantages else ""),
             f"policy loss {algorithm.policy_loss}" + (f", clip {clip.low} and {clip.high}" if clip.low else ""),
             f"reduction {algorithm.loss_reduction.value}",
             "no KL" if kl.estimator is None else f"KL {kl.estimator.value} in the {kl.where.value}, coef {kl.coef}"]
    if algorithm.overlong_buffer:
        parts.append(f"rewards fall over the last {algorithm.overlong_buffer} tokens")
    if algorithm.resample_rounds:
        parts.append(f"prompts of equal rewards are replaced, in at most {algorithm.resample_rounds} rounds")
    if correction.level.value != "none":
        parts.append(f"importance correction by {correction.level.value} ({correction.how.value})")
    return f"{algorithm.name.value} (arXiv {recipe_of(algorithm).paper}): {'; '.join(parts)}"


def algorithm_table() -> str:
    """The algorithms that a config can name, as the table of README.md."""
    rows = []
    for name in AlgorithmName:
        whole = with_recipe(Config(algorithm=AlgorithmConfig(name))).algorithm
        clip, kl = whole.clip, whole.kl
        assert whole.loss_reduction is not None and whole.kl.where is not None
        bounds = "" if clip.low is None else f" {clip.low}, {clip.high}"
        cells = (f"`{name.value}`", recipe_of(whole).paper, f"`{whole.advantage}`", f"`{whole.policy_loss}`{bounds}",
                 f"`{whole.loss_reduction.value}`",
                 "-" if kl.estimator is None else f"{kl.where.value}, {kl.estimator.value}",
                 "yes" if whole.normalise_advantages else "-",
                 "; ".join(need.value for need in Need if need in needs_of(whole)) or "-")
        rows.append(f"| {' | '.join(cells)} |")
    head = "| name | arXiv | advantage | policy loss, clip low and high | reduction | KL | whitened | needs |"
    return "\n".join([head, "| --- " * 8 + "|", *rows])


def _clip(algorithm: AlgorithmConfig) -> tuple[float | None, float | None]:
    """The bounds where the block names none: the recipe's with its own loss, else the loss's."""
    entry, recipe = loss_entry(algorithm), recipe_of(algorithm)
    bounds = entry.clip
    if recipe.clip is not None and policy_loss_of(algorithm) == recipe.policy_loss:
        bounds = recipe.clip
    return (None, None) if bounds is None else bounds
