"""Thoughts: the block in front of an answer in which a model reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    ThinkingMarkers("<|START_THINKING|>", "<|END_THINKING|>", "<|END_THINKING|>", "<|START_THINKING|>"),
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


class ThoughtsSplitter:
    """Separates thoughts, markers included, from the text that follows them, as an answer arrives.

    end: what ends thoughts. openings: what may come first in an answer, and whether it begins thoughts. inside: whether
    the answer begins within thoughts. repeats: whether an opening may come after thoughts, too.
    over: whether all that arrives from now on is text.
    """

    def __init__(self, end: str, openings: Mapping[str, bool], inside: bool, repeats: bool) -> None:
        self._end, self._openings, self._inside, self._repeats = end, openings, inside, repeats
        self._tail = ""  # last characters of thoughts, with which the end marker may begin
        self.held = ""  # what may belong to the thoughts or follow them
        self.over = False

    def push(self, text: str) -> tuple[str, str]:
        """Take more of the answer; return its thoughts and its text, as far as they are told apart."""
        thoughts: list[str] = []
        while text and not self.over:
            hidden, text = self._after_thoughts(text) if self._inside else self._opened(text)
            thoughts.append(hidden)
        return "".join(thoughts), text

    def finish(self) -> str:
        """End the answer; return the text that was held back."""
        text, self.held, self.over = self.held, "", True
        return text

    def _after_thoughts(self, text: str) -> tuple[str, str]:
        whole = self._tail + text
        place = whole.find(self._end)
        if place < 0:
            self._tail = whole[max(0, len(whole) - len(self._end) + 1) :]
            return text, ""
        size = place + len(self._end) - len(self._tail)
        self._tail, self._inside = "", False
        self._openings = self._openings if self._repeats else {}
        return text[:size], text[size:]

    def _opened(self, text: str) -> tuple[str, str]:
        whole, self.held = self.held + text, ""
        head = whole.lstrip(None if self._openings else "\n")
        opening = next((each for each in self._openings if head.startswith(each)), None)
        if opening is None and (not head or any(each.startswith(head) for each in self._openings)):
            self.held = whole
            return "", ""
        self._inside = opening is not None and self._openings[opening]
        self.over = not self._inside
        size = len(whole) - len(head) + len(opening or "") if opening is not None or not self._openings else 0
        return whole[:size], whole[size:]


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
