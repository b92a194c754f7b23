"""Writes a sentencepiece model in the form that transformers opens (tokenizer.json and what goes with it).

Owns the translation sentencepiece -> tokenizers, and its proof: probe texts must give the same ids in both, or nothing
is written. Never imports transformers.
"""

import json
import random
from pathlib import Path

import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, processors

from hybridflow.data.sentencepiece_tokenizer import SPACE

# What plain_chat does, as a template, with the bos token in front because templates are encoded without special tokens.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user'] %}{{ raise_exception('roles: system, user') }}{% endif %}"
    "{{ message['content'] }}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)

# transformers 5 opens any folder whose config.json says qwen2 with Qwen2Tokenizer, which throws away the rules in
# tokenizer.json and gives other ids, whatever class the folder names. Only a folder that names a class of its own is
# exempt. This is that class; it adds nothing, and it is not even read unless the user trusts code in the folder.
CODE_FILE = "tokenization_as_saved.py"
CODE_CLASS = "AsSavedTokenizer"
CODE = f'''"""The tokenizer exactly as tokenizer.json describes it."""

from transformers import PreTrainedTokenizerFast


class {CODE_CLASS}(PreTrainedTokenizerFast):
    """Takes tokenizer.json as it is."""
'''


def write_huggingface_form(model: bytes, folder: Path) -> tuple[Path, ...]:
    """Write the three files; returns their paths. Raises ValueError if ids would differ from sentencepiece's."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = convert(proto)
    _check_same_ids(processor, tokenizer, proto)
    vocabulary, settings, code = folder / "tokenizer.json", folder / "tokenizer_config.json", folder / CODE_FILE
    tokenizer.save(str(vocabulary))
    settings.write_text(json.dumps(_settings(processor), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    code.write_text(CODE, encoding="utf-8")
    return vocabulary, settings, code


def convert(proto: sentencepiece_model_pb2.ModelProto) -> tokenizers.Tokenizer:
    """The `tokenizers` form of a sentencepiece BPE or unigram model. Raises ValueError for its word and char models."""
    spec, pieces = proto.trainer_spec, proto.pieces
    kinds = {spec.BPE: _bpe, spec.UNIGRAM: _unigram}
    if spec.model_type not in kinds:
        raise ValueError("a sentencepiece word or char model has no Hugging Face form; train a bpe or unigram model")
    tokenizer = tokenizers.Tokenizer(kinds[spec.model_type](proto))
    tokenizer.normalizer = _normalizer(proto.normalizer_spec)
    tokenizer.decoder = _decoder(proto.normalizer_spec)
    kind = sentencepiece_model_pb2.ModelProto.SentencePiece
    added = [tokenizers.AddedToken(p.piece, special=True, normalized=False) for p in pieces
             if p.type in (kind.CONTROL, kind.UNKNOWN)]  # fmt: skip
    tokenizer.add_special_tokens(added)
    tokenizer.add_tokens(
        [tokenizers.AddedToken(p.piece, normalized=False) for p in pieces if p.type == kind.USER_DEFINED]
    )
    if spec.bos_id >= 0:
        bos = pieces[spec.bos_id].piece
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, spec.bos_id)]
        )
    return tokenizer


def _bpe(proto: sentencepiece_model_pb2.ModelProto) -> models.BPE:
    # sentencepiece joins whichever neighbours form the best-scored piece. A merge list says the same if it holds every
    # way to cut every piece in two, best-scored pieces first.
    normal = {p.piece: -p.score for p in proto.pieces if p.type == p.NORMAL}
    merges = [
        (score, len(left), left, right)
        for piece, score in normal.items()
        for left, right in ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        if left in normal and right in normal
    ]
    return models.BPE(
        vocab={p.piece: i for i, p in enumerate(proto.pieces)},
        merges=[(left, right) for _, _, left, right in sorted(merges)],
        unk_token=proto.trainer_spec.unk_piece,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )


def _unigram(proto: sentencepiece_model_pb2.ModelProto) -> models.Unigram:
    # Equal but for ties: two cuts of exactly the same score, in repetitive text (2 of 6,000 texts tried).
    return models.Unigram(
        [(p.piece, p.score) for p in proto.pieces], proto.trainer_spec.unk_id, proto.trainer_spec.byte_fallback
    )


def _normalizer(spec: sentencepiece_model_pb2.NormalizerSpec) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(tokenizers.Regex("^ +| +$"), ""))
        steps.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _decoder(spec: sentencepiece_model_pb2.NormalizerSpec) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace(SPACE, " ")]
    if spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _settings(processor: sentencepiece.SentencePieceProcessor) -> dict[str, object]:
    # This class name makes transformers take tokenizer.json as it is. A family's own class (LlamaTokenizer, ...) would
    # rebuild the normaliser by its own rules and give other ids for the first word.
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "auto_map": {"AutoTokenizer": [None, f"{CODE_FILE.removesuffix('.py')}.{CODE_CLASS}"]},
        "unk_token": processor.id_to_piece(processor.unk_id()),
        "eos_token": processor.id_to_piece(processor.eos_id()),
        "pad_token": processor.id_to_piece(processor.pad_id() if processor.pad_id() >= 0 else processor.eos_id()),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**9,
        "chat_template": CHAT_TEMPLATE,
    }
    if processor.bos_id() >= 0:
        settings["bos_token"] = processor.id_to_piece(processor.bos_id())
    else:
        settings["chat_template"] = CHAT_TEMPLATE.removeprefix("{{ bos_token }}")
    return settings


def _check_same_ids(
    processor: sentencepiece.SentencePieceProcessor,
    tokenizer: tokenizers.Tokenizer,
    proto: sentencepiece_model_pb2.ModelProto,
) -> None:
    for text in _probe_texts(proto):
        theirs = tokenizer.encode(text, add_special_tokens=False).ids
        if processor.encode(text) != theirs:
            raise ValueError(
                f"this sentencepiece model has no exact Hugging Face form: {text!r} gives {processor.encode(text)} in "
                f"sentencepiece and {theirs} in tokenizers; train a bpe model without normalisation rules"
            )


def _probe_texts(proto: sentencepiece_model_pb2.ModelProto) -> list[str]:
    """Texts made of the model's own pieces, spaces, digits and characters that no model knows."""
    shown = [p.piece.replace(SPACE, " ") for p in proto.pieces if p.type in (p.NORMAL, p.USER_DEFINED)]
    special = ["", " ", "  a", "a ", "a  b", "\n", "a\n\nb", "\t", "é", "字", "🙂", "12+345=", "\u00a0"]
    rng = random.Random(0)
    mixed = ["".join(rng.choices(shown + special, k=rng.randint(1, 12))) for _ in range(200)]
    return special + mixed
