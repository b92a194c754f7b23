"""Estimators and policy losses of users that return what they must not."""

import torch

from hybridflow.algorithms.advantages import Estimate

# What an estimator must not return.
WRONG_ESTIMATORS = {
    "a_tensor": lambda rewarded, options: rewarded.token_rewards,
    "nothing": lambda rewarded, options: None,
    "one_too_few": lambda rewarded, options: Estimate(rewarded.token_rewards[1:]),
    "not_finite": lambda rewarded, options: Estimate(rewarded.token_rewards / 0.0 * 0.0),
    "integers": lambda rewarded, options: Estimate(rewarded.token_rewards.long()),
    "no_returns": lambda rewarded, options: Estimate(rewarded.token_rewards),
    "returns_of_rows": lambda rewarded, options: Estimate(rewarded.token_rewards, rewarded.row_rewards),
    "returns_not_finite": lambda rewarded, options: Estimate(rewarded.token_rewards, rewarded.token_rewards / 0.0),
}


def _loss(term, sums=None):
    """A loss function that sums `term(log_probs, columns)` up."""
    def loss(log_probs, columns, rows, clip):
        loss = (columns.weight * term(log_probs, columns)).sum()
        return loss, {"policy_loss": loss.detach().double()} if sums is None else sums
    return loss


# What a policy loss must not return.
WRONG_LOSSES = {
    "no_pair": lambda log_probs, columns, rows, clip: log_probs.sum(),
    "nothing": lambda log_probs, columns, rows, clip: None,
    "of_tokens": lambda log_probs, columns, rows, clip: (columns.weight * log_probs, {}),
    "a_number": lambda log_probs, columns, rows, clip: (1.5, {}),
    "no_sums": _loss(lambda log_probs, columns: log_probs, sums=[1.0]),
    "sums_of_tokens": _loss(lambda log_probs, columns: log_probs, sums={"x": torch.zeros(2)}),
    "detached": _loss(lambda log_probs, columns: log_probs.detach()),
    "not_finite": _loss(lambda log_probs, columns: log_probs.log()),
    # The loss is finite and its gradient is not: 0 times infinity, on the side that is not taken.
    "gradient": _loss(lambda log_probs, columns: torch.where(log_probs < 0, 0.0, (log_probs * 0.0).sqrt())),
}
