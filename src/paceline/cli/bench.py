"""``paceline bench``: measurements of speed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli.command import Command
from paceline.cli.console import Sheet, latency_table, note, stderr, working
from paceline.cli.document import command_line, end
from paceline.cli.flags import KEPT_FILES, with_flags
from paceline.cli.options import (
    DEFAULT_MODEL,
    EngineFlags,
    Model,
    Quiet,
    Repeats,
    refuse_given,
    speculation_length,
    whole_numbers,
)
from paceline.cli.questions import PromptsFile, questions_in, tokens_of
from paceline.config import LOOKS_UP
from paceline.config.files import check_output, write_text
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.cli.jobs import Job
    from paceline.llm import LLM
    from paceline.tools.bench.offline import OfflineResult

app = typer.Typer(no_args_is_help=True, help="Measure speed.")


def offline(
    context: typer.Context,
    engine: EngineFlags,
    model: Model = DEFAULT_MODEL,
    batch_sizes: Annotated[
        str, typer.Option("--batch-sizes", help="Prompts in a batch; several, separated by commas.")
    ] = "1,2,4,8",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of every answer.")] = 64,
    prompts: Annotated[
        Literal["mixed", "copying", "open", "stubs", "chat", "edits", "retrieval", "project"],
        typer.Option(
            "--prompts",
            help="Built-in texts: copying repeats its prompt (good for ngram), open does not. Conversations: stubs of "
            "functions, open chat, edits of programs, retrieval from a document, edits in a project (4,100 tokens).",
        ),
    ] = "mixed",
    prompts_file: PromptsFile = None,
    references: Annotated[
        bool,
        typer.Option(help="Give n-gram lookup the text that edits and retrieval repeat: the program, the document."),
    ] = True,
    repeats: Repeats = 3,
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="Time several speculation lengths side by side: 1,2,4,bass,auto.")
    ] = None,
    wrong_drafts: Annotated[
        bool,
        typer.Option("--wrong-drafts", help="Make every draft token wrong: speculation at its worst."),
    ] = False,
    compare: Annotated[
        Literal["transformers"] | None, typer.Option("--compare", help="Time another program with the same batches.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Also write the JSON document to a file.")] = None,
    round_log: Annotated[
        Path | None, typer.Option("--round-log", help="Write every round of the timed runs, as JSON lines.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Time plain decoding and speculation, batch by batch. The last line of stdout is one JSON document."""
    from paceline.engine.utilisation import arithmetic_of
    from paceline.tools.bench.offline import (
        Paceline,
        Transformers,
        document,
        has_references,
        logged_rounds,
        measure,
        prompts_for,
        sides_for,
    )

    check_output("--output", output)
    check_output("--round-log", round_log)
    asked = None
    if prompts_file is not None:
        refuse_given(context, "left out beside --prompts-file", "prompts", "references")
        asked = questions_in(prompts_file)
    kind = prompts if prompts_file is None else str(prompts_file)
    sizes = whole_numbers("--batch-sizes", batch_sizes)
    if max_tokens < 2:
        raise ParameterError("--max-tokens", max_tokens, "a whole number of at least 2")
    if lengths is not None:
        refuse_given(context, "left out beside --lengths, which sets it", "num_speculative_tokens")
    if engine.drafter is None:
        refuse_given(context, "left out beside --drafter none", "lengths", "wrong_drafts")
    if not has_references(kind):
        refuse_given(context, f"left out beside --prompts {kind}, which have none", "references")
    each = [] if lengths is None else [speculation_length(text) for text in lengths.split(",")]
    llm = replace(engine, prefix_cache=False).load(model, quiet)
    if llm.config.drafter is None:
        refuse_given(context, _NOTHING_DRAFTED, "lengths")
    if not llm.config.draft_tokens or each == [0]:
        refuse_given(context, _NOTHING_DRAFTED, "wrong_drafts")
    if not llm.config.looks_up or each == [0]:
        refuse_given(context, f"left out here; it needs {LOOKS_UP}", "references")
    copies = references and has_references(kind) and llm.config.looks_up and each != [0]
    others = [Transformers(model, llm)] if compare == "transformers" else []
    with working("measuring the machine's peak"):
        arithmetic = arithmetic_of(llm.engine.models.target, llm.engine.threads)
    results: list[OfflineResult] = []
    rounds: list[dict[str, Any]] = []
    for size in sizes:
        with working(f"batch of {size}"):
            batch, copied = prompts_for(llm, kind, size) if asked is None else (repeated(asked, size, llm), [])
            sides = sides_for(llm, size, each, wrong_drafts, others, copied if copies else None)
            if round_log is not None:
                sides = [side.recorded() if isinstance(side, Paceline) else side for side in sides]
            results += measure(sides, batch, max_tokens, repeats, arithmetic)
            rounds += logged_rounds(sides, size)
    if round_log is not None:
        write_text(round_log, "".join(f"{json.dumps(line)}\n" for line in rounds))
    stderr().print(_table(results, max_tokens, kind))
    rows = [(f"{r.side}, batch {r.batch_size}", r.median.latency, r.utilisation) for r in results]
    stderr().print(latency_table(rows))
    note(f"utilisation: arithmetic that ended up in answers, of {arithmetic.peak}")
    end(document(llm, command_line(), kind, results, copies, arithmetic), output)


def repeated(jobs: Sequence[Job], size: int, llm: LLM) -> list[list[int]]:
    """``size`` of the prompts, repeated from the first one if there are fewer."""
    return [tokens_of(llm, jobs[number % len(jobs)]) for number in range(size)]


def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="A document of bench offline.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Another one; its figures over those of A.")],
) -> None:
    """Compare two runs of bench offline: how many times faster B is than A, with 95 % intervals."""
    from paceline.tools.bench.compare import compared, different_settings, read_run

    runs = read_run(first), read_run(second)
    rows = compared(*runs)
    for name in different_settings(*runs):
        note(f"the runs differ in {name}: {runs[0][name]} and {runs[1][name]}")
    cells = [[row.side, str(row.batch_size), *row.texts] for row in rows]
    columns = ["", "batch", "tokens/s, A", "B", "B over A", "95 % interval", "acceptance\nlength, A", "B"]
    stderr().print(Sheet("bootstrap over the repeats of each run", columns, cells))
    end({"first": str(first), "second": str(second), "results": [dataclasses.asdict(row) for row in rows]}, None)


_NOTHING_DRAFTED = "left out here, where nothing is drafted: give -k 1 or more, --drafter ngram or a draft model"


app.command(cls=Command)(
    with_flags(offline, without={"max_batch_size", "prefix_cache", "prefix_memory", *KEPT_FILES})
)  # it has --batch-sizes and reads all prompts anew


app.command(cls=Command)(compare)


def _table(results: list[OfflineResult], tokens: int, prompts: str) -> Sheet:
    columns = ["", "batch", "prefill s", "decode s", "tokens/s", "ms/token\na sequence", "accepted", "speed-up"]
    rows = []
    for result in results:
        timing = result.median
        rows.append(
            [
                result.side,
                str(result.batch_size),
                f"{timing.prefill_seconds:.3f}",
                f"{timing.decode_seconds:.3f}",
                f"{result.tokens_per_second:.1f}",
                f"{result.ms_per_token:.1f}",
                "" if timing.acceptance_rate is None else f"{timing.acceptance_rate:.0%}",
                f"{result.speed_up:.2f}x",
            ]
        )
    fewer = any(result.output_tokens < tokens for result in results)
    title = f"{'at most ' if fewer else ''}{tokens} tokens an answer, {prompts} prompts, greedy, median"
    return Sheet(title, columns, rows)
