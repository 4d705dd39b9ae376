"""Training data: questions, answers, the target's outputs, and that a shard depends only on the settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import DraftData
from paceline.errors import PacelineError, ParameterError
from paceline.llm import LLM
from paceline.models.text.tokenizer import Tokenizer
from paceline.tools.training.collect import Collector, check_disk, settings_of
from paceline.tools.training.hidden_states import taps_of
from paceline.tools.training.prompts import Question, opening_of, read_questions, split
from paceline.tools.training.shards import HELD_OUT, Shards, directory_lock

TAPS = (2, 4, 5)
DATA = DraftData(tokens=400, prompt_tokens=8, answer_tokens=16, held_out=4, shard=8)


def make(llm: LLM, directory: Path, data: DraftData = DATA, questions: list[Question] | None = None) -> Shards:
    directory.mkdir(exist_ok=True)
    stored = Shards(directory, settings_of(llm, data, TAPS, questions), resume=True)
    for _ in Collector(llm, data, TAPS, questions).shards(stored, lambda _tokens: None):
        pass
    return stored


def test_held_out_answers_of_a_base_model_are_greedy_and_differ(target: str, tmp_path: Path) -> None:
    base = shutil.copytree(target, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    llm = LLM(str(base), drafter=None, num_speculative_tokens=0, dtype="bfloat16", device="cpu", threads=1)
    shard = make(llm, tmp_path / "data").open(HELD_OUT)
    assert shard is not None
    texts = [shard.read(number) for number in range(len(shard))]
    for text in texts:
        assert torch.equal(text.best[text.prompt - 1 : -1], text.tokens[text.prompt :])
    assert len({tuple(text.tokens.tolist()) for text in texts}) > 1


def test_the_opening_of_a_users_turn_is_derived_from_the_chat_template(target: str) -> None:
    tokenizer = Tokenizer.load(target)
    opening = opening_of(tokenizer)
    assert opening is not None
    assert "".join(tokenizer.token_text(token) for token in opening.tokens) == "[user]"
    assert opening.ends == (), "the turn ends with ordinary text, which users may write"
    tokenizer.huggingface.chat_template = "{% for m in messages %}<eos>{{ m.content }}<eos>{% endfor %}bot"
    closed = opening_of(Tokenizer(tokenizer.huggingface, "closed", ()))
    assert closed is not None
    assert closed.ends == (tokenizer.huggingface.eos_token_id,)


def test_a_deleted_shard_is_made_again_bit_for_bit(llm: LLM, tmp_path: Path) -> None:
    stored = make(llm, tmp_path)
    lost = stored.path(1)
    before = {path: path.read_bytes() for path in stored.directory.iterdir()}
    lost.unlink()
    (tmp_path / ".0123.part.safetensors").write_bytes(b"half")  # left by a kill while writing
    make(llm, tmp_path)
    assert {path: path.read_bytes() for path in stored.directory.iterdir()} == before
    other = make(llm, tmp_path / "other", DraftData(**{**vars(DATA), "seed": 1}))
    assert other.path(1).read_bytes() != before[lost]


def test_shards_contain_the_targets_answers_and_outputs(llm: LLM, tmp_path: Path) -> None:
    """Held-out answers are greedy, so each token is the most likely one. hidden and norm give the target's logits."""
    shard = make(llm, tmp_path).open(HELD_OUT)
    assert shard is not None
    assert len(shard) == DATA.held_out
    model = llm.engine.models.target
    for index in range(len(shard)):
        example = shard.read(index)
        assert example.features.shape == (len(example.tokens), 3, 64)
        answer = example.tokens[example.prompt :]
        assert torch.equal(example.best[example.prompt - 1 : -1], answer)
        assert torch.equal(shard.answer(index).long(), answer)
        logits = model.logits(example.hidden.float())
        assert torch.allclose(logits.logsumexp(-1), example.norm, atol=0.05)
        following = llm.engine.next_logits(example.tokens.tolist())
        assert torch.allclose(logits[-1], following, atol=0.2)


def test_held_out_prompts_are_not_in_training_shards(llm: LLM, tmp_path: Path) -> None:
    """Prompts of one token, which the target generates repeatedly."""
    data = DraftData(tokens=100, prompt_tokens=1, answer_tokens=4, held_out=64, shard=32)
    stored = make(llm, tmp_path, data)
    held_out, first = stored.open(HELD_OUT), stored.open(0)
    assert held_out is not None
    assert first is not None
    assert not set(held_out.prompt_keys) & set(first.prompt_keys)
    assert 0 < len(first) < 32, "some prompts are in the held-out shard and are left out"


def test_questions_are_read_from_a_file(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
    lines: list[Any] = ["a text", {"prompt": "another"}, {"messages": messages}, "a text"]
    file.write_text("\n".join(map(json.dumps, lines)))
    questions = read_questions(file)
    assert questions == [
        (("user", "a text"),), (("user", "another"),), (("system", "be brief"), ("user", "why?")),
    ]  # fmt: skip
    training, held_out = split(questions, 0)
    assert (len(training), len(held_out)) == (2, 1)
    assert sorted([*training, *held_out]) == sorted(questions)
    stored = make(llm, tmp_path / "data", questions=questions)
    shard, other = stored.open(0), stored.open(HELD_OUT)
    assert shard is not None
    assert other is not None
    assert len(set(shard.prompt_keys)) == 2
    assert not set(shard.prompt_keys) & set(other.prompt_keys)


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", '"a\u2028b"\r\n"c\x85"\n'), ("a.txt", "a\u2028b\r\nc\x85\n")]
)
def test_only_line_ends_separate_questions(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert read_questions(tmp_path / name) == [(("user", "a\u2028b"),), (("user", "c\x85"),)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "two different"),
        ('"one"\n"one"', "two different"),
        ('"one"\n{"prompt": 3}', "prompt 2"),
        ('"one"\n{"messages": [{"role": "user"}]}', "prompt 2"),
        ('"one"\nnot json', "prompt 2"),
        ('"one"\n"\\ud800"', "prompt 2"),
        ('"one"\n{"prompt": "two", "tools": []}', "prompt 2.*tools would be ignored"),
        (
            '"one"\n[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]',
            "prompt 2.*the last message is an answer",
        ),
        (
            '"one"\n[{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "tool_call_id": "c"}]',
            "prompt 2.*tool_call_id",
        ),
    ],
)
def test_invalid_question_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ParameterError, match=message):
        read_questions(file)


def test_data_made_with_other_settings_is_refused_and_the_setting_named(llm: LLM, tmp_path: Path) -> None:
    Shards(tmp_path, settings_of(llm, DATA, TAPS, None), resume=False)
    with pytest.raises(ParameterError, match="--resume"):
        Shards(tmp_path, settings_of(llm, DATA, TAPS, None), resume=False)
    longer = DraftData(**{**vars(DATA), "answer_tokens": 17})
    with pytest.raises(ParameterError, match="answer_tokens=17"):
        Shards(tmp_path, settings_of(llm, longer, TAPS, None), resume=True)


def test_a_broken_shard_is_named(llm: LLM, tmp_path: Path) -> None:
    stored = Shards(tmp_path, settings_of(llm, DATA, TAPS, None), resume=True)
    stored.path(0).write_bytes(b"no tensors")
    with pytest.raises(PacelineError, match=r"train-00000\.safetensors is broken"):
        stored.open(0)


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    with directory_lock(tmp_path), pytest.raises(ParameterError, match="no other run"), directory_lock(tmp_path):
        pass
    with directory_lock(tmp_path):
        pass


def test_disk_space_is_checked_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="--disk-budget"):
        check_disk(tmp_path, DraftData(disk_budget=0.01), width=576, taps=3, checkpoint=60_000_000)
    with pytest.raises(ParameterError, match="--output"):
        check_disk(tmp_path, DraftData(disk_budget=2.0**20, tokens=2**31 - 1), width=2**12, taps=3, checkpoint=0)


def test_the_three_tapped_layers() -> None:
    assert taps_of(30) == (2, 15, 27)
    with pytest.raises(ParameterError, match="8 layers"):
        taps_of(6)
