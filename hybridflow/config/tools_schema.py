"""The `tools` block: what the model may call while it answers."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.config.words import OnToolError


@dataclass(frozen=True)
class ToolsConfig:
    """Answers of several turns: the model calls a function of yours, reads what it gives, and goes on."""

    file: str | None = None
    """Python file whose public functions the model may call. null: an answer is one turn."""
    call: str = "tags"
    """A call: tags (<tool>name: text</tool>) | json (<tool_call>{"name": ...}</tool_call>) | file.py:function."""
    max_turns: int = 4
    """Most turns of the model in one answer; what it calls in the last one is not run."""
    max_observation_tokens: int = 128
    """Most tokens of what a tool says; it is cut there. In all, an answer has generation.max_new_tokens."""
    timeout_s: float = 10.0
    """Longest time for one call; a call that takes longer is killed and has failed."""
    on_error: OnToolError = OnToolError.OBSERVE
    """A call that failed: observe (the model reads the error and goes on) | end (the answer ends)."""
    role: str = "tool"
    """Whose turn what a tool says is, in a tokenizer's chat template."""
    wrapper: str | None = None
    """Text around {observation}. null: a turn of the chat template; without one lines with <result>...</result>."""
