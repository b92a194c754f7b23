"""Files of prompts to complete: what their lines may be, and that all bad ones are told."""

import json

import pytest

from hybridflow.data.prompt_lines import read_prompt_lines
from hybridflow.data.tokenizer import plain_chat

VOCAB = 40


class Letters:
    """Token 10 is "a"; 1 is put in front of a prompt."""

    vocab_size, eos_id, stop_ids = VOCAB, 2, (2,)

    def encode_prompt(self, prompt):
        return [1, *(10 + ord(letter) - ord("a") for letter in plain_chat(prompt) if letter != "\n")]

    def decode(self, ids):
        return "".join(chr(ord("a") + token - 10) for token in ids if token >= 10)


def read(path, lines, most_tokens=8):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return read_prompt_lines(path, Letters(), VOCAB, most_tokens)


def test_words_chats_and_ids(tmp_path):
    chat = [{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}]
    lines = read(tmp_path / "p.jsonl", [{"prompt": "abc", "other": 1}, "", {"prompt": chat, "id": "x"},
                                        {"prompt_ids": [1, 12], "id": 7}, {"prompt": "a", "id": -3}])
    assert [(line.id, line.prompt, line.ids) for line in lines] == [
        (0, "abc", (1, 10, 11, 12)), ("x", chat, (1, 10, 11, 12)), (7, "c", (1, 12)), (-3, "a", (1, 10))]


def test_the_samples_of_a_prompt_belong_to_its_id_not_to_its_place(tmp_path):
    there = [{"prompt": "a", "id": "x"}, {"prompt": "b", "id": 5}, {"prompt": "c", "id": -1}]
    streams = {line.id: line.stream for line in read(tmp_path / "p", there)}
    assert {line.id: line.stream for line in read(tmp_path / "p", there[::-1])} == streams
    assert streams[5] == 5 and len(set(streams.values())) == 3 and all(0 <= s < 2**63 for s in streams.values())


def test_lines_may_ask_for_samples_of_one_prompt_apart(tmp_path):
    lines = read(tmp_path / "p", [{"prompt": "a", "id": "x", "sample": i} for i in (0, 2)])
    assert [line.sample for line in lines] == [0, 2] and lines[0].stream == lines[1].stream
    for sample in (-1, 1.0, True, "1"):
        with pytest.raises(ValueError, match="is no integer from 0 on"):
            read(tmp_path / "p", [{"prompt": "a", "sample": sample}])


def test_every_bad_line_is_told_with_its_number(tmp_path):
    path = tmp_path / "p.jsonl"
    with pytest.raises(ValueError) as caught:
        read(path, [
            {"prompt": "a"}, "{", "[1]", {"promt": "a"}, {"prompt": "a", "prompt_ids": [1]}, {"prompt": ""},
            {"prompt": [{"role": "user"}]}, {"prompt": [{"role": "assistant", "content": "a"}]}, {"prompt": "\ud800"},
            {"prompt_ids": []}, {"prompt_ids": [1, 2.0]}, {"prompt_ids": [True]}, {"prompt_ids": [3, 40]},
            {"prompt_ids": [-1]}, {"prompt": "abcdefgh"}, {"prompt": "a", "id": 1.5}, {"prompt": "a", "id": None},
            {"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}, {"prompt": "b"}])
    first, *told = str(caught.value).splitlines()
    assert first == f"{path}: 17 bad lines"
    want = ["line 2: not JSON", "line 3: [1] is no object", "line 4: has neither of the keys", "line 5: has both",
            "line 6: key 'prompt' must be text or a list", "line 7: key 'prompt[0].content' is missing",
            "line 8: message role 'assistant' needs a chat template", "line 9: key 'prompt' holds half of a surrogate",
            "line 10: has no tokens", "line 11: key 'prompt_ids' must be a list of integers, got [1, 2.0]",
            "line 12: key 'prompt_ids' must be",
            "line 13: token id 40 is not in the model's vocabulary; ids are 0 to 39", "line 14: token id -1",
            "line 15: has 9 tokens; beside generation.max_new_tokens the model has positions for 8",
            "line 16: id 1.5 is neither", "line 17: id null is neither", 'line 19: id "x" is that of line 18 too']
    assert len(told) == len(want)
    for line, beginning in zip(told, want):
        assert line.strip().startswith(beginning)


def test_files_without_prompts(tmp_path):
    with pytest.raises(ValueError, match="no such file of prompts"):
        read_prompt_lines(tmp_path / "none", Letters(), VOCAB, 8)
    with pytest.raises(ValueError, match='has no prompts; write one JSON object on each line, with either "prompt"'):
        read(tmp_path / "p", ["", " "])
    (tmp_path / "p").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "\xff"}')
    with pytest.raises(ValueError, match="1 bad line\n  line 2: not JSON"):
        read_prompt_lines(tmp_path / "p", Letters(), VOCAB, 8)
