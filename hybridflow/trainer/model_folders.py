"""Whether a folder that a key names has the model that it is named for. Reads shapes and headers, and no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.hf_import import FRESH, require_tensors
from hybridflow.models.weights import canonical_shapes


def require_weights(key: str, path: str | None, head: Head, fresh: Sequence[str] = FRESH) -> None:
    """The folder that `key` names, if any, has the tensors of its model under `head`, but perhaps the `fresh` heads.

    Raises:
        ValueError: as `load_hf`; the key is named.
    """
    if path is None:
        return
    try:
        require_tensors(Path(path), canonical_shapes(ModelConfig.from_hf_folder(path), head), fresh)
    except ValueError as error:
        wanted = "; it must be a *ForSequenceClassification with one label" if head is Head.SCORE else ""
        raise ValueError(f"{key} = {error}{wanted}") from None


def require_vocabulary(key: str, path: str | None, size: int) -> None:
    """The model that `key` names, if any, reads all `size` ids of the actor.

    Raises:
        ValueError: it does not.
    """
    if path is not None and (own := ModelConfig.from_hf_folder(path).vocab_size) < size:
        raise ValueError(f"{key} = {path}: its vocabulary of {own} is smaller than the actor's of {size}, whose tokens "
                         "it has to read; choose a model with the actor's tokenizer")
