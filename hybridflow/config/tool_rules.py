"""What the `tools` block must be, and what else may be configured beside it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config.faults import Fault
from hybridflow.config.schema import Config
from hybridflow.config.words import EngineName, Overlap
from hybridflow.tools.observation import PLACE


def tool_faults(config: Config) -> Iterator[Fault]:
    """Of commands in which tools are called."""
    tools = config.tools
    if tools.wrapper is not None and tools.wrapper.count(PLACE) != 1:
        yield Fault("tools.wrapper", tools.wrapper, f"must have {PLACE} in it once",
                    f'write e.g. "<result>{PLACE}</result>"')
    if tools.file is None:
        return
    if config.generation.overlap is Overlap.PARTIAL:
        yield Fault("generation.overlap", "partial", "interrupts answers, and those that call tools end in their step",
                    "choose one_step_off or none, or tools.file null")
    if config.generation.engine is EngineName.VLLM:
        yield Fault("generation.engine", "vllm", "does not go on from ids that it has not sampled itself",
                    "choose own, or tools.file null")
