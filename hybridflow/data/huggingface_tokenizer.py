"""Tokenizer backend over a Hugging Face folder: local files only, and no code from the folder is run.

The only module of data that knows transformers.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import transformers

from hybridflow.data.chat import AS_IT_IS, ChatFormat
from hybridflow.data.records import ChatMessage, Prompt
from hybridflow.data.tokenizer import decode_known, plain_chat
from hybridflow.models.hf_export import tokenizer_files

TEMPLATE_FILE = "chat_template.jinja"


class HuggingFaceTokenizer:
    """A transformers tokenizer behind the Tokenizer interface.

    Text prompts get the bos id where the tokenizer adds one. Messages go through the folder's chat template, with the
    opening of the assistant's turn at the end; without a template they are joined as plain_chat does. `chat` may bring
    a template of its own, a system prompt and variables of the template.
    """

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, folder: Path,
                 chat: ChatFormat = AS_IT_IS) -> None:
        """Raises ValueError if the tokenizer has no end token, or the template does not take what `chat` gives it."""
        self.tokenizer = tokenizer
        self.folder = folder
        self.chat = chat
        self.template: str | None = tokenizer.chat_template if chat.template is None else chat.template
        self.vocab_size: int = len(tokenizer)
        if tokenizer.eos_token_id is None:
            raise ValueError(f"{folder}: the tokenizer has no eos_token, so no response could end; set one there")
        self.eos_id: int = tokenizer.eos_token_id
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([self.eos_id, *_generation_eos(folder)]))
        # Only what is put in front is a prompt's: some tokenizers also add an end token, after which nothing follows.
        starts_with_bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        self.prefix: list[int] = [tokenizer.bos_token_id] if starts_with_bos else []
        self._check_chat()

    @classmethod
    def open(cls, folder: Path, chat: ChatFormat = AS_IT_IS) -> "HuggingFaceTokenizer":
        """Open the tokenizer in `folder`. Raises ValueError if transformers finds none there."""
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder}: transformers cannot open a tokenizer here: {error}") from error
        return cls(tokenizer, folder, chat)

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone. Special tokens written out in the text are read as such."""
        return self._encode([text])[0]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens."""
        return decode_known(ids, self.vocab_size, self._decode)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """bos and text, or the chat template's rendering."""
        return self.encode_prompts([prompt])[0]

    def encode_prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """encode_prompt of each."""
        prompts = [self.chat.applied(prompt) for prompt in prompts]
        templated = [self._uses_template(prompt) for prompt in prompts]
        texts = [self._render(p) if has_template else plain_chat(p) for p, has_template in zip(prompts, templated)]
        # A template writes the bos token itself where its model wants one.
        return [ids if t else self.prefix + ids for ids, t in zip(self._encode(texts), templated)]

    def save(self, folder: str | Path) -> tuple[Path, ...]:
        """Copy the tokenizer's own files, byte for byte: saving anew would rewrite them in this version's form."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        written = [Path(shutil.copyfile(file, folder / file.name)) for file in tokenizer_files(self.folder)]
        if self.chat.template is not None:  # transformers takes this file before a template in tokenizer_config.json
            own = folder / TEMPLATE_FILE
            own.write_text(self.chat.template, encoding="utf-8")
            written = list(dict.fromkeys([*written, own]))
        return tuple(written)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _uses_template(self, prompt: Prompt) -> bool:
        return not isinstance(prompt, str) and self.template is not None

    def _check_chat(self) -> None:
        """
        Raises:
            ValueError: the chat format cannot be used, or part of it would change nothing.
        """
        chat, user = self.chat, ChatMessage("user", "2 + 3?")
        chat.require_variables(self.template, str(self.folder))
        if not chat.is_given or self.template is None:
            return
        keys = "data.chat_template, data.system_prompt, data.chat_template_kwargs"
        try:
            plain, asked = self._render((user,)), self._render(chat.applied((user,)))
        except ValueError as error:
            raise ValueError(f"{keys}: a prompt of one user message cannot be rendered: {error}") from error
        if chat.system_prompt is not None and asked == plain:
            raise ValueError("data.system_prompt: the chat template leaves system messages out; remove it, or give "
                             "data.chat_template")

    def _render(self, prompt: Prompt) -> str:
        """
        Raises:
            ValueError: the template has rules of its own (who speaks first, say), and the messages break one.
        """
        from jinja2 import TemplateError  # comes with what renders templates

        messages = [{"role": message.role, "content": message.content} for message in prompt]
        try:
            return self.tokenizer.apply_chat_template(messages, chat_template=self.template, tokenize=False,
                                                      add_generation_prompt=True, **self.chat.template_kwargs)
        except TemplateError as error:
            raise ValueError(f"the tokenizer's chat template refuses the messages: {error}") from error


def _generation_eos(folder: Path) -> list[int]:
    """The end ids that generation_config.json lists: chat models end a turn with another id than a document."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else list(eos)
