"""The page of an answer: all of it is there, nothing of it is taken for markup, and the trees are those verified."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from paceline.bench.trace import TracedRound, Tracer, page
from paceline.drafters.branches import Branches
from paceline.outputs import CompletionOutput
from paceline.params import SamplingParams
from toy import ToyModel, make_engine, run

pytestmark = pytest.mark.usefixtures("one_thread")

HOSTILE = ["</pre><script>alert(1)</script>", '" onload="x', "<img src=http://example.com/x>", "&lt;", "\u202e\x00é\n"]


class Reader(HTMLParser):
    """Tags, and the text outside of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.taken = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.taken += (tag, ("class", "taken")) == ("li", attrs[0] if attrs else None)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_what_a_model_wrote_is_shown_and_never_taken_for_markup() -> None:
    answer = CompletionOutput(0, "".join(HOSTILE), [0, 1, 2, 3, 4], ["accepted"] * 3 + ["recovered", "bonus"], HOSTILE)
    rounds = [TracedRound([0, 1, 2], [-1, -1, 1], [1, 2], [1, 2, 3]), TracedRound([], [], [], [4])]
    made = page("<b>a model</b>", answer, rounds, HOSTILE.__getitem__)
    reader = Reader()
    reader.feed(made)
    assert not reader.tags & {"script", "img", "a", "link", "iframe"}
    assert reader.attributes <= {"charset", "http-equiv", "content", "lang", "class", "open"}
    assert "default-src 'none'" in made
    for text in ("".join(HOSTILE), *HOSTILE[:3], "<b>a model</b>"):
        assert text in reader.text
    assert reader.taken == 2
    assert "3 verified, 2 kept, saved by a sibling" in reader.text
    assert "0 verified, 0 kept: \u202e\x00é\u23ce" in reader.text


@pytest.mark.parametrize("width", [1, 2])
def test_the_trees_of_a_trace_lead_to_the_answer(width: int) -> None:
    engine = make_engine(
        ToyModel(), ToyModel(blur=0.3), drafter="model", num_speculative_tokens=4, speculation_width=width,
        max_batch_size=1,
    )  # fmt: skip
    tracer = engine.parts.policy = Tracer(engine.parts.policy)
    (output,) = run(engine, [[3, 1, 4]], [SamplingParams(max_tokens=40, seed=1, ignore_eos=True)])
    gained = [token for each in tracer.traced for token in each.tokens]
    assert gained[:40] == output.outputs[0].token_ids
    for each in tracer.traced:
        tree = Branches(list(each.guesses), list(each.follows))
        assert [each.guesses[guess] for guess in each.path] == list(each.tokens[:-1])
        assert tree.path(each.tokens)[: len(each.path)] == list(each.path)
    saved = sum(each.saved for each in tracer.traced)
    metrics = output.outputs[0].metrics
    assert (saved > 0) == (width > 1)
    assert saved - 1 <= metrics.saved_by_sibling <= saved  # the last one may be cut off
    assert saved == sum(each.saved for each in tracer.rounds)
    assert metrics.rounds == len(tracer.traced)
    assert sum(len(each.guesses) for each in tracer.traced[:-1]) <= metrics.drafted
