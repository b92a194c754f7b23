"""Turns one row of a data file into a PromptRecord, or says what is wrong with it.

Owns the row schema that RL data sets are commonly published in (verl's):
    data_source     text
    prompt          text, or a list of {"role": text, "content": text}
    reward_model    {"ground_truth": any JSON value, "style": text, ...}
    extra_info      object, optional: passed on whole to rewards
    images, videos  must be empty: nothing here reads them
Other keys (ability, ...) are ignored. Never opens a file.
"""

import json
from typing import Any

from hybridflow.data.records import ChatMessage, Prompt, PromptRecord, prompt_text

# What a row must not have: a model that sees none of it would be trained on half a prompt.
MEDIA = ("images", "videos")
# Where a reward_model.style other than "rule" is kept among the extra_info.
STYLE_KEY = "reward_style"


def parse_row(row: Any, origin: str) -> PromptRecord:
    """The record in `row`. `origin` ("train.jsonl row 7") starts every message.

    Raises ValueError naming origin, key and rule.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{origin}: expected an object with data_source, prompt and reward_model, got {_show(row)}")
    _require_no_media(row, origin)
    return require_text(PromptRecord(
        data_source=_require(row, "data_source", str, "text", f"{origin}: "),
        prompt=parse_prompt(row, origin),
        ground_truth=_parse_ground_truth(row, origin),
        extra_info=_parse_extra_info(row, origin),
        origin=origin,
    ))


def require_text(record: PromptRecord) -> PromptRecord:
    """The record, whose prompt is not empty and whose texts tokenizers and files can take.

    Raises ValueError naming origin and key.
    """
    if not record.prompt:
        raise ValueError(f"{record.origin}: key 'prompt' must not be empty")
    texts = {"data_source": record.data_source, "prompt": prompt_text(record.prompt),
             "reward_model.ground_truth": record.ground_truth}
    for key, text in texts.items():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{record.origin}: key '{key}' holds half of a surrogate pair at character "
                             f"{error.start}, which is no text") from error
    return record


def parse_prompt(row: dict[str, Any], origin: str = "") -> Prompt:
    """The prompt in a row: text, or a list of messages. Raises ValueError naming origin, key and rule."""
    where = origin and f"{origin}: "
    if "prompt" not in row:
        raise ValueError(f"{where}key 'prompt' is missing")
    prompt = row["prompt"]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt:
        return tuple(_parse_message(message, f"prompt[{i}]", where) for i, message in enumerate(prompt))
    raise ValueError(f"{where}key 'prompt' must be text or a list of chat messages, not empty, got {_show(prompt)}")


def _parse_message(message: Any, key: str, where: str) -> ChatMessage:
    if not isinstance(message, dict):
        raise ValueError(f"{where}key '{key}' must be an object with role and content, got {_show(message)}")
    return ChatMessage(
        role=_require(message, "role", str, "text", where, f"{key}."),
        content=_require(message, "content", str, "text (images and other parts are not read)", where, f"{key}."),
    )


def _parse_ground_truth(row: dict[str, Any], origin: str) -> str:
    reward_model = _require(row, "reward_model", dict, "an object with the key ground_truth", f"{origin}: ")
    if reward_model.get("ground_truth") is None:
        raise ValueError(f"{origin}: key 'reward_model.ground_truth' is missing")
    truth = reward_model["ground_truth"]
    # Several data sets keep numbers or lists of accepted answers here; a reward function sees their JSON text.
    return truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, default=str)


def _parse_extra_info(row: dict[str, Any], origin: str) -> dict[str, Any]:
    """The extra_info, and how the row wants to be judged where that is not by a rule (verl's default)."""
    # Parquet fills absent structs with nulls.
    info = {} if row.get("extra_info") is None else _require(row, "extra_info", dict, "an object", f"{origin}: ")
    style = row["reward_model"].get("style")
    return info if style in (None, "rule") else {STYLE_KEY: style, **info}


def _require_no_media(row: dict[str, Any], origin: str) -> None:
    for key in MEDIA:
        if key in row and row[key] is not None and (not isinstance(row[key], list) or row[key]):
            raise ValueError(f"{origin}: key '{key}' is not empty, and only text is read here; leave such rows out, or "
                             "empty the column if the prompt is whole without it")


def _require(row: dict[str, Any], key: str, kind: type, meaning: str, where: str, prefix: str = "") -> Any:
    """`where` starts the message, with its colon."""
    if key not in row:
        raise ValueError(f"{where}key '{prefix}{key}' is missing")
    if not isinstance(row[key], kind):
        raise ValueError(f"{where}key '{prefix}{key}' must be {meaning}, got {_show(row[key])}")
    return row[key]


def _show(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
