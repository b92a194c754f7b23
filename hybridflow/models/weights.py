"""Where every Hugging Face tensor of a decoder lies: the ShardMap of a model on a grid.

Owns canonical names and shapes, and how they are fused and cut into the storages of a `DecoderStage` (the names of its
state_dict). Pure metadata; weights are moved by plans over these maps and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.layout import HeadSplit, chunk_layers, require_layout, split_heads
from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.mesh import Coord, Grid
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.vocab import vocab_range

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
VALUE_HEAD = "value_head.weight"
SCORE_HEAD = "score.weight"


def canonical_shapes(config: ModelConfig, head: Head) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> full shape of every tensor, in the order of the layers. A tied head has no tensor."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    name = head_name(config, head)
    if name != EMBEDDING:
        shapes[name] = (config.vocab_size if head is Head.LANGUAGE_MODEL else 1, config.hidden_size)
    return shapes


def head_name(config: ModelConfig, head: Head) -> str:
    """The canonical tensor of the head."""
    match head:
        case Head.LANGUAGE_MODEL:
            return EMBEDDING if config.tie_word_embeddings else LM_HEAD
        case Head.VALUE:
            return VALUE_HEAD
        case Head.SCORE:
            return SCORE_HEAD


def decoder_shard_map(config: ModelConfig, grid: Grid, head: Head, chunks: Chunks | None = None,
                      layers_per_chunk: Sequence[int] | None = None) -> ShardMap:
    """The map of a decoder in `grid`'s layout. Its storages are the names in a stage's state_dict.

    Args:
        chunks: None for one chunk on each stage.
        layers_per_chunk: None for an even split.

    Raises:
        ValueError: the model cannot be cut so (all reasons).
    """
    chunks = chunks or Chunks(grid.layout.pp)
    require_layout(config, grid.layout, layers_per_chunk, chunks)
    shapes = canonical_shapes(config, head)
    layers = chunk_layers(config.num_layers, chunks, layers_per_chunk)
    cut = _Cut(config, head, grid.layout.tp, shapes)

    def shards(rank: int) -> list[Shard]:
        coord = grid.coord(rank)
        mine = [layer for chunk in chunks.of_stage(coord.pp) for layer in layers[chunk]]
        return cut.stage(coord, mine, has_head=coord.pp == chunks.head_stage)

    return ShardMap(shapes, grid.ranks, shards, lambda rank: (grid.coord(rank).tp, grid.coord(rank).pp))


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
    kv_size, inner = config.num_kv_heads * config.head_dim, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, rows in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
        shapes[f"self_attn.{name}.weight"] = (rows, hidden)
        if config.qkv_bias:
            shapes[f"self_attn.{name}.bias"] = (rows,)
    shapes["self_attn.o_proj.weight"] = (hidden, q_size)
    if config.o_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    shapes["post_attention_layernorm.weight"] = (hidden,)
    for name, shape in (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner))):
        shapes[f"mlp.{name}.weight"] = shape
        if config.mlp_bias:
            shapes[f"mlp.{name}.bias"] = shape[:1]
    return shapes


class _Cut:
    """The shards of one coordinate, tensor by tensor."""

    def __init__(self, config: ModelConfig, head: Head, tp: int, shapes: dict[str, tuple[int, ...]]) -> None:
        self.config, self.head, self.tp, self.shapes = config, head, tp, shapes

    def stage(self, coord: Coord, layers: Sequence[int], has_head: bool) -> list[Shard]:
        shards = []
        vocab = vocab_range(self.config.vocab_size, self.tp, coord.tp)
        if coord.pp == 0:
            shards.append(self._rows(EMBEDDING, vocab, "embed.weight"))
        for layer in layers:
            shards += self._layer(coord.tp, f"model.layers.{layer}", f"layers.{layer}")
        if has_head:
            shards.append(self._whole("model.norm.weight", "norm.weight"))
            name = head_name(self.config, self.head)
            if self.head is not Head.LANGUAGE_MODEL:
                shards.append(self._whole(name, "head.weight"))
            elif name != EMBEDDING or coord.pp != 0:  # a tied head on another stage holds the embedding once more
                shards.append(self._rows(name, vocab, "head.weight"))
        return shards

    def _layer(self, tp_index: int, canonical: str, local: str) -> list[Shard]:
        shards = [self._whole(f"{canonical}.input_layernorm.weight", f"{local}.input_norm.weight"),
                  self._whole(f"{canonical}.post_attention_layernorm.weight", f"{local}.post_norm.weight")]
        heads = split_heads(self.config, self.tp, tp_index)
        shards += self._attention(heads, f"{canonical}.self_attn", f"{local}.attention")
        shards.append(self._columns(f"{canonical}.self_attn.o_proj.weight", tp_index, f"{local}.attention.out.weight"))
        size = self.config.intermediate_size // self.tp
        part = (tp_index * size, (tp_index + 1) * size)
        for kind in self._kinds(self.config.mlp_bias):
            shards += [self._rows(f"{canonical}.mlp.gate_proj.{kind}", part, f"{local}.mlp.gate_up.{kind}"),
                       self._rows(f"{canonical}.mlp.up_proj.{kind}", part, f"{local}.mlp.gate_up.{kind}", size)]
        shards.append(self._columns(f"{canonical}.mlp.down_proj.weight", tp_index, f"{local}.mlp.down.weight"))
        if self.config.mlp_bias:
            shards.append(self._whole(f"{canonical}.mlp.down_proj.bias", f"{local}.mlp.down.bias"))
        return shards

    def _attention(self, heads: HeadSplit, canonical: str, local: str) -> list[Shard]:
        """Query, key and value rows: one storage `[q; k; v]`, or `q` and `[k; v]` where key-value heads are replicated.
        """
        dim = self.config.head_dim
        q, kv = [(lo * dim, hi * dim) for lo, hi in (heads.q, heads.kv)]
        fused = heads.kv_replicas == 1
        q_storage, kv_storage = (f"{local}.qkv",) * 2 if fused else (f"{local}.qkv.q", f"{local}.qkv.kv")
        k_start = q[1] - q[0] if fused else 0
        shards = []
        for kind in self._kinds(self.config.qkv_bias):
            shards += [
                self._rows(f"{canonical}.q_proj.{kind}", q, f"{q_storage}.{kind}"),
                self._rows(f"{canonical}.k_proj.{kind}", kv, f"{kv_storage}.{kind}", k_start),
                self._rows(f"{canonical}.v_proj.{kind}", kv, f"{kv_storage}.{kind}", k_start + kv[1] - kv[0]),
            ]
        if self.config.o_bias:
            shards.append(self._whole(f"{canonical}.o_proj.bias", f"{local}.out.bias"))
        if self.config.qk_norm:
            shards += [self._whole(f"{canonical}.{name}.weight", f"{local}.{name}.weight")
                       for name in ("q_norm", "k_norm")]
        return shards

    @staticmethod
    def _kinds(bias: bool) -> tuple[str, ...]:
        return ("weight", "bias") if bias else ("weight",)

    def _whole(self, name: str, storage: str) -> Shard:
        return Shard.of_rows(Box.whole(name, self.shapes[name]), storage)

    def _rows(self, name: str, rows: tuple[int, int], storage: str, row_start: int = 0) -> Shard:
        trailing = self.shapes[name][1:]
        box = Box(name, (rows[0], *(0 for _ in trailing)), (rows[1], *trailing))
        return Shard.of_rows(box, storage, row_start)

    def _columns(self, name: str, tp_index: int, storage: str) -> Shard:
        rows, columns = self.shapes[name]
        part = columns // self.tp
        return Shard.of_rows(Box(name, (0, tp_index * part), (rows, (tp_index + 1) * part)), storage)
