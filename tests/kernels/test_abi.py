"""Python and the compiler agree about the structs and functions of the C interface, and a disagreement is an error."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.kernels import abi, build, native

needs_sources = pytest.mark.skipif(not build.source_hash(), reason="installed without the C++ sources")
needs_extension = pytest.mark.skipif(not native.available(), reason=native.why_none())
PYTHON = Path(abi.__file__)


def check(sources: Path) -> str:
    """Why what bindings.py writes is not up to date; empty if it is."""
    command = [sys.executable, str(sources / "bindings.py"), "--check"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


@needs_sources
def test_the_interface_is_what_the_headers_declare() -> None:
    assert check(build.SOURCES) == ""


@needs_sources
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (
            "kernels.h",
            "const float* scales;  // int8: one per column\n  const float* bias;",
            "const float *bias, *scales;",
        ),
        ("model.h", "int32_t tap_count, target_width;", "int32_t target_width, tap_count;"),
        ("model.h", "kGeluTanh = 1, kClampedSilu = 2", "kClampedSilu = 1, kGeluTanh = 2"),
        ("gain.h", "int64_t stop_count;", "int32_t stop_count;"),
        ("lookup.h", "  int64_t first;\n", "  int64_t first;\n  int64_t last;\n"),
        ("capi.cpp", "int64_t token, float* out", "float* out, int64_t token"),
    ],
)
def test_a_change_of_a_declaration_stops_the_build_until_python_knows_it(
    tmp_path: Path, file: str, old: str, new: str
) -> None:
    sources, copy = tmp_path / "csrc", tmp_path / "src" / "paceline" / "kernels" / PYTHON.name
    shutil.copytree(build.SOURCES, sources)
    copy.parent.mkdir(parents=True)
    shutil.copyfile(PYTHON, copy)
    text = (sources / file).read_text()
    assert text.count(old) == 1
    (sources / file).write_text(text.replace(old, new))
    assert str(copy) in check(sources)
    if build.compiler() is not None:
        with pytest.raises(build.BuildError, match="not up to date"):
            build.build(tmp_path, sources)
    subprocess.run([sys.executable, str(sources / "bindings.py")], check=True)
    assert check(sources) == ""
    assert copy.read_text() != PYTHON.read_text()


@needs_extension
def test_a_field_elsewhere_than_the_compiler_has_it_is_named() -> None:
    library = native.available()[0].library
    assert native._misplaced(library.pl_layout()) is None
    count = sum(1 + len(struct._fields_) for struct in abi.STRUCTS)
    layout = (ctypes.c_int32 * count).from_buffer_copy((ctypes.c_int32 * count).from_address(library.pl_layout()))
    layout[1], layout[7] = layout[7], layout[1]
    assert native._misplaced(ctypes.addressof(layout)) == "CLinear.bias"


@needs_extension
def test_a_library_with_other_structs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class CLinear(ctypes.Structure):
        _fields_ = (
            *abi.CLinear._fields_[:1],
            abi.CLinear._fields_[2],
            abi.CLinear._fields_[1],
            *abi.CLinear._fields_[3:],
        )

    monkeypatch.setattr(native, "STRUCTS", (CLinear, *abi.STRUCTS[1:]))
    refused = native._open(native.library_path())
    assert isinstance(refused, str)
    assert "CLinear.bias" in refused
