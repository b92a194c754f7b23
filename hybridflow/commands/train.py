"""`hybridflow train`: reinforcement learning from a config, on all ranks."""

from __future__ import annotations

from contextlib import closing

from hybridflow.config.batch_math import layout_table
from hybridflow.config.schema import Config
from hybridflow.data.tokenizer import open_tokenizer
from hybridflow.parallel.world import World
from hybridflow.trainer.prompts import held_out_prompts, read_records, training_prompts
from hybridflow.trainer.rl import RLTrainer
from hybridflow.trainer.run import Run, RunParts


def run(config: Config) -> None:
    """Train, evaluate and export as `config` says. Collective over the launched ranks."""
    with closing(World.from_env(config.train.timeout_s)) as world:
        tokenizer = open_tokenizer(config.model.tokenizer or config.model.path)
        records = read_records(config, world)
        title = f"{config.algorithm.name.value}, world size {world.size}"
        whole = Run(config, world, title, config.train.total_steps)
        with closing(RLTrainer(config, world, tokenizer)) as trainer:
            vocab_size = trainer.model.vocab_size
            loader = training_prompts(config, records, tokenizer, vocab_size)
            whole.view.say(trainer.batch_line())
            whole.view.say(layout_table(config, world.size))
            if loader.num_dropped:
                whole.view.say(f"{loader.num_dropped} of {len(records.train)} prompts are too long and were dropped.")
            held_out = held_out_prompts(config, records, tokenizer, vocab_size)
            whole.fit(RunParts(
                step=lambda: trainer.step(next(loader)), export=trainer.export, trace=trainer.trace,
                timer=trainer.timer, grid=trainer.roles.actor.engine.mesh.grid,
                evaluate=None if config.evaluation.every_steps is None else trainer.evaluator(held_out),
                samples=lambda: trainer.samples(config.logging.samples),
                trouble=lambda: trainer.roles.rewards.last_fault,
            ))
