"""What a batch says of itself once its advantages are known: lengths, and moments of its token columns over all ranks.

Owns these numbers and their reduction. They are cheap: two small reductions, and no column leaves its rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.crew import Crew
from hybridflow.micro_batch import TokenColumns
from hybridflow.parallel.collectives import all_reduce
from hybridflow.trainer.board import Metrics


@dataclass(frozen=True)
class Quantity:
    """A number of each trained token. `told`: the moments that are metrics, `<name>_<moment>`; without any `<name>` is
    its mean.
    """

    name: str
    told: tuple[str, ...]


RANGE = ("mean", "min", "max")
QUANTITIES = (
    Quantity("advantage/trained", RANGE),
    Quantity("critic/target", RANGE),
    Quantity("critic/old_value", RANGE),
    Quantity("policy/rollout_kl", ()),
    Quantity("policy/rollout_kl_k3", ()),
    Quantity("policy/prob_gap", ("mean", "max", "std")),
)


def batch_metrics(batch: Batch, crew: Crew, *, prompt_limit: int, response_limit: int) -> Metrics:
    """Metrics of a batch whose advantages have been computed; what its columns do not have is left out. Collective
    over the crew, where all rows are at home.

    Args:
        prompt_limit, response_limit: data.max_prompt_length and generation.max_new_tokens, in tokens.
    """
    return _lengths(batch, prompt_limit, response_limit) | _moments(batch.columns, crew)


def _lengths(batch: Batch, prompt_limit: int, response_limit: int) -> Metrics:
    prompts, responses = batch.prompt_lengths, batch.response_lengths
    return {
        "rollout/response_tokens_min": float(min(responses)),
        "rollout/response_limit_fraction": sum(n == response_limit for n in responses) / len(responses),
        "rollout/prompt_tokens_min": float(min(prompts)),
        "rollout/prompt_tokens_max": float(max(prompts)),
        "rollout/prompt_limit_fraction": sum(n == prompt_limit for n in prompts) / len(prompts),
    }


def _moments(columns: TokenColumns, crew: Crew) -> Metrics:
    """Every rank takes part in both reductions, whatever it is home to: a column without tokens counts nothing."""
    values = [_trained(column, columns.loss_mask, crew) for column in _columns(columns)]
    sums = torch.stack([torch.stack([x.new_tensor(x.numel()), x.sum(), x.square().sum()]) for x in values])
    none = values[0].new_full((1,), -torch.inf)
    ends = torch.stack([torch.stack([torch.cat([none, x]).max(), torch.cat([none, -x]).max()]) for x in values])
    totals = crew.sum(sums).tolist()
    extremes = all_reduce(ends, crew.group, dist.ReduceOp.MAX).tolist()
    metrics: Metrics = {}
    for quantity, (count, total, squares), (most, least) in zip(QUANTITIES, totals, extremes, strict=True):
        if not count:
            continue
        variance = max(squares - total * total / count, 0.0) / max(count - 1.0, 1.0)
        moments = {"mean": total / count, "min": -least, "max": most, "std": variance**0.5}
        told = {f"{quantity.name}_{moment}": moments[moment] for moment in quantity.told}
        metrics |= told or {quantity.name: moments["mean"]}
    return metrics


def _columns(columns: TokenColumns) -> list[Tensor | None]:
    """A column `[tokens]` for each of QUANTITIES, None where it is not known."""
    gap = kl = k3 = None
    if columns.old_log_probs is not None and columns.rollout_log_probs is not None:
        old, rollout = columns.old_log_probs.double(), columns.rollout_log_probs.double()
        kl, k3, gap = rollout - old, (old - rollout).exp() - (old - rollout) - 1, (old.exp() - rollout.exp()).abs()
    return [columns.advantages, columns.returns, columns.old_values, kl, k3, gap]


def _trained(column: Tensor | None, mask: Tensor | None, crew: Crew) -> Tensor:
    """The trained tokens' values, fp64."""
    if column is None or mask is None:
        return torch.zeros(0, dtype=torch.float64, device=crew.world.device)
    return column.detach().double()[mask > 0]
