"""A small random model whose chat template has tools and thoughts."""

from __future__ import annotations

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


def save_chat_model(path: Path, template: str = TEMPLATE) -> str:
    saved: str = save_model(path)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(saved)
    return saved
