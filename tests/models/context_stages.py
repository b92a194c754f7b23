"""What a rank of a test world does with a decoder whose rows are cut over the context axis: answers and gradients.

Stages talk by plain sends and receives, one micro-batch after another.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.context import ContextCut, ContextPart
from hybridflow.micro_batch import MicroBatch, Sample, TokenColumns, reassemble
from hybridflow.models.config import Family, Head, ModelConfig
from hybridflow.models.context_attention import ContextCausal
from hybridflow.models.decoder import DecoderStage, HeadOutput
from hybridflow.models.init import init_weights
from hybridflow.models.layout import chunk_layers
from hybridflow.models.recompute import Recompute
from hybridflow.models.weights import decoder_shard_map
from hybridflow.parallel.box import Box
from hybridflow.parallel.collectives import all_reduce
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.world import World

VOCAB = 37


@dataclass(frozen=True)
class Case:
    """A layout, and rows as (prompt tokens, response tokens): micro-batch after micro-batch, for each dp rank."""

    layout: Layout
    rows: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]
    sequence_parallel: bool = False
    head: Head = Head.LANGUAGE_MODEL
    changes: tuple[tuple[str, object], ...] = ()
    recompute: Recompute = Recompute.NONE


@dataclass(frozen=True)
class Picture:
    """What a rank saw: all answers of each micro-batch of its replica on its last stage, and its summed gradients."""

    answers: list[list[Tensor]]
    gradients: list[tuple[Box, Tensor]]


def model(changes: tuple[tuple[str, object], ...] = ()) -> ModelConfig:
    shape = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2,
                 head_dim=4, initializer_range=0.3)
    return ModelConfig(Family.LLAMA, **{**shape, **dict(changes)})


def samples(rows: tuple[tuple[int, int], ...]) -> list[Sample]:
    """Ids that depend on the shape and place of a row only."""
    found = []
    for number, (prompt, response) in enumerate(rows):
        draw = random.Random(1000 * prompt + 10 * response + number)
        ids = tuple(draw.randrange(VOCAB) for _ in range(prompt + response))
        found.append(Sample(ids[:prompt], ids[prompt:]))
    return found


def packed(rows: tuple[tuple[int, int], ...], part: ContextPart, multiple_of: int) -> MicroBatch:
    """Rows with one weight for each target, in different decades."""
    mine = samples(rows)
    weights = [10.0 ** -(i % 3) * (1 + i % 7) for i in range(sum(len(sample.response) for sample in mine))]
    columns = TokenColumns(weight=torch.tensor(weights, dtype=torch.float64))
    return MicroBatch.pack(mine, columns, device=torch.device("cpu"), multiple_of=multiple_of, cp=part)


def picture(world: World, case: Case) -> Picture:
    """Answers, and gradients of the weighted sum of log-probs and entropies (or values), summed over `mesh.data`."""
    config, mesh = model(case.changes), Mesh(Grid.of(case.layout), world)
    chunks = Chunks(case.layout.pp)
    stage = DecoderStage(config, mesh, case.head, chunks=chunks, chunk_layers=chunk_layers(config.num_layers, chunks),
                         sequence_parallel=case.sequence_parallel, dtype=torch.float64, recompute=case.recompute)
    shard_map = decoder_shard_map(config, mesh.grid, case.head)
    init_weights({name: weight.data for name, weight in stage.named_parameters()}, shard_map, world.rank, 7, config)
    part = ContextPart(case.layout.cp, mesh.coord.cp)
    answers = []
    for rows in case.rows[mesh.coord.dp]:
        batch = packed(rows, part, mesh.tp.size if case.sequence_parallel else 1)
        output = forward_backward(stage, mesh, batch)
        if output is not None:
            answers.append([reassemble(values, batch, mesh.cp) for values in output])
    for name, sync in stage.grad_syncs().items():
        for group in (*sync.groups, mesh.data):
            all_reduce(stage.get_parameter(name).grad, group)
    grads = {name: parameter.grad.contiguous() for name, parameter in stage.named_parameters()}
    return Picture(answers, [(shard.box, shard.view(grads)) for shard in shard_map.shards(world.rank)])


def forward_backward(stage: DecoderStage, mesh: Mesh, batch: MicroBatch) -> list[Tensor] | None:
    """Adds up gradients; the outputs for my targets on the last stage."""
    x = batch.input_ids
    if not mesh.is_first_stage:
        tokens = batch.num_tokens // (mesh.tp.size if stage.sequence_parallel else 1)
        x = torch.empty(tokens, stage.config.hidden_size, dtype=stage.dtype)
        dist.recv(x, mesh.pp.ranks[mesh.pp.index - 1])
        x.requires_grad_()
    if mesh.is_last_stage:
        output = stage(x, batch, with_entropy=True)
        outputs = [output.log_probs, output.entropy] if isinstance(output, HeadOutput) else [output]
        sum((batch.columns.weight * values * 0.3 ** i).sum() for i, values in enumerate(outputs)).backward()
    else:
        hidden = stage(x, batch)
        dist.send(hidden.detach(), mesh.pp.ranks[mesh.pp.index + 1])
        grad = torch.empty_like(hidden)
        dist.recv(grad, mesh.pp.ranks[mesh.pp.index + 1])
        hidden.backward(grad)
    if not mesh.is_first_stage:
        dist.send(x.grad, mesh.pp.ranks[mesh.pp.index - 1])
    return [values.detach() for values in outputs] if mesh.is_last_stage else None


def scores(world: World, layout: Layout, rows: tuple[tuple[int, int], ...]) -> Tensor:
    """A score head's answer for each row."""
    config, mesh = model(), Mesh(Grid.of(layout), world)
    stage = DecoderStage(config, mesh, Head.SCORE, chunks=Chunks(1), chunk_layers=(range(config.num_layers),),
                         sequence_parallel=layout.tp > 1, dtype=torch.float64)
    shard_map = decoder_shard_map(config, mesh.grid, Head.SCORE)
    init_weights({name: weight.data for name, weight in stage.named_parameters()}, shard_map, world.rank, 7, config)
    batch = MicroBatch.pack_last_tokens(samples(rows), device=world.device, multiple_of=layout.tp,
                                        cp=ContextPart(layout.cp, mesh.coord.cp))
    with torch.no_grad():
        return reassemble(stage(batch.input_ids, batch), batch, mesh.cp)


def padded_attention(world: World, lengths: tuple[int, ...], num_tokens: int) -> tuple[Tensor, list[Tensor]]:
    """What this rank's tokens, of which the last are padding full of NaN, see, and the gradients of q, k and v."""
    cp = Mesh(Grid.of(Layout(cp=world.size)), world).cp
    part = ContextPart(cp.size, cp.index)
    real = ContextCut(lengths, cp.size).tokens(cp.index).numel()
    q, k, v = (torch.randn(num_tokens, heads, 4, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    for x in (q, k, v):
        x[real:] = torch.nan
        x.requires_grad_()
    out = ContextCausal(lengths, part, num_tokens, cp, world.device)(0, q, k, v)
    out.sum().backward()
    return out[real:].detach(), [x.grad[real:] for x in (q, k, v)]
