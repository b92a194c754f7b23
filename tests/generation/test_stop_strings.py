"""Stop strings against the text of the whole response, with decoders that differ in blanks and in bytes."""

import io
import random

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from hybridflow.generation.stop_strings import StopStrings

LINES = ["The answer is 7. END of it\n\nQuestion: naïve 字 \U0001f642 stop </think> tail"] * 2
LINES += ["END</think> and so on"] * 30


def byte_level():
    """Tokens of bytes, as the Qwen and Llama 3 families have; merges cut characters apart."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(LINES, trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    return lambda text: tokenizer.encode(text).ids, lambda ids: tokenizer.decode(list(ids)), 300


def pieces(dummy_prefix):
    """Pieces with a blank in front, which the first of a text loses where `dummy_prefix`; rare characters as bytes."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, vocab_size=310, model_type="bpe", byte_fallback=True,
        character_coverage=0.985, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=dummy_prefix, num_threads=1, minloglevel=2, hard_vocab_limit=False)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return processor.encode, lambda ids: processor.decode(list(ids)), processor.vocab_size()


@pytest.fixture(scope="module", params=["byte_level", "pieces", "pieces_with_dummy_prefix"])
def tokenizer(request):
    return byte_level() if request.param == "byte_level" else pieces(request.param == "pieces_with_dummy_prefix")


def first_end(strings, decode, ids):
    """Tokens of the shortest beginning of `ids` whose whole text has a stop string; None if none has."""
    return next((n for n in range(1, len(ids) + 1) if any(s in decode(ids[:n]) for s in strings)), None)


def found_end(stops, ids):
    return next((n for n in range(1, len(ids) + 1) if stops.ends(ids[:n])), None)


STRINGS = [("END",), ("</think>",), ("\n\nQuestion",), (" 字",), ("\U0001f642",), ("ï",), ("7. ", "stop"), (" ",),
           ("a", "xyz"), ("字\U0001f642 E",), ("s it is it",)]


@pytest.mark.parametrize("strings", STRINGS)
def test_a_response_ends_where_its_whole_text_first_has_a_string(strings, tokenizer):
    encode, decode, vocab = tokenizer
    rng = random.Random(str(strings))
    stops, ended = StopStrings(strings, decode), 0
    for _ in range(60):
        bits = [*LINES[0].split(" "), *strings, " ", "\n\n", "字字", "é", "\U0001f642\U0001f643", "EN"]
        parts = rng.choices(bits, k=12)
        ids = encode("".join(parts))
        for _ in range(rng.randint(0, 3)):  # anything can be sampled, such as half a character
            ids.insert(rng.randrange(len(ids) + 1), rng.randrange(vocab))
        want = first_end(strings, decode, ids)
        assert found_end(stops, ids) == want
        ended += want is not None
        if want is not None:
            text = decode(ids[:want])
            assert stops.cut(ids[:want]) == text[: min(text.find(s) for s in strings if s in text)]
            assert stops.cut(ids[: want - 1]) == decode(ids[: want - 1])
    assert ended > 10


def test_a_string_that_stands_already_ends_nothing_a_second_time(tokenizer):
    """Behind min_new_tokens: only the token that makes a string whole counts."""
    encode, decode, _ = tokenizer
    stops = StopStrings(("END",), decode)
    first, ids = encode("so END of it"), encode("so END of it is END of it")
    assert not stops.ends(first)
    ends = [n for n in range(1, len(ids) + 1) if stops.ends(ids[:n])]
    assert len(ends) == 2 and decode(ids[: ends[1]]).count("END") == 2
    assert stops.cut(ids[: ends[1]]) == "so END of it is "


def test_a_string_within_one_token_and_one_over_many():
    words = ["say", "xSTOPx", "S", "TO", "P", "STO", "", "\n"]
    stops = StopStrings(("STOP",), lambda ids: "".join(words[i] for i in ids))
    assert stops.ends([0, 1]) and stops.cut([0, 1]) == "sayx"
    assert [stops.ends([0, 2, 3, 4][:n]) for n in range(1, 5)] == [False, False, False, True]
    assert stops.ends([5, *[6] * 100, 4])  # tokens without text lie between
    assert not stops.ends([3, 4])  # its beginning may stand in the prompt: that does not count
    assert not stops.ends([]) and stops.cut([]) == ""


def test_tokens_that_no_string_can_end_in_are_looked_up_once():
    calls = []

    def decode(ids):
        calls.append(ids)
        return "".join("ab cd"[i] for i in ids)

    stops = StopStrings(("cd",), decode)
    ids = [0, 1, 2] * 20
    for n in range(1, len(ids) + 1):
        assert not stops.ends(ids[:n])
    assert len(calls) <= 2 + 2 * 3 and max(map(len, calls)) <= 2
    assert stops.ends([*ids, 3, 4])
    assert max(map(len, calls)) <= 20  # however long the response is
