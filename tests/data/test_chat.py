"""Chats as the data block wants them: another template, a system prompt, words for the template; each is checked."""

import pytest

from hybridflow.data.chat import AS_IT_IS, ChatFormat
from hybridflow.data.records import ChatMessage
from hybridflow.data.sentencepiece_tokenizer import train_sentencepiece
from hybridflow.data.tokenizer import open_tokenizer
from tests.data.test_huggingface import TEMPLATE, write_folder

USER, BRIEF = (ChatMessage("user", "4?"),), ChatMessage("system", "Be brief.")
OWN = "{% for m in messages %}[{{ m['role'] }}|{{ m['content'] }}]{% endfor %}{{ '' if think is false else '...' }}"


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path)
    return tmp_path


def rendered(folder, chat, prompt):
    tokenizer = open_tokenizer(folder, chat)
    return tokenizer.tokenizer.decode(tokenizer.encode_prompt(prompt), clean_up_tokenization_spaces=False)


def test_as_it_is_nothing_changes(folder):
    assert AS_IT_IS.applied("4?") == "4?" and AS_IT_IS.applied(USER) == USER
    assert rendered(folder, AS_IT_IS, "4?") == "4?"
    assert rendered(folder, AS_IT_IS, USER) == "<|turn|>user: 4?<|end|><|turn|>assistant: "


def test_a_template_of_ones_own_takes_texts_too(folder):
    own = ChatFormat(template=OWN)
    assert rendered(folder, own, USER) == rendered(folder, own, "4?") == "[user|4?]..."
    assert rendered(folder, ChatFormat(OWN, template_kwargs={"think": False}), "4?") == "[user|4?]"
    both = ChatFormat(OWN, "Be brief.")
    assert rendered(folder, both, "4?") == "[system|Be brief.][user|4?]..."


def test_a_system_prompt_gives_way_to_the_rows_own(folder):
    chat = ChatFormat(system_prompt="Be brief.")
    assert rendered(folder, chat, USER) == ("<|turn|>system: Be brief.<|end|><|turn|>user: 4?<|end|>"
                                            "<|turn|>assistant: ")
    assert chat.applied((ChatMessage("system", "Be long."), *USER))[0].content == "Be long."


def test_an_export_has_the_template_that_was_trained(folder, tmp_path):
    tokenizer = open_tokenizer(folder, ChatFormat(template=OWN))
    assert tmp_path / "out" / "chat_template.jinja" in tokenizer.save(tmp_path / "out")
    assert rendered(tmp_path / "out", AS_IT_IS, USER) == "[user|4?]..."


@pytest.mark.parametrize(("template", "chat", "message"), [
    (TEMPLATE, ChatFormat("{% for %}"), "data.chat_template, .* cannot be rendered"),
    (TEMPLATE, ChatFormat("{{ raise_exception('no') }}"), "refuses the messages: no"),
    (TEMPLATE, ChatFormat(template_kwargs={"enable_thinkng": False}),
     "data.chat_template_kwargs.enable_thinkng: is no variable of the chat template"),
    (TEMPLATE, ChatFormat(template_kwargs={"messages": []}), "kwargs.messages: is set for every prompt"),
    (None, ChatFormat(template_kwargs={"think": True}), "has no chat template that could read it"),
    ("{{ messages[-1]['content'] }}", ChatFormat(system_prompt="Be brief."), "leaves system messages out"),
    ("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}x",
     ChatFormat(system_prompt="Be brief."), "refuses the messages: no system"),
])
def test_what_would_not_work_or_change_nothing_is_refused(tmp_path, template, chat, message):
    write_folder(tmp_path, template=template)
    with pytest.raises(ValueError, match=message):
        open_tokenizer(tmp_path, chat)


def test_a_tokenizer_without_templates_joins_the_messages(tmp_path):
    lines = ["Be brief. What is 2 + 3? 4"] * 4
    plain = train_sentencepiece(lines, 280)
    asked = train_sentencepiece(lines, 280, chat=ChatFormat(system_prompt="Be brief."))
    assert asked.encode_prompt("4?") == plain.encode_prompt((BRIEF, *USER)) == plain.encode_prompt("Be brief.\n4?")
    plain.save(tmp_path)
    with pytest.raises(ValueError, match="data.chat_template: .* is a sentencepiece model"):
        open_tokenizer(tmp_path / "tokenizer.model", ChatFormat(template=OWN))
    with pytest.raises(ValueError, match="kwargs.think: .* has no chat template"):
        open_tokenizer(tmp_path / "tokenizer.model", ChatFormat(template_kwargs={"think": 1}))
