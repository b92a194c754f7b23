"""How far the weights that made a batch are behind those that learn from it."""

from __future__ import annotations

import torch

from hybridflow.batch import Batch
from hybridflow.crew import Crew
from hybridflow.engine.blueprint import Elsewhere
from hybridflow.engine.native import TrainEngine
from hybridflow.trainer.board import Metrics


def staleness(batch: Batch, actor: TrainEngine | Elsewhere, crew: Crew) -> Metrics:
    """Weight versions by which tokens are behind the actor, before it learns from them; {} where none can be. The rows
    are at home where the actor trains. Collective over the crew.
    """
    versions = batch.columns.versions
    if versions is None:
        return {}
    sums = torch.zeros(2, dtype=torch.float64, device=versions.device)
    largest = torch.zeros(crew.size, dtype=torch.float64, device=versions.device)
    if versions.numel():
        assert isinstance(actor, TrainEngine), "rows are at home where the actor trains"
        behind = actor.version - versions.double()
        largest[crew.group.index] = behind.max()
        sums += torch.stack([behind.sum(), torch.ones_like(behind).sum()])
    total, tokens = crew.sum(sums).tolist()
    return {"rollout/staleness_mean": total / max(tokens, 1.0), "rollout/staleness_max": crew.sum(largest).max().item()}
