"""What a rank of a test world does with a decoder stage: build, load, run through its pipeline, export.

Workers import this module, so it does not import transformers, which would cost seconds a worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from hybridflow.micro_batch import MicroBatch, Sample, TokenColumns
from hybridflow.models.attention import PackedCausal
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.decoder import DecoderStage
from hybridflow.models.hf_export import export_hf, tokenizer_files
from hybridflow.models.hf_import import load_hf
from hybridflow.models.layout import chunk_layers
from hybridflow.models.recompute import Recompute
from hybridflow.models.weights import decoder_shard_map
from hybridflow.parallel.box import Box
from hybridflow.parallel.collectives import all_gather, all_reduce
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.pipeline import PipelineRunner
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.schedules.chunks import ChunkOrder, Chunks
from hybridflow.parallel.schedules.training import build as build_schedule
from hybridflow.parallel.shard_map import ShardMap

ROWS = [[3, 14, 15, 9, 26, 5, 35], [8, 9, 7], [66]]


@dataclass(frozen=True)
class Case:
    """What a rank builds; `layers_per_chunk` None is even, `chunks` None is one on each stage."""

    folder: Path
    layout: Layout
    head: Head = Head.LANGUAGE_MODEL
    sequence_parallel: bool = False
    layers_per_chunk: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    chunks: Chunks | None = None
    recompute: Recompute = Recompute.NONE


@dataclass
class Built:
    config: ModelConfig
    mesh: Mesh
    stage: DecoderStage
    shard_map: ShardMap
    storages: dict[str, torch.Tensor] = field(default_factory=dict)


def build(world, case: Case) -> Built:
    """The loaded stage of this rank; storages start as NaN, so that whatever is not loaded shows."""
    config = ModelConfig.from_hf_folder(case.folder)
    mesh = Mesh(Grid.of(case.layout), world)
    chunks = case.chunks or Chunks(case.layout.pp)
    stage = DecoderStage(config, mesh, case.head, chunks=chunks,
                         chunk_layers=chunk_layers(config.num_layers, chunks, case.layers_per_chunk),
                         sequence_parallel=case.sequence_parallel, dtype=case.dtype, recompute=case.recompute)
    shard_map = decoder_shard_map(config, mesh.grid, case.head, chunks, case.layers_per_chunk)
    storages = stage.state_dict()
    for storage in storages.values():
        storage.fill_(torch.nan)
    load_hf(case.folder, storages, shard_map, world.rank)
    return Built(config, mesh, stage, shard_map, storages)


def hidden_states(built: Built, batch: MicroBatch) -> torch.Tensor | None:
    """The last chunk's hidden states of all tokens, by plain sends and receives; None on stages without the head."""
    mesh, stage, chunks = built.mesh, built.stage, built.stage.chunks
    tokens = batch.num_tokens // (mesh.tp.size if stage.sequence_parallel else 1)
    out = batch.input_ids
    for chunk in chunks.of_stage(mesh.pp.index):
        x = out  # of the chunk before, where it is on this stage
        source = mesh.pp.index if chunk == 0 else chunks.stage_of(chunk - 1)
        if source != mesh.pp.index:
            x = torch.empty(tokens, built.config.hidden_size, dtype=stage.dtype)
            dist.recv(x, mesh.pp.ranks[source])
        with torch.no_grad():
            out = stage.forward_hidden(x, batch.position_ids, PackedCausal(batch.lengths, x.device), chunk)
        if chunk == chunks.last:
            return all_gather(out, mesh.tp) if stage.sequence_parallel else out
        target = chunks.stage_of(chunk + 1)
        if target != mesh.pp.index:
            dist.send(out, mesh.pp.ranks[target])
    return None


def backward(built: Built, samples: list[tuple[Sample, torch.Tensor]], per_micro_batch: int) -> None:
    """Gradients of sum(weight x log-prob, or x value) over the samples, in every parameter, with their extra sums."""
    multiple = built.mesh.tp.size if built.stage.sequence_parallel else 1
    batches = []
    for start in range(0, len(samples), per_micro_batch):
        part = samples[start:start + per_micro_batch]
        columns = TokenColumns(weight=torch.cat([weight for _, weight in part]))
        batches.append(MicroBatch.pack([sample for sample, _ in part], columns, device=torch.device("cpu"),
                                       multiple_of=multiple))

    def loss(output, batch):
        answers = output.log_probs if built.stage.head_kind is Head.LANGUAGE_MODEL else output
        return (batch.columns.weight * answers).sum(), {}

    chunks = built.stage.chunks
    runner = PipelineRunner(built.stage, built.mesh, chunks, built.config.hidden_size, built.stage.dtype,
                            built.stage.sequence_parallel)
    kind = ScheduleKind.ONE_F_ONE_B
    if chunks.vpp > 1:
        kind = ScheduleKind.ZB_V if chunks.order is ChunkOrder.V else ScheduleKind.INTERLEAVED
    runner.run(build_schedule(kind, chunks, len(batches)), batches, loss)
    syncs = built.stage.grad_syncs()
    for name, parameter in built.stage.named_parameters():
        for group in syncs[name].groups:
            all_reduce(parameter.grad, group)


def sample_gradients(world, case: Case, samples: list[tuple[Sample, torch.Tensor]], per_micro_batch: int,
                     ) -> list[tuple[Box, np.ndarray, bool]]:
    """For each box of this rank its gradient, and whether this rank counts it in the norm."""
    built = build(world, case)
    backward(built, samples, per_micro_batch)
    syncs = built.stage.grad_syncs()
    grads = {name: parameter.grad.contiguous() for name, parameter in built.stage.named_parameters()}
    return [(shard.box, shard.view(grads).numpy(), syncs[shard.storage].counted)
            for shard in built.shard_map.shards(world.rank)]


def descend(world, case: Case, samples: list[tuple[Sample, torch.Tensor]], steps: int,
            learning_rate: float) -> list[tuple[Box, np.ndarray]]:
    """The boxes of this rank after some steps of plain gradient descent."""
    built = build(world, case)
    for _ in range(steps):
        backward(built, samples, 2)
        with torch.no_grad():
            for parameter in built.stage.parameters():
                parameter.sub_(parameter.grad, alpha=learning_rate)
                parameter.grad = None
    return [(shard.box, shard.view(built.storages).numpy()) for shard in built.shard_map.shards(world.rank)]


def import_run_export(world, cases, out):
    """Logits of each case on the last stage's first tensor rank (else None), and an export of it."""
    logits = []
    for case in cases:
        built = build(world, case)
        multiple = case.layout.tp if case.sequence_parallel else 1
        batch = MicroBatch.pack([Sample(tuple(row), ()) for row in ROWS], device=world.device, multiple_of=multiple)
        hidden = hidden_states(built, batch)
        logits.append(None if hidden is None else built.stage.logits(hidden)[:sum(map(len, ROWS))].numpy())
        export_hf(out / case.folder.name, built.config, built.shard_map, built.storages, world,
                  tokenizer_files(case.folder))
    return logits


def export_in_rounds(world, case, out):
    """Files of at most 20 kB from two writers, in rounds of 1 kB."""
    built = build(world, case)
    export_hf(out, built.config, built.shard_map, built.storages, world, writers=(0, 3), file_bytes=20_000,
              round_bytes=1_000)


def scores(world, case):
    """Scores of the rows on the last stage."""
    built = build(world, case)
    batch = MicroBatch.pack_last_tokens([Sample(tuple(row), ()) for row in ROWS], device=world.device,
                                        multiple_of=case.layout.tp)
    hidden = hidden_states(built, batch)
    return None if hidden is None else built.stage.values(hidden[batch.target_index]).detach().numpy()


def fresh_value_head(world, case):
    built = build(world, case)
    return built.storages["head.weight"].numpy() if built.mesh.pp.index == built.stage.chunks.head_stage else None
