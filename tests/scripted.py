"""A live server whose model says what a script says, through the real engine, parsers and routes.

The model is tiny and random. A logits processor leaves it one choice per token. Its chat template and its tokenizer's
vocabulary are those of ordinary chat models, so that agents' long prompts stay affordable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import real_models
from byte_model import save_llama
from paceline.config import ServerConfig
from paceline.engine.engine import Request
from paceline.llm import LLM
from paceline.models.text.tokenizer import Tokenizer
from paceline.server import dispatch
from paceline.server.structures import AnswerForm
from server_support import Live, start

POSITIONS = 2**17
TEMPLATE = """
{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == "system" else "" }}
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call> to call one.<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% elif not (tools and loop.first and message.role == "system") %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}<|im_start|>assistant
"""
Script = Callable[[str, Sequence[str]], str]
"""What the model answers: from the rendered prompt and the names of the tools that it may call. Where a request forces
a call, the words before it are left out, as the grammar that is not compiled here would have it."""


def call(name: str, /, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def save_model(path: Path) -> str:
    tokenizer = Tokenizer.load(real_models.find("smollm2-135m")).huggingface
    tokenizer.chat_template = TEMPLATE
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    return save_llama(path, tokenizer, seed=1, **sizes, max_position_embeddings=POSITIONS, initializer_range=0.02)


@contextmanager
def scripted(model: str, script: Script, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """Serve the model on this machine; its name is "scripted"."""

    async def form(llm: LLM, requests: Sequence[Request], form: AnswerForm) -> Sequence[Request]:
        names = [] if form.chat is None else [tool.name for tool in form.chat.options.offered]
        prompts = [llm.requests.tokenizer.spell(request.prompt_token_ids) for request in requests]
        forced = form.chat is not None and form.chat.options.tool_choice.forces_call
        answers = [script(prompt, names) for prompt in prompts]
        if forced:
            answers = [answer[max(answer.find("<tool_call>"), 0) :] for answer in answers]
        return [_told(llm, request, answer) for request, answer in zip(requests, answers, strict=True)]

    monkeypatch.setattr(dispatch, "structured", form)
    config = ServerConfig(port=0, served_model_name="scripted", max_body_bytes=2**24)
    server = start(config, model, attention="padded", max_model_len=POSITIONS, memory_limit=2**31)
    yield next(server)
    for _ in server:
        raise AssertionError("it starts once")


def _told(llm: LLM, request: Request, answer: str) -> Request:
    tokenizer = llm.requests.tokenizer
    tokens = [*tokenizer.encode(answer, add_special_tokens=False), *tokenizer.eos_token_ids[:1]]

    def process(made: Sequence[int], logits: Tensor) -> Tensor:
        wanted = tokens[min(len(made), len(tokens) - 1)]
        forced = torch.full_like(logits, -torch.inf)
        forced[wanted] = 0.0
        return forced

    params = replace(request.params, logits_processors=[process], temperature=0.0)
    return replace(request, params=params, make_constraint=llm.requests.constraint(params))
