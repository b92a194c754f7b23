"""Whether two tokenizers mean the same by an id, found by asking them; their files may differ in form."""

from __future__ import annotations

from hybridflow.data.tokenizer import Tokenizer

PROBES = (
    "The quick brown fox jumps over the lazy dog.", " leading, trailing ", "two\nlines\n\n\tand a tab", "12 + 345 = 5",
    "def f(x):\n    return x ** 2  # squared", "naïve café – “quoted” …", "日本語と中文", "Привет, мир", "🙂👍🏽",
    "https://a.b/c?d=e&f=%20", "MiXeD CaSe isn't",
)
NUM_IDS = 1024
# Marks (unknown, beginning, end, padding) that backends spell in their own ways, of one tokenizer too.
NUM_MARKS = 4


def same_tokenizer(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether both have as many ids, cut texts of many kinds alike, and have the same text for ids all over the
    vocabulary, but for a few marks. Example: a sentencepiece file and the Hugging Face folder that was made of it.
    """
    if one.vocab_size != other.vocab_size:
        return False
    if any(one.encode(text) != other.encode(text) for text in PROBES):
        return False
    step = max(1, one.vocab_size // NUM_IDS)
    ids = {*range(0, one.vocab_size, step), *range(min(NUM_IDS, one.vocab_size)),
           *range(max(0, one.vocab_size - NUM_IDS), one.vocab_size)}
    return sum(one.decode([token]) != other.decode([token]) for token in ids) <= NUM_MARKS
