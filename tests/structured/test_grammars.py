"""Grammars: compiled in a trial process that may hang, use much memory or crash, then shared by answers."""

from __future__ import annotations

import json
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch

from models.test_tokenizer import sentencepiece_backend, wrap
from paceline.chat.values import ToolDefinition
from paceline.config import SamplingParams, StructuredOutputs
from paceline.core import child_limits
from paceline.core.outputs import CompletionOutput
from paceline.errors import StructureError
from paceline.llm import LLM
from paceline.models.text.tokenizer import Tokenizer
from paceline.structured import grammars as module
from paceline.structured.calls import CallsStructure
from paceline.structured.grammars import GrammarConstraint, Grammars
from paceline.structured.lark import translated
from paceline.structured.limits import GrammarLimits
from paceline.structured.schemas import grammar_of
from paceline.structured.trial import GrammarLimitError, TrialJob, try_out
from polling import PATIENCE
from server_support import byte_tokenizer, load, save_model

pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")

BOMB = StructuredOutputs(json={"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(4000)}})
WORDS = StructuredOutputs(regex="[a-c]{3}( [a-c]{3}){0,30}")
OTHER = StructuredOutputs(json={"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 9})
DEEP = StructuredOutputs(regex="abc(.{1,40}.{1,40}){1,25}")  # cheap for three letters, then masks exceed the limits


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("grammars") / "tiny")


@pytest.fixture
def llm(path: str) -> LLM:
    return load(path, drafter=None, num_speculative_tokens=0)


def grammars(**limits: Any) -> Grammars:
    tokenizer = Tokenizer.load(byte_tokenizer())
    return Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids, GrammarLimits(**limits))


MANY_PARTS: dict[str, Any] = {"schema_parts": 10**6}  # allows schemas that take seconds to compile


@pytest.fixture(scope="module")
def usual() -> Grammars:
    return grammars()


def constraint_of(found: Grammars, wanted: StructuredOutputs) -> GrammarConstraint:
    constraint = found.compile(wanted)()
    assert isinstance(constraint, GrammarConstraint)
    return constraint


def mask_of(constraint: Any, draft: list[int]) -> torch.Tensor:
    """The mask after the answer and a draft: 0 for allowed tokens, -inf for others."""
    logits = torch.zeros(1, 257)
    constraint.mask(draft, len(draft), logits)
    return logits


def usual_token(letter: str) -> int:
    return Tokenizer.load(byte_tokenizer()).encode(letter)[0]


# --- tokens ---


def test_tokens_have_the_bytes_that_they_stand_for_within_a_text() -> None:
    """The vocabulary is not byte-level, the logits are padded, and its decoder strips a space at the beginning."""
    tokenizer = wrap(sentencepiece_backend(), eos_token="</s>")
    size = tokenizer.vocab_size + 3
    constraint = constraint_of(Grammars(tokenizer, size, [2], GrammarLimits()), StructuredOutputs(regex="the the"))

    def allowed() -> set[str | None]:
        logits = torch.zeros(1, size)
        constraint.mask([], 0, logits)
        return {tokenizer.spelling(token) for token in (logits[0] == 0).nonzero().flatten().tolist()}

    pieces: dict[str | None, int] = {piece: token for token, piece in enumerate(tokenizer.tokens())}
    assert allowed() == {"t", "th", "<0x74>"}
    constraint.advance([pieces["th"], pieces["<0x65>"]])
    assert allowed() == {"▁", "▁th", "▁the", "<0x20>"}
    constraint.advance([pieces["▁the"]])
    assert allowed() == {"</s>"}


# --- trees ---


def test_each_node_of_a_tree_has_a_state_of_its_own(usual: Grammars) -> None:
    """Masks of all branches, made as for a tree, equal those of each branch as an answer of its own."""
    make = usual.compile(StructuredOutputs(regex="ab(cd|e)|b(xy)+"))
    tokenizer = Tokenizer.load(byte_tokenizer())
    branches = [tokenizer.encode(text) for text in ("", "a", "b", "ab", "bx", "abc", "bxy")]
    constraint = make()
    for branch in branches:
        together, alone = torch.zeros(1, tokenizer.vocab_size), torch.zeros(1, tokenizer.vocab_size)
        constraint.mask(branch, len(branch), together)
        other = make()
        other.advance(branch)
        other.mask([], 0, alone)
        assert torch.equal(together, alone)
        assert alone.isinf().any()


def test_an_error_in_another_branch_does_not_end_the_answer(usual: Grammars) -> None:
    constraint = constraint_of(usual, WORDS)
    letter = {each: usual_token(each) for each in "abc"}
    constraint._faults[letter["a"], letter["b"]] = StructureError("cannot be completed")
    constraint.advance([letter["a"], letter["c"], letter["a"]])
    constraint._faults[(usual_token(" "),)] = StructureError("cannot be completed")
    with pytest.raises(StructureError, match="cannot be completed"):
        constraint.advance([usual_token(" "), letter["a"]])


# --- compiling ---


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [({"compile_cpu_seconds": 0.15}, BOMB), ({"compile_cpu_seconds": 60, "compile_memory_bytes": 0}, BOMB)],
)
@pytest.mark.parametrize("by_kernel", [True, False])
def test_structures_that_exceed_a_compile_limit_are_refused(
    limits: dict[str, Any], wanted: StructuredOutputs, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_limits, "BY_KERNEL", by_kernel)
    found = grammars(**MANY_PARTS, **limits)
    for _ in range(2):  # the second time from the cache
        with pytest.raises(StructureError, match="too much"):
            found.compile(wanted)
    found._limits = GrammarLimits()  # on a busy machine an ordinary structure may take longer than the test's limit
    found.compile(WORDS)


def test_a_trial_that_a_busy_machine_ends_says_nothing_about_the_structure() -> None:
    found = grammars(**MANY_PARTS, compile_wall_seconds=0.0)
    with pytest.raises(StructureError, match="too busy; try again"):
        found.compile(BOMB)
    found._limits = GrammarLimits(**MANY_PARTS, compile_cpu_seconds=0.3, compile_wall_seconds=60)
    with pytest.raises(StructureError, match="too much"):
        found.compile(BOMB)


@pytest.mark.parametrize("text", ['"\\', r"\"", r"\/", "/", '"a', "//", "#"])
def test_a_grammar_of_literals_without_an_end_is_read_in_linear_time(text: str) -> None:
    started = time.process_time()
    translated("start: " + text * (2**18 // len(text)), str, {})
    assert time.process_time() - started < 2


def test_a_crash_of_llguidance_ends_only_the_trial_process() -> None:
    """With little room on its stack, llguidance overflows it."""
    nested = '{"type":"array","items":' * 50 + "{}" + "}" * 50
    with pytest.raises(GrammarLimitError, match="crashes"):
        try_out(TrialJob("schema", nested, [], {}), GrammarLimits(compile_stack_bytes=2**17), lambda: False)


# Each has at most 256 Ki characters, and was walked for seconds in the server's own threads.
NUMBERED = {"1899": {"type": "null"}} | {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in reversed(range(1899))}
TAGGED = {"properties": {f"p{n}": {"const": "a"} for n in range(1000)}, "required": [f"p{n}" for n in range(1000)]}
LETTERS = "defabcghik"
SPELLINGS = ["".join(f"%{ord(c):02x}" if n >> k & 1 else c for k, c in enumerate(LETTERS)) for n in range(1000)]
ENDLESS_WALKS: dict[str, dict[str, Any]] = {
    "a chain of references": {"oneOf": [{"$ref": "#/$defs/0"}] * 4000, "$defs": NUMBERED},
    "tags": {"oneOf": [{"$ref": "#/$defs/T"}] * 4000, "$defs": {"T": {"type": "object", **TAGGED}}},
    "pairs": {
        "oneOf": [{"type": "object", "properties": {"k": {"const": f"{n}"}}, "required": ["k"]} for n in range(3000)]
    },
    "spellings": {
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in SPELLINGS],
        "$defs": {LETTERS: {"enum": [*range(20_000)]}},
    },
}


@pytest.mark.parametrize("name", ENDLESS_WALKS)
def test_each_reference_of_a_schema_is_followed_once(name: str) -> None:
    started = time.process_time()
    with suppress(StructureError):
        assert len(grammar_of("schema", json.dumps(ENDLESS_WALKS[name], separators=(",", ":")))) < 2**18
    assert time.process_time() - started < 1


@pytest.mark.parametrize("kind", ["schema", "calls"])
def test_structures_are_translated_in_the_trial_process(kind: str) -> None:
    """A translation that takes long takes none of this process's time."""
    text = {"type": "string", "pattern": r"[^\W\d]" * 40}
    costly = {"type": "object", "properties": {f"p{n}": text for n in range(600)}, "required": ["p0"]}
    tools = [ToolDefinition(f"f{n}", parameters=costly, strict=True) for n in range(8)]
    calls = CallsStructure("hermes", tools, "forced", one_call=True)
    found, started = grammars(compile_cpu_seconds=0.4), time.process_time()
    with pytest.raises(StructureError, match="too much"):
        found.grammar(calls if kind == "calls" else StructuredOutputs(json=costly))
    assert time.process_time() - started < 0.3


def test_a_refused_structure_is_refused_again_without_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    found = grammars(**MANY_PARTS, compile_cpu_seconds=0.3)
    with pytest.raises(StructureError):
        found.compile(BOMB)
    trials = list[str]()
    monkeypatch.setattr(module, "try_out", lambda job, *_: trials.append(job.text))
    with pytest.raises(StructureError, match=r"0\.3 s"):
        found.compile(BOMB)
    assert not trials


def test_compiling_is_cancelled_with_its_request_and_does_not_block_others() -> None:
    found, over, errors = (
        grammars(**MANY_PARTS, compile_cpu_seconds=60, compile_wall_seconds=60),
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
    assert ["compilation cancelled" in str(error) for error in errors] == [True, True]


def test_concurrent_requests_compile_a_structure_once(usual: Grammars) -> None:
    wanted, found = StructuredOutputs(regex="once"), list[Any]()
    threads = [threading.Thread(target=lambda: found.append(constraint_of(usual, wanted)._grammar)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in found}) == 1


def test_what_is_kept_of_a_refused_structure_is_small() -> None:
    found = grammars()
    for letter in "ab":
        with pytest.raises(StructureError, match="supported"):
            found.compile(StructuredOutputs(json={"description": letter * 10**7}))
    assert all(error.__traceback__ is None for error in found._cache.values() if isinstance(error, StructureError))
    assert len(repr(found._cache)) < 2000


@pytest.mark.usefixtures("no_trials")
def test_unused_grammars_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHED_GRAMMARS", 2)
    found = grammars()
    used = constraint_of(found, StructuredOutputs(regex="held"))
    kept = [weakref.ref(constraint_of(found, StructuredOutputs(regex=f"a{n}"))._grammar) for n in range(4)]
    assert [each() is None for each in kept] == [True, True, False, False]
    used.advance([usual_token("h")])


# --- errors within answers ---


def generate(llm: LLM, wanted: list[StructuredOutputs]) -> list[CompletionOutput]:
    """One answer for each structure, all in one batch."""
    outputs = [
        llm.engine.add(llm.request("abc", SamplingParams(seed=n, max_tokens=60, structured_outputs=each)))
        for n, each in enumerate(wanted)
    ]
    while llm.engine.busy:
        llm.engine.step()
    return [output.outputs[0] for output in outputs]


@pytest.mark.parametrize("draft", [False, True])
def test_an_answer_that_exceeds_a_limit_ends_with_an_error_and_others_continue(
    llm: LLM, path: str, draft: bool
) -> None:
    """The draft model is the target itself, so it drafts beyond the position of the error."""
    expected = generate(llm, [WORDS, OTHER])
    drafting = load(path, draft_model=path, drafter="model") if draft else llm
    limits = GrammarLimits(trial_tokens=0, mask_fuel=1000)  # so that the trial does not find the error
    drafting.requests.__dict__["_grammars"] = Grammars(drafting.requests.tokenizer, 257, (256,), limits)
    ended, other = generate(drafting, [DEEP, OTHER])
    assert ended.finish_reason == "error"
    assert isinstance(ended.error, StructureError)
    assert "too much to follow" in str(ended.error)
    assert ended.text == ("" if draft else "abc")  # the round with the error commits nothing
    assert (other.token_ids, other.finish_reason) == (expected[1].token_ids, expected[1].finish_reason)


@pytest.mark.usefixtures("no_trials")
def test_lexer_states_of_other_answers_do_not_end_an_answer(usual: Grammars) -> None:
    """The limit is 100 states. An answer needs about 35, most of which it shares with no other."""
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


@pytest.mark.usefixtures("no_trials")
def test_a_grammar_too_slow_to_recompile_in_a_round_is_recompiled_for_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_RECOMPILE_SECONDS", 0.0)
    words = [letter * 6 + "." for letter in "abcdefghijklmnopqrstuvwxyz"]
    found, wanted = grammars(lexer_states=100, trial_tokens=0), StructuredOutputs(regex="|".join(words))
    make = found.compile(wanted)
    assert constraint_of(found, wanted)._grammar is make()._grammar  # type: ignore[attr-defined]

    def follow_all() -> None:
        for word in words:
            constraint = make()
            for letter in word:
                mask_of(constraint, [])
                constraint.advance([usual_token(letter)])

    with pytest.raises(GrammarLimitError, match="too many states"):
        follow_all()
    assert constraint_of(found, wanted)._grammar is not make()._grammar  # type: ignore[attr-defined]
