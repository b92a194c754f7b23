"""Tools for tests, and rules by which turns call them."""

import os
import time


def add(numbers: str) -> int:
    return sum(map(int, numbers.split()))


def fails(text: str) -> None:
    raise KeyError(f"no {text}")


def spins(text: str) -> None:
    while True:
        time.sleep(0.01)


def dies(text: str) -> None:
    os._exit(3)


def silent(text: str) -> None:
    pass


def long(text: str) -> str:
    return "7 " * int(text)


def minus(a: int, b: int = 0) -> int:
    return a - b


def half(text: str) -> str:
    return "\ud800"  # of a surrogate pair: no text


def _hidden(text: str) -> str:
    return text


def length(text: str) -> str:
    return f"{len(text)} letters"


def every_turn(text: str) -> tuple[str, str]:
    """A rule that always fires."""
    return "length", text
