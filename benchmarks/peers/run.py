"""`make bench-peers`: the same prompts through paceline and the engines that a user would choose on a CPU.

Every configuration (peer, mode, batch size) is measured once per repeat; the peers alternate inside each repeat, and
while one is measured all others are stopped. A peer that fails is in the results with its error line. Progress goes to
stderr; the last line of stdout is the results as one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import config, contenders, report
from benchmarks.peers.config import PAIRS, Pair, Peer
from benchmarks.peers.environments import SetupError, ensure_environment, ensure_models
from benchmarks.peers.pool import Pool, WorkerSpec
from benchmarks.peers.schedule import Configuration, Measurement, Outcome, point

from paceline.tools.bench.sets import SETS, SetName

ROOM_FOR_SPECULATION = 32  # positions of a row beyond prompt and answer
# One run each; peers see the original of an edit only in its prompt.
PROMPT_SETS = ("stubs", "chat", "edits", "project")
OVERHEAD_GIB = 1.5  # memory of a worker besides its weights


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="make bench-peers ARGS=...", description=__doc__)
    names = ",".join(config.ALL_NAMES)
    parser.add_argument("--pair", choices=sorted(PAIRS), default="qwen", help="models (default: %(default)s)")
    parser.add_argument("--peers", type=_words, default=names, help="comma-separated (default: %(default)s)")
    precisions = ",".join(config.PACELINE_PRECISIONS)
    parser.add_argument("--precision", type=_words, default=precisions, help="paceline's (default: %(default)s)")
    parser.add_argument("--modes", type=_words, default=",".join(config.OWN_MODES), help="(default: %(default)s)")
    parser.add_argument("--prompts", choices=PROMPT_SETS, default="stubs", help="which set (default: %(default)s)")
    parser.add_argument("--batches", type=_numbers, default="1,2,4,8,16", help="at most 16 (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens per row (default: %(default)s)")
    parser.add_argument("--k", type=int, default=5, help="speculation length (default: %(default)s)")
    parser.add_argument("--paceline-k", help="paceline's own: a number or a policy's name (default: --k)")
    parser.add_argument("--paceline-options", type=json.loads, default={}, help="JSON: more options of its LLM")
    parser.add_argument("--contenders", type=Path, help="an earlier run's JSON: leave out what was far behind there")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every engine (default: %(default)s)")
    parser.add_argument("--budget-minutes", type=float, default=1e6, help="for measuring; installing is not counted")
    parser.add_argument("--call-seconds", type=float, default=420, help="limit of one run (default: %(default)s)")
    parser.add_argument("--start-seconds", type=float, default=900, help="limit of one start (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, help="the JSON file (default: benchmarks/results/peers-PAIR-PROMPTS-DATE.json)"
    )
    parser.add_argument("--plot", type=Path, default=config.PLOT, help="(default: docs/img/peers.png)")
    parser.add_argument("--setup-only", action="store_true", help="environments and models, no measurement")
    options = parser.parse_args(argv)
    _check(parser, options)
    return options


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[int]:
    return sorted({int(word) for word in _words(text)})


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for given, known in ((options.peers, ("paceline", *config.PEERS)), (options.modes, config.OWN_MODES)):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    if not options.batches or not 1 <= options.batches[0] <= options.batches[-1] <= 16:
        parser.error("--batches: from 1 to 16")
    if min(options.repeats, options.max_tokens, options.k, options.threads) < 1:
        parser.error("--repeats, --max-tokens, --k and --threads: at least 1")


def say(text: str) -> None:
    """Print progress."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


def prompt_ids(pair: Pair, chosen: SetName, count: int) -> list[list[int]]:
    """The prompts through the target's own chat template, or as plain text if it has none."""
    from paceline.models.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(config.model_source(pair.target))
    asked = SETS[chosen][:count]
    if tokenizer.huggingface.chat_template:
        return [tokenizer.chat(prompt.messages) for prompt in asked]
    return [tokenizer.encode(prompt.text) for prompt in asked]


class Plan:
    """The configurations of a run, and those that are skipped because their set-up failed or they are too slow."""

    def __init__(self, options: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> None:
        self._options, self._pair = options, PAIRS[options.pair]
        longest = max(map(len, prompts)) + options.max_tokens + ROOM_FOR_SPECULATION
        self._tokens_of_row = -(-longest // 64) * 64
        self.runnable: list[Configuration] = []
        self.not_run: list[Outcome] = []
        self._left_out = contenders.left_out(options.contenders) if options.contenders else {}
        for peer in config.chosen_peers(options.peers, options.precision):
            self._add(peer)

    def _add(self, peer: Peer) -> None:
        failure: str | None = None
        try:
            ensure_environment(peer, say)
            models = ensure_models(self._pair, peer, say)
        except SetupError as error:
            say(f"{peer.name}: set-up failed: {error}")
            models, failure = {}, f"set-up: {error}"
        for configuration in self._configurations(peer, models):
            behind = self._left_out.get(point(configuration))
            if failure is None and behind is None:
                self.runnable.append(configuration)
            else:
                self.not_run.append(Outcome(configuration, error=failure, left_out=behind))

    def _configurations(self, peer: Peer, models: dict[str, Path]) -> Iterator[Configuration]:
        modes = [mode for mode in self._pair.modes() if mode in peer.modes and mode in self._options.modes]
        for mode in modes:
            spec = self._spec(peer, [mode] if peer.split else modes, models)
            for batch in self._options.batches:
                yield Configuration(peer.name, peer.precision, mode, batch, self._k(peer), spec)

    def _k(self, peer: Peer) -> int | str:
        own = self._options.paceline_k
        if own is None or not peer.name.startswith("paceline"):
            return int(self._options.k)
        return int(own) if own.isdigit() else str(own)

    def _spec(self, peer: Peer, modes: Sequence[str], models: dict[str, Path]) -> WorkerSpec:
        draft = self._pair.draft if {"draft", "hybrid"} & set(modes) else None
        setup = {
            "target": str(models.get(self._pair.target, "")),
            "draft": str(models.get(draft, "")) if draft else None,
            "modes": list(modes),
            "precision": peer.precision,
            "k": self._options.k,
            "max_batch": self._options.batches[-1],
            "max_tokens_of_row": self._tokens_of_row,
            "threads": self._options.threads,
            "options": self._options.paceline_options if peer.name.startswith("paceline") else {},
        }
        weights = sum(gib for name, gib in self._pair.bf16_gib.items() if name in (self._pair.target, draft))
        script = config.HERE / "workers" / peer.worker
        return WorkerSpec(
            key=f"{peer.name}-{modes[0]}" if peer.split else peer.name,
            command=(str(peer.python), str(script), json.dumps(setup)),
            environment={"OMP_NUM_THREADS": str(self._options.threads), **peer.environment},
            need_gib=OVERHEAD_GIB + peer.memory * weights,
        )


class Recorder:
    """Keeps the results file up to date."""

    def __init__(self, options: argparse.Namespace, plan: Plan, prompts: Sequence[Sequence[int]]) -> None:
        self._date = datetime.datetime.now().astimezone()
        stamp = self._date.strftime("%Y%m%d-%H%M")
        self.path: Path = options.output or config.RESULTS / f"peers-{options.pair}-{options.prompts}-{stamp}.json"
        self._plan, self._machine, self._settings = plan, report.machine(), _settings(options, prompts)
        self.measurement: Measurement | None = None

    def document(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        measurement = self.measurement
        return {
            "benchmark": "peers",
            "date": self._date.isoformat(timespec="seconds"),
            "machine": self._machine,
            "settings": self._settings,
            "units": report.UNITS,
            "notes": measurement.notes if measurement else [],
            "workers": measurement.infos if measurement else {},
            "results": report.rows([*outcomes, *self._plan.not_run]),
        }

    def save(self, outcomes: Sequence[Outcome]) -> None:
        report.write_json(self.path, self.document(outcomes))


def _settings(options: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    pair, lengths = PAIRS[options.pair], [len(prompt) for prompt in prompts]
    kept = ("pair", "prompts", "batches", "repeats", "max_tokens", "k", "paceline_k", "paceline_options", "threads")
    return {
        **{name: getattr(options, name) for name in kept},
        "budget_minutes": options.budget_minutes,
        "contenders": options.contenders and options.contenders.name,
        "target": pair.target,
        "draft": pair.draft,
        "greedy": True,
        "ignore_eos": True,
        "prompt_tokens": lengths,
        "prompt_tokens_mean": sum(lengths) / len(lengths),
    }


def measure(options: argparse.Namespace, plan: Plan, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Run the plan, save as it goes, and return the document; an interrupt keeps the results so far."""
    recorder = Recorder(options, plan, prompts)
    logs = recorder.path.parent / "logs" / recorder.path.stem
    latest: list[Outcome] = []

    def saved(outcomes: list[Outcome]) -> None:
        latest[:] = outcomes
        recorder.save(outcomes)

    with contextlib.closing(Pool(logs, options.start_seconds, say)) as pool:
        deadline = time.monotonic() + 60 * options.budget_minutes
        measurement = Measurement(pool, prompts, options.max_tokens, options.call_seconds, deadline, say, saved)
        recorder.measurement = measurement
        try:
            measurement.run(plan.runnable, options.repeats)
        except KeyboardInterrupt:
            measurement.notes.append("interrupted")
    recorder.save(latest)
    for line in report.failures([*latest, *plan.not_run]):
        say(f"failed: {line}")
    say(f"written: {recorder.path}")
    return recorder.document(latest)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Set up, measure, write, plot. Returns the exit status: 0 even if peers failed, because that is a result."""
    options = arguments(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    prompts = prompt_ids(PAIRS[options.pair], options.prompts, options.batches[-1])
    plan = Plan(options, prompts)
    if options.setup_only:
        return 1 if any(outcome.error for outcome in plan.not_run) else 0
    document = measure(options, plan, prompts)
    report.plot([document], options.plot)
    say(f"drawn: {options.plot}\n{report.table(document['results'], options.prompts)}")
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
