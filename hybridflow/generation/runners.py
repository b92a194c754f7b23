"""Which runner executes a stage: the fastest one that there is for its device and the memory of its weights.

Owns the choice.
"""

from __future__ import annotations

from hybridflow.generation.native_runner import NativeRunner
from hybridflow.generation.runner import StageRunner
from hybridflow.generation.torch_runner import TorchRunner
from hybridflow.kernels.native_build import Unavailable, native_library
from hybridflow.kernels.native_ops import COMPUTE
from hybridflow.models.decoder import DecoderStage
from hybridflow.models.layout import sum_segments
from hybridflow.parallel.mesh import Mesh


def make_runner(stage: DecoderStage, mesh: Mesh, *, owns_weights: bool, batch_invariant: bool = False) -> StageRunner:
    """The runner of `stage` on a generation mesh.

    Args:
        owns_weights: the stage's parameters are its own, and may be laid out anew.
        batch_invariant: a token's bits may depend neither on the rest of its step nor on the tensor parallel degree.

    Raises:
        ValueError: `batch_invariant`, and what could compute so is missing.
    """
    fault = _no_kernels(stage, mesh, owns_weights)
    if batch_invariant and fault is not None:
        raise ValueError(f"generation.batch_invariant is true, but {fault}")
    if fault is not None:
        return TorchRunner(stage, mesh.device, owns_weights=owns_weights)
    return NativeRunner(stage, sum_segments(stage.config, mesh.tp.size) if batch_invariant else 1)


def _no_kernels(stage: DecoderStage, mesh: Mesh, owns_weights: bool) -> str | None:
    """Why the C++ kernels cannot run the stage; None where they can."""
    if mesh.device.type != "cpu":
        return f"the kernels that are batch-invariant are a CPU's, and the device is {mesh.device}"
    if not owns_weights:
        return "its weights are shared with training: set generation.weights to packed"
    if stage.dtype not in COMPUTE:
        return f"the kernels do not compute in {stage.dtype}"
    found = native_library()
    return found.reason if isinstance(found, Unavailable) else None
