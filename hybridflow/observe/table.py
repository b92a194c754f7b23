"""Figures as a table of text, for people."""

from __future__ import annotations

from collections.abc import Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest entry: the first to the left, numbers to the right."""
    lines = [tuple(heads), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(word.rjust(width) if place else word.ljust(width)
                               for place, (word, width) in enumerate(zip(line, widths))).rstrip() for line in lines)


def ratio(of: float, to: float) -> str:
    """Example: `ratio(3.0, 2.0) == "1.50x"`."""
    return f"{of / to:.2f}x" if to else "-"


def mib(num_bytes: float) -> str:
    """Example: `mib(3 << 20) == "3.000"`."""
    return f"{num_bytes / 2**20:.3f}"
