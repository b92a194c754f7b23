"""Which runner executes a stage: the fastest one that there is for its device and the memory of its weights.

Owns the choice.
"""

from __future__ import annotations

from hybridflow.generation.runner import StageRunner
from hybridflow.generation.torch_runner import TorchRunner
from hybridflow.models.decoder import DecoderStage
from hybridflow.parallel.mesh import Mesh


def make_runner(stage: DecoderStage, mesh: Mesh, *, owns_weights: bool) -> StageRunner:
    """The runner of `stage` on a generation mesh.

    Args:
        owns_weights: the stage's parameters are its own, and may be laid out anew.
    """
    return TorchRunner(stage, mesh.device, owns_weights=owns_weights)
