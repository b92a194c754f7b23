"""Whole-number arithmetic that layouts, buckets and batches share. Imports nothing."""


def ceil_div(amount: int, parts: int) -> int:
    """The least whole number that is not below amount / parts. Example: ceil_div(5, 2) == 3."""
    return -(-amount // parts)


def round_up(amount: int, multiple: int) -> int:
    """The least multiple that is not below `amount`. Example: round_up(5, 4) == 8."""
    return ceil_div(amount, multiple) * multiple
