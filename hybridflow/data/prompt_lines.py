"""Reads a file of prompts to be completed: JSON lines, in words, as chats or as token ids.

Owns the format of these lines. Data to train on is `readers`'. Every bad line is told, not only the first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.data.records import Prompt
from hybridflow.data.row_schema import parse_prompt
from hybridflow.data.tokenizer import Tokenizer

KEYS = 'either "prompt" or "prompt_ids"'


@dataclass(frozen=True)
class PromptLine:
    """One prompt. Example: `PromptLine(id="a7", stream=..., prompt="2 + 3 =", ids=(1, 52, 7))`.

    Attributes:
        id: as given, or the line's place among the prompts, from 0.
        stream: 63 bits made of the id, so that a prompt's samples do not depend on the lines around it; an integer from
            0 on is its own.
        prompt: text or messages as given; the text of the ids where ids were given.
        ids: at least one, in the vocabulary.
        sample: which sample of the prompt the first answer is.
    """

    id: int | str
    stream: int
    prompt: str | list[dict[str, str]]
    ids: tuple[int, ...]
    sample: int = 0


def read_prompt_lines(path: Path, tokenizer: Tokenizer, vocab_size: int, most_tokens: int) -> tuple[PromptLine, ...]:
    """The prompts of a file, in order; empty lines are skipped, and so are keys other than id, sample, prompt and
    prompt_ids.

    Args:
        vocab_size: of the model.
        most_tokens: that a prompt may have.

    Raises:
        ValueError: the file cannot be read or has no prompts, or all its bad lines: number, what, rule.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file of prompts")
    lines, faults, places = [], [], {}
    for number, text in _lines(path):
        try:
            line = _parsed(text, len(lines) + len(faults), tokenizer, vocab_size, most_tokens)
            if (name := (line.id, line.sample)) in places:
                raise ValueError(f"id {json.dumps(line.id)} is that of line {places[name]} too; ids must differ, "
                                 "or their samples (a line without an id has its place among the prompts, from 0)")
            places[name] = number
            lines.append(line)
        except ValueError as error:
            faults.append(f"  line {number}: {error}")
    if faults:
        count = f"{len(faults)} bad line{'s' if len(faults) > 1 else ''}"
        raise ValueError("\n".join([f"{path}: {count}", *faults]))
    if not lines:
        raise ValueError(f"{path}: has no prompts; write one JSON object on each line, with {KEYS}")
    return tuple(lines)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered from 1, without the empty ones."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # some editors put a mark in front
            if line.strip():
                yield number, line


def _parsed(text: bytes, place: int, tokenizer: Tokenizer, vocab_size: int, most_tokens: int) -> PromptLine:
    try:
        row = json.loads(text.decode())
    except (ValueError, RecursionError) as error:  # among them: no UTF-8, a number of thousands of digits
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{_shown(row)} is no object; write {{...}} with {KEYS}")
    if ("prompt" in row) == ("prompt_ids" in row):
        raise ValueError(f"has {'both' if 'prompt' in row else 'neither'} of the keys; give {KEYS}")
    name = row.get("id", place)
    if isinstance(name, bool) or not isinstance(name, (int, str)):
        raise ValueError(f"id {_shown(name)} is neither text nor an integer")
    sample = row.get("sample", 0)
    if type(sample) is not int or not 0 <= sample < 2**31:
        raise ValueError(f"sample {_shown(sample)} is no integer from 0 on")
    prompt, ids = _prompt_ids(row, tokenizer, vocab_size) if "prompt_ids" in row else _prompt_text(row, tokenizer)
    _check(ids, vocab_size, most_tokens)
    return PromptLine(name, _stream(name), prompt, ids, sample)


def _prompt_text(row: dict[str, Any], tokenizer: Tokenizer) -> tuple[str | list, tuple[int, ...]]:
    prompt: Prompt = parse_prompt(row)
    texts = [prompt] if isinstance(prompt, str) else [part for m in prompt for part in (m.role, m.content)]
    for text in texts:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError("key 'prompt' holds half of a surrogate pair, which is no text")
    return row["prompt"], tuple(tokenizer.encode_prompt(prompt))


def _prompt_ids(row: dict[str, Any], tokenizer: Tokenizer, vocab_size: int) -> tuple[str, tuple[int, ...]]:
    ids = row["prompt_ids"]
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError(f"key 'prompt_ids' must be a list of integers, got {_shown(ids)}")
    return tokenizer.decode([token for token in ids if 0 <= token < vocab_size]), tuple(ids)


def _check(ids: Sequence[int], vocab_size: int, most_tokens: int) -> None:
    if not ids:
        raise ValueError("has no tokens; a response needs at least one token before it")
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"token id {wrong} is not in the model's vocabulary; ids are 0 to {vocab_size - 1}")
    if len(ids) > most_tokens:
        raise ValueError(f"has {len(ids)} tokens; beside generation.max_new_tokens the model has positions for "
                         f"{most_tokens}")


def _stream(name: int | str) -> int:
    if isinstance(name, int) and 0 <= name < 2**63:
        return name
    digest = hashlib.blake2b(json.dumps(name).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
