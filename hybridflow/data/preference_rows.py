"""Reads preference rows from JSONL and parquet files.

Owns their schema, in the forms that such data is commonly published in:
    prompt               text, or a list of {"role": text, "content": text}
    chosen, rejected     text; or a list of messages: a whole conversation (then `prompt` may be left out: it is what
                         both begin with) or the answer alone, which is one message of the assistant in both cases
    (margin_key)         number, by how much the chosen one is better; read where such a key is named
or, of a single answer,
    prompt               as above
    completion           text, or a list as `chosen`
    label                true (good) or false
Other keys are ignored. Never tokenises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from hybridflow.data.preference import TextLabel, TextPreference, TextRow
from hybridflow.data.readers import FileFormat, jsonl_rows
from hybridflow.data.records import ChatMessage, Prompt, PromptRecord, prompt_text
from hybridflow.data.row_schema import parse_prompt

ASSISTANT = "assistant"
LARGEST_MARGIN = 1e6  # of two scores in nats; the loss of a pair is in proportion to it
KEYS = ("prompt", "chosen", "rejected", "completion", "label", "data_source")


def read_preference_files(paths: Sequence[str], file_format: FileFormat,
                          margin_key: str | None = None) -> tuple[tuple[TextRow, ...], int]:
    """The rows of `paths`, in order; rows are counted from 1 within each file (for JSONL: the line number). And the
    number of pairs whose two answers are the same: these say nothing and are left out.

    Raises ValueError naming file, row and key for the first bad row, and FileNotFoundError for a missing file.
    """
    rows: list[TextRow] = []
    num_equal = 0
    for path in paths:
        found = [parse_preference(row, f"{path} row {number}", margin_key)
                 for number, row in _rows(Path(path), file_format, margin_key)]
        telling = [row for row in found if row is not None]
        if not telling:
            raise ValueError(f"{path}: has no rows with a preference")
        num_equal += len(found) - len(telling)
        rows += telling
    return tuple(rows), num_equal


def _rows(path: Path, file_format: FileFormat, margin_key: str | None) -> Iterator[tuple[int, Any]]:
    if file_format is FileFormat.JSONL:
        return jsonl_rows(path)
    from hybridflow.data.parquet import parquet_rows  # see readers

    return enumerate(parquet_rows(path, (*KEYS, *([] if margin_key is None else [margin_key]))), start=1)


def parse_preference(row: Any, origin: str, margin_key: str | None = None) -> TextRow | None:
    """The row; None for a pair of equal answers. `origin` ("train.jsonl row 7") starts every message.

    Raises ValueError naming origin, key and rule.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{origin}: expected an object with prompt, chosen and rejected, or with prompt, completion "
                         f"and label, got {_show(row)}")
    present = {key: value for key, value in row.items() if value is not None}  # parquet fills what is absent with nulls
    if "chosen" in present or "rejected" in present:
        return _pair(present, origin, margin_key)
    if margin_key is not None:
        raise ValueError(f"{origin}: keys 'chosen' and 'rejected' are missing, of which the margin is")
    return _label(present, origin)


def held_out_records(rows: Sequence[TextRow]) -> tuple[PromptRecord, ...]:
    """Each prompt of `rows` once, its first good answer as the ground truth that a reward function is given; prompts
    without a good answer are left out.
    """
    records: dict[str, PromptRecord] = {}
    for row in rows:
        if isinstance(row, TextLabel) and not row.desirable:
            continue
        answer = row.response if isinstance(row, TextLabel) else row.chosen
        records.setdefault(prompt_text(row.prompt), PromptRecord("preference", row.prompt, answer, origin=row.origin))
    return tuple(records.values())


def _pair(row: dict[str, Any], origin: str, margin_key: str | None) -> TextPreference | None:
    chosen, rejected = (_answer(row, key, origin) for key in ("chosen", "rejected"))
    if chosen == rejected:
        return None
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError(f"{origin}: keys 'chosen' and 'rejected' must both be text, or both be lists of messages")
    margin = 0.0 if margin_key is None else _margin(row, margin_key, origin)
    if isinstance(chosen, str) and isinstance(rejected, str):
        return TextPreference(_prompt(row, origin), chosen, rejected, margin, origin)
    shared = tuple(one for one, _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected)))
    prompt = _prompt(row, origin) if "prompt" in row else None
    if shared:
        _require_start(prompt, shared, origin)
    before = shared if shared else _needed(prompt, origin)  # the answers alone
    return TextPreference(before, _last(chosen, len(shared), "chosen", origin),
                          _last(rejected, len(shared), "rejected", origin), margin, origin)


def _label(row: dict[str, Any], origin: str) -> TextLabel:
    answer = _answer(row, "completion", origin)
    label = row.get("label")
    if not isinstance(label, bool):
        raise ValueError(f"{origin}: key 'label' must be true or false, got {_show(label)}")
    prompt = _prompt(row, origin)
    if isinstance(answer, str):
        return TextLabel(prompt, answer, label, origin)
    before = _as_messages(prompt)
    if answer[:len(before)] == before:
        answer = answer[len(before):]
    return TextLabel(prompt, _last(answer, 0, "completion", origin), label, origin)


def _prompt(row: dict[str, Any], origin: str) -> Prompt:
    return _encodable(parse_prompt(row, origin), "prompt", origin)


def _needed(prompt: Prompt | None, origin: str) -> Prompt:
    if prompt is None:
        raise ValueError(f"{origin}: key 'prompt' is missing, and 'chosen' and 'rejected' do not begin with the same "
                         "messages")
    return prompt


def _answer(row: dict[str, Any], key: str, origin: str) -> str | tuple[ChatMessage, ...]:
    """Text, which may be empty (a model may end at once), or messages."""
    if key not in row:
        raise ValueError(f"{origin}: key '{key}' is missing")
    value = row[key]
    if isinstance(value, str):
        return _encodable(value, key, origin)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{origin}: key '{key}' must be text or a list of chat messages, got {_show(value)}")
    try:
        return _encodable(parse_prompt({"prompt": value}), key, origin)
    except ValueError as error:
        raise ValueError(str(error).replace("key 'prompt", f"{origin}: key '{key}", 1)) from None


def _encodable(value: Prompt, key: str, origin: str) -> Prompt:
    try:
        prompt_text(value).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{origin}: key '{key}' holds half of a surrogate pair at character {error.start}, which is "
                         "no text") from error
    return value


def _margin(row: dict[str, Any], key: str, origin: str) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST_MARGIN:
        raise ValueError(f"{origin}: key '{key}' (preference.margin_key) must be a number in [{-LARGEST_MARGIN:g}, "
                         f"{LARGEST_MARGIN:g}], got {_show(value)}")
    return float(value)


def _as_messages(prompt: Prompt) -> tuple[ChatMessage, ...]:
    return (ChatMessage("user", prompt),) if isinstance(prompt, str) else prompt


def _require_start(prompt: Prompt | None, shared: tuple[ChatMessage, ...], origin: str) -> None:
    """Where a row names its prompt beside whole conversations, it is what they begin with, or the last turn of that."""
    if prompt is None or prompt in (shared, shared[-1].content):
        return
    raise ValueError(f"{origin}: key 'prompt' is not what 'chosen' and 'rejected' begin with; give one of the two")


def _last(messages: Sequence[ChatMessage], before: int, key: str, origin: str) -> str:
    """The content of the one message behind the prompt."""
    rest = messages[before:]
    if len(rest) != 1 or rest[0].role != ASSISTANT:
        roles = ", ".join(message.role for message in rest) or "nothing"
        raise ValueError(f"{origin}: key '{key}' must end with one message of the assistant behind the prompt, and has "
                         f"{roles} there")
    return rest[0].content


def _show(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
