"""Answers in a file: drafted from after a restart, by their scope and model alone; damaged files change no answer."""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core.batch import RequestGroup
from paceline.drafters import NgramDrafter
from paceline.drafters.answers import AnswerTexts
from paceline.engine import answer_file, stores
from paceline.engine.answer_file import AnswerFile
from paceline.engine.engine import Engine, Request
from paceline.engine.tensor_file import MAX_HEADER, decoded, encoded
from paceline.errors import ParameterError
from paceline.kernels import native
from toy import ToyModel, answers, make_engine, run

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [3, 9, 4]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1, seed=5)
FEW, MANY = 7, 12  # rounds of 24 tokens: with drafts of four tokens that are all right, and with hardly any


@pytest.fixture(autouse=True)
def _from_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of tests count as loaded from files."""
    monkeypatch.setattr(stores, "is_from_files", lambda _model: True)


def open_engine(path: Path, draft: ToyModel | None = None, **options: Any) -> Engine:
    drafter = "ngram" if draft is None else "hybrid"
    return make_engine(ToyModel(), draft, drafter=drafter, lookup_dir=str(path), **options)


def ask(engine: Engine, params: SamplingParams = GREEDY, owner: str = "") -> tuple[list[int], int]:
    """The answer to ``PROMPT``, and the rounds that it took."""
    output = engine.add(Request(PROMPT, params, prefix_owner=owner))
    while engine.busy:
        engine.step()
    return output.outputs[0].token_ids, output.outputs[0].metrics.rounds


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*.answers"))


@pytest.mark.parametrize(
    ("kernels", "draft", "params"),
    [("auto", None, SAMPLED), ("off", None, GREEDY), ("auto", ToyModel(9), SAMPLED)],
    ids=["ngram", "ngram in Python", "hybrid"],
)
def test_after_a_restart_answers_are_drafted_from(
    tmp_path: Path, kernels: str, draft: ToyModel | None, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.VARIABLE, kernels)
    plain = answers(run(make_engine(ToyModel()), [PROMPT], [params]))[0][0]
    first = open_engine(tmp_path / "new", draft)
    assert ask(first, params)[0] == plain
    first.close()
    (file,) = files(tmp_path / "new")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    for _ in range(2):  # a file that was read is written again with what it had
        second = open_engine(tmp_path / "new", draft)
        tokens, rounds = ask(second, params)
        assert tokens == plain
        assert rounds <= FEW
        second.close()


def test_a_scope_never_gets_another_ones_answers(tmp_path: Path) -> None:
    first = open_engine(tmp_path)
    assert ask(first, owner="key one")[1] > MANY
    ask(first, replace(SAMPLED, keep_prefix=False), owner="key two")
    first.close()
    (file,) = files(tmp_path)
    assert b"key" not in file.read_bytes()
    _, tensors = decoded(bytearray(file.read_bytes()))
    assert len(tensors["answers"]) == 1, "private answers are not written"
    for owner, salt, finds in (("key two", None, 0), ("", None, 0), ("key one", "s", 0), ("key one", None, 1)):
        again = open_engine(tmp_path)
        rounds = ask(again, replace(GREEDY, cache_salt=salt), owner=owner)[1]
        assert rounds <= FEW if finds else rounds > MANY, (owner, salt)
        again._answer_file._unlock()  # type: ignore[union-attr]  # it ends without writing


def test_engines_that_run_at_a_time_have_a_file_each(tmp_path: Path) -> None:
    first, second = open_engine(tmp_path), open_engine(tmp_path)
    ask(first), ask(second, SAMPLED)
    for engine in (second, first):
        engine.close()
    assert len(files(tmp_path)) == 2
    again = open_engine(tmp_path)
    assert ask(again)[1] <= FEW
    again.close()
    assert len(files(tmp_path)) == 2


def test_answers_are_written_while_the_engine_runs_and_can_be_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(tmp_path)
    ask(engine)
    assert files(tmp_path) == []
    monkeypatch.setattr(answer_file, "_INTERVAL", 0.0)
    ask(engine, SAMPLED)
    engine._answer_file._writer.submit(int).result()  # type: ignore[union-attr]
    (file,) = files(tmp_path)
    assert len(decoded(bytearray(file.read_bytes()))[1]["sizes"]) == 2
    engine.clear_answers()
    assert files(tmp_path) == []
    assert ask(engine)[1] > MANY, "memory has none either"
    make_engine(ToyModel()).clear_answers()  # nothing to do


def no_answers(most: int) -> AnswerTexts:
    answers = NgramDrafter(answer_tokens=most).answers
    assert answers is not None
    return answers


def contents(answers: AnswerTexts) -> list[tuple[bytes, list[int], list[int]]]:
    shared = answers.shared().items()
    return [(scope, texts.tokens.tolist(), texts.sizes.tolist()) for scope, texts in shared]


def test_a_file_keeps_the_order_and_the_bound(tmp_path: Path) -> None:
    first, second, small = (no_answers(most) for most in (1000, 1000, 65))
    for number, owner in enumerate("abc"):
        texts, _ = first.of(group := RequestGroup(scope=(owner,), shared=True))
        for place in range(4):
            texts.append(place, [number + place] * 10)
        first.count(group)
    file = AnswerFile(tmp_path, "model", first, 100)
    file.answer_ended()
    file.close()
    for read in (second, small):
        AnswerFile(tmp_path, "model", read, 100).close()
    assert contents(first) == contents(second)
    assert [tokens[::10] for _, tokens, _ in contents(small)] == [[3, 4], [2, 3, 4, 5]], "the latest"
    for model, vocab in (("another model", 100), ("model", 5)):
        other = no_answers(65)
        AnswerFile(tmp_path, model, other, vocab).close()
        assert other.held == 0, "of another model, or tokens outside of its vocabulary"


Change = Callable[[dict[str, Tensor]], object]


def rewritten(change: Change) -> Callable[[bytes], bytes]:
    """A file with other tensors and the right checksum."""

    def changed(data: bytes) -> bytes:
        header, tensors = decoded(bytearray(data))
        change(tensors)
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        return b"".join(encoded(kept, {"fingerprint": header.metadata["fingerprint"]}))

    return changed


def with_numbers(name: str, *numbers: int) -> Callable[[bytes], bytes]:
    return rewritten(lambda tensors: tensors.update({name: torch.tensor(numbers, dtype=tensors[name].dtype)}))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "a bit": lambda data: data[:-3] + bytes([data[-3] ^ 4]) + data[-2:],
    "a long header": lambda data: (2**63).to_bytes(8, "little") + data[8:],
    "no JSON": lambda data: data[:8] + b"[" * (len(data) - 8),
    "a pickle": lambda _: b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "too long for this engine": lambda data: data + bytes(MAX_HEADER + 60 * 1000),
    "another fingerprint": lambda data: b"".join(encoded(decoded(bytearray(data))[1], {"fingerprint": "x"})),
    "no fingerprint": lambda data: b"".join(encoded(decoded(bytearray(data))[1], {})),
    "no sizes": rewritten(lambda tensors: tensors.pop("sizes")),
    "sizes of another type": rewritten(lambda tensors: tensors.update(sizes=tensors["sizes"].int())),
    "a table of tokens": rewritten(lambda tensors: tensors.update(tokens=tensors["tokens"][None])),
    "sizes below 0": with_numbers("sizes", -1, 28),
    "sizes of 0": with_numbers("sizes", 0, 27),
    "sizes whose sum overflows": rewritten(
        lambda tensors: tensors.update(
            sizes=torch.tensor([*[2**62] * 4, len(tensors["tokens"])]), answers=torch.tensor([5])
        )
    ),
    "more answers than there are": with_numbers("answers", 9),
    "fewer scopes than numbers of answers": rewritten(lambda tensors: tensors.update(scopes=tensors["scopes"][:0])),
    "short hashes": rewritten(lambda tensors: tensors.update(scopes=tensors["scopes"][:, :9])),
    "tokens below 0": rewritten(lambda tensors: tensors["tokens"].fill_(-1)),
    "tokens outside the vocabulary": rewritten(lambda tensors: tensors["tokens"].fill_(10**6)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_replaced_and_changes_no_answer(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_engine(tmp_path, lookup_tokens=1000)
    told, _ = ask(first)
    first.close()
    (file,) = files(tmp_path)
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    with caplog.at_level(logging.WARNING, logger="paceline"):
        engine = open_engine(tmp_path, lookup_tokens=1000)
    assert f"{file} are not used, and will be replaced" in caplog.text
    tokens, rounds = ask(engine)
    assert tokens == told
    assert rounds > MANY
    engine.close()
    again = open_engine(tmp_path, lookup_tokens=1000)
    assert ask(again)[1] <= FEW


def test_what_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name in ("file", "open"):
        with pytest.raises(ParameterError, match=r"lookup_dir=.* a directory"):
            open_engine(tmp_path / name)
    for options in ({"prefix_cache": False}, {"lookup_tokens": 0}, {"acceptance": "rejection"}, {"drafter": None}):
        with pytest.raises(ParameterError, match=r"lookup_dir=.* it needs n-gram lookup in answers"):
            make_engine(ToyModel(), **{"drafter": "ngram", "lookup_dir": str(tmp_path), **options})  # type: ignore[arg-type]
    monkeypatch.undo()
    with pytest.raises(ParameterError, match=r"lookup_dir=.* not loaded from files"):
        open_engine(tmp_path)
