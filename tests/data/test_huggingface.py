"""The Hugging Face backend: chat templates, end ids, files kept byte for byte."""

import json

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from hybridflow.data.records import ChatMessage
from hybridflow.data.tokenizer import open_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)
CHAT = (ChatMessage("user", "2 + 3?"), ChatMessage("assistant", "5"), ChatMessage("user", "and 4?"))


def write_folder(path, with_bos=False, template=TEMPLATE, **settings):
    """A byte-level BPE tokenizer, as the Qwen and Llama 3 families have."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|bos|>", "<|text_end|>", "<|turn|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["What is 2 + 3? What is 4?"] * 3, trainer)
    if with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A <|text_end|>", special_tokens=[("<|bos|>", 0), ("<|text_end|>", 1)]
        )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|end|>", **settings
    )
    fast.chat_template = template
    fast.save_pretrained(path)
    return fast


def test_text_and_messages(tmp_path):
    theirs = write_folder(tmp_path)
    ours = open_tokenizer(tmp_path)
    for text in ("What is 4?", " 字 🙂\n", ""):
        assert ours.encode(text) == ours.encode_prompt(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode([*ours.encode(text), ours.eos_id]) == text
    rendered = "<|turn|>user: 2 + 3?<|end|><|turn|>assistant: 5<|end|><|turn|>user: and 4?<|end|><|turn|>assistant: "
    assert ours.encode_prompt(CHAT) == theirs.encode(rendered, add_special_tokens=False)
    assert ours.encode_prompt(CHAT)[0] == 2  # the turn token is one id
    assert ours.encode_prompts([CHAT, "a"]) == [ours.encode_prompt(CHAT), ours.encode_prompt("a")]
    assert ours.vocab_size == len(theirs) and ours.decode([ours.vocab_size]) == "\ufffd"


def test_text_prompts_get_bos_but_never_an_end_token(tmp_path):
    write_folder(tmp_path, with_bos=True)
    ours = open_tokenizer(tmp_path)
    assert ours.encode_prompt("4") == [0, *ours.encode("4")]
    assert ours.encode_prompt(CHAT)[0] == 2


def test_all_end_ids_of_a_model_stop_a_response(tmp_path):
    write_folder(tmp_path)
    assert open_tokenizer(tmp_path).stop_ids == (3,)
    for eos, stops in (([1, 3], (3, 1)), (1, (3, 1)), (None, (3,))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert open_tokenizer(tmp_path).stop_ids == stops


def test_saving_copies_the_files_as_they_are(tmp_path):
    write_folder(tmp_path / "a")
    (tmp_path / "a" / "generation_config.json").write_text('{"eos_token_id": [3, 1]}')
    (tmp_path / "a" / "config.json").write_text('{"model_type": "qwen3"}')
    ours = open_tokenizer(tmp_path / "a")
    written = ours.save(tmp_path / "b")
    assert {path.name for path in written} >= {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert "config.json" not in {path.name for path in written}
    for path in written:
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()
    again = open_tokenizer(tmp_path / "b")
    assert again.encode_prompt(CHAT) == ours.encode_prompt(CHAT) and again.stop_ids == ours.stop_ids


def test_messages_that_a_template_refuses_are_an_error_of_the_prompt(tmp_path):
    write_folder(tmp_path, template="{{ raise_exception('the user speaks first') }}")
    with pytest.raises(ValueError, match="chat template refuses the messages: the user speaks first"):
        open_tokenizer(tmp_path).encode_prompt(CHAT)


def test_without_a_template_chats_are_plain(tmp_path):
    write_folder(tmp_path, template=None)
    ours = open_tokenizer(tmp_path)
    assert ours.encode_prompt((ChatMessage("user", "2 + 3?"),)) == ours.encode("2 + 3?")
    with pytest.raises(ValueError, match="needs a chat template"):
        ours.encode_prompt(CHAT)


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    write_folder(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["eos_token"] = None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="no eos_token"):
        open_tokenizer(tmp_path)


def test_code_in_a_folder_is_not_run(tmp_path):
    write_folder(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": [None, "theirs.Theirs"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "theirs.py").write_text("raise SystemExit('code was run')")
    assert open_tokenizer(tmp_path).encode("a")
