"""The records that data hands to the rest: one prompt with what is needed to judge an answer to it.

Owns the record types. Never reads files, never tokenises.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ChatMessage:
    """One turn of a chat. Example: ChatMessage(role="user", content="What is 2 + 3?")."""

    role: str
    content: str


Prompt = str | tuple[ChatMessage, ...]


@dataclass(frozen=True)
class PromptRecord:
    """One prompt, as text or as chat messages, and what judges an answer to it.

    `origin` says where the record came from and is used in error messages only. `entry` is the generated
    dataset entry (question, answer, metadata) that a reasoning-gym scorer asks for, None for records from files.

    Example: PromptRecord("openai/gsm8k", (ChatMessage("user", "2 + 3 = ?"),), "5", {"index": 7}, "train.jsonl row 7")
    """

    data_source: str
    prompt: Prompt
    ground_truth: str
    extra_info: dict[str, Any] = field(default_factory=dict)
    origin: str = "record"
    entry: dict[str, Any] | None = None


@dataclass(frozen=True)
class TextPair:
    """One supervised example before tokenisation. Example: TextPair("2 + 3 = ", "5", "train.jsonl row 7")."""

    prompt: Prompt
    response: str
    origin: str = "record"


@dataclass(frozen=True)
class DataSplit:
    """Training and held-out records; no held-out prompt text is among the training prompts.

    Example: DataSplit(train=(record, ...), test=(record, ...))
    """

    train: tuple[PromptRecord, ...]
    test: tuple[PromptRecord, ...]


def fingerprint(records: Sequence[PromptRecord]) -> int:
    """63 bits that are equal on two ranks only if they hold the same prompts and answers in the same order.

    For a run to compare over its ranks at the start: files can differ between machines, and a few generated tasks
    (isomorphic_strings in reasoning-gym 0.1.25) depend on the process's string hashes.
    """
    digest = hashlib.blake2b(digest_size=8)
    for record in records:
        row = json.dumps([record.data_source, prompt_text(record.prompt), record.ground_truth])
        digest.update(row.encode())
    return int.from_bytes(digest.digest(), "big") >> 1


def prompt_text(prompt: Prompt) -> str:
    """A prompt as plain text, whatever its form: for comparing prompts and for showing them to people."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.role}: {message.content}" for message in prompt)
