"""Thoughts: the block in front of an answer in which a model reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.chat.parser import MessageWriter, Reader
from paceline.chat.reading import Markers, Reading, Source


@dataclass(frozen=True)
class ThinkingMarkers:
    """What begins and ends the block of thoughts in a model's answers.

    closing: text that ends it at any place. sign: text in the chat templates of models that think so.
    """

    begin: str
    end: str
    closing: str
    sign: str


KNOWN = (
    ThinkingMarkers("<think>", "</think>", "\n</think>\n\n", "</think>"),
    ThinkingMarkers("[THINK]", "[/THINK]", "[/THINK]", "[/THINK]"),
    ThinkingMarkers("<|channel>thought\n", "<channel|>", "<channel|>", "<channel|>"),
    ThinkingMarkers("<|channel|>analysis<|message|>", "<|end|>", "<|end|>", "<|channel|>analysis"),
    ThinkingMarkers("<seed:think>", "</seed:think>", "</seed:think>", "</seed:think>"),
)


def markers_in(chat_template: str) -> ThinkingMarkers | None:
    """The markers of thoughts that a chat template names; None if it has none."""
    return next((markers for markers in KNOWN if markers.sign in chat_template), None)


def begins_inside(markers: ThinkingMarkers | None, prompt_end: str) -> bool:
    """Whether a rendered prompt ends in an open block of thoughts. prompt_end: the last characters of the prompt."""
    return markers is not None and prompt_end.rstrip().endswith(markers.begin.rstrip())


def is_over(markers: ThinkingMarkers, prompt_end: str) -> bool:
    """Whether a rendered prompt ends with a closed block of thoughts, so that the answer has none."""
    return prompt_end.rstrip().endswith(markers.end)


def reads_thinking(markers: ThinkingMarkers, inside: bool, rest: Reader) -> Reader:
    """Return a reader of an answer with thoughts. inside: whether it begins within them. rest: reads what follows."""

    def read(source: Source, writer: MessageWriter) -> Reading[None]:
        if inside or (yield from _begins(source, writer, markers.begin)):
            yield from _thoughts(source, writer.reasoning, markers.end)
            writer.end_reasoning()
        yield from rest(source, writer)

    return read


def _begins(source: Source, writer: MessageWriter, begin: str) -> Reading[bool]:
    """Read the marker at the answer's beginning, if it is there. White space before anything else stays text."""
    source.record()
    yield from source.skip_space()
    found = yield from source.accept(begin)
    before = source.recorded()
    if not found:
        writer.text(before)
    return found


def _thoughts(source: Source, emit: Callable[[str], None], end: str) -> Reading[None]:
    """Read thoughts and the marker after them. Newlines at the markers are left out."""
    held = ""  # newlines that the marker may follow
    begun = False

    def add(text: str) -> None:
        nonlocal held, begun
        text = text if begun else text.lstrip("\n")
        whole = held + text
        kept = whole.rstrip("\n")
        held, begun = whole[len(kept) :], begun or bool(text)
        if kept:
            emit(kept)

    yield from Markers(end).read(source, add)
