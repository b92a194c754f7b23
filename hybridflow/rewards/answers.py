"""Where the answer is in a response. Standard library only; knows no task."""

from __future__ import annotations

import re

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def extract_answer(completion: str) -> str:
    """What the last complete `<answer>...</answer>` holds, else the whole completion; stripped of white space.

    Example: "so <answer> 12 </answer>." gives "12", and "12\\n" gives "12".
    """
    tagged = _TAGGED.findall(completion)
    return (tagged[-1] if tagged else completion).strip()
