"""Chat templates render as in transformers, and hostile ones are stopped by limits."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import real_models
from hostile.at_random import BOMBS
from paceline.chat.families import FORMATS
from paceline.chat.messages import for_template
from paceline.core import child_limits
from paceline.errors import RequestError
from paceline.models.files.gguf import GGUFFile
from paceline.models.text import chat_template, limited_process
from paceline.models.text.chat_template import ChatTemplate
from polling import PATIENCE

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "höflich 日本 <b>&\n"},
    {"role": "assistant", "content": "x", "reasoning": "so", "name": None},
    {"role": "user", "content": " y "},
]
TEMPLATES = {
    "roles": "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{% endfor %}{{ eos_token }}",
    "blocks": "  {% if add_generation_prompt %}\n  yes\n  {% endif %}\n{%- set x = 3 -%} {{ x }}\n",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2, ensure_ascii=True) }}{{ tools }}{{ documents }}",
    "namespace": "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 2 %}{% endfor %}{{ n.i }}",
    "loops": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "generation": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }} {% endgeneration %}{{ x }}",
    "dict": "{% set d = dict(a=1, **{'b': 2}) %}{{ d | tojson }}{{ dict.fromkeys([1, 2]) }}{{ dict is mapping }}",
    "thoughts": "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ 'name' in m }};{% endfor %}",
    "macro": "{% macro show(m) %}[{{ m.role }}]{% endmacro %}{{ show(messages[0]) }}{{ show(messages[1]) }}{{ no }}",
    "text": "{{ '%s-%s' | format(1, 2) }}{{ messages[0].content.split(' ')[-1] }}{{ messages[-1].content.strip() }}",
}


def in_transformers(template: str, talk: list[dict[str, Any]]) -> str:
    words = Backend(WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template, **SPECIAL)
    return str(tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False))


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limit each conversation to 1 s of CPU time, and check that the test itself uses little."""
    monkeypatch.setattr(limited_process, "SECONDS", 1)
    monkeypatch.setattr(limited_process, "WALL_SECONDS", 20.0)
    started = time.process_time()
    yield
    assert time.process_time() - started < 5


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str) -> None:
    assert ChatTemplate(TEMPLATES[name], SPECIAL).render(TALK) == in_transformers(TEMPLATES[name], TALK)


@pytest.mark.parametrize("model", ["smollm2-135m", "qwen-coder-0.5b"])
def test_templates_of_real_models_render_as_in_transformers(model: str) -> None:
    template = GGUFFile(real_models.find(model)).metadata["tokenizer.chat_template"]
    for talk in (TALK, TALK[1:2], TALK[1:]):
        assert ChatTemplate(template, SPECIAL).render(talk) == in_transformers(template, talk)


@pytest.mark.slow
@pytest.mark.parametrize("bomb", [bomb for bomb in BOMBS if bomb])
def test_hostile_templates_are_stopped(bomb: str, short_limits: None) -> None:
    try:
        text = ChatTemplate(bomb, SPECIAL).render(TALK)
    except RequestError as error:
        assert len(str(error)) < 600  # noqa: PT017
    else:
        assert len(text) < chat_template.CHARACTERS
    assert not Path("/tmp/was-here").exists()


@pytest.mark.parametrize("by_kernel", [True, False])
def test_a_runaway_template_is_killed_and_the_next_conversation_is_served(
    short_limits: None, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_limits, "BY_KERNEL", by_kernel)
    template = ChatTemplate("{% if messages[0].content == 'run' %}" + BOMBS[0] + "{% endif %}done", SPECIAL)
    assert template.render(TALK) == "done"
    with pytest.raises(RequestError, match="more than 1 seconds"):
        template.render([{"role": "user", "content": "run"}])
    assert template.render(TALK) == "done"


@pytest.mark.parametrize("by_kernel", [True, False])
def test_memory_and_text_length_are_limited(by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_limits, "BY_KERNEL", by_kernel)
    monkeypatch.setattr(chat_template, "CHARACTERS", 1000)
    with pytest.raises(RequestError, match="more than 1000 characters"):
        ChatTemplate("{% for i in range(99999) %}xxxxxxxxxx{% endfor %}", SPECIAL).render(TALK)
    with pytest.raises(RequestError, match="more than 512 MiB"):
        ChatTemplate("{{ 'x' * 10**9 }}", SPECIAL).render(TALK)


def test_errors_of_a_template_keep_its_message() -> None:
    with pytest.raises(RequestError, match=r"^roles must alternate$"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", SPECIAL).render(TALK)


CHATML = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
BY_ROLE = (
    "{% for m in messages %}{% if m.role in ('system', 'user') %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "role"), [(CHATML, "system"), (BY_ROLE, "system"), (CHATML + "{# developer #}", "developer")]
)
def test_the_role_developer_is_that_of_the_system_unless_the_template_knows_it(template: str, role: str) -> None:
    talk = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert ChatTemplate(template, SPECIAL).render(talk) == f"{role}: be brief\nuser: hello\n"


LISTED = "{% for name, value in call.arguments | items %}{{ name }}={{ value }};{% endfor %}"  # Qwen3-Coder
PRINTED = (
    "{% if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}"  # Qwen3
)


@pytest.mark.parametrize(
    ("arguments", "listed", "printed"),
    [
        ('{"a": 1}', "a=1;", '{"a": 1}'),
        (" ", "", "{}"),
        ('{"a": ', 'INVALID_JSON={"a": ;', '{"a": '),
        ("[1]", "INVALID_JSON=[1];", "[1]"),
    ],
)
def test_arguments_of_earlier_calls_may_be_no_object(arguments: str, listed: str, printed: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    talk: list[dict[str, Any]] = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    for one, text in ((LISTED, listed), (PRINTED, printed)):
        template = f"{{% set call = messages[0].tool_calls[0].function %}}{{# tools #}}{one}"
        messages, _ = for_template(talk, (), None, template)
        assert ChatTemplate(template, SPECIAL).render(messages) == text
    ((told,), _) = for_template(talk, (), FORMATS["json"], "")
    assert told["content"] == f'{{"name": "f", "arguments": {arguments if arguments.strip() else "{}"}}}'


def test_a_message_that_the_template_leaves_out_for_its_role_is_refused() -> None:
    talk = [{"role": "System", "content": " be brief "}, {"role": "user", "content": "hello"}]
    assert "System: " in ChatTemplate(CHATML, SPECIAL).render(talk)
    with pytest.raises(RequestError, match=r"role 'System'; use system, developer"):
        ChatTemplate(BY_ROLE, SPECIAL).render(talk)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_whole_process_group_costs_no_conversation(number: signal.Signals) -> None:
    template = ChatTemplate("done", SPECIAL)
    template.render(TALK)
    assert template.process.child is not None
    template.process.child.send_signal(number)
    if number == signal.SIGKILL:
        template.process.child.wait(PATIENCE)
    assert template.render(TALK) == "done"


class InterruptedOnce:
    """A pipe whose first line is interrupted by Ctrl-C before it is read."""

    def __init__(self, pipe: Any) -> None:
        self.close, self._readline, self._interrupts = pipe.close, pipe.readline, True

    def readline(self) -> str:
        if self._interrupts:
            self._interrupts = False
            raise KeyboardInterrupt
        return str(self._readline())


def test_after_an_interrupt_the_next_conversation_gets_its_own_text() -> None:
    template = ChatTemplate("{{ messages[0].content }}", SPECIAL)
    template.render(TALK)
    assert template.process.child is not None
    template.process.child.stdout = InterruptedOnce(template.process.child.stdout)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        template.render([{"role": "user", "content": "one"}])
    assert template.render([{"role": "user", "content": "two"}]) == "two"


def test_one_process_serves_all_conversations_and_ends_with_its_template() -> None:
    template = ChatTemplate("{{ messages | length }}", SPECIAL)
    assert [template.render(TALK[:size]) for size in (1, 2, 3)] == ["1", "2", "3"]
    process = template.process.child
    assert process is not None
    assert process.poll() is None
    del template
    gc.collect()
    assert process.poll() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
