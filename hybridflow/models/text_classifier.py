"""Sequence classifiers of any architecture that transformers knows, scoring texts: the DeBERTa-v3 kind.

The only module of `models` that has transformers run a model. A classifier is whole on one device; nothing is cut or
resharded. Nothing is downloaded, and no code in a folder is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.data.records import Prompt
from hybridflow.data.tokenizer import plain_chat
from hybridflow.models.safetensors_files import read_json_object

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spm.model", "sentencepiece.bpe.model", "vocab.txt", "vocab.json")
SUFFIX = "ForSequenceClassification"
# Families whose first position is the one behind the padding's id.
COUNT_FROM_PADDING = ("camembert", "data2vec-text", "longformer", "mpnet", "roberta", "roberta-prelayernorm",
                      "xlm-roberta", "xlm-roberta-xl")
# A row as the model reads it: input_ids, and what else its tokenizer gives beside them (token types).
Encoded = Mapping[str, list[int]]


def require_classifier(folder: str, label: int | None) -> None:
    """The folder holds a classifier that can be loaded, as far as its config.json and the names of its files tell.

    Args:
        label: whose logit is the score; None where there is only one.

    Raises:
        ValueError: what it is instead, or which labels there are.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN

    raw = read_json_object(Path(folder) / "config.json")
    kind, classes = raw.get("model_type"), raw.get("architectures") or []
    if kind not in KNOWN or "auto_map" in raw:
        raise ValueError(f"{folder}: model_type {kind!r} is no sequence classifier that transformers has by itself")
    if not any(name.endswith(SUFFIX) for name in classes):
        raise ValueError(f"{folder}: architectures {classes} name no *{SUFFIX}, so that its head would be random")
    if not any(Path(folder).glob("*.safetensors")):
        raise ValueError(f"{folder}: has no *.safetensors; save it anew with transformers' save_pretrained")
    num_labels = AutoConfig.from_pretrained(folder, local_files_only=True).num_labels
    if label is None and num_labels != 1:
        raise ValueError(f"{folder}: has {num_labels} labels; choose one in model.reward_model.label, 0 to "
                         f"{num_labels - 1}")
    if label is not None and label >= num_labels:
        raise ValueError(f"{folder}: has no label {label}; model.reward_model.label may be 0 to {num_labels - 1}")
    if not any(Path(folder, name).is_file() for name in VOCABULARIES):  # transformers would make an empty one
        raise ValueError(f"{folder}: has no tokenizer; put the model's own beside it ({', '.join(VOCABULARIES)})")


def pads_rows(folder: str) -> bool:
    """Whether the classifier in a folder runs several rows at once, for which all but the longest are padded."""
    from transformers import AutoConfig, AutoTokenizer

    return _may_pad(AutoTokenizer.from_pretrained(folder, local_files_only=True),
                    AutoConfig.from_pretrained(folder, local_files_only=True))


class TextClassifier:
    """A classifier and its tokenizer. Scores are raw logits, and a row's does not depend on the rows beside it.

    Example: `TextClassifier.open("models/deberta-reward", torch.device("cpu"), torch.float32)`.
    """

    def __init__(self, model: Any, tokenizer: Any, *, label: int | None = None, pair: bool = False,
                 micro_batch_size: int = 8) -> None:
        """
        Args:
            label: whose logit is the score, None for the only one.
            pair: prompt and response are the two texts of a pair.
            micro_batch_size: rows that are run at once.
        """
        self.model, self.tokenizer = model.eval().requires_grad_(False), tokenizer
        self.label, self.pair = label or 0, pair
        self.rows_at_once = micro_batch_size if _may_pad(tokenizer, model.config) else 1
        self.max_tokens = _longest(tokenizer, model.config)

    @classmethod
    def open(cls, folder: str, device: torch.device, dtype: torch.dtype, **settings: Any) -> TextClassifier:
        """The classifier in `folder`, on `device`; `settings` as the constructor's.

        Raises:
            ValueError: weights are missing.
        """
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        with _without_progress_bars():
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, dtype=dtype, output_loading_info=True)
        missing = sorted(loading["missing_keys"])
        if missing:
            raise ValueError(f"{folder}: {len(missing)} weights are missing, the first of them {missing[0]}")
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return cls(model.to(device), tokenizer, **settings)

    def to(self, device: torch.device) -> None:
        """Move the weights."""
        self.model.to(device)

    def read(self, prompt: Prompt, response: str) -> tuple[Encoded, bool]:
        """A row as the model reads it, and whether its beginning was cut off since it is too long.

        With a chat template the response is the assistant's turn; else the text of the prompt and the response follow
        each other, or are a pair. What looks like a special token in a text without a template is text.
        """
        whole = self._encode(prompt, response)
        ids = whole["input_ids"]
        if self.max_tokens is None or len(ids) <= self.max_tokens:
            return whole, False
        first = int(ids[0] in self.tokenizer.all_special_ids)  # what marks the beginning stays there
        start = len(ids) - self.max_tokens + first
        return {name: [*values[:first], *values[start:]] for name, values in whole.items()}, True

    def score(self, rows: Sequence[Encoded]) -> Tensor:
        """`[rows]` fp64 on the CPU: the logit of the label."""
        scores = torch.zeros(len(rows), dtype=torch.float64)
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]["input_ids"]), reverse=True)
        for start in range(0, len(order), self.rows_at_once):
            places = order[start:start + self.rows_at_once]
            scores[places] = self._logits([rows[place] for place in places])
        return scores

    @torch.no_grad()
    def _logits(self, rows: Sequence[Encoded]) -> Tensor:
        """`[rows]` of one forward, padded on the right where no position and no attention takes notice."""
        longest = max(len(row["input_ids"]) for row in rows)
        padding = {"input_ids": self.tokenizer.pad_token_id or 0, "token_type_ids": 0}
        columns = {name: torch.tensor([[*row[name], *[padding[name]] * (longest - len(row[name]))] for row in rows],
                                      device=self.model.device) for name in rows[0]}
        mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
        logits = self.model(**columns, attention_mask=torch.tensor(mask, device=self.model.device)).logits
        return logits[:, self.label].double().cpu()

    def _encode(self, prompt: Prompt, response: str) -> dict[str, list[int]]:
        if self.pair:
            encoded = self._tokenised(plain_chat(prompt), response)
        elif self.tokenizer.chat_template is not None:
            turns = [("user", prompt)] if isinstance(prompt, str) else [(turn.role, turn.content) for turn in prompt]
            turns = [{"role": role, "content": text} for role, text in (*turns, ("assistant", response))]
            text = self.tokenizer.apply_chat_template(turns, tokenize=False)
            encoded = self.tokenizer(text, add_special_tokens=False, verbose=False)
        else:
            encoded = self._tokenised(plain_chat(prompt) + response)
        return {name: list(encoded[name]) for name in ("input_ids", "token_type_ids") if name in encoded}

    def _tokenised(self, *texts: str) -> Mapping[str, list[int]]:
        return self.tokenizer(*texts, split_special_tokens=True, verbose=False)


def _may_pad(tokenizer: Any, config: Any) -> bool:
    """Rows may be padded with a token that marks nothing else, and that the model knows for padding. (Decoders among
    classifiers look for the last token that is not the padding.)
    """
    pad = tokenizer.pad_token_id
    others = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id}
    return pad is not None and pad == config.pad_token_id and pad not in others


def _longest(tokenizer: Any, config: Any) -> int | None:
    """Tokens that the model can read, None for any number: tokenizers know where some positions are reserved."""
    positions = vars(config).get("max_position_embeddings")
    if positions is not None and config.model_type in COUNT_FROM_PADDING:
        positions -= config.pad_token_id + 1
    limits = [limit for limit in (positions, tokenizer.model_max_length) if limit is not None and 0 < limit < 1 << 30]
    return min(limits, default=None)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Every rank would draw one."""
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


