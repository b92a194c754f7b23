"""Steps of generation by the C++ kernels: one call a step, or one a half layer where tensor ranks share the layers.

Owns the packed weights, the pages of keys and values, and the room that a step works in. The arithmetic is in
kernels/native; which tokens make a step is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof

import torch
from torch import Tensor, nn

from hybridflow.generation.blocks import BLOCK_TOKENS
from hybridflow.generation.runner import StepBatch
from hybridflow.kernels.native_ops import COMPUTE, DTYPES, set_threads
from hybridflow.kernels.native_stage import Draw, PackedMatrices, Stage, StageLayer, Step, stage_library
from hybridflow.models.attention import ReplicatedKeyValue
from hybridflow.models.decoder import DecoderLayer, DecoderStage
from hybridflow.models.layout import split_heads
from hybridflow.models.rope import rope_tables
from hybridflow.parallel.collectives import all_reduce, tree_sum
from hybridflow.parallel.vocab import gather_columns, vocab_range

VALUES_READ_BEHIND = 64  # numbers that attention may load behind the last page, and not use


class NativeRunner:
    """A `StageRunner` of a stage with one chunk on the CPU, in fp32, bf16 or fp64.

    bf16 is storage: products, softmax and sums between tensor ranks are fp32, rounded where the trainer's operations
    round. A token's bits depend neither on what else is in its step, nor on chunks of its prompt, threads or blocks.

    Args:
        segments: parts in which this rank adds up the products whose sums tensor ranks add up; with
            `models.layout.sum_segments` of them the bits do not depend on tp either.

    Raises:
        ValueError: `segments` do not divide what is added up.
        RuntimeError: there is no native library on this machine.
    """

    def __init__(self, stage: DecoderStage, segments: int = 1) -> None:
        config, tp = stage.config, stage.tp
        heads = split_heads(config, tp.size, tp.index)
        (self._layers,) = stage.chunk_layers.values()
        self._stage, self._tp, self._library = stage, tp, stage_library()
        self._dtype, self._wide = stage.dtype, COMPUTE[stage.dtype]
        intermediate = config.intermediate_size // tp.size
        for size in (heads.num_q * config.head_dim, intermediate):
            if size % segments:
                raise ValueError(f"{segments} segments must divide the {size} inputs of a rank's product: use 1")
        self._record = Stage(
            dtype=DTYPES[stage.dtype], num_layers=len(self._layers), hidden=config.hidden_size, heads=heads.num_q,
            kv_heads=heads.num_kv, head_dim=config.head_dim, intermediate=intermediate, segments=segments,
            eps=config.rms_norm_eps)
        self._step = Step()
        set_threads(torch.get_num_threads())
        self._addresses = addressof(self._record), addressof(self._step)
        self._halves = 2 * len(self._layers)
        self._kept: list[Tensor] = []  # what records point to
        self._packed: PackedMatrices | None = None
        self._head = 0  # where the packed head lies, on the last stage
        first, end = vocab_range(config.vocab_size, tp.size, tp.index)
        self._vocab = end - first  # rows of the head here
        self._pages: tuple[Tensor, Tensor] | None = None
        self._room, self._positions = 0, 0
        self._logits = torch.empty(0, dtype=self._wide)
        self._draw, self._blocks = Draw(vocab=self._vocab), torch.empty(0, dtype=torch.uint8)
        self._is_whole = tp.size == 1 and stage.embed is not None and stage.norm is not None

    @property
    def drawer(self) -> NativeRunner | None:
        return self if self._is_whole else None

    @property
    def block_bytes(self) -> int:
        record = self._record
        return 2 * record.num_layers * BLOCK_TOKENS * record.kv_heads * record.head_dim * self._dtype.itemsize

    def prepare(self) -> None:
        """Pack all matrices, and take their memory from the stage's parameters: weights exist once."""
        stage, record = self._stage, self._record
        self._kept = []
        matrices = [weight.shape for name, weight in stage.named_parameters() if weight.ndim == 2]
        self._packed = PackedMatrices(matrices, self._dtype)  # a tied embedding stands for its head
        if stage.norm is not None:
            record.final_norm = self._keep(stage.norm.weight)
            self._head = self._packed.pack(stage.head_weight.detach())
            if stage.head is not None:
                _empty(stage.head.weight)
        if stage.embed is not None:
            record.embedding = self._keep(stage.embed.weight)
            record.vocab_first, record.vocab_rows = stage.embed.start, stage.embed.end - stage.embed.start
        self._layer_records = (StageLayer * len(self._layers))(
            *(self._prepared(stage.layers[str(layer)]) for layer in self._layers))
        record.layers = addressof(self._layer_records)

    def allocate(self, num_blocks: int) -> None:
        numbers = self._record.num_layers * num_blocks * self._record.kv_heads * BLOCK_TOKENS * self._record.head_dim
        self._pages = tuple(torch.empty(numbers + VALUES_READ_BEHIND, dtype=self._dtype) for _ in range(2))
        for pages in self._pages:  # fetched from places all over them
            self._library.hf_huge_pages(pages.data_ptr(), pages.nbytes)
        self._record.num_blocks = num_blocks
        self._record.keys, self._record.values = (pages.data_ptr() for pages in self._pages)

    def release(self) -> None:
        self._pages, self._packed, self._kept = None, None, []
        for name in ("keys", "values", "layers", "embedding", "final_norm"):
            setattr(self._record, name, None)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        table = torch.tensor(pairs, dtype=torch.int64)
        self._library.hf_copy_blocks(self._addresses[0], table.data_ptr(), len(pairs), self._dtype.itemsize)

    def run(self, batch: StepBatch, x: Tensor | None) -> Tensor:
        leaves = self._begin(batch, x)
        if self._tp.size == 1:
            self._library.hf_stage(*self._addresses, 0, self._halves, True, True)
        else:
            self._run_with_others(len(batch.ids), x is None)
        return self._out[:leaves]

    def run_and_draw(self, batch: StepBatch, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """As `Drawer.run_and_draw`: one call, so that the other threads are woken once."""
        samples, draw = self._begin(batch, None), self._draw
        tokens, log_probs = torch.empty(samples, dtype=torch.int64), torch.empty(samples, dtype=self._wide)
        draw.temperature, draw.head, draw.uniforms = temperature, self._head, uniforms.data_ptr()
        draw.logits = self._logits_room(samples).data_ptr()
        draw.tokens, draw.log_probs = tokens.data_ptr(), log_probs.data_ptr()
        self._library.hf_stage_and_draw(*self._addresses, addressof(draw))
        return tokens, log_probs

    def _begin(self, batch: StepBatch, x: Tensor | None) -> int:
        """Point the step's record to its tokens, in room enough. Returns how many hidden states leave the stage."""
        step, tokens, tables = self._step, len(batch.ids), batch.tables
        leaves = len(batch.sampled) if self._stage.norm is not None else tokens
        if max(tokens, leaves) > self._room:
            self._grow(max(tokens, leaves))
        if tables.shape[1] * BLOCK_TOKENS > self._positions:
            self._extend_rope(tables.shape[1] * BLOCK_TOKENS)
        step.tokens, step.num_decode, step.samples, step.width = tokens, batch.num_decode, leaves, tables.stride(0)
        step.ids, step.positions, step.slots = batch.ids.data_ptr(), batch.positions.data_ptr(), batch.slots.data_ptr()
        step.tables, step.sampled = tables.data_ptr(), batch.sampled.data_ptr()
        step.x = None if x is None else x.data_ptr()
        return leaves

    def _run_with_others(self, tokens: int, looks_up: bool) -> None:
        """Half by half, with the sum of what the tensor ranks' products leave."""
        call, addresses, partial = self._library.hf_stage, self._addresses, self._partial[:tokens]
        call(*addresses, 0, 0, True, False)
        if looks_up:  # every row is one rank's, the others have zeros: the sum is exact
            all_reduce(self._h[:tokens], self._tp)
        for half in range(self._halves):
            call(*addresses, half, half + 1, False, False)
            tree_sum(partial, self._tp)
        call(*addresses, self._halves, self._halves, False, True)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `StageRunner.logits`; at tp 1 the next call overwrites them."""
        rows, vocab, size = len(hidden), self._vocab, self._record.hidden
        local = self._logits_room(rows)[: rows * vocab].view(rows, vocab)
        self._library.hf_linear(self._record.dtype, hidden.data_ptr(), rows, size, self._head, None, vocab, size, 1,
                                True, local.data_ptr(), vocab)
        return local if self._tp.size == 1 else gather_columns(local, self._tp, self._stage.config.vocab_size)

    def _logits_room(self, rows: int) -> Tensor:
        """Room for the logits of so many rows, and for the statistics of a draw from them."""
        if rows * self._vocab > self._logits.numel():
            self._logits = torch.empty(rows * self._vocab, dtype=self._wide)
            size = rows * self._library.hf_statistics_bytes(DTYPES[self._wide], self._vocab)
            self._blocks = torch.empty(size, dtype=torch.uint8)
            self._draw.blocks = self._blocks.data_ptr()
        return self._logits

    def _keep(self, vector: Tensor | None) -> int | None:
        """Where it lies; it stays alive as long as the records that point to it."""
        if vector is None:
            return None
        self._kept.append(vector.detach().contiguous())
        return self._kept[-1].data_ptr()

    def _pack(self, *weights: nn.Parameter) -> int:
        """Where they lie as one matrix, one below the other."""
        place = self._packed.pack(weights[0].detach() if len(weights) == 1 else torch.cat([*weights]).detach())
        for weight in weights:
            _empty(weight)
        return place

    def _pack_pair(self, gate_up: nn.Parameter) -> int:
        place = self._packed.pack_pair(gate_up.detach())
        _empty(gate_up)
        return place

    def _prepared(self, layer: DecoderLayer) -> StageLayer:
        attention, mlp, keep = layer.attention, layer.mlp, self._keep
        if isinstance(attention.qkv, ReplicatedKeyValue):
            parts = attention.qkv.q, attention.qkv.kv
        else:
            parts = (attention.qkv,)
        biases = [part.bias.detach() for part in parts if part.bias is not None]
        norms = [None if norm is None else norm.weight for norm in (attention.q_norm, attention.k_norm)]
        return StageLayer(
            input_norm=keep(layer.input_norm.weight), qkv=self._pack(*(part.weight for part in parts)),
            qkv_bias=keep(torch.cat(biases) if biases else None), q_norm=keep(norms[0]), k_norm=keep(norms[1]),
            out=self._pack(attention.out.weight), out_bias=keep(attention.out.bias),
            post_norm=keep(layer.post_norm.weight), gate_up=self._pack_pair(mlp.gate_up.weight),
            gate_up_bias=keep(mlp.gate_up.bias), down=self._pack(mlp.down.weight), down_bias=keep(mlp.down.bias))

    def _grow(self, tokens: int) -> None:
        """Room for steps of so many tokens."""
        self._room, record = max(tokens, 2 * self._room), self._record
        heads = record.heads * record.head_dim
        widths = {"h": record.hidden, "normed": record.hidden, "seen": heads, "out": record.hidden,
                  "qkv": heads + 2 * record.kv_heads * record.head_dim, "active": record.intermediate}
        rooms = {name: torch.empty(self._room, width, dtype=self._dtype) for name, width in widths.items()}
        rooms["partial"] = torch.empty(self._room, record.hidden, dtype=self._wide)
        for name, room in rooms.items():
            setattr(self._step, name, room.data_ptr())
        self._rooms = rooms
        self._h, self._partial, self._out = rooms["h"], rooms["partial"], rooms["out"]

    def _extend_rope(self, positions: int) -> None:
        """Tables of the first positions, in the numbers of the trainer's."""
        config = self._stage.config
        known = torch.arange(min(positions, max(config.max_position_embeddings, self._positions)))
        tables, half = rope_tables(config.rope, config.head_dim, known, self._dtype), config.head_dim // 2
        self._angles = tables.cos[:, 0, :half].contiguous(), tables.signed_sin[:, 0, half:].contiguous()
        self._record.cos, self._record.sin = (table.data_ptr() for table in self._angles)
        self._positions = positions


def _empty(weight: nn.Parameter) -> None:
    weight.data = weight.data.new_empty(0)
