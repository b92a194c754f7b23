"""DAPO: decoupled clip and dynamic sampling policy optimisation (Yu et al. 2025, arXiv:2503.14476).

On top of GRPO's advantages: an upper clip bound of its own (clip-higher, eq. 10: `Clip(low=0.2, high=0.28)` of PPO's
loss), the mean over all tokens of the batch (eq. 12: `token-mean`), a punishment for responses that come near the
length limit (eq. 13), prompts whose group says nothing replaced by others (eq. 11), and no KL. Here are the last two: a
formula and a predicate. Who generates the replacements is the dataflow's business.
"""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.groups import group_statistics


def soft_overlong_punishment(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """`[rows]` fp64, to be added to the rewards (eq. 13): 0 up to max_length - buffer tokens, then falling linearly to
    -1 at max_length, and -1 beyond. In units of the reward of a right answer.

    Args:
        lengths: `[rows]` int64, tokens of the responses.
        max_length, buffer: L_max and L_cache, in tokens; buffer in 1 .. max_length.

    Raises:
        ValueError: the buffer is outside its range.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"the overlong buffer is {buffer} tokens; it must lie in 1 .. {max_length}, the length limit")
    return ((max_length - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0)


def groups_with_signal(row_rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The ids `[n]` int64, in rising order, of the groups whose rewards are not all equal (eq. 11, of 0 and 1).

    Other groups have no advantage and no gradient. Rows whose reward failed (NaN) are left out; a group of fewer than
    two others has no signal.

    Args:
        row_rewards: `[rows]` as they were given, before any punishment for length.
        group_ids: `[rows]` int64.
    """
    known = ~row_rewards.isnan()
    groups = group_statistics(row_rewards[known], group_ids[known])
    return groups.ids[groups.differs]
