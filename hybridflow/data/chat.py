"""How a run wants its chats: a template of its own, a system prompt, words for the template.

Owns what messages a prompt is made of, and the choice between the tokenizer's template and another. Rendering is the
tokenizer backend's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridflow.data.records import ChatMessage, Prompt

# What a template is given anyway.
SET_HERE = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token", "tools", "documents"})


@dataclass(frozen=True)
class ChatFormat:
    """Example: `ChatFormat(system_prompt="Be brief.").applied("2 + 3?")` is a system and a user message.

    Attributes:
        template: Jinja source in place of the tokenizer's; None uses that.
        system_prompt: the first message of each prompt that has no system message; None adds none.
        template_kwargs: further variables of the template, e.g. {"enable_thinking": False}.
    """

    template: str | None = None
    system_prompt: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_given(self) -> bool:
        return self.template is not None or self.system_prompt is not None or bool(self.template_kwargs)

    def applied(self, prompt: Prompt) -> Prompt:
        """The messages of a prompt. Where anything of this is given a text is a user's message; else it stays a text.
        """
        if not self.is_given:
            return prompt
        messages = (ChatMessage("user", prompt),) if isinstance(prompt, str) else prompt
        if self.system_prompt is None or messages[0].role == "system":
            return messages
        return (ChatMessage("system", self.system_prompt), *messages)

    def require_variables(self, template: str | None, where: str) -> None:
        """
        Raises:
            ValueError: a key of `template_kwargs` is no variable of `template` (None: there is no template), or is one
                that is set here. `where` says which tokenizer.
        """
        for name in self.template_kwargs:
            if template is None:
                raise ValueError(f"data.chat_template_kwargs.{name}: {where} has no chat template that could read it; "
                                 "remove it, or give data.chat_template")
            if name in SET_HERE or not re.search(rf"\b{re.escape(name)}\b", template):
                rule = "is set for every prompt" if name in SET_HERE else "is no variable of the chat template"
                raise ValueError(f"data.chat_template_kwargs.{name}: {rule} of {where}; remove it")


AS_IT_IS = ChatFormat()  # the tokenizer's own template, and nothing added
