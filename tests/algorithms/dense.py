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


# --- estimators: rows are numbered, `tokens` are lists of arrays a row, masks too; a reward may be NaN ---------------


def peers(rewards, groups, row):
    """The rewards of the row's group that are numbers."""
    return np.array([r for r, g in zip(rewards, groups, strict=True) if g == groups[row] and not np.isnan(r)])


def row_advantage(name, rewards, groups, row, baselines=None, eps=1e-6):
    """A row's advantage where it is one number."""
    reward, group = rewards[row], peers(rewards, groups, row)
    if np.isnan(reward) or (name != "remax" and np.all(group == group[0])):
        return 0.0
    if name == "remax":
        return 0.0 if np.isnan(baselines[row]) else reward - baselines[row]
    if name == "rloo":
        return reward - (group.sum() - reward) / (len(group) - 1)
    return (reward - group.mean()) / (group.std(ddof=1) + eps if name == "grpo" else 1.0)


def on_trained(per_token, mask):
    """An array a row with the numbers of its trained tokens in their places."""
    out = np.zeros(len(mask))
    out[mask != 0] = per_token
    return out


def returns_to_go(rewards, gamma):
    return np.array([sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))])


def whitened(rows_of_advantages, masks, eps=1e-8):
    kept = np.concatenate([[], *(a[m != 0] for a, m in zip(rows_of_advantages, masks, strict=True))])
    if not len(kept):
        return rows_of_advantages
    return [np.where(m != 0, (a - kept.mean()) / np.sqrt(kept.var() + eps), 0.0)
            for a, m in zip(rows_of_advantages, masks, strict=True)]


def overlong(length, longest, buffer):
    if length <= longest - buffer:
        return 0.0
    return (longest - buffer - length) / buffer if length <= longest else -1.0


# --- policy losses: one row at a time, arrays of its trained tokens --------------------------------------------------


def policy_row_losses(name, log_probs, old, advantages, low, high, dual=None):
    """The token losses of a row, as a function of the log-probs alone: what has no gradient is not written here."""
    if name == "reinforce":
        return -advantages * log_probs
    ratios = np.exp(log_probs - old)
    if name == "gspo":
        ratios = np.full(len(log_probs), np.exp(np.mean(log_probs - old))) if len(log_probs) else ratios
    return np.array([policy_token_loss(np.log(r), 0.0, a, low, high, dual if name == "ppo" else None)
                     for r, a in zip(ratios, advantages, strict=True)])


def importance(trainer, rollout, level, how, low, high):
    """(weights, out of bounds) of the trained tokens of a row."""
    log_ratios = np.asarray(trainer) - np.asarray(rollout)
    if level == "sequence":
        log_ratios = np.full(len(log_ratios), log_ratios.sum())
    ratios = np.exp(np.clip(log_ratios, -20, 20))
    out = (ratios > high) | ((ratios < low) if how == "mask" else False)
    return (np.minimum(ratios, high) if how == "truncate" else np.where(out, 0.0, ratios)), out
