"""An estimator and a policy loss as a user writes them: a file of its own, which imports a neighbour."""

import torch
from users_neighbour import SCALE

from hybridflow.algorithms.advantages import Estimate


def scaled_scores(rewarded, options):
    """The score itself, times a number, less its mean over the tokens of all ranks."""
    tokens = rewarded.on_tokens(SCALE * rewarded.row_rewards.nan_to_num(0.0))
    sums = torch.stack([tokens.sum(), rewarded.mask.sum()])
    total, count = rewarded.total(sums).tolist()
    return Estimate(torch.where(rewarded.mask != 0, tokens - total / max(count, 1.0), 0.0))


def bounded_log_prob(log_probs, columns, rows, clip):
    """-A log p, with the log-prob bounded below by how far `clip.low` lets it fall."""
    token_loss = -columns.advantages * log_probs.clamp(min=-3.0 - clip.low)
    loss = (columns.weight * token_loss).sum()
    return loss, {"policy_loss": loss.detach().double()}


def takes_one(rewarded):
    """What an estimator must not take."""


NOT_A_FUNCTION = 3
