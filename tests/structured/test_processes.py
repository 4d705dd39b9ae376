"""Grammars live in processes of their own: what one of them does to its process, no other answer notices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import StructureError
from paceline.llm import LLM
from paceline.outputs import CompletionOutput
from paceline.params import SamplingParams, StructuredOutputs
from paceline.structured.grammars import GrammarConstraint, Grammars
from paceline.structured.limits import Limits
from paceline.tokenizer import Tokenizer
from polling import PATIENCE, wait_until
from server_support import byte_tokenizer, load, save_model

pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")

BOMB = StructuredOutputs(regex="(.{1,40}.{1,40}){1,25}")  # fits the bounds, and takes seconds to compile
WORDS = StructuredOutputs(regex="[a-c]{3}( [a-c]{3}){0,30}")
OTHER = StructuredOutputs(json={"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 9})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("processes") / "tiny")


@pytest.fixture
def llm(path: str) -> LLM:
    return limited(load(path, drafter=None, num_speculative_tokens=0), PATIENCE)


def limited(llm: LLM, mask_wait: float) -> LLM:
    """Its rounds stand still for a grammar for so many seconds at most."""
    assert llm.tokenizer is not None
    limits = Limits(mask_wait=mask_wait)
    llm.__dict__["_grammars"] = Grammars(llm.tokenizer, llm.engine.models.target.vocab_size, (256,), limits)
    return llm


def grammars(**limits: Any) -> Grammars:
    tokenizer = Tokenizer.load(byte_tokenizer())
    return Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids, Limits(**limits))


@pytest.fixture(scope="module")
def usual() -> Iterator[Grammars]:
    made = grammars()
    yield made
    made.close()


def follower_of(found: Grammars, wanted: StructuredOutputs) -> Any:
    constraint = found.compile(wanted)()
    assert isinstance(constraint, GrammarConstraint)
    return constraint._follower


def gone(pid: int) -> bool:
    """Ended, whether or not its parent has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


# --- trees ---


def test_each_node_of_a_tree_has_a_state_of_its_own(usual: Grammars) -> None:
    """Asked together, branch by branch, as where the acceptance of a tree asks; against the branch as an answer."""
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


def test_an_answer_is_not_stuck_where_a_sibling_of_its_guesses_is(usual: Grammars) -> None:
    constraint = usual.compile(WORDS)()
    assert isinstance(constraint, GrammarConstraint)
    constraint.stick([97, 98])
    constraint.advance([97, 99, 97])
    constraint.stick([98])
    with pytest.raises(StructureError, match="cannot be completed"):
        constraint.advance([98, 97])


# --- compiling ---


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ({"compile_seconds": 0.1}, BOMB),
        ({"compile_wait": 0.2}, BOMB),
        ({"compile_memory": 24 * 2**20}, StructuredOutputs(json={"enum": [f"{n}{-n}" for n in range(9000)]})),
    ],
)
def test_what_takes_too_much_to_compile_is_refused_and_others_are_not(
    limits: dict[str, Any], wanted: StructuredOutputs
) -> None:
    found = grammars(**limits)
    for _ in range(2):  # the second time it is known
        with pytest.raises(StructureError, match="too much"):
            found.compile(wanted)
    found._limits = Limits()  # for a loaded machine, where what is ordinary may take as long
    found.compile(WORDS)
    found.close()


def test_what_was_too_much_is_refused_at_once_when_it_comes_again() -> None:
    found = grammars(compile_seconds=0.1)
    with pytest.raises(StructureError):
        found.compile(BOMB)
    forks = []
    found._nursery.fork = lambda: forks.append(1)  # type: ignore[assignment,return-value,func-returns-value]
    with pytest.raises(StructureError, match=r"0\.1 s"):
        found.compile(BOMB)
    assert not forks


def test_compiling_ends_when_nobody_waits_and_holds_up_no_other() -> None:
    found, over, errors = grammars(compile_seconds=60, compile_wait=60), threading.Event(), list[Exception]()

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
    found.close()


def test_one_structure_is_compiled_once_however_many_ask(usual: Grammars) -> None:
    wanted, found = StructuredOutputs(regex="once"), list[Any]()
    threads = [threading.Thread(target=lambda: found.append(follower_of(usual, wanted))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in found}) == 1


def test_grammars_that_nobody_uses_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.structured.grammars.KEPT", 2)
    found = grammars()
    held = found.compile(StructuredOutputs(regex="held"))
    kept = [follower_of(found, StructuredOutputs(regex=f"a{n}"))._pid for n in range(4)]
    wait_until(lambda: [gone(pid) for pid in kept] == [True, True, False, False])
    assert not gone(held()._follower._pid)  # type: ignore[attr-defined]
    found.close()


def test_whoever_kills_the_processes_costs_no_later_request_its_answer(usual: Grammars) -> None:
    usual.compile(WORDS)
    assert usual._nursery._breeder is not None
    usual._nursery._breeder.close()
    usual.compile(OTHER)


# --- in the middle of answers ---


def play(llm: LLM, wanted: list[StructuredOutputs], after: int, then: Callable[[LLM], None]) -> list[CompletionOutput]:
    """An answer of each structure, all together; something happens after so many rounds."""
    outputs = [
        llm.engine.add(llm.request("abc", SamplingParams(seed=n, max_tokens=60, structured_outputs=each)))
        for n, each in enumerate(wanted)
    ]
    rounds = 0
    while llm.engine.busy:
        if rounds == after:
            then(llm)
        llm.engine.step()
        rounds += 1
    return [output.outputs[0] for output in outputs]


def to_process(wanted: StructuredOutputs, sign: int) -> Callable[[LLM], None]:
    return lambda llm: os.kill(follower_of(llm._grammars, wanted)._pid, sign)


def nothing(_: LLM) -> None: ...


@pytest.mark.parametrize("draft", [False, True])
def test_an_answer_whose_process_is_killed_is_what_it_would_have_been(llm: LLM, path: str, draft: bool) -> None:
    truth = play(llm, [WORDS, OTHER], 5, nothing)
    drafting = limited(load(path, draft_model=path, drafter="model"), PATIENCE) if draft else llm
    found = play(drafting, [WORDS, OTHER], 5, to_process(WORDS, signal.SIGKILL))
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in truth]
    assert [answer.finish_reason for answer in found] == [answer.finish_reason for answer in truth]


def test_an_answer_that_hangs_ends_with_the_reason_and_others_go_on(llm: LLM) -> None:
    truth = play(llm, [WORDS, OTHER], 5, nothing)
    hung, other = play(limited(llm, mask_wait=1), [WORDS, OTHER], 5, to_process(WORDS, signal.SIGSTOP))
    assert hung.finish_reason == "error"
    assert isinstance(hung.error, StructureError)
    assert "too much to follow" in str(hung.error)
    assert hung.token_ids == truth[0].token_ids[: len(hung.token_ids)]
    assert other.token_ids == truth[1].token_ids
    with pytest.raises(StructureError, match="too much to follow"):
        llm.request("abc", SamplingParams(structured_outputs=WORDS))


def test_a_grammar_that_is_slow_all_the_time_ends_its_answers(llm: LLM) -> None:
    def be_slow(llm: LLM) -> None:
        follower_of(llm._grammars, WORDS)._pay(seconds=0.8, places=3)

    slow, other = play(llm, [WORDS, OTHER], 5, be_slow)
    assert (slow.finish_reason, other.finish_reason) == ("error", "length")
    assert "on the average" in str(slow.error)


def test_a_round_that_is_given_up_disturbs_no_later_one(usual: Grammars) -> None:
    make = usual.compile(StructuredOutputs(regex="ab|cd"))
    first, second = make(), make()
    first.ask([], 0, 1).send()  # and never heard
    logits = torch.zeros(1, 257)
    asked = second.ask([], 0, 1)
    asked.send()
    asked.mask(logits)
    assert (logits[0] == 0).nonzero().flatten().tolist() == [
        Tokenizer.load(byte_tokenizer()).encode(letter)[0] for letter in "ac"
    ]


# --- the end ---

ORPHANS = """
import os, sys, time
sys.path[:0] = {paths!r}
from server_support import byte_tokenizer
from paceline.params import StructuredOutputs
from paceline.structured.grammars import Grammars
from paceline.tokenizer import Tokenizer
tokenizer = Tokenizer.load(byte_tokenizer())
grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
kept = grammars.compile(StructuredOutputs(regex="a+"))()
def parent(pid):
    return int(open(f"/proc/{{pid}}/stat").read().rsplit(")", 1)[1].split()[1])
follower = kept._follower._pid
nursery = parent(follower)
root = parent(nursery)
assert parent(root) == os.getpid()
print(follower, nursery, root, flush=True)
time.sleep({seconds})
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
@pytest.mark.parametrize("killed", [True, False])
def test_no_process_outlives_the_one_that_it_works_for(killed: bool) -> None:
    script = ORPHANS.format(paths=[path for path in sys.path if path], seconds=600 if killed else 0)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 3
        if killed:
            process.kill()
    wait_until(lambda: all(map(gone, pids)))
