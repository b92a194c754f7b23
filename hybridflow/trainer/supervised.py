"""A supervised learner: the actor alone, on pairs of prompt and response."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.algorithms.losses import finish_metrics, supervised_loss
from hybridflow.batch import Rows
from hybridflow.data.sft import SftExample
from hybridflow.engine.native import Output
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.models.decoder import HeadOutput
from hybridflow.observe.phases import Phase
from hybridflow.parallel.world import World
from hybridflow.target_rows import TargetRows
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.offline import Metrics, OfflineTrainer
from hybridflow.trainer.roles import response_counts


class SupervisedTrainer(OfflineTrainer):
    """Minimises the negative log-prob of the responses."""

    area = "sft"

    def __init__(self, inputs: Inputs, world: World) -> None:
        steps = inputs.config.sft.steps
        super().__init__(inputs, world, lambda builder: builder.actor(steps, temperature=1.0))

    def step(self, examples: Sequence[SftExample]) -> Metrics:
        """One optimizer step on `examples`, the same on every rank."""
        with self.timer.step(), self.timer.phase(Phase.UPDATE_ACTOR):
            samples = [Sample(example.prompt_ids, example.response_ids) for example in examples]
            share = self.actor.share(range(len(samples)), [sample.length for sample in samples], self.actor.training)
            mine = Rows(tuple(samples[row] for row in share.rows_of[self.world.rank]), TokenColumns())
            counts = response_counts([len(sample.response) for sample in samples])
            update = self.actor.learn(mine, share.sizes, counts, _loss)
        return (self.update_metrics(update, sum(sample.length for sample in samples))
                | {"sft/loss": finish_metrics(update.sums)["supervised_loss"]})


def _loss(output: Output, columns: TokenColumns, rows: TargetRows) -> tuple:
    assert isinstance(output, HeadOutput)
    return supervised_loss(output.log_probs, columns)
