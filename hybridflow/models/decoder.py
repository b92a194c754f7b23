"""The layers of a decoder that one rank computes: the chunks of a pipeline stage, cut over the tensor axis.

Owns the forward of each chunk. It never initialises, loads or moves weights (see `init`, `hf_import`, `weights`), and
never talks to another stage: what crosses a stage border is the runner's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hybridflow.kernels.invariant import InvariantProduct
from hybridflow.kernels.native_backward import has_kernels
from hybridflow.kernels.packed_weights import PackedWeights
from hybridflow.micro_batch import MicroBatch
from hybridflow.models.attention import Attention, ReplicatedKeyValue, RMSNorm, Sight
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.context_attention import packed_attention
from hybridflow.models.grad_syncs import stage_grad_syncs
from hybridflow.models.invariant import InvariantCausal, compute_invariantly
from hybridflow.models.layout import require_layout, sum_segments
from hybridflow.models.mlp import MLP
from hybridflow.models.recompute import Recompute, keep_less
from hybridflow.models.rope import RopeTables, rope_tables
from hybridflow.models.slots import read_rows
from hybridflow.parallel.collectives import gather_replicated, gather_tokens
from hybridflow.parallel.gradients import GradSync
from hybridflow.parallel.invariant_log_probs import invariant_log_probs, invariant_logits
from hybridflow.parallel.linear import ColumnParallelLinear
from hybridflow.parallel.mesh import AxisGroup, Mesh
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.tiles import Tiles
from hybridflow.parallel.vocab import VocabParallelEmbedding, gather_logits, token_log_probs, vocab_range


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind its norm, added to the residual stream.

    Attributes:
        recompute: what its backward computes once more.
    """

    def __init__(self, config: ModelConfig, layer: int, *, tp: AxisGroup, sequence_parallel: bool, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__()
        shared = dict(tp=tp, sequence_parallel=sequence_parallel, dtype=dtype, device=device)
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.attention = Attention(config, layer, **shared)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.mlp = MLP(config, **shared)
        self.recompute = Recompute.NONE

    def forward(self, x: Tensor, rope: RopeTables, attend: Sight) -> Tensor:
        if self.recompute is Recompute.NONE or not torch.is_grad_enabled():
            return self._keeping_all(x, rope, attend)
        if self.recompute is Recompute.FULL:
            return checkpoint(self._keeping_all, x, rope, attend, use_reentrant=False, preserve_rng_state=False)
        return self._keeping_products(x, rope, attend)

    def _keeping_all(self, x: Tensor, rope: RopeTables, attend: Sight) -> Tensor:
        # In place: nobody else keeps the new term, and its gradient does not need it.
        x = self.attention(self.input_norm(x), rope, attend).add_(x)
        return self.mlp(self.post_norm(x)).add_(x)

    def _keeping_products(self, x: Tensor, rope: RopeTables, attend: Sight) -> Tensor:
        """The same with `Recompute.SELECTIVE`."""
        attention, mlp = self.attention, self.mlp
        qkv = _behind_norm(self.input_norm, attention.qkv, x)
        x = attention.out(keep_less(lambda qkv: attention.see(qkv, rope, attend), qkv)).add_(x)
        gate_up = _behind_norm(self.post_norm, mlp.gate_up, x)
        return keep_less(lambda gate_up: mlp.down(mlp.activate(gate_up)), gate_up, remake=mlp.activate).add_(x)


def _behind_norm(norm: RMSNorm, linear: ColumnParallelLinear | ReplicatedKeyValue, x: Tensor) -> Tensor:
    """`linear(norm(x))` that keeps `x`, neither the linear's input nor what the linear gathers of it."""

    def input_of_linear(x: Tensor) -> Tensor:
        normed = norm(x)
        return gather_tokens(normed, linear.tp) if linear.sequence_parallel else normed

    return keep_less(lambda x: linear(norm(x)), x, remake=input_of_linear)


class HeadWeight(nn.Module):
    """The last matrix of a model: `[vocab/tp, hidden]` of a language model, `[1, hidden]` of a value or score head."""

    def __init__(self, rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden_size, dtype=dtype, device=device))
        self.tiles: Tiles | None = None


@dataclass(frozen=True)
class HeadOutput:
    """Of each target `[targets]`, fp32 or better: its log-probability, and the entropy (None unless asked for)."""

    log_probs: Tensor
    entropy: Tensor | None


class DecoderStage(nn.Module):
    """The chunks (virtual stages) of one pipeline stage on one tensor rank; parameters are uninitialised until loaded.

    The stage of chunk 0 has the embedding, that of the last chunk the norm and the head.

    Args:
        chunks: which chunk lies on which stage.
        chunk_layers: of every chunk of the model, its layers (`layout.chunk_layers`).
        sequence_parallel: outside attention and MLP each tensor rank holds its own tokens/tp; the tokens of every
            micro-batch are then a multiple of tp.
        recompute: in the backward of layers.
        recompute_layers: it holds for the first so many layers of each chunk; None is all.
        device: of the parameters; None is the mesh's. On the meta device they have shapes and no memory.
        batch_invariant: a token's hidden states, logits and log-prob have the bits that generation gives them, whatever
            rows and padding stand beside it and however the model is cut (`layout.sum_segments` says over which tp);
            gradients are ordinary. A language model on a CPU without context ranks.

    Raises:
        ValueError: the model cannot be cut over the mesh's tensor axis and these chunks (all reasons).
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, head: Head, *, chunks: Chunks, chunk_layers: tuple[range, ...],
                 sequence_parallel: bool, dtype: torch.dtype, recompute: Recompute = Recompute.NONE,
                 recompute_layers: int | None = None, device: torch.device | None = None,
                 batch_invariant: bool = False) -> None:
        super().__init__()
        device = mesh.device if device is None else device
        require_layout(config, mesh.layout, [len(layers) for layers in chunk_layers], chunks)
        assert chunks.pp == mesh.layout.pp, (chunks, mesh.layout)
        self.config, self.head_kind, self.dtype = config, head, dtype
        self.sequence_parallel = sequence_parallel and mesh.tp.size > 1
        self.tp, self.cp = mesh.tp, mesh.cp
        self.chunks = chunks
        self.chunk_layers = {chunk: chunk_layers[chunk] for chunk in chunks.of_stage(mesh.coord.pp)}
        with_embedding, with_head = 0 in self.chunk_layers, chunks.last in self.chunk_layers
        shared = dict(tp=mesh.tp, sequence_parallel=self.sequence_parallel, dtype=dtype, device=device)
        self.embed = VocabParallelEmbedding(config.vocab_size, config.hidden_size, **shared) if with_embedding else None
        self.layers = nn.ModuleDict({str(layer): DecoderLayer(config, layer, **shared)
                                     for layers in self.chunk_layers.values() for layer in layers})
        for layers in self.chunk_layers.values():
            for layer in layers[:recompute_layers]:
                self.layers[str(layer)].recompute = recompute
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device) if with_head else None
        # A tied head beside its embedding has no weight of its own.
        tied_here = head is Head.LANGUAGE_MODEL and config.tie_word_embeddings and with_embedding
        own_head = with_head and not tied_here
        self.head = HeadWeight(self._head_rows(), config.hidden_size, dtype, device) if own_head else None
        self.packed = PackedWeights() if batch_invariant else None
        if self.packed is not None:
            assert head is Head.LANGUAGE_MODEL and mesh.cp.size == 1 and mesh.device.type == "cpu", (head, mesh.layout)
            compute_invariantly(self.modules(), self.packed, sum_segments(config, mesh.tp.size))
        self._syncs = stage_grad_syncs(self, config, head, mesh, chunks.head_stage, self.sequence_parallel)

    def chunk_of(self, name: str) -> int:
        """The chunk whose backward completes the gradient of a parameter of this stage (a tied embedding's: chunk 0's,
        whose backward comes last)."""
        first, _, rest = name.partition(".")
        if first == "layers":
            layer = int(rest.partition(".")[0])
            return next(chunk for chunk, layers in self.chunk_layers.items() if layer in layers)
        return 0 if first == "embed" else self.chunks.last

    def _head_rows(self) -> int:
        if self.head_kind is not Head.LANGUAGE_MODEL:
            return 1
        start, end = vocab_range(self.config.vocab_size, self.tp.size, self.tp.index)
        return end - start

    def weights_stay(self) -> AbstractContextManager[None]:
        """Inside, no weight changes before the last forward: what a batch-invariant stage packs of them is kept."""
        return nullcontext() if self.packed is None else self.packed.kept()

    @property
    def head_weight(self) -> Tensor:
        """The matrix of the head, which is the embedding's where they are tied on this stage."""
        return self.embed.weight if self.head is None else self.head.weight

    def forward_hidden(self, x: Tensor, position_ids: Tensor, attend: Sight, chunk: int | None = None) -> Tensor:
        """The layers of a chunk, and the final norm where it is the last.

        Args:
            x: `[tokens]` ids for chunk 0, else `[tokens, hidden]` (`[tokens/tp, hidden]` under sequence parallelism)
                of the chunk before.
            position_ids: `[tokens]` of all tokens.
            attend: sees each layer's heads of this rank.
            chunk: one of this stage; None where it has only one.

        Returns:
            hidden states in the shape of the hidden `x`.
        """
        chunk = self._only_chunk() if chunk is None else chunk
        rope = rope_tables(self.config.rope, self.config.head_dim, position_ids, self.dtype)
        hidden = self.embed(x) if chunk == 0 else x
        for layer in self.chunk_layers[chunk]:
            hidden = self.layers[str(layer)](hidden, rope, attend)
        return self.norm(hidden) if chunk == self.chunks.last else hidden

    def _only_chunk(self) -> int:
        assert len(self.chunk_layers) == 1, "which chunk of this stage?"
        return next(iter(self.chunk_layers))

    def forward(self, x: Tensor, micro_batch: MicroBatch, chunk: int | None = None, temperature: float = 1.0,
                with_entropy: bool = False) -> Tensor | HeadOutput:
        """One chunk (None: the only one of this stage) on one packed micro-batch.

        Returns:
            hidden states for the next chunk; after the last chunk `HeadOutput` of a language model, or `[targets]`
            values (fp32 or better), each read at `target_index`.
        """
        attend = self.attend(micro_batch)
        chunk = self._only_chunk() if chunk is None else chunk
        hidden = self.forward_hidden(x, micro_batch.position_ids, attend, chunk)
        if chunk != self.chunks.last:
            return hidden
        if self.sequence_parallel:
            hidden = gather_replicated(hidden, self.tp)
        answers = read_rows(hidden, micro_batch.target_index)  # [targets, hidden]
        if self.head_kind is Head.LANGUAGE_MODEL:
            return self._log_probs(answers, micro_batch.targets, temperature, with_entropy)
        return self.values(answers)

    @property
    def fuses_attention(self) -> bool:
        """Whether one kernel goes from the projections to what tokens see, in a forward of a micro-batch."""
        is_plain = self.cp.size == 1 and self.packed is None and not self.config.qk_norm
        return is_plain and has_kernels(next(self.parameters()))

    def attend(self, micro_batch: MicroBatch) -> Sight:
        """How the rows of a micro-batch see their keys and values."""
        if self.packed is None:
            return packed_attention(micro_batch, self.cp, fused=self.fuses_attention)
        assert not micro_batch.branches.lengths, "a cache of keys and values has whole rows"
        return InvariantCausal(micro_batch.lengths, micro_batch.position_ids.device)

    def _log_probs(self, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool) -> HeadOutput:
        where = self.head_weight, targets, self.tp, self.config.vocab_size
        if self.packed is None:
            return HeadOutput(*token_log_probs(hidden, *where, temperature, with_entropy))
        product = InvariantProduct(self.packed, wide=True)
        return HeadOutput(*invariant_log_probs(hidden, *where, product, temperature, with_entropy))

    def values(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` after the final norm -> `[rows]` values or scores, in fp32 or better."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return F.linear(hidden.to(wide), self.head_weight.to(wide)).squeeze(1)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` after the final norm -> `[rows, vocab]` on every tensor rank; no gradient passes."""
        if self.packed is not None:
            return invariant_logits(hidden, self.head_weight, self.tp, self.config.vocab_size,
                                    InvariantProduct(self.packed, wide=True))
        tiles = self.embed.tiles if self.head is None else self.head.tiles
        return gather_logits(hidden, self.head_weight if tiles is None else tiles, self.tp, self.config.vocab_size)

    def grad_syncs(self) -> dict[str, GradSync]:
        """By parameter name: the groups that its gradient is summed over besides dp, and who counts its norm."""
        return self._syncs
