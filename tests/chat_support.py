"""A small random model whose chat template has tools and thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from server_support import save_model

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.a }}</tool_call>{% endfor %}{% endfor %}[bot]"
    "{% if enable_thinking %}<think>{% elif enable_thinking is defined %}{% else %}<think></think>{% endif %}"
)
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y\n"]}},
            "required": ["a", "b"],
        },
    },
}
PING: dict[str, Any] = {"type": "function", "function": {"name": "ping"}}


MESSAGES = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
HARMONY_TEMPLATE = MESSAGES + "<|start|>assistant{# <|channel|>analysis #}"
GEMMA_TEMPLATE = MESSAGES + "{# <|channel>thought\n<channel|> <|tool_call> #}"


def save_chat_model(path: Path, template: str = TEMPLATE, special: Sequence[str] = ()) -> str:
    """Save the model. special: spellings of further special tokens."""
    saved: str = save_model(path, special)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(saved)
    return saved
