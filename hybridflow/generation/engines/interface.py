"""What a rollout asks of a generation engine, whoever wrote it.

Owns no behaviour. Our own `Generator` is one; adapters to other engines stand beside this file, and import what they
adapt only when they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hybridflow.generation.records import Completion, OnEnd, Prompt, SamplingParams
from hybridflow.generation.work_source import WorkSource


class GenerationEngine(Protocol):
    """Samples under weights of one version at a time.

    Weights come in boxes of canonical tensors, by a plan (`weight_home.WeightHome`): its `shard_map` says which boxes
    this rank wants and where in the storages of `take` they lie, whatever the engine fuses of them later. The order is
    home.take, filling what it gave, home.ready, `wake`, any number of `generate`, `sleep`, home.free.

    Attributes:
        weight_version: of the weights that it generates under; None while it sleeps.
    """

    weight_version: int | None

    def wake(self, version: int = 0) -> None:
        """The weights of `version` are in: prepare to generate under them. Nothing computed under others is used."""

    def sleep(self) -> None:
        """Give back what generation takes; the weights may go."""

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int,
                 expected_version: int | None = None, *, source: WorkSource | None = None,
                 interrupt: Callable[[], bool] | None = None,
                 ended: OnEnd | None = None) -> list[Completion]:
        """Complete the prompts, in their order. A sample depends on the weights, `params`, `seed` and its own `Prompt`.

        Its log-probs are raw ones, under the sampling temperature and before anything else, for the algorithm; where
        tokens were drawn from something else, the processed ones are there too.

        Args:
            source: hands prompts out by their index; completions are of those that were taken, in their order. None:
                all are taken.
            interrupt: asked now and then whether to stop; what is not finished then comes back as `INTERRUPTED`.
            ended: called, on every rank of the replica, for each response that has ended, with the index of its prompt
                and its ids: as soon as the engine knows.

        Raises:
            StaleWeightsError: the weights have another version than is expected, or there are none.
            ValueError: prompts or parameters that this engine cannot follow.
        """
