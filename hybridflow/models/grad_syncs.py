"""Which gradients of a stage need a sum besides the one over data-parallel ranks, and who counts their norm.

Owns the reasons, one a rule. The sums are made by `parallel.gradients`.
"""

from __future__ import annotations

from torch import nn

from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.layout import split_heads
from hybridflow.parallel.gradients import SHARDED, GradSync
from hybridflow.parallel.mesh import Mesh


def stage_grad_syncs(stage: nn.Module, config: ModelConfig, head: Head, mesh: Mesh,
                     head_stage: int, sequence_parallel: bool) -> dict[str, GradSync]:
    """By parameter name of a `DecoderStage`. A collective call: it makes the groups of key-value replicas.

    - Norms and row-parallel biases are whole on each tensor rank. Each rank has their full gradient, but under
      sequence parallelism only that of its own tokens.
    - q/k norms are whole too, and each rank has the part of its own heads.
    - Key-value heads held by several ranks: each rank has the part of its own query heads.
    - A tied embedding on the first stage and its second copy on the last each have the part of their own use. In V
      order both uses are on the first stage and of one parameter, which needs no sum.
    - Value and score heads are computed alike on every tensor rank.
    """
    replicated = GradSync(counted=mesh.tp.index == 0)
    split_by_tokens = GradSync((mesh.tp,), mesh.tp.index == 0) if sequence_parallel else replicated
    split_by_heads = GradSync((mesh.tp,), mesh.tp.index == 0) if mesh.tp.size > 1 else replicated
    block = mesh.tp_block(split_heads(config, mesh.tp.size, mesh.tp.index).kv_replicas)
    kv_replica = GradSync((block,), block.index == 0)
    tied = head is Head.LANGUAGE_MODEL and config.tie_word_embeddings and head_stage != 0
    tied_copy = GradSync((mesh.embedding,), mesh.embedding.index == 0)

    def rule(name: str) -> GradSync:
        if name in ("embed.weight", "head.weight"):
            if tied:
                return tied_copy
            return replicated if name == "head.weight" and head is not Head.LANGUAGE_MODEL else SHARDED
        if name.endswith((".q_norm.weight", ".k_norm.weight")):
            return split_by_heads
        if name.endswith(("norm.weight", ".out.bias", ".down.bias")):
            return split_by_tokens
        return kv_replica if ".qkv.kv." in name else SHARDED

    return {name: rule(name) for name, _ in stage.named_parameters()}
