"""Users' files: read as text, checked before the work, written whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.config.files import check_output, read_text, write_text, written_whole
from paceline.errors import ParameterError


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfh\xc3\xa9\r\n")
    assert read_text("--text", tmp_path / "a") == "h\u00e9\r\n"


@pytest.mark.parametrize("content", [b"\xff\xfea\0", b"\x80", None])
def test_what_is_no_text_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a").write_bytes(content)
    with pytest.raises(ParameterError, match=r"^--text=.*UTF-8"):
        read_text("--text", tmp_path / "a")


def test_checking_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("kept")
    check_output("--output", tmp_path / "old", tmp_path / "new", None)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "kept"


@pytest.mark.parametrize("name", ["absent/a", ".", "old/a", "x" * 300, "dangling"])
def test_what_cannot_be_written_is_named_before_the_work(tmp_path: Path, name: str) -> None:
    (tmp_path / "old").write_text("kept")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent" / "b")
    with pytest.raises(ParameterError, match=r"^--output="):
        check_output("--output", tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ParameterError, match=r"^--output="):
        check_output("--output", tmp_path / "a")


def test_what_killed_processes_left_is_swept_a_day_later_and_nothing_else(tmp_path: Path) -> None:
    old, new, others = ".0123456789ab.part.job", ".0123456789ac.part", [".part", "a.part", ".0123456789ab.parts", ".b"]
    for name in (old, new, *others):
        (tmp_path / name).write_text("half")
        if name != new:
            os.utime(tmp_path / name, (0, 0))
    write_text(tmp_path / "a", "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([new, *others, "a"])


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "one")

    def interrupted() -> None:
        with written_whole(tmp_path / "a") as part:
            part.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "a").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_safetensors_files_may_be_read_by_whom_other_files_may(tmp_path: Path) -> None:
    with written_whole(tmp_path / "weights.safetensors") as part:
        save_file({"a": torch.zeros(2)}, part)
    (tmp_path / "plain").touch()
    assert (tmp_path / "weights.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"
    check_output("--output", Path(os.devnull))
    write_text(Path(os.devnull), "nothing")
    assert not Path(os.devnull).is_file()
