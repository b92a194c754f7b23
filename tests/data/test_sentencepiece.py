"""The sentencepiece backend: training is deterministic and lossless, and its Hugging Face form gives the same ids."""

import json
import random

import pytest
import sentencepiece
import transformers

from hybridflow.data.huggingface_tokenizer import HuggingFaceTokenizer
from hybridflow.data.records import ChatMessage
from hybridflow.data.sentencepiece_tokenizer import SentencePieceTokenizer, train_sentencepiece
from hybridflow.data.tokenizer import open_tokenizer

LINES = [f"What is {a} + {b}? The sum of the two numbers is {a + b}." for a in range(30) for b in range(30)]
WORDS = [
    "the sum",
    "What",
    " ",
    "  ",
    "   leading",
    "12345",
    "+",
    "naïve",
    "字",
    "🙂",
    "\n",
    "\t",
    "\u00a0",
    "x",
    "zqj",
    "\u2581",
    "<unk",
]


def random_texts(count: int) -> list[str]:
    rng = random.Random(1)
    fixed = ["", " ", "  ", " a", "a ", "\n\na", "0", " 7 + 8 ", "\u2581", "\ud7ff", "\U0010ffff", "e\u0301"]
    mixed = ["".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(count)]
    anything = [
        "".join(chr(rng.choice([rng.randint(1, 127), rng.randint(160, 0xD7FF)])) for _ in range(9))
        for _ in range(count)
    ]
    return fixed + mixed + anything


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    train_sentencepiece(LINES, 300, symbols=("<think>", "</think>")).save(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return open_tokenizer(folder / "tokenizer.model")


def test_training_is_deterministic_to_the_byte(folder, tmp_path):
    train_sentencepiece(iter(LINES), 300, symbols=("<think>", "</think>")).save(tmp_path)
    for name in ("tokenizer.model", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_special_ids_and_size(tokenizer):
    assert tokenizer.vocab_size == 300
    assert (tokenizer.eos_id, tokenizer.stop_ids, tokenizer.prefix) == (2, (2,), [1])


@pytest.mark.parametrize("text", random_texts(100))
def test_decode_gives_the_text_back(tokenizer, text):
    # sentencepiece writes a space as U+2581, so that one character comes back as a space.
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("\u2581", " ")


def test_spaces_that_training_never_saw_come_back(tmp_path):
    train_sentencepiece(["abc", "cab", "bca"] * 50, 265).save(tmp_path)
    text = "a b  error: no c"
    for path in (tmp_path / "tokenizer.model", tmp_path):
        tokenizer = open_tokenizer(path)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_each_digit_is_one_token_and_symbols_are_whole(tokenizer):
    pieces = [tokenizer.processor.id_to_piece(i) for i in tokenizer.encode("<think>2024</think>")]
    assert pieces == ["<think>", "2", "0", "2", "4", "</think>"]


def test_special_tokens_in_text_are_plain_text(tokenizer):
    assert tokenizer.eos_id not in tokenizer.encode("</s>")
    assert tokenizer.decode([1, *tokenizer.encode("42"), 2]) == "42"


def test_an_unknown_id_is_seen_in_the_text(tokenizer):
    four, two = tokenizer.encode("4"), tokenizer.encode("2")
    assert tokenizer.decode([*four, 300, *two]) == "4\ufffd2"


def test_prompts_get_bos_and_plain_chats_are_joined(tokenizer):
    messages = (ChatMessage("system", "Be brief."), ChatMessage("user", "2 + 3?"))
    assert tokenizer.encode_prompt("2 + 3?") == [1, *tokenizer.encode("2 + 3?")]
    assert tokenizer.encode_prompt(messages) == [1, *tokenizer.encode("Be brief.\n2 + 3?")]
    assert tokenizer.encode_prompts(["a", messages]) == [
        tokenizer.encode_prompt("a"),
        tokenizer.encode_prompt(messages),
    ]
    with pytest.raises(ValueError, match="'assistant' needs a chat template"):
        tokenizer.encode_prompt((ChatMessage("assistant", "5"),))


@pytest.mark.parametrize("trust", [None, False, True])
@pytest.mark.parametrize("model_type", [None, "llama", "qwen2", "qwen3"])
def test_transformers_gives_the_same_ids(tokenizer, tmp_path, monkeypatch, model_type, trust):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    if model_type is not None:
        # What an exported model folder holds beside the tokenizer: it must not change how transformers opens it.
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 512}))
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path), trust_remote_code=trust)
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (1, 2, 300)
    for text in random_texts(150):
        ids = tokenizer.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids, text
        assert theirs(text)["input_ids"] == tokenizer.encode_prompt(text), text
        assert theirs.decode([1, *ids, 2], skip_special_tokens=True) == tokenizer.decode(ids), text
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 2 + 3?"}]
    ours = tokenizer.encode_prompt(tuple(ChatMessage(**message) for message in chat))
    assert theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) == ours


def test_both_backends_agree_behind_the_interface(tokenizer, folder):
    theirs = open_tokenizer(folder)
    assert isinstance(theirs, HuggingFaceTokenizer)
    prompts = [*random_texts(50), (ChatMessage("system", "a"), ChatMessage("user", "b"))]
    assert theirs.encode_prompts(prompts) == tokenizer.encode_prompts(prompts)
    assert (theirs.vocab_size, theirs.eos_id, theirs.stop_ids) == (300, 2, (2,))


# Models as others trained them: a dummy space in front, spaces squeezed, Unicode normalised, no bos.
OTHERS = {
    "llama2-like": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": True},
    "default normalisation": {},
    "no bos": {
        "bos_id": -1,
        "unk_id": 0,
        "eos_id": 1,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "no byte fallback": {
        "byte_fallback": False,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
}


@pytest.mark.parametrize("piece_model", ["bpe", "unigram"])
@pytest.mark.parametrize("name", OTHERS)
def test_models_trained_elsewhere(tmp_path, name, piece_model):
    options = {
        "byte_fallback": True,
        "vocab_size": 320,
        "hard_vocab_limit": piece_model == "bpe",
        **OTHERS[name],
    }
    if not options["byte_fallback"]:
        options["vocab_size"] = 60
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_prefix=str(tmp_path / "m"), model_type=piece_model,
        num_threads=1, minloglevel=2, **options,
    )  # fmt: skip
    tokenizer = SentencePieceTokenizer.open(tmp_path / "m.model")
    tokenizer.save(tmp_path / "hf")
    theirs = open_tokenizer(tmp_path / "hf")
    for text in random_texts(100):
        if name == "default normalisation" and not text.isascii():
            continue
        assert theirs.encode(text) == tokenizer.encode(text), repr(text)
        assert theirs.encode_prompt(text) == tokenizer.encode_prompt(text)
        if options["byte_fallback"]:  # without it the unknown id has a text in sentencepiece and none in transformers
            assert theirs.decode(theirs.encode(text)) == tokenizer.decode(tokenizer.encode(text))


def test_a_vocabulary_that_the_corpus_cannot_fill_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"vocab_size 4000: the corpus has too few distinct pieces.*at most \d+"):
        train_sentencepiece(LINES, 4000)
    with pytest.raises(ValueError, match="vocab_size 100"):
        train_sentencepiece(LINES, 100)


def test_a_word_model_has_no_huggingface_form_and_leaves_no_files(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_prefix=str(tmp_path / "m"), model_type="word", vocab_size=30, minloglevel=2
    )
    with pytest.raises(ValueError, match="word or char model"):
        SentencePieceTokenizer.open(tmp_path / "m.model").save(tmp_path / "hf")
    assert list((tmp_path / "hf").iterdir()) == []


def test_what_is_not_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "x.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="x.model: not a sentencepiece model"):
        open_tokenizer(tmp_path / "x.model")
    with pytest.raises(ValueError, match="no tokenizer here"):
        open_tokenizer(tmp_path / "missing")
    with pytest.raises(ValueError, match="transformers cannot open a tokenizer here"):
        open_tokenizer(tmp_path)
