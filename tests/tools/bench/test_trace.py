"""The page of an answer: it is complete and escaped, and its trees are the verified ones."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from paceline.config import SamplingParams
from paceline.core.outputs import CompletionOutput
from paceline.drafters.branches import DraftTree
from paceline.tools.bench.trace import TracedRound, Tracer, by_depth, by_node, by_source, page
from toy import VOCAB, ToyModel, make_engine, run, slow_answer

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


def test_model_output_is_shown_and_escaped() -> None:
    answer = CompletionOutput(0, "".join(HOSTILE), [0, 1, 2, 3, 4], ["accepted"] * 3 + ["recovered", "bonus"], HOSTILE)
    rounds = [TracedRound([0, 1, 2], [-1, -1, 1], [1, 2], [1, 2, 3]), TracedRound([], [], [], [4])]
    made = page("<b>a model</b>", answer, rounds, HOSTILE.__getitem__)
    reader = Reader()
    reader.feed(made)
    assert not reader.tags & {"script", "img", "a", "link", "iframe"}
    assert reader.attributes <= {"charset", "http-equiv", "content", "lang", "class", "open", "name"}  # of the viewport
    assert "default-src 'none'" in made
    for text in ("".join(HOSTILE), *HOSTILE[:3], "<b>a model</b>"):
        assert text in reader.text
    assert reader.taken == 2
    assert "3 verified, 2 accepted, saved by a lower-ranked sibling" in reader.text
    assert "0 verified, 0 accepted: \u202e\x00é\u23ce" in reader.text


@pytest.mark.parametrize("width", [1, 2])
def test_the_trees_of_a_trace_lead_to_the_answer(width: int) -> None:
    engine = make_engine(
        ToyModel(), ToyModel(blur=0.3), drafter="model", num_speculative_tokens=4, speculation_width=width,
        max_batch_size=1,
    )  # fmt: skip
    tracer = engine.use_policy(Tracer(engine.parts.policy, drafter=engine.parts.drafter))
    (output,) = run(engine, [[3, 1, 4]], [SamplingParams(max_tokens=40, seed=1, ignore_eos=True)])
    gained = [token for each in tracer.traced for token in each.tokens]
    assert gained[:40] == output.outputs[0].token_ids
    for each in tracer.traced:
        tree = DraftTree(list(each.draft_tokens), list(each.parents))
        assert [each.draft_tokens[node] for node in each.path] == list(each.tokens[:-1])
        assert tree.path(each.tokens)[: len(each.path)] == list(each.path)
    saved = sum(each.saved for each in tracer.traced)
    metrics = output.outputs[0].metrics
    assert (saved > 0) == (width > 1)
    assert saved - 1 <= metrics.saved_by_sibling <= saved  # the last one may be cut off
    assert saved == sum(each.saved for each in tracer.rounds)
    assert metrics.rounds == len(tracer.traced)
    assert sum(len(each.draft_tokens) for each in tracer.traced[:-1]) <= metrics.drafted


ROUNDS = [
    TracedRound([5, 6, 7], [-1, -1, 1], [1, 2], [6, 7, 8], ["own text", "own text", "<b>a file</b>"]),
    TracedRound([5], [-1], [], [9], ["<b>a file</b>"]),
    TracedRound([], [], [], [4]),
]


def test_a_depth_counts_rounds_that_drafted_there_after_accepting_all_before() -> None:
    assert by_depth(ROUNDS) == [("1", 2, 1), ("2", 1, 1)]
    assert by_depth(ROUNDS[2:]) == []


def test_a_source_counts_its_draft_tokens_and_lower_ranked_siblings_separately() -> None:
    assert by_source(ROUNDS) == [("<b>a file</b>", 2, 1), ("own text", 1, 0), ("own text, lower-ranked sibling", 1, 1)]


def test_a_node_counts_the_tokens_that_were_drafted_for() -> None:
    kinds = ["accepted", "accepted", "recovered", "accepted", "recovered", "bonus", "plain"]
    answer = CompletionOutput(0, "", list(range(7)), kinds)
    nodes = ["identifier", None, "identifier", "identifier", "integer", "integer", "identifier"]
    assert by_node(answer, nodes) == [("identifier", 3, 2), ("integer", 1, 0)]
    assert by_node(answer, []) == []


def test_the_page_has_a_table_of_each_and_none_that_is_empty() -> None:
    answer = CompletionOutput(0, "".join(HOSTILE), [0, 1, 2, 3, 4], ["accepted"] * 3 + ["recovered", "bonus"], HOSTILE)
    reader = Reader()
    reader.feed(page("a model", answer, ROUNDS, "{}".format, ["<i>node</i>"] * 4 + [None]))
    for line in ("depthdraftedacceptedrate12150%211100%", "<b>a file</b>2150%", "own text100%", "<i>node</i>4375%"):
        assert line in reader.text
    assert "i" not in reader.tags
    bare = page("a model", answer, ROUNDS[2:], "{}".format)
    assert not any(title in bare for title in ("by depth", "by source", "syntax tree"))


PLAIN = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
DRAFTED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "own text": ({"drafter": "ngram"}, {"own text"}),
    "a document": ({"drafter": "ngram"}, {"own text", "documents"}),
    "a draft model": ({"drafter": "model"}, {"draft model"}),
    "both": ({"drafter": "hybrid"}, {"documents", "draft model"}),
}


@pytest.mark.parametrize(("kind", "width"), zip(DRAFTED, (1, 2, 1, 2), strict=True))
def test_every_draft_token_has_its_source(kind: str, width: int) -> None:
    options, sources = DRAFTED[kind]
    prompt, draft = [3, 1, 4], ToyModel(blur=0.3) if options["drafter"] != "ngram" else None
    text = [*prompt, *slow_answer(ToyModel(), prompt, PLAIN)]
    nearly = [(token + 1) % VOCAB if place % 9 == 8 else token for place, token in enumerate(text)]
    documents = [nearly] if "documents" in sources else []
    engine = make_engine(ToyModel(), draft, documents=documents, speculation_width=width, max_batch_size=1, **options)
    tracer = engine.use_policy(Tracer(engine.parts.policy, drafter=engine.parts.drafter))
    run(engine, [prompt], [PLAIN])
    assert all(len(each.sources) == len(each.draft_tokens) for each in tracer.traced)
    found = {source for each in tracer.traced for source in each.sources}
    assert sources <= found <= {*sources, "own text"}
    if documents:
        assert {name: kept for name, _, kept in by_source(tracer.traced)}["documents"] > 10
