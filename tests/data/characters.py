"""A tokenizer of characters, so that ids can be read by eye, and records of a few texts."""

from hybridflow.data.records import PromptRecord


class CharacterTokenizer:
    """Code points as ids; a prompt starts with 1, 2 ends a response."""

    vocab_size = 128
    eos_id = 2
    stop_ids = (2,)

    def encode(self, text):
        return [ord(character) for character in text]

    def decode(self, ids):
        return "".join(chr(i) for i in ids if i > 2)

    def encode_prompt(self, prompt):
        return [1, *self.encode(prompt)]

    def encode_prompts(self, prompts):
        return [self.encode_prompt(prompt) for prompt in prompts]


def records(texts):
    return [PromptRecord("s", text, text[::-1], origin=f"f.jsonl row {i}") for i, text in enumerate(texts, start=1)]


def take(source, count):
    return [next(source) for _ in range(count)]
