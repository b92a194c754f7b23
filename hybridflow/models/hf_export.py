"""Writes a model as a Hugging Face folder: each byte once, in bounded memory, from any layout.

Owns which rank writes which file and in which rounds. The files are one more shard map, so the bytes get to the
writers by a TransferPlan.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from hybridflow.models.config import ModelConfig
from hybridflow.models.safetensors_files import INDEX_FILE, NewFile, index_of, plan_files
from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.plan import TransferPlan
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.transfer import execute
from hybridflow.parallel.world import World

FILE_BYTES = 4 * 2**30
ROUND_BYTES = 64 * 2**20
# Patterns of every file that a tokenizer may be made of, its own code included (which is copied, never run), and
# generation_config.json, which holds the further ids that end a response.
TOKENIZER_FILES = ("tokenizer*", "tokenization_*.py", "*.model", "vocab*", "merges.txt", "special_tokens_map.json",
                   "added_tokens.json", "chat_template*", "generation_config.json")


def export_hf(path: str | Path, config: ModelConfig, shard_map: ShardMap, storages: dict[str, Tensor], world: World,
              tokenizer_files: Sequence[Path] = (), *, dtype: torch.dtype | None = None,
              kept_dtype: torch.dtype | None = None, writers: Sequence[int] = (0,), file_bytes: int = FILE_BYTES,
              round_bytes: int = ROUND_BYTES) -> None:
    """Write config.json, the weights and copies of `tokenizer_files` to `path`. Collective over the world.

    Args:
        storages: this rank's storages, as `shard_map` names them.
        dtype: of every tensor written; None: as in the files that `config` was read from, else as in the storages.
        kept_dtype: of the storages; may be None where every rank has some.
        writers: ranks that write weight files; more than one only where all of them see the same file system.
        file_bytes: bound on the data of one file; with more than one file there is an index.
        round_bytes: bound on what a writer holds at once (tensors are cut to fit).
    """
    folder = Path(path)
    kept_dtype = next(iter(storages.values())).dtype if kept_dtype is None else kept_dtype
    dtypes = _file_dtypes(config, shard_map, kept_dtype, dtype)
    files = plan_files(shard_map.shapes, dtypes, file_bytes)
    owner = {file.name: writers[number % len(writers)] for number, file in enumerate(files)}
    if world.rank in writers:
        folder.mkdir(parents=True, exist_ok=True)
    if world.rank == writers[0]:
        for old in (*folder.glob("model*.safetensors"), *folder.glob(INDEX_FILE)):
            old.unlink()
    world.barrier()
    mine = [file for file in files if owner[file.name] == world.rank]
    _write_weights(folder, mine, plan_rounds(files, owner, shard_map, dtypes, round_bytes), shard_map, storages, world)
    if world.rank == writers[0]:
        _write_rest(folder, config, files, dtype, tokenizer_files)
    world.barrier()


def tokenizer_files(folder: str | Path) -> tuple[Path, ...]:
    """The files of a model folder that belong to its tokenizer or to sampling: what an export copies."""
    return tuple(sorted({file for pattern in TOKENIZER_FILES for file in Path(folder).glob(pattern)
                         if file.is_file() and file.suffix != ".safetensors"}))


@dataclass(frozen=True)
class Round:
    """What every writer gathers at once: consecutive pieces of its files, back to back in a buffer of one dtype.

    `pieces` are (file, box) of each writer in the order of its buffer.
    """

    dtype: torch.dtype
    pieces: dict[int, list[tuple[NewFile, Box]]]

    def shard_map(self, shapes: dict[str, tuple[int, ...]]) -> ShardMap:
        """The buffers of this round as a destination."""
        def shards(rank: int) -> list[Shard]:
            start, found = 0, []
            for _, box in self.pieces[rank]:
                found.append(Shard(box, "buffer", start, Shard.of_rows(box, "").strides))
                start += box.numel
            return found

        # in the order of the pieces: a set's would be another one in each process, and ranks must plan alike
        of_pieces = {box.name: shapes[box.name] for pieces in self.pieces.values() for _, box in pieces}
        return ShardMap(of_pieces, tuple(self.pieces), shards)


def plan_rounds(files: list[NewFile], owner: dict[str, int], shard_map: ShardMap, dtypes: dict[str, torch.dtype],
                round_bytes: int) -> list[Round]:
    """Cut the files into rounds of at most `round_bytes` for each writer. Pure, the same on every rank."""
    rounds = []
    for dtype in dict.fromkeys(dtypes.values()):
        batches: dict[int, list[list[tuple[NewFile, Box]]]] = {}
        room: dict[int, int] = {}
        max_numel = max(1, round_bytes // dtype.itemsize)
        for file in files:
            writer = owner[file.name]
            for name in (name for name in file.starts if dtypes[name] is dtype):
                for box in Box.whole(name, shard_map.shapes[name]).cut(max_numel):
                    if box.numel > room.get(writer, 0):
                        batches.setdefault(writer, []).append([])
                        room[writer] = max_numel
                    batches[writer][-1].append((file, box))
                    room[writer] -= box.numel
        longest = max(map(len, batches.values()))
        rounds += [Round(dtype, {writer: batch[step] for writer, batch in batches.items() if step < len(batch)})
                   for step in range(longest)]
    return rounds


def _write_weights(folder: Path, mine: list[NewFile], rounds: list[Round], shard_map: ShardMap,
                   storages: dict[str, Tensor], world: World) -> None:
    streams = {file.name: _create(folder, file) for file in mine}
    held = _by_tensor(shard_map)
    try:
        for each in rounds:
            pieces = each.pieces.get(world.rank, [])
            buffer = torch.empty(sum(box.numel for _, box in pieces), dtype=each.dtype, device=world.device)
            plan = TransferPlan(_only(shard_map, held, each), each.shard_map(shard_map.shapes))
            execute(plan, world, storages, {"buffer": buffer}, wire_dtype=each.dtype)
            _write_pieces(streams, pieces, buffer.cpu(), shard_map.shapes)
    finally:
        for stream in streams.values():
            stream.close()
    for file in mine:
        (folder / f"{file.name}.incomplete").replace(folder / file.name)


def _create(folder: Path, file: NewFile) -> BinaryIO:
    stream = (folder / f"{file.name}.incomplete").open("wb")
    stream.write(file.head)
    stream.truncate(file.size)
    return stream


def _by_tensor(shard_map: ShardMap) -> dict[str, dict[int, list[Shard]]]:
    held: dict[str, dict[int, list[Shard]]] = {name: {} for name in shard_map.shapes}
    for rank in shard_map.ranks:
        for shard in shard_map.shards(rank):
            held[shard.box.name].setdefault(rank, []).append(shard)
    return held


def _only(shard_map: ShardMap, held: dict[str, dict[int, list[Shard]]], each: Round) -> ShardMap:
    """The source without the tensors that this round does not touch, so that planning costs what the round moves."""
    names = sorted({box.name for pieces in each.pieces.values() for _, box in pieces})
    return ShardMap({name: shard_map.shapes[name] for name in names}, shard_map.ranks,
                    lambda rank: [shard for name in names for shard in held[name].get(rank, [])])


def _write_pieces(streams: dict[str, BinaryIO], pieces: list[tuple[NewFile, Box]], buffer: Tensor,
                  shapes: dict[str, tuple[int, ...]]) -> None:
    """Boxes cut along the outermost dims are consecutive bytes of their tensor, so each is one write."""
    start = 0
    for file, box in pieces:
        place, stride = 0, 1
        for lo, size in zip(reversed(box.lo), reversed(shapes[box.name])):
            place, stride = place + lo * stride, stride * size
        stream = streams[file.name]
        stream.seek(file.starts[box.name] + place * buffer.element_size())
        stream.write(memoryview(buffer[start:start + box.numel].view(torch.uint8).numpy()))
        start += box.numel


def _file_dtypes(config: ModelConfig, shard_map: ShardMap, kept_dtype: torch.dtype,
                 dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    usual = dtype or config.file_dtype or kept_dtype
    unusual = {} if dtype else config.tensor_dtypes
    return {name: unusual.get(name, usual) for name in shard_map.shapes}


def _write_rest(folder: Path, config: ModelConfig, files: list[NewFile], dtype: torch.dtype | None,
                tokenizer_files: Sequence[Path]) -> None:
    if len(files) > 1:
        total = sum(file.size - len(file.head) for file in files)
        _write_json(folder / INDEX_FILE, index_of(files, total))
    hf = config.to_hf_dict()
    if dtype is not None:
        keys = [key for key in ("dtype", "torch_dtype") if key in hf] or ["torch_dtype"]
        hf |= dict.fromkeys(keys, str(dtype).removeprefix("torch."))
    _write_json(folder / "config.json", hf)
    for file in tokenizer_files:
        if file.resolve() != (folder / file.name).resolve():
            shutil.copyfile(file, folder / file.name)


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
