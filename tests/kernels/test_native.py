import os
import subprocess
import sys
from functools import cache

import psutil
import pytest

from paceline.errors import ParameterError
from paceline.kernels import build, native

needs_extension = pytest.mark.skipif(not native.available(), reason=native.why_none())


def test_off_selects_no_kernels(monkeypatch):
    monkeypatch.setenv(native.VARIABLE, "off")
    assert native.select() is None


def test_an_unknown_choice_is_refused():
    with pytest.raises(ParameterError, match="one of auto"):
        native.select("neon")


@needs_extension
def test_the_variable_forces_an_instruction_set(monkeypatch):
    for kernels in native.available():
        choice = next(name for name, names in native.CHOICES.items() if name != "auto" and kernels.name in names)
        monkeypatch.setenv(native.VARIABLE, choice)
        chosen = native.select()
        assert chosen is not None
        assert chosen.name in native.CHOICES[choice]


def test_an_unavailable_instruction_set_is_refused_not_replaced(monkeypatch):
    monkeypatch.setattr(native, "available", lambda: ())
    with pytest.raises(ParameterError, match="not available here"):
        native.select("avx512")
    assert native.select("auto") is None


@pytest.fixture
def loaded_anew(monkeypatch):
    """Let the test load the library again; the one that other tests have stays."""
    for name in ("_load", "available"):
        monkeypatch.setattr(native, name, cache(getattr(native, name).__wrapped__))


@pytest.mark.usefixtures("loaded_anew")
def test_a_missing_library_is_explained(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_BUILD_DIR", str(tmp_path))
    assert native.available() == ()
    assert native.why_none().startswith("the C++ extension is not built")


@needs_extension
@pytest.mark.usefixtures("loaded_anew")
def test_an_unusable_library_is_logged_and_models_run_in_torch(monkeypatch, caplog):
    """Changed sources without a new build would otherwise only be noticed as slowness."""
    monkeypatch.setattr(native, "INTERFACE", "")
    assert native.select("auto") is native.select("auto") is None
    assert caplog.text.count("built from other sources") == 1
    assert "models run in torch" in caplog.text


def test_the_build_reports_a_missing_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "compiler", lambda: None)
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.build(tmp_path)


@needs_extension
def test_zero_threads_are_refused():
    with pytest.raises(ParameterError, match="threads"):
        native.pool(native.available()[0], 0)


@needs_extension
def test_an_arena_refuses_more_than_its_size():
    arena = native.Arena(native.available()[0].library, 200)
    assert arena.take(100).numel() == 100
    with pytest.raises(MemoryError):
        arena.take(100)


@needs_extension
@pytest.mark.parametrize("kernels", [*native.available(), *native.emulated()], ids=lambda kernels: kernels.name)
def test_every_instruction_set_passes_the_self_check_that_amx_must_pass_before_it_is_used(kernels):
    assert kernels.library.pl_multiplies_correctly(kernels.handle)


@needs_extension
@pytest.mark.parametrize("name", native.EMULATED)
def test_emulated_sets_run_only_if_asked_for(monkeypatch, name):
    assert all(kernels.name != name for kernels in native.available())
    if not any(kernels.name == name for kernels in native.emulated()):
        pytest.skip(f"{name}: {native.why_not(name)}")
    monkeypatch.setenv(native.VARIABLE, name)
    chosen = native.select()
    assert chosen is not None
    assert chosen.name == name


def test_the_reason_for_not_using_a_faster_set_is_reported(monkeypatch):
    monkeypatch.setattr(native, "available", lambda: ())
    monkeypatch.setattr(native, "why_not", lambda name: "it is Sunday" if name == "amx" else native._LACKING)
    with pytest.raises(ParameterError, match="not amx: it is Sunday"):
        native.select("amx")
    assert native.faster_obstacle("none") == "not amx: it is Sunday"


@needs_extension
def test_of_the_sets_that_the_processor_lacks_the_next_faster_one_is_named(monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda name: native._LACKING)
    assert native.faster_obstacle("avx2").startswith("not avx512-bw: the processor")
    assert native.faster_obstacle("amx") == ""


@needs_extension
def test_every_set_runs_or_has_an_obstacle():
    running = {kernels.name for kernels in (*native.available(), *native.emulated())}
    for name in (*native.SETS, *native.EMULATED):
        assert (name in running) == (native.why_not(name) == "")
    assert native.why_not("avx3").startswith("this library has no kernels")


@pytest.mark.skipif(build.compiler() is None, reason="needs a compiler")
def test_a_compiler_that_does_not_know_the_flags_is_noticed():
    assert not build._knows(build.compiler() or "", ("-mno-such-instructions",))


@needs_extension
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer's own memory has no limit")
def test_threads_that_the_system_refuses_are_an_error():
    resource = pytest.importorskip("resource", reason="Windows limits no process's memory")
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + (1 << 30)  # a thread's stack takes 2 MiB of it or more
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        with pytest.raises(ParameterError, match="threads=2000 is not allowed: fewer"):
            native.pool(native.available()[0], 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


GUARDED = """
import ctypes, torch
from kernels.tools import cache_for, random_spec
from paceline.core import row_tables
from paceline.core.nodes import Nodes
from paceline.models.native.model import NativeModel

libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *4 * [ctypes.c_int]]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def reserve(size):
    memory = libc.mmap(None, size + 4096, 3, 0x22, -1, 0)
    assert libc.mprotect(memory + size, 4096, 0) == 0
    return (ctypes.c_uint8 * size).from_address(memory)

row_tables._reserve = reserve
spec = random_spec(width=128, heads=2, kv_heads=1, head_dim=256, layers=1, max_positions=64)
model, cache, n = NativeModel(spec, "random", threads=1), cache_for(spec, rows=1, positions=23), 20
model.fill(Nodes(torch.arange(n), torch.zeros(n, dtype=torch.int64), torch.arange(n)), cache)
siblings = [[5, 6, 7], [0, 0, 0], [n, n + 1, n + 1], [n, n + 1, n + 2], [-1, 0, 0]]
print(model.forward(Nodes(*map(torch.tensor, siblings)), cache).hidden.shape[0])
"""


@needs_extension
def test_a_tree_at_the_end_of_a_cache_reads_nothing_beyond_it():
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", GUARDED], env=env, capture_output=True, text=True)
    assert done.stdout == "3\n", done.stderr
