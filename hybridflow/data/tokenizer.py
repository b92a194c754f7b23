"""The small interface behind which every tokenizer lives, and the function that opens one.

Owns the interface and the rules common to all backends (plain chats, ids outside the vocabulary). Backends:
sentencepiece_tokenizer.py and huggingface_tokenizer.py, each the only module that knows its library.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from hybridflow.data.chat import AS_IT_IS, ChatFormat
from hybridflow.data.records import Prompt

REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """Text to token ids and back.

    vocab_size: number of ids, special ones included; every id is in range(vocab_size).
    eos_id: the id that ends a response. stop_ids: all ids that end one, eos_id first.
    """

    vocab_size: int
    eos_id: int
    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone: nothing in front, nothing at the end."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens. Ids that the tokenizer does not have become U+FFFD.

        (A model's vocabulary may be larger than its tokenizer's, so such an id can be sampled. It must be seen:
        dropping it would let "4", unknown, "2" pass for the answer 42.)
        """
        ...

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """The ids that a model continues: text gets the bos id where the model has one, messages the chat template."""
        ...

    def encode_prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """encode_prompt of each; one call, because backends are several times faster on many texts at once."""
        ...

    def save(self, folder: str | Path) -> tuple[Path, ...]:
        """Write the files that make `AutoTokenizer.from_pretrained(folder)` give the same ids; returns their paths."""
        ...


def open_tokenizer(path: str | Path, chat: ChatFormat = AS_IT_IS) -> Tokenizer:
    """The tokenizer at `path`, a sentencepiece `.model` file or a Hugging Face folder, which renders chats as `chat`
    says.

    A folder that has only a sentencepiece `tokenizer.model` is opened as that. Nothing is downloaded, and no code
    in the folder is run. Raises ValueError if there is no tokenizer at `path`, or it cannot render chats so.
    """
    path = Path(path)
    if path.is_dir() and not (path / "tokenizer_config.json").is_file() and (path / "tokenizer.model").is_file():
        path = path / "tokenizer.model"
    # The libraries are imported where one is chosen: transformers alone takes seconds.
    if path.is_file() and path.suffix == ".model":
        from hybridflow.data.sentencepiece_tokenizer import SentencePieceTokenizer

        return SentencePieceTokenizer.open(path, chat)
    if path.is_dir():
        from hybridflow.data.huggingface_tokenizer import HuggingFaceTokenizer

        return HuggingFaceTokenizer.open(path, chat)
    raise ValueError(f"{path}: no tokenizer here; give a Hugging Face folder or a sentencepiece file ending in .model")


def plain_chat(prompt: Prompt) -> str:
    """The text of a prompt for a tokenizer without a chat template: the contents of its messages, one under the other.

    Only system and user turns can be joined without saying who speaks; other roles raise ValueError.
    """
    if isinstance(prompt, str):
        return prompt
    for message in prompt:
        if message.role not in ("system", "user"):
            raise ValueError(
                f"message role {message.role!r} needs a chat template and this tokenizer has none; "
                "use a tokenizer folder with a chat template, or prompts of system and user messages only"
            )
    return "\n".join(message.content for message in prompt)


def decode_known(ids: Sequence[int], vocab_size: int, decode: Callable[[list[int]], str]) -> str:
    """decode(ids), with U+FFFD in place of each id that is not in range(vocab_size)."""
    pieces: list[str] = []
    known: list[int] = []
    for token in ids:
        if 0 <= token < vocab_size:
            known.append(token)
            continue
        pieces += [decode(known), REPLACEMENT]
        known = []
    return "".join([*pieces, decode(known)])
