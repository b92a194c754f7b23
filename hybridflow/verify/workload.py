"""What every combination is run on: tiny models, one ragged batch, and the objective of each.

Owns the fixtures, in fp64. Batches are made of plain random numbers, the same on every machine.
"""

from __future__ import annotations

import math
import random

import torch

from hybridflow.algorithms.correction import Bounding, Correction, RatioOf
from hybridflow.algorithms.gspo import gspo_policy_loss
from hybridflow.algorithms.kl import KlEstimator
from hybridflow.algorithms.losses import Clip
from hybridflow.algorithms.objectives import ActorObjective, CriticObjective
from hybridflow.algorithms.reduction import LossReduction
from hybridflow.batch import Batch
from hybridflow.engine.native import Loss
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.models.config import Family, Head, ModelConfig
from hybridflow.parallel.world import World
from hybridflow.trainer.roles import Reduction
from hybridflow.verify.combinations import FAILED, ROWS, Combination, TinyModel

VOCAB = 37
SEED = 7
SAMPLES = 3  # to a prompt
ACTOR = ActorObjective(Clip(0.2, 0.3, dual=2.0), entropy_coef=0.01, kl_estimator=KlEstimator.K3, kl_coef=0.1)
# Ratios and weights of whole responses, which context ranks have parts of.
OF_SEQUENCES = ActorObjective(Clip(0.5, 2.0), kl_estimator=KlEstimator.K2, kl_coef=0.1, policy_loss=gspo_policy_loss,
                              correction=Correction(RatioOf.SEQUENCE, Bounding.TRUNCATE, high=1.5))
CRITIC = CriticObjective(value_clip=0.2, coef=0.5)


def model_of(combination: Combination) -> ModelConfig:
    """A decoder of some 15 thousand weights, large enough ones that no gradient is small."""
    family = {TinyModel.ACTOR: Family.LLAMA, TinyModel.TIED: Family.QWEN2, TinyModel.CRITIC: Family.QWEN3}
    return ModelConfig(
        family[combination.model], vocab_size=VOCAB, hidden_size=16, intermediate_size=24,
        num_layers=combination.num_layers, num_heads=8, num_kv_heads=2, head_dim=4, initializer_range=0.3,
        tie_word_embeddings=combination.model is TinyModel.TIED, qkv_bias=combination.model is TinyModel.TIED,
        qk_norm=combination.model is TinyModel.CRITIC)


def head_of(model: TinyModel) -> Head:
    """What the last chunk computes."""
    return Head.VALUE if model is TinyModel.CRITIC else Head.LANGUAGE_MODEL


def reduction_of(model: TinyModel) -> Reduction:
    """How token losses become one number."""
    return Reduction(LossReduction.SEQ_MEAN_TOKEN_MEAN if model is TinyModel.TIED else LossReduction.TOKEN_MEAN)


def loss_of(model: TinyModel) -> Loss:
    """What is minimised: every term that the actor, or the critic, can have."""
    if model is TinyModel.CRITIC:
        return lambda out, columns, rows: CRITIC(out, columns)
    objective = OF_SEQUENCES if model is TinyModel.TIED else ACTOR
    return lambda out, columns, rows: objective(out.log_probs, out.entropy, columns, rows)


def ragged_batch(world: World, some_failed: bool = False) -> Batch:
    """Rows of 1-5 prompt and 1-6 response tokens, neighbours with the same prompt, every one at home on rank 0 so that
    all must travel.

    Args:
        some_failed: the rewards of `FAILED` are not there, so that these rows are not trained.
    """
    draw = random.Random(SEED)
    ids = lambda most: tuple(draw.randrange(VOCAB) for _ in range(draw.randint(1, most)))  # noqa: E731
    groups = tuple(row // SAMPLES for row in range(ROWS))
    prompts = [ids(5) for _ in range(groups[-1] + 1)]
    samples = tuple(Sample(prompts[group], ids(6)) for group in groups)
    mine = samples if world.rank == 0 else ()
    generator = torch.Generator().manual_seed(SEED)
    targets = sum(len(sample.response) for sample in mine)
    old, ref, advantages, returns, values, gap = torch.randn(6, targets, generator=generator, dtype=torch.float64)
    columns = TokenColumns(old_log_probs=old - 3, ref_log_probs=ref - 3, rollout_log_probs=old - 3 + gap / 5,
                           advantages=advantages, returns=returns, old_values=values)
    scores = None
    if some_failed:
        scores = torch.zeros(ROWS, dtype=torch.float64).index_fill(0, torch.tensor(FAILED), math.nan)
        trained = [float(row not in FAILED) for row, sample in enumerate(mine) for _ in sample.response]
        columns = columns.with_columns(loss_mask=torch.tensor(trained, dtype=torch.float64))
    home = (tuple(range(ROWS)), *((),) * (world.size - 1))
    return Batch(tuple(len(sample.prompt) for sample in samples), tuple(len(sample.response) for sample in samples),
                 groups, home, mine, columns, scores)
