"""The safetensors files of a model folder: which file has which tensor, of which dtype, and how new files are laid out.

Owns the format's header (8 bytes of length, then json) and the names of files. It never reads or writes weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor of a model folder, one file or several with an index.

    Raises:
        ValueError: no safetensors weights, a file that is none, or files that the index names and that are not there.
    """
    if (folder / INDEX_FILE).is_file():
        weight_map = read_json_object(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{folder / INDEX_FILE}: has no weight_map from tensors to files; save the model again")
        missing = sorted({name for name in weight_map.values() if not (folder / name).is_file()})
        if missing:
            raise ValueError(f"{folder / INDEX_FILE} names files that are not there: {', '.join(missing)}")
        return {name: folder / file for name, file in weight_map.items()}
    if (folder / SINGLE_FILE).is_file():
        return {name: folder / SINGLE_FILE for name in read_header(folder / SINGLE_FILE)}
    raise ValueError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; save the model with "
                     "save_pretrained(..., safe_serialization=True)")


def has_weights(folder: Path) -> bool:
    """Whether a model folder has safetensors files."""
    return (folder / INDEX_FILE).is_file() or (folder / SINGLE_FILE).is_file()


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The dtype of each tensor of a model folder, from the headers alone; empty where there are no weights.

    Raises:
        ValueError: a tensor of a dtype that is not a floating-point type of at least 16 bits.
    """
    if not has_weights(folder):
        return {}
    entries = {name: entry for file in sorted(set(tensor_files(folder).values()))
               for name, entry in read_header(file).items()}
    wrong = [f"{name} ({entry['dtype']})" for name, entry in entries.items() if entry["dtype"] not in DTYPES]
    if wrong:
        raise ValueError(f"{folder}: dtypes that are not supported: {', '.join(wrong[:5])}; "
                         f"supported are {', '.join(DTYPES)}")
    return {name: DTYPES[entry["dtype"]] for name, entry in entries.items()}


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Name -> dtype, shape and data_offsets of each tensor of one file.

    Raises:
        ValueError: it is no safetensors file, or shorter than its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length) if length <= size else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{file}: is no safetensors file, or only a part of one; copy or save it again") from error
    if size != end:
        raise ValueError(f"{file}: has {size} bytes where its header says {end}; copy or save it again")
    return header


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: it is not JSON, or holds something else.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"holds {type(content).__name__} {str(content)[:40]}, not an object with keys")
    return content


@dataclass(frozen=True)
class NewFile:
    """A file to be written: its name, its first bytes, and the byte at which each tensor starts."""

    name: str
    head: bytes
    starts: dict[str, int]
    size: int


def plan_files(shapes: dict[str, tuple[int, ...]], dtypes: dict[str, torch.dtype], max_bytes: int) -> list[NewFile]:
    """Fill files of at most `max_bytes` of data (or one tensor) with the tensors in the order given."""
    groups: list[list[str]] = [[]]
    room = max_bytes
    for name, shape in shapes.items():
        size = prod(shape) * dtypes[name].itemsize
        if size > room and groups[-1]:
            groups.append([])
            room = max_bytes
        groups[-1].append(name)
        room -= size
    names = [SINGLE_FILE] if len(groups) == 1 else [
        f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    return [_plan_file(file, {name: shapes[name] for name in group}, dtypes) for file, group in zip(names, groups)]


def _plan_file(file: str, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, torch.dtype]) -> NewFile:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name in sorted(shapes, key=lambda name: -dtypes[name].itemsize):  # wide dtypes first: all starts stay aligned
        starts[name], end = end, end + prod(shapes[name]) * dtypes[name].itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtypes[name]], "shape": list(shapes[name]),
                        "data_offsets": [starts[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return NewFile(file, head, {name: len(head) + start for name, start in starts.items()}, len(head) + end)


def index_of(files: list[NewFile], total_bytes: int) -> dict[str, Any]:
    """The content of the index of several files."""
    return {"metadata": {"total_size": total_bytes},
            "weight_map": {name: file.name for file in files for name in sorted(file.starts)}}
