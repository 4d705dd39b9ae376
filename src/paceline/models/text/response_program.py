"""Subprocess that reads answers by a checkpoint's response template, within limits; started by response_template.py.

transformers' own parser reads them. Each line has a piece of one answer, and is answered by what that piece adds:
["text", text], ["thoughts", text], or ["call", name, arguments as JSON text].
"""

from __future__ import annotations

import json
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from paceline.models.text.limited_program import Answer, serve

TEXTS = {"content": "text", "reasoning_content": "thoughts", "reasoning": "thoughts", "thinking": "thoughts"}
CALLS = "tool_calls"
Event = list[str]


class _Parser(ResponseParser):  # type: ignore[misc]  # transformers has no types
    """A parser that goes on behind a region that cannot be parsed: its value is then None."""

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        try:
            super()._close_current(events)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001  (a model may write anything, and parsers of the template's choice read it)
            events.append({"type": "region_close", "field": self._current, "value": None})
            self._reset_to_implicit()


class _Answer:
    """One answer. tools: in OpenAI's form; without any, calls are text.

    strips: whether white space around a field's text is left out, by field.
    """

    def __init__(self, template: dict[str, Any], prefix: str, tools: list[dict[str, Any]]) -> None:
        self._parser, self._tools = _Parser(template, prefix=prefix, tools=tools), tools
        self._strips = {
            name: bool((field.get("content_args") or {}).get("strip", True))
            for name, field in template["fields"].items()
        }
        self._body, self._space, self._begun = "", "", False  # of the region that is open

    def feed(self, text: str, *, ends: bool) -> list[Event]:
        """Return what more text, or the answer's end behind it, adds."""
        events = self._parser.feed(text)
        if ends:
            events += self._parser.finalize()[1]
        return [found for event in events for found in self._read(event)]

    def _read(self, event: dict[str, Any]) -> list[Event]:
        field, kind = event["field"], event["type"]
        to = TEXTS.get(field)
        if kind == "region_open":
            self._body, self._space, self._begun = "", "", False
        elif kind == "region_chunk" and (field == CALLS or event["dirty"]):
            self._body += event["text"]
        elif kind == "region_chunk" and to is not None:
            if text := self._stripped(event["text"]) if self._strips[field] else event["text"]:
                return [[to, text]]
        elif kind == "region_close" and field == CALLS:
            return self._calls(event["value"])
        elif kind == "region_close" and to is not None and self._body:
            return [[to, _as_text(event["value"], self._body)]]
        return []

    def _stripped(self, text: str) -> str:
        """Return more of a region's text. White space at its beginning is dropped, and at its end held back."""
        whole = self._space + text if self._begun else text.lstrip()
        kept = whole.rstrip()
        self._space, self._begun = whole[len(kept) :], self._begun or bool(kept)
        return kept

    def _calls(self, value: Any) -> list[Event]:
        """Return the calls of a region; its text if it has none, or without tools."""
        calls = [_call(one) for one in (value if isinstance(value, list) else [value])]
        if not self._tools or not calls or None in calls:
            return [["text", self._body]] if self._body else []
        return [call for call in calls if call is not None]


def _call(value: Any) -> Event | None:
    """Return a call that was parsed; None if it is none."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        return None
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):  # JSON text, which the parser was told to leave alone
        return ["call", function["name"], arguments]
    return (
        ["call", function["name"], json.dumps(arguments, ensure_ascii=False)] if isinstance(arguments, dict) else None
    )


def _as_text(value: Any, body: str) -> str:
    if value is None:
        return body
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _reads(settings: dict[str, Any]) -> Answer:
    """Check the template of the settings; return what reads a piece of an answer."""
    template = settings["template"]
    if not isinstance(template, dict) or not isinstance(template.get("fields"), dict):
        raise ValueError("it is no object with fields")
    fields = {
        name: {**field, "optional": True} for name, field in template["fields"].items() if isinstance(field, dict)
    }
    template = {**template, "fields": {**template["fields"], **fields}}
    _Parser(template, prefix="")
    answers: dict[int, _Answer] = {}

    def read(line: str) -> dict[str, Any]:
        job = json.loads(line)
        for number in job["dropped"]:
            answers.pop(number, None)
        number = job["answer"]
        if "prefix" in job:
            answers[number] = _Answer(template, job["prefix"], job["tools"])
        if number not in answers:
            raise ValueError("the process that read this answer was ended")
        try:
            return {"events": answers[number].feed(job["text"], ends=job["ends"])}
        except BaseException:
            del answers[number]
            raise

    return read


if __name__ == "__main__":
    serve(_reads)
