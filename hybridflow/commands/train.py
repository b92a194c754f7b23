"""`hybridflow train`: reinforcement learning from a config, on all ranks."""

from __future__ import annotations

from hybridflow.config.batch_math import layout_table
from hybridflow.config.schema import Config
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.tokenizer import open_tokenizer
from hybridflow.parallel.world import World
from hybridflow.trainer.prompts import held_out_prompts, read_records, training_prompts
from hybridflow.trainer.rl import RLTrainer
from hybridflow.trainer.run import Run, RunParts


def run(config: Config) -> None:
    """Train, evaluate and export as `config` says. Collective over the launched ranks."""
    world = World.from_env()
    try:
        _run(config, world)
    finally:
        world.close()


def _run(config: Config, world: World) -> None:
    tokenizer = open_tokenizer(config.model.tokenizer or config.model.path)
    whole = Run(config, world, f"{config.algorithm.name.value}, world size {world.size}", config.train.total_steps)
    records = read_records(config, world)
    trainer = RLTrainer(config, world, tokenizer)
    loader = training_prompts(config, records, tokenizer, trainer.model.vocab_size)
    whole.view.say(trainer.batch_line())
    whole.view.say(layout_table(config, world.size))
    if loader.num_dropped:
        whole.view.say(f"{loader.num_dropped} of {len(records.train)} prompts are too long and were dropped.")
    last: list[TokenisedPrompt] = []

    def step() -> dict[str, float]:
        last[:] = next(loader)
        return trainer.step(last)

    evaluate = trainer.evaluator(held_out_prompts(config, records, tokenizer, trainer.model.vocab_size))
    whole.fit(RunParts(step=step, evaluate=evaluate, export=trainer.export, trace=trainer.trace,
                       grid=trainer.roles.actor.engine.mesh.grid, timing=trainer.timer.take,
                       samples=lambda: trainer.samples(last, config.logging.samples)))
