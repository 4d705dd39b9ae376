"""Grammars: tried out in a process that may hang, grow or crash, then followed by any number of answers."""

from __future__ import annotations

import json
import threading
import weakref
from typing import Any

import pytest
import torch

from models.test_tokenizer import sentencepiece_backend, wrap
from paceline.config import SamplingParams, StructuredOutputs
from paceline.core.outputs import CompletionOutput
from paceline.errors import StructureError
from paceline.llm import LLM
from paceline.models.tokenizer import Tokenizer
from paceline.structured import grammars as module
from paceline.structured.grammars import GrammarConstraint, Grammars
from paceline.structured.limits import GrammarLimits
from paceline.structured.trial import GrammarLimitError, try_out
from polling import PATIENCE
from server_support import byte_tokenizer, load, save_model

pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")

BOMB = StructuredOutputs(json={"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(4000)}})
WORDS = StructuredOutputs(regex="[a-c]{3}( [a-c]{3}){0,30}")
OTHER = StructuredOutputs(json={"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 9})
DEEP = StructuredOutputs(regex="abc(.{1,40}.{1,40}){1,25}")  # three easy letters, then more than a mask may cost


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("grammars") / "tiny")


@pytest.fixture
def llm(path: str) -> LLM:
    return load(path, drafter=None, num_speculative_tokens=0)


def grammars(**limits: Any) -> Grammars:
    tokenizer = Tokenizer.load(byte_tokenizer())
    return Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids, GrammarLimits(**limits))


@pytest.fixture(scope="module")
def usual() -> Grammars:
    return grammars()


@pytest.fixture
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemas may be so large that they take seconds to compile."""
    monkeypatch.setattr("paceline.structured.schemas._MAX_SUBSCHEMAS", 10**6)


def constraint_of(found: Grammars, wanted: StructuredOutputs) -> GrammarConstraint:
    constraint = found.compile(wanted)()
    assert isinstance(constraint, GrammarConstraint)
    return constraint


def mask_of(constraint: Any, draft: list[int]) -> torch.Tensor:
    """What may follow the answer and a draft: 0, and -inf for the rest."""
    logits = torch.zeros(1, 257)
    constraint.ask(draft, len(draft), 1).mask(logits)
    return logits


def usual_token(letter: str) -> int:
    return Tokenizer.load(byte_tokenizer()).encode(letter)[0]


# --- tokens ---


def test_tokens_are_known_by_the_bytes_that_they_stand_for_in_the_middle_of_a_text() -> None:
    """A vocabulary that is not byte-level, and logits padded beyond it; its decoder strips a space at the beginning."""
    tokenizer = wrap(sentencepiece_backend(), eos_token="</s>")
    size = tokenizer.vocab_size + 3
    constraint = constraint_of(Grammars(tokenizer, size, [2], GrammarLimits()), StructuredOutputs(regex="the the"))

    def allowed() -> set[str | None]:
        logits = torch.zeros(1, size)
        constraint.ask([], 0, 1).mask(logits)
        return {tokenizer.spelling(token) for token in (logits[0] == 0).nonzero().flatten().tolist()}

    pieces: dict[str | None, int] = {piece: token for token, piece in enumerate(tokenizer.tokens())}
    assert allowed() == {"t", "th", "<0x74>"}
    constraint.advance([pieces["th"], pieces["<0x65>"]])
    assert allowed() == {"▁", "▁th", "▁the", "<0x20>"}
    constraint.advance([pieces["▁the"]])
    assert allowed() == {"</s>"}


# --- trees ---


def test_each_node_of_a_tree_has_a_state_of_its_own(usual: Grammars) -> None:
    """GrammarMaskQuery together, branch by branch, as where the acceptance of a tree asks; against the branch as an answer."""
    make = usual.compile(StructuredOutputs(regex="ab(cd|e)|b(xy)+"))
    tokenizer = Tokenizer.load(byte_tokenizer())
    branches = [tokenizer.encode(text) for text in ("", "a", "b", "ab", "bx", "abc", "bxy")]
    constraint = make()
    asked = [constraint.ask(branch, len(branch), 1) for branch in branches]
    for question in asked:
        question.send()
    for branch, question in zip(branches, asked, strict=True):
        together, alone = torch.zeros(1, tokenizer.vocab_size), torch.zeros(1, tokenizer.vocab_size)
        question.mask(together)
        other = make()
        other.advance(branch)
        other.ask([], 0, 1).mask(alone)
        assert torch.equal(together, alone)
        assert alone.isinf().any()


def test_an_answer_is_not_stuck_where_a_sibling_of_its_draft_is(usual: Grammars) -> None:
    constraint = constraint_of(usual, WORDS)
    letter = {each: usual_token(each) for each in "abc"}
    constraint._faults[letter["a"], letter["b"]] = StructureError("cannot be completed")
    constraint.advance([letter["a"], letter["c"], letter["a"]])
    constraint._faults[(usual_token(" "),)] = StructureError("cannot be completed")
    with pytest.raises(StructureError, match="cannot be completed"):
        constraint.advance([usual_token(" "), letter["a"]])


# --- compiling ---


@pytest.mark.usefixtures("many_parts")
@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ({"compile_cpu_seconds": 0.3}, BOMB),
        ({"compile_wall_seconds": 0.3}, BOMB),
        ({"compile_cpu_seconds": 60, "compile_memory_bytes": 0}, BOMB),
    ],
)
def test_what_takes_too_much_to_compile_is_refused_and_others_are_not(
    limits: dict[str, Any], wanted: StructuredOutputs
) -> None:
    found = grammars(**limits)
    for _ in range(2):  # the second time it is known
        with pytest.raises(StructureError, match="too much"):
            found.compile(wanted)
    found._limits = GrammarLimits()  # for a loaded machine, where what is ordinary may take as long
    found.compile(WORDS)


@pytest.mark.parametrize("schema", [{"const": -(2**63) + 1}, {"enum": [-(2**63)]}])
def test_what_crashes_llguidance_ends_another_process(schema: Any) -> None:
    """Once these are compiled, schemas.py need not refuse them; the process remains for what is not known."""
    with pytest.raises(GrammarLimitError, match="crashes"):
        try_out(f"start: %json {json.dumps(schema)}", GrammarLimits(), lambda: False)


@pytest.mark.usefixtures("many_parts")
def test_what_was_too_much_is_refused_at_once_when_it_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = grammars(compile_cpu_seconds=0.3)
    with pytest.raises(StructureError):
        found.compile(BOMB)
    trials = list[str]()
    monkeypatch.setattr(module, "try_out", lambda grammar, *_: trials.append(grammar))
    with pytest.raises(StructureError, match=r"0\.3 s"):
        found.compile(BOMB)
    assert not trials


@pytest.mark.usefixtures("many_parts")
def test_compiling_ends_when_nobody_waits_and_holds_up_no_other() -> None:
    found, over, errors = (
        grammars(compile_cpu_seconds=60, compile_wall_seconds=60),
        threading.Event(),
        list[Exception](),
    )

    def wait() -> None:
        try:
            found.compile(BOMB, over.is_set)
        except StructureError as error:
            errors.append(error)

    waiting = [threading.Thread(target=wait) for _ in range(2)]  # the second waits for the first
    for thread in waiting:
        thread.start()
    found.compile(WORDS)
    assert all(thread.is_alive() for thread in waiting)
    over.set()
    for thread in waiting:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert ["nobody waits" in str(error) for error in errors] == [True, True]


def test_one_structure_is_compiled_once_however_many_ask(usual: Grammars) -> None:
    wanted, found = StructuredOutputs(regex="once"), list[Any]()
    threads = [threading.Thread(target=lambda: found.append(constraint_of(usual, wanted)._grammar)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in found}) == 1


def test_grammars_that_nobody_uses_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHED_GRAMMARS", 2)
    found = grammars()
    held = constraint_of(found, StructuredOutputs(regex="held"))
    kept = [weakref.ref(constraint_of(found, StructuredOutputs(regex=f"a{n}"))._grammar) for n in range(4)]
    assert [each() is None for each in kept] == [True, True, False, False]
    held.advance([usual_token("h")])


# --- in the middle of answers ---


def play(llm: LLM, wanted: list[StructuredOutputs]) -> list[CompletionOutput]:
    """An answer of each structure, all together."""
    outputs = [
        llm.engine.add(llm.request("abc", SamplingParams(seed=n, max_tokens=60, structured_outputs=each)))
        for n, each in enumerate(wanted)
    ]
    while llm.engine.busy:
        llm.engine.step()
    return [output.outputs[0] for output in outputs]


@pytest.mark.parametrize("draft", [False, True])
def test_an_answer_that_becomes_too_much_ends_with_the_reason_and_others_go_on(
    llm: LLM, path: str, draft: bool
) -> None:
    """The draft model is the same one, so it drafts beyond where the answer ends."""
    truth = play(llm, [WORDS, OTHER])
    drafting = load(path, draft_model=path, drafter="model") if draft else llm
    assert drafting.tokenizer is not None
    limits = GrammarLimits(trial_tokens=0, mask_fuel=1000)  # as if the trial had not met it
    drafting.__dict__["_grammars"] = Grammars(drafting.tokenizer, 257, (256,), limits)
    ended, other = play(drafting, [DEEP, OTHER])
    assert ended.finish_reason == "error"
    assert isinstance(ended.error, StructureError)
    assert "too much to follow" in str(ended.error)
    assert ended.text == ("" if draft else "abc")  # a round in which it ends gives it nothing
    assert (other.token_ids, other.finish_reason) == (truth[1].token_ids, truth[1].finish_reason)


def test_states_that_other_answers_have_left_end_no_answer(usual: Grammars) -> None:
    """There is room for 100; an answer has some 35, most of them its own."""
    words = [letter * 6 + "." for letter in "abcdefghijklmnopqrstuvwxyz"]
    roomy = usual.compile(StructuredOutputs(regex="|".join(words)))
    make, begun = (
        grammars(lexer_states=100, trial_tokens=0).compile(StructuredOutputs(regex="|".join(words))),
        set[int](),
    )
    for word in words:
        mine, free = make(), roomy()
        for letter in word:
            assert torch.equal(mask_of(mine, []), mask_of(free, []))
            mine.advance([usual_token(letter)])
            free.advance([usual_token(letter)])
        begun.add(id(mine._grammar._first))  # type: ignore[attr-defined]
    assert len(begun) > 1


def test_a_grammar_that_takes_long_to_compile_is_compiled_again_for_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_RECOMPILE_SECONDS", 0.0)
    words = [letter * 6 + "." for letter in "abcdefghijklmnopqrstuvwxyz"]
    found, wanted = grammars(lexer_states=100, trial_tokens=0), StructuredOutputs(regex="|".join(words))
    make = found.compile(wanted)
    assert constraint_of(found, wanted)._grammar is make()._grammar  # type: ignore[attr-defined]

    def play_all() -> None:
        for word in words:
            constraint = make()
            for letter in word:
                mask_of(constraint, [])
                constraint.advance([usual_token(letter)])

    with pytest.raises(GrammarLimitError, match="too many states"):
        play_all()
    assert constraint_of(found, wanted)._grammar is not make()._grammar  # type: ignore[attr-defined]


def test_a_round_that_is_given_up_disturbs_no_later_one(usual: Grammars) -> None:
    make = usual.compile(StructuredOutputs(regex="ab|cd"))
    first, second = make(), make()
    first.ask([], 0, 1).send()  # and never heard
    assert (mask_of(second, [])[0] == 0).nonzero().flatten().tolist() == [usual_token(letter) for letter in "ac"]
