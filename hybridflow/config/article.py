"""The nested dict of the seed article, read as a `Config`, with a note on how each of its keys was taken.

The article's blocks are `train` (total_steps, global_batch_size, micro_batch_size, gradient_accumulation_steps,
zero_stage, fsdp, mixed_precision), `model` (actor, critic, reward_model) and `rl_algorithm` (type, clip_eps,
entropy_coef, value_loss_coef). Keys of our own schema may stand beside them and mean what they always do.

Its N = M x S counts the micro-batch M over all data-parallel ranks: 256 = 8 x 32 on any number of ranks. Ours counts
it per replica, so one replica takes M / dp rollouts at once and S stays as it is.

Owns the translation only; what comes out is checked like any other config (`check`). A key that cannot be honoured
gets a note that says what is done instead; none is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from math import prod
from typing import Any

from hybridflow.algorithms.recipes import RECIPES
from hybridflow.config.algorithm_schema import AlgorithmConfig
from hybridflow.config.faults import Fault, listed, nearest_key, shown
from hybridflow.config.hints import field_types
from hybridflow.config.load import Tree
from hybridflow.config.words import KLWhere
from hybridflow.parallel.arithmetic import ceil_div

ARTICLE_MODELS = ("actor", "critic", "reward_model")
ARTICLE_ALGORITHM = ("type", "clip_eps", "entropy_coef", "value_loss_coef")
MODEL_NAMES = ("path", "name", "name_or_path", "model_name")
PRECISIONS = {"bf16": "bf16", "bfloat16": "bf16", "fp32": "no", "float32": "no", "none": "no", "no": "no",
              "fp64": "fp64", "fp16": "fp16", "float16": "fp16", "true": "bf16", "false": "no"}


def is_article(tree: Mapping[str, Any]) -> bool:
    """Whether a dict has a key that only the article's form has."""
    model, train = tree.get("model"), tree.get("train")
    names_actor = isinstance(model, Mapping) and "actor" in model
    return "rl_algorithm" in tree or names_actor or (isinstance(train, Mapping) and "fsdp" in train)


def translate(article: Mapping[str, Any], world_size: int) -> tuple[Tree, list[Fault], list[str]]:
    """The same config in our keys, the faults of the article's own keys, and the notes for the log.

    Example: on 4 ranks {"train": {"global_batch_size": 256, "micro_batch_size": 8, "gradient_accumulation_steps": 32}}
    becomes the same with micro_batch_size 2, and a note says so.
    """
    tree: Tree = deepcopy(dict(article))
    faults: list[Fault] = []
    notes: list[str] = []
    train, model, algorithm = (_taken(tree, name, faults) for name in ("train", "model", "rl_algorithm"))
    _batch(train, world_size, faults, notes)
    _sharding(train, faults, notes)
    _precision(train, notes)
    tree["train"] = train
    tree["model"] = _models(model, faults)
    own, theirs = _taken(tree, "algorithm", faults), _algorithm(algorithm, faults, notes)
    faults += [Fault(f"algorithm.{name}", theirs[name], f"but the algorithm block says {shown(own[name])}",
                     "name it in one of the two") for name in own.keys() & theirs.keys()
               if str(own[name]).lower() != str(theirs[name]).lower()]
    tree["algorithm"] = {**own, **theirs}
    if not _asks_for_kl(tree["algorithm"]):
        notes.append("rl_algorithm names no KL penalty: no reference model is held (algorithm.kl.where is none)")
    return tree, faults, notes


def article_key(key: str) -> str:
    """How the article calls one of our keys: "model.path" is its "model.actor"."""
    names = {"model.path": "model.actor", "model.critic.path": "model.critic", "algorithm.name": "rl_algorithm.type",
             "model.reward_model.path": "model.reward_model", "algorithm.clip.low": "rl_algorithm.clip_eps",
             "algorithm.clip.high": "rl_algorithm.clip_eps"}
    return names.get(key, key.replace("algorithm.", "rl_algorithm.", 1) if key.startswith("algorithm.") else key)


def _taken(tree: Tree, name: str, faults: list[Fault]) -> Tree:
    """Take a block out of the tree; {} where there is none."""
    block = tree.pop(name, {})
    if isinstance(block, Mapping):
        return dict(block)
    faults.append(Fault(name, block, "is not a block of keys"))
    return {}


def _batch(train: Tree, world_size: int, faults: list[Fault], notes: list[str]) -> None:
    """N = M x S with M over all data-parallel ranks."""
    total, micro, steps = (train.get(key) for key in
                           ("global_batch_size", "micro_batch_size", "gradient_accumulation_steps"))
    dp = _replicas(train.get("layout"), world_size)
    if not _whole(micro) or dp is None:
        return  # whatever is wrong there is found by the checks of our own keys
    if _whole(total) and _whole(steps) and micro * steps != total:
        faults.append(Fault("train.gradient_accumulation_steps", steps,
                            f"global_batch_size {total} is not micro_batch_size {micro} x {steps} = {micro * steps}",
                            f"choose global_batch_size {micro * steps}"))
    if _whole(total) and steps is None and total % micro:
        faults.append(Fault("train.global_batch_size", total, f"is not a multiple of micro_batch_size {micro}",
                            f"choose global_batch_size {ceil_div(total, micro) * micro}"))
    if micro % dp:
        faults.append(Fault("train.micro_batch_size", micro, f"counts all {dp} data-parallel ranks, among which "
                            f"{micro} rollouts cannot be shared out evenly", f"choose a multiple of {dp}"))
        return
    train["micro_batch_size"] = micro // dp
    if "global_batch_size" not in train and _whole(steps):
        train["global_batch_size"] = micro * steps
    total = train.get("global_batch_size")
    numbers = f" ({total} = {micro} x {total // micro})" if _whole(total) else ""
    notes.append(f"train.micro_batch_size {micro} is read over all data-parallel ranks, as N = M x S{numbers} needs: "
                 f"each of the {dp} replicas takes {micro // dp} at once")


def _replicas(layout: object, world_size: int) -> int | None:
    """dp of the training layout; None where the world cannot be cut so."""
    degrees = layout if isinstance(layout, Mapping) else {}
    within = [degrees.get(name, 1) for name in ("tp", "cp", "pp")]
    if not all(_whole(degree) for degree in within) or world_size % prod(within):
        return None
    return world_size // prod(within)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _sharding(train: Tree, faults: list[Fault], notes: list[str]) -> None:
    """zero_stage 3 and fsdp cut the weights, which tensor and pipeline parallelism do here."""
    instead = ("instead, the replicas share out optimizer states and gradients (zero_stage 2), and weights are cut by "
               "train.layout.tp and train.layout.pp")
    fsdp = train.pop("fsdp", False)
    if not isinstance(fsdp, bool):
        faults.append(Fault("train.fsdp", fsdp, "is not true or false"))
    elif fsdp:
        notes.append(f"train.fsdp true is not honoured: {instead}")
    stage = train.get("zero_stage")
    if stage == 3:
        notes.append(f"train.zero_stage {stage} is not honoured: {instead}")
    if stage == 3 or (fsdp is True and stage in (None, 0, 1)):
        train["zero_stage"] = 2


def _precision(train: Tree, notes: list[str]) -> None:
    """Other names of the precisions. What is not a name of one stays as it is, to be refused by the schema."""
    written = train.get("mixed_precision")
    precision = PRECISIONS.get(str(written).lower())
    if "mixed_precision" not in train or precision is None:
        return
    train["mixed_precision"] = precision
    if str(written).lower() != precision:
        notes.append(f"train.mixed_precision {written} is read as {precision}")


def _models(model: Tree, faults: list[Fault]) -> Tree:
    """actor, critic and reward_model are names of folders, or blocks that hold one."""
    named = {name: model.pop(name) for name in ARTICLE_MODELS if name in model}
    if "actor" in named:
        if "path" in model:
            faults.append(Fault("model.path", model["path"], "is the actor's folder, as model.actor is",
                                "remove one of the two"))
        model["path"] = _block("model.actor", named.pop("actor"), faults).get("path")
    for name, value in named.items():
        model[name] = _block(f"model.{name}", value, faults)
    return model


def _block(key: str, value: object, faults: list[Fault]) -> Tree:
    """A model's block in our keys, from a folder's name, a block with one, or null."""
    if not isinstance(value, Mapping):
        return {"path": value}
    block = dict(value)
    names = [name for name in MODEL_NAMES if name in block]
    if len(names) > 1:
        faults.append(Fault(f"{key}.{names[1]}", block[names[1]], f"{names[0]} names the model already",
                            "remove one of the two"))
    folder = [block.pop(name) for name in names]
    if key == "model.actor":
        faults += [Fault(f"{key}.{name}", left, "unknown key", f"keys here: {listed(MODEL_NAMES)}")
                   for name, left in block.items()]
    return {**block, "path": folder[0] if folder else None}


def _algorithm(algorithm: Tree, faults: list[Fault], notes: list[str]) -> Tree:
    """The article's four keys in ours; the other keys of our own `algorithm` block may stand beside them."""
    known = [*ARTICLE_ALGORITHM, *field_types(AlgorithmConfig)]
    ours = {name: value for name, value in algorithm.items() if name in known}
    for name in algorithm.keys() - ours.keys():
        near = nearest_key(str(name), known, ())
        hint = f"did you mean rl_algorithm.{near}?" if near else f"keys here: {listed(ARTICLE_ALGORITHM)}"
        faults.append(Fault(f"rl_algorithm.{name}", algorithm[name], "unknown key", hint))
    if "type" in ours:
        ours["name"] = ours.pop("type")
    if "clip_eps" in ours:
        width = ours.pop("clip_eps")
        ours["clip"] = {"low": width, "high": width}
        notes.append(f"rl_algorithm.clip_eps {width} is both algorithm.clip.low and algorithm.clip.high")
    return ours


def _asks_for_kl(algorithm: Tree) -> bool:
    kl, recipe = algorithm.get("kl"), RECIPES.get(str(algorithm.get("name", "ppo")).lower())
    where = kl.get("where") if isinstance(kl, Mapping) else None
    if where is None:  # the algorithm's own
        return recipe is not None and recipe.kl_where is not KLWhere.NONE
    return str(where) != "none"
