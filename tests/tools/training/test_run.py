"""``paceline train-draft`` end to end: its files, its errors, and that a run killed with SIGKILL resumes exactly."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import paceline
from paceline.cli.main import app
from paceline.cli.train_draft import FILES, measuring
from paceline.config import DraftData, DraftTraining, EngineOptions, SamplingParams
from paceline.config.training import HEAD_KINDS
from paceline.drafters.heads.block_native import NativeBlock
from paceline.drafters.heads.checkpoint import read_head_config
from paceline.llm import LLM
from paceline.tools.training.run import TrainingRun
from tools.training.conftest import SIZES, save_target


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["train-draft", *arguments], env={"COLUMNS": "200"})


def test_a_run_writes_head_and_report(whole: Path) -> None:
    config = read_head_config(whole)
    assert (config.taps, config.draft_vocab_size, config.width) == ((2, 4, 5), 64, 64)
    report = json.loads((whole / "report.json").read_text())
    assert report["data"]["tokens_made"] >= 900
    assert report["data"]["tokens_of_answers"] < report["data"]["tokens_made"]
    assert report["passes"] >= 2 * report["data"]["tokens_made"]
    assert len(report["acceptance"][-1]["conditional"]) == 4
    assert "| draft token | 1 | 2 | 3 | 4 |" in (whole / "report.md").read_text()
    assert (whole / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_commands_size_options_reach_the_engine(whole: Path) -> None:
    assert json.loads((whole / "data" / "settings.json").read_text())["max_model_len"] == 96


def test_the_report_has_no_speed_but_the_command_that_measures_it(whole: Path, tmp_path: Path) -> None:
    """The cost of drafts depends on kernels, torch and the host's part of a round."""
    report, page = json.loads((whole / "report.json").read_text()), (whole / "report.md").read_text()
    assert "speed_up" not in report
    assert report["measure"] in page
    name, *words = shlex.split(report["measure"])
    assert name == "paceline"
    options = ("--prompts", "open", "--batch-sizes", "1", "--max-tokens", "4", "--repeats", "1", "--threads", "1", "-q")
    measured = CliRunner().invoke(app, [*words, *options])
    assert measured.exit_code == 0, measured.output
    document = json.loads(measured.stdout.splitlines()[-1])
    assert document["draft_model"] is not None
    assert [result["side"] for result in document["results"]] == ["plain", "speculation"]


def test_the_measuring_command_includes_dtype_and_quantization() -> None:
    plan = TrainingRun(Path("my head"), DraftData(), DraftTraining(kind="model"), None, resume=False)
    wanted = "paceline bench offline MODEL --draft-model 'my head' --dtype auto --device cpu"
    assert measuring(plan, "MODEL", {"dtype": "auto", "quantization": None, "device": "cpu"}) == wanted
    int8 = measuring(plan, "MODEL", {"dtype": "auto", "quantization": "int8", "device": "cpu"})
    assert int8 == f"{wanted} --quantization int8"


def test_the_same_seed_gives_the_same_head_and_a_finished_run_is_not_overwritten(
    whole: Path, target: str, tmp_path: Path
) -> None:
    assert call(target, *SIZES, "--output", str(tmp_path)).exit_code == 0
    wanted = (whole / "model.safetensors").read_bytes()
    assert (tmp_path / "model.safetensors").read_bytes() == wanted
    assert call(target, *SIZES, "--output", str(tmp_path)).exit_code == 2, "without --resume nothing is overwritten"
    (tmp_path / "model.safetensors").unlink()
    assert call(target, *SIZES, "--output", str(tmp_path), "--resume").exit_code == 0
    assert (tmp_path / "model.safetensors").read_bytes() == wanted
    other = call(target, *SIZES, "--output", str(tmp_path), "--resume", "--learning-rate", "0.001")
    assert other.exit_code == 2
    assert "learning_rate" in other.stderr


@pytest.mark.parametrize("kind", HEAD_KINDS[1:])
def test_other_kinds_of_head_train_on_the_same_data_and_draft_losslessly(
    kind: str, whole: Path, target: str, tmp_path: Path
) -> None:
    shutil.copytree(whole / "data", tmp_path / "data")
    done = call(target, *SIZES, "--kind", kind, "--output", str(tmp_path), "--resume")
    assert done.exit_code == 0, done.stderr
    assert read_head_config(tmp_path).kind == kind
    for path in (whole / "data").iterdir():
        assert (tmp_path / "data" / path.name).read_bytes() == path.read_bytes(), "the data was reused"
    refused = call(target, *SIZES, "--output", str(tmp_path), "--resume")
    assert refused.exit_code == 2
    assert "--resume: kind" in refused.stderr
    options: EngineOptions = {"dtype": "bfloat16", "device": "cpu", "threads": 1, "max_model_len": 96}
    llm = LLM(target, str(tmp_path), **options, drafter="feature", num_speculative_tokens=4)
    params = [SamplingParams(temperature=heat, max_tokens=40, seed=5, ignore_eos=True) for heat in (0.0, 0.8)]
    prompts = ["a b c", "why is the sky blue?"]
    assert isinstance(llm.engine.models.draft, NativeBlock) == (kind == "dspark"), "it drafts on the CPU kernels"
    found = llm.generate(prompts, params, use_tqdm=False)
    plain = llm.plain().generate(prompts, params, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in plain]
    assert sum(each.outputs[0].metrics.accepted for each in found) > 0


def test_a_run_of_an_older_version_without_kinds_can_be_resumed(whole: Path, target: str, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "training.json").read_text())
    del settings["kind"], settings["layers"]
    (tmp_path / "training.json").write_text(json.dumps(settings))
    assert call(target, *SIZES, "--output", str(tmp_path), "--resume").exit_code == 0
    other = call(target, *SIZES, "--output", str(tmp_path), "--resume", "--kind", "parallel")
    assert other.exit_code == 2
    assert other.stderr.splitlines()[-1] == (
        f"error: --resume: kind='parallel' is not allowed: {tmp_path} was begun with 'feature': take that, or another "
        "directory"
    )


@pytest.mark.parametrize(
    ("option", "begun"), [(("--mlp-width", "80"), "without it"), (("--learning-rate", "0.001"), "with 0.002")]
)
def test_resuming_with_another_setting_names_the_original_one(
    whole: Path, target: str, tmp_path: Path, option: tuple[str, str], begun: str
) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    other = call(target, *SIZES, *option, "--output", str(tmp_path), "--resume")
    assert other.exit_code == 2
    assert f"{tmp_path} was begun {begun}: " in other.stderr.splitlines()[-1]


def test_another_attempt_on_the_same_data_may_have_other_settings(whole: Path, target: str, tmp_path: Path) -> None:
    """After training diverged, or was refused, before it had written anything."""
    shutil.copytree(whole / "data", tmp_path / "data")
    shutil.copy(whole / "training.json", tmp_path)
    done = call(target, *SIZES, "--output", str(tmp_path), "--resume", "--learning-rate", "0.001")
    assert done.exit_code == 0, done.stderr
    assert json.loads((tmp_path / "training.json").read_text())["learning_rate"] == 0.001


def test_answers_that_leave_no_room_for_questions_are_refused_and_leave_no_settings(
    target: str, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("why is the sky blue?\nwhy is it not?\n")
    line = [target, *SIZES, "--prompts", str(tmp_path / "prompts.txt"), "--output", str(tmp_path / "o")]
    for tokens in ("95", "96"):
        refused = call(*line, "--answer-tokens", tokens)
        assert refused.exit_code == 2
        assert "--max-model-len" in refused.stderr
    again = call(*line, "--minutes", "0.001")
    assert again.exit_code == 0, again.stderr


def test_a_disk_that_is_too_small_is_refused_with_the_space_needed(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = call(target, *SIZES, "--disk-budget", "0.000001", "--output", str(tmp_path))
    assert "error: --disk-budget=1e-06 is not allowed: at least 0.0" in budget.stderr
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 1 << 10))
    full = call(target, *SIZES, "--output", str(tmp_path))
    assert (
        f"error: --output={str(tmp_path)!r} is not allowed: on a disk with 0.00 GiB free; it needs 0.0" in full.stderr
    )
    for result in (budget, full):
        assert result.exit_code == 2
        assert "fewer --tokens" in result.stderr


def test_without_a_terminal_progress_is_printed_as_lines(whole: Path, target: str, tmp_path: Path) -> None:
    shutil.copytree(whole / "data", tmp_path / "data")
    line = [target, *(each for each in SIZES if each != "-q"), "--output", str(tmp_path), "--resume"]
    lines = call(*line).stderr.splitlines()
    assert "data: 100 %" in lines
    shares = [int(row.split()[1]) for row in lines if row.startswith("training: ")]
    assert shares[-1] == 100
    assert len(shares) > 3
    assert shares == sorted(set(shares)), "each tenth once"
    assert all(re.search(r"training: \d+ %, loss \d+\.\d+", row) for row in lines if row.startswith("training: "))
    assert call(*line, "-q").stderr == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "model", "--mlp-width", "9"], "whose layers are the target's"),
        (["--kind", "model", "--unroll", "2"], "learns all draft tokens from one pass"),
        (["--kind", "model", "--layers", "9"], "at most the target's 8"),
        (["--layers", "2"], "left out except with --kind model and --kind dspark"),
        (["--kind", "dspark", "--unroll", "1"], "2 to 8 with --kind dspark"),
        (["--kind", "hidden_transfer", "--mlp-width", "9"], "whose layers are the target's"),
        (["--kind", "features"], "'feature'"),
        (["--tokens", "0"], "tokens"),
        (["--prompts", "/no/such/file"], "--prompts"),
        (["--disk-budget", "0.000001"], "--disk-budget"),
        (["--mlp-width", "2000000000"], "--mlp-width"),
        (["--drafter", "ngram"], "No such option"),
    ],
)
def test_invalid_options_are_refused_before_any_work(
    target: str, tmp_path: Path, options: list[str], message: str
) -> None:
    result = call(target, *SIZES, *options, "--output", str(tmp_path / "new"))
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "new" / "data").exists()


def test_an_output_that_cannot_be_written_is_refused(target: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = call(target, *SIZES, "--output", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "a directory that can be written" in result.stderr


def test_a_target_with_too_few_layers_is_refused(tmp_path: Path) -> None:
    result = call(save_target(tmp_path / "flat", layers=4), *SIZES, "--output", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "at least 8 layers" in result.stderr


@pytest.mark.slow
def test_a_run_that_is_killed_repeatedly_gives_the_same_data_and_head(whole: Path, target: str, tmp_path: Path) -> None:
    """Five kills, during data collection and training, with a checkpoint after every step."""
    line = [sys.executable, "-m", "paceline.cli.main", "train-draft", target, *SIZES, "--output", str(tmp_path)]
    line += ["--resume", "--checkpoint-every", "0.0001"]
    environment = {**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parent.parent)}
    data = tmp_path / "data"
    for awaited in (
        data / "settings.json", data / "train-00000.safetensors", data / "train-00001.safetensors",
        tmp_path / "training.safetensors", tmp_path / "training.safetensors",
    ):  # fmt: skip
        before = awaited.stat().st_mtime_ns if awaited.exists() else 0
        with subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            wait_until_written(awaited, before, process)
            process.send_signal(signal.SIGKILL)
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for path in sorted((whole / "data").glob("*.safetensors")):
        assert (data / path.name).read_bytes() == path.read_bytes(), path.name
    ours, theirs = (json.loads((output / "report.json").read_text()) for output in (tmp_path, whole))
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
    assert (tmp_path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert not list(data.glob(".*.part.safetensors"))
    assert all((tmp_path / name).exists() for name in FILES)


def wait_until_written(path: Path, before: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the file is newer than ``before``, or the process has ended."""
    ends = time.monotonic() + 120
    while process.poll() is None and not (path.exists() and path.stat().st_mtime_ns > before):
        assert time.monotonic() < ends, f"{path} was not written"
        time.sleep(0.01)
