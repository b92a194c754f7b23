"""The same formulas written once more: numpy, fp64, loops over rows and tokens, as the papers have them.

Shares nothing with the code under test. Rows are lists of arrays.
"""

import numpy as np


def rows(flat, lengths):
    ends = np.cumsum(lengths)
    return [np.asarray(flat)[end - n : end] for end, n in zip(ends, lengths, strict=True)]


def gae_row(rewards, values, gamma, lam):
    advantages = np.zeros(len(rewards))
    for t in range(len(rewards)):
        for k in range(t, len(rewards)):
            following = values[k + 1] if k + 1 < len(values) else 0.0
            advantages[t] += (gamma * lam) ** (k - t) * (rewards[k] + gamma * following - values[k])
    return advantages


def grpo(rewards, groups, by_std, eps=1e-6):
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = np.array([r for r, g in zip(rewards, groups, strict=True) if g == group])
        if np.all(peers == peers[0]):
            result.append(0.0)
        else:
            result.append((reward - peers.mean()) / ((peers.std(ddof=1) + eps) if by_std else 1.0))
    return np.array(result)


def kl(log_p, log_q, estimator):
    d = log_p - log_q
    return {"k1": d, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[estimator]


def policy_token_loss(log_prob, old, advantage, low, high, dual=None):
    ratio = np.exp(log_prob - old)
    surrogate = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        surrogate = max(surrogate, dual * advantage)
    return -surrogate


def value_token_loss(value, old, target, clip):
    errors = [(value - target) ** 2]
    if clip is not None:
        errors.append((min(max(value, old - clip), old + clip) - target) ** 2)
    return max(errors) / 2


def reduce(losses, masks, reduction, constant_length=None):
    """`losses`, `masks`: a list of arrays, one per row of the whole batch."""
    losses = [loss[mask != 0] for loss, mask in zip(losses, masks, strict=True)]
    losses = [loss for loss in losses if len(loss)]
    if not losses:
        return 0.0
    return {
        "token-mean": lambda: np.concatenate(losses).mean(),
        "seq-mean-token-mean": lambda: np.mean([loss.mean() for loss in losses]),
        "seq-mean-token-sum": lambda: np.mean([loss.sum() for loss in losses]),
        "constant-length": lambda: np.mean([loss.sum() for loss in losses]) / constant_length,
    }[reduction]()
