"""``benchmarks/agent_turns.py``: a transcript on both sides, its shares and its document."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import agent_turns
from chat_support import save_chat_model

pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")


@pytest.mark.usefixtures("one_thread")
def test_a_transcript_comes_from_the_cache_with_and_without_speculation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    template = (
        "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}[bot]"
    )
    model, document = save_chat_model(tmp_path / "tiny", template), tmp_path / "turns.json"
    config = tmp_path / "tiny" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 8192}))
    flags = ["--quantization", "none", "--turns", "4", "--functions", "2", "--output", str(document)]
    monkeypatch.setattr(sys, "argv", ["agent_turns", "--model", model, *flags])
    agent_turns.main()
    *lines, last = capsys.readouterr().out.splitlines()
    summary, found = json.loads(last), json.loads(document.read_text())
    assert lines[-2:] == agent_turns.table(found)
    assert [line.split(" | ")[0] for line in lines[-2:]] == ["| 1", "| 2"]
    assert found["model"] == "tiny"
    assert found["summary"] == summary
    assert summary["answers_equal"]
    for name, side in found["sides"].items():
        assert len(side["seconds_to_first_token"]) == len(side["rounds"]) == 4
        assert side["cached_tokens"][0] == 0
        assert summary["cached_share_after_the_first_turn"][name] > 0.8
    assert 0 < summary["rounds"]["speculative"] <= summary["rounds"]["plain"]  # ``auto`` may find that no draft pays
