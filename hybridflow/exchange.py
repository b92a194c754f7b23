"""Small facts that ranks tell one another as JSON: names, counts, sentences. Never tensors, never pickles."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.parallel.mesh import AxisGroup, everyone
from hybridflow.parallel.world import World


def share_json(world: World, value: Any, group: AxisGroup | None = None) -> list[Any]:
    """Every rank's `value`, in rank order, on every rank of `group` (None: of the world). Collective; for what is small
    beside one micro-batch.
    """
    group = everyone(world) if group is None else group
    if group.size == 1:
        return [value]
    payload = json.dumps(value).encode()
    sizes = [torch.zeros(1, dtype=torch.int64, device=world.device) for _ in range(group.size)]
    dist.all_gather(sizes, torch.tensor([len(payload)], dtype=torch.int64, device=world.device),
                    group=group.process_group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=world.device)
    padded[:len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(world.device)
    rows = [torch.empty_like(padded) for _ in range(group.size)]
    dist.all_gather(rows, padded, group=group.process_group)
    return [json.loads(row[:int(size)].cpu().numpy().tobytes()) for row, size in zip(rows, sizes)]
