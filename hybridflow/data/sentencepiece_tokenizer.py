"""Tokenizer backend over a sentencepiece model, and training one on a corpus.

The only module (with sentencepiece_export.py, its half for Hugging Face) that knows sentencepiece.
"""

import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece

from hybridflow.data.chat import AS_IT_IS, ChatFormat
from hybridflow.data.records import Prompt
from hybridflow.data.tokenizer import decode_known, plain_chat

MODEL_FILE = "tokenizer.model"
SPACE = "▁"  # how sentencepiece writes a space inside a piece


class SentencePieceTokenizer:
    """A sentencepiece model behind the Tokenizer interface. Prompts get the bos id if the model has one.

    Text is never parsed for special tokens: "</s>" in a prompt is four ordinary characters here. (The Hugging Face
    form of the same tokenizer does take it for the end token, as all Hugging Face tokenizers do.)
    """

    def __init__(self, model: bytes, name: str, chat: ChatFormat = AS_IT_IS) -> None:
        """`model` is the content of a .model file, `name` says in errors which. Raises ValueError without an eos id, or
        for a chat template.
        """
        if chat.template is not None:
            raise ValueError(f"data.chat_template: {name} is a sentencepiece model, which reads no special tokens out "
                             "of a text; give a Hugging Face tokenizer folder in model.tokenizer, or remove it")
        chat.require_variables(None, name)
        self.model, self.chat = model, chat
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size: int = self.processor.vocab_size()
        self.eos_id: int = self.processor.eos_id()
        if self.eos_id < 0:
            raise ValueError(f"{name}: the model has no end id, so no response could end; train it with one")
        self.stop_ids: tuple[int, ...] = (self.eos_id,)
        bos = self.processor.bos_id()
        self.prefix: list[int] = [bos] if bos >= 0 else []

    @classmethod
    def open(cls, path: Path, chat: ChatFormat = AS_IT_IS) -> "SentencePieceTokenizer":
        """Read a .model file. Raises ValueError if it is not one."""
        try:
            return cls(path.read_bytes(), str(path), chat)
        except RuntimeError as error:
            raise ValueError(f"{path}: not a sentencepiece model: {error}") from error

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone."""
        return self.processor.encode(text)

    def encode_literally(self, text: str) -> list[int]:
        """The same: no text is parsed."""
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bos and eos give nothing."""
        return decode_known(ids, self.vocab_size, self._decode)

    def _decode(self, ids: list[int]) -> str:
        """A vocabulary that was trained on text without spaces spells their mark in bytes, which stay a mark."""
        return self.processor.decode(ids).replace(SPACE, " ")

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """bos, then the prompt's text (see plain_chat for messages)."""
        return self.encode_prompts([prompt])[0]

    def encode_prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """encode_prompt of each."""
        # One thread: several ranks of one machine do this at the same time.
        texts = [plain_chat(self.chat.applied(prompt)) for prompt in prompts]
        return [self.prefix + ids for ids in self.processor.encode(texts, num_threads=1)]

    def turn_between(self, role: str) -> None:
        """There is no chat template."""

    def save(self, folder: str | Path) -> tuple[Path, ...]:
        """Write tokenizer.model and the Hugging Face form (see sentencepiece_export).

        Raises ValueError if the Hugging Face form would give other ids than this one.
        """
        from hybridflow.data.sentencepiece_export import write_huggingface_form

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        written = write_huggingface_form(self.model, folder)
        model_path = folder / MODEL_FILE
        model_path.write_bytes(self.model)
        return (model_path, *written)


def train_sentencepiece(
    lines: Iterable[str], vocab_size: int, symbols: tuple[str, ...] = (), chat: ChatFormat = AS_IT_IS
) -> SentencePieceTokenizer:
    """Train a BPE tokenizer on `lines`; nothing is written (see `save`).

    Lossless: no normalisation, spaces kept as they are, unseen characters become their UTF-8 bytes. Digits are single
    tokens. `symbols` are kept whole. Ids: 0 unknown, 1 bos, 2 eos, then symbols, 256 bytes, pieces.
    The same lines give the same tokenizer, byte for byte (one thread, no sampling).
    Raises ValueError if the corpus does not yield or does not fit `vocab_size`.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, vocab_size=vocab_size, model_type="bpe",
            user_defined_symbols=list(symbols), byte_fallback=True, split_digits=True, character_coverage=1.0,
            normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
            input_sentence_size=0, shuffle_input_sentence=False, num_threads=1, minloglevel=2,
        )  # fmt: skip
    except RuntimeError as error:
        raise ValueError(f"vocab_size {vocab_size}: {_training_fault(str(error))}") from error
    return SentencePieceTokenizer(model.getvalue(), "a new tokenizer", chat)


def _training_fault(message: str) -> str:
    """sentencepiece's reason in the words of this project; it names the largest size that the corpus can fill."""
    largest = re.search(r"<= (\d+)", message)
    if largest:
        return f"the corpus has too few distinct pieces; give more text or a vocab_size of at most {largest[1]}"
    return f"sentencepiece could not train a model: {message}"
