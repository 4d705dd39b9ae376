"""The plugin of the ``llm`` command line, with the real ``llm``: its prompts, conversations, options and logs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llm", reason='the package llm is not installed: pip install "paceline[llm]"')

from click.testing import CliRunner, Result
from llm.cli import cli
from llm.migrations import migrate
from llm.plugins import load_plugins, pm
from sqlite_utils import Database

from paceline import LLM, SamplingParams
from paceline.cli import llm_plugin
from server_support import save_model

ROOT = Path(__file__).parents[2]
GREEDY = {"temperature": "0", "max_tokens": "8", "ignore_eos": "1"}
ENGINE = {"dtype": "float32", "drafter": "ngram", "num_speculative_tokens": "3", "max_batch_size": "1"}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("llm") / "tiny")


@pytest.fixture(scope="module")
def plain(tiny: str) -> LLM:
    return LLM(tiny, dtype="float32", drafter=None, num_speculative_tokens=0)


@pytest.fixture(scope="module")
def empty_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without logs, which ``llm`` takes most of a second to create."""
    path = tmp_path_factory.mktemp("llm") / "logs.db"
    migrate(Database(path))
    return path


@pytest.fixture
def ask(tiny: str, empty_logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``llm`` in this process, with logs of its own. options: of the model."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    shutil.copy(empty_logs, tmp_path)
    load_plugins()
    if not pm.is_registered(llm_plugin):  # it is, where this version of paceline is installed
        pm.register(llm_plugin)

    def run(*arguments: str, model: str = tiny, stdin: str | None = None, **options: str) -> Result:
        given = {"model": model} | ENGINE | GREEDY | options
        flags = [word for name, value in given.items() for word in ("-o", name, value)]
        return CliRunner().invoke(cli, [*arguments, "-m", "paceline", *flags], input=stdin)

    return run


def logs() -> list[dict[str, Any]]:
    result = CliRunner().invoke(cli, ["logs", "--json", "-n", "0"])
    return list(json.loads(result.output))


def answer(plain: LLM, *turns: str) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(turns)]
    return plain.chat(messages, PARAMS, use_tqdm=False)[0].outputs[0].text


def test_a_prompt_is_answered_as_by_plain_decoding_and_its_tokens_are_counted(ask: Any, plain: LLM) -> None:
    result = ask("hello")
    assert result.exit_code == 0, result.output
    assert result.output == answer(plain, "hello") + "\n"
    (entry,) = logs()
    assert entry["output_tokens"] == 8
    assert entry["input_tokens"] == len(plain.tokens_of_chat([{"role": "user", "content": "hello"}]))
    assert entry["response_json"]["finish_reason"] == "length"
    assert "float32" in entry["response_json"]["engine"]


def test_an_answer_that_is_not_streamed_is_the_same(ask: Any) -> None:
    assert ask("hello", "--no-stream").output == ask("hello").output


def test_a_conversation_goes_on_and_what_was_read_is_not_read_again(ask: Any, plain: LLM) -> None:
    first = answer(plain, "a first question that is long")
    second = answer(plain, "a first question that is long", first, "more")
    assert ask("a first question that is long").output == first + "\n"
    result = ask("-c", "more")
    assert result.output == second + "\n"
    details = json.loads(logs()[-1]["token_details"])
    assert details["cached_tokens"] > len("a first question that is long")


def test_a_chat_keeps_its_system_prompt(ask: Any, plain: LLM) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    result = ask("hello", "--system", "be brief")
    assert result.output == plain.chat(messages, PARAMS, use_tqdm=False)[0].outputs[0].text + "\n"


def test_options_reach_the_sampler(ask: Any) -> None:
    hot = {"temperature": "1", "top_p": "0.9"}
    one, again, other = (ask("hello", seed=seed, **hot).output for seed in ("1", "1", "2"))
    assert one == again != other
    whole = ask("hello").output
    assert ask("hello", stop=whole[2:4]).output == whole[:2] + "\n"


def test_an_option_that_was_not_given_is_as_the_model_s_files_recommend(ask: Any, tiny: str, tmp_path: Path) -> None:
    model = tmp_path / "advised"
    shutil.copytree(tiny, model)
    (model / "generation_config.json").write_text('{"top_k": 1, "repetition_penalty": 2.0}')
    llm = LLM(str(model), dtype="float32", drafter=None, num_speculative_tokens=0)
    said = [{"role": "user", "content": "hello"}]
    usual = {"max_tokens": 40, "ignore_eos": True, "seed": 1}
    for given in ({"temperature": 1.0}, {"temperature": 1.0, "repetition_penalty": 1.0}):
        params = SamplingParams(**{"top_k": 1, "repetition_penalty": 2.0} | usual | given)  # type: ignore[arg-type]
        wanted = llm.chat(said, params, use_tqdm=False)[0].outputs[0].text
        result = ask("hello", model=str(model), max_tokens="40", seed="1", **{k: str(v) for k, v in given.items()})
        assert result.output == wanted + "\n"
    described = {name: field.description for name, field in llm_plugin.PacelineModel("x").Options.model_fields.items()}
    assert described["top_k"].endswith("Default: as the model's files recommend, else 0, in chats 40.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": "-1"}, "temperature=-1.0 is not allowed"),
        ({"n": "2"}, "n\n  Extra inputs are not permitted"),
        ({"num_speculative_tokens": "often"}, "num_speculative_tokens='often' is not allowed"),
        ({"model": "no such model"}, "no model 'no such model'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(ask: Any, options: dict[str, str], message: str) -> None:
    result = ask("hello", **options)
    assert result.exit_code != 0
    assert message in result.output


def test_what_is_no_text_is_refused(ask: Any, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n")
    assert ask("look", "-a", str(picture)).exit_code != 0


def test_a_schema_is_enforced(ask: Any, plain: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    result = ask("hello", "--schema", json.dumps(schema), max_tokens="40", ignore_eos="0")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output) == {"a": 1}


def test_the_entry_point_is_found_by_llm_and_brings_nothing_large(tmp_path: Path) -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["llm"]
    metadata = tmp_path / "paceline_entry-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline-entry\nVersion: 1.0\n")
    lines = [f"{name} = {module}" for name, module in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[llm]", *lines]))
    script = "import sys, llm; print([m.model_id for m in llm.get_models()], 'torch' in sys.modules)"
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | {"PYTHONPATH": path, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": "paceline-entry"}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "'paceline/smollm2-135m', 'paceline'" in done.stdout
    assert done.stdout.endswith("False\n")
