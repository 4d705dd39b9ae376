"""``paceline trace``: one answer, round by round, as a page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import note
from paceline.cli.document import as_text
from paceline.cli.options import DEFAULT_MODEL, EngineFlags, Model, Quiet, follow_recommendation
from paceline.config import SamplingParams
from paceline.config.files import check_output, write_text, written_whole
from paceline.errors import ParameterError

WITHOUT = {
    "n",
    "best_of",
    "rank_by",
    "logprobs",
    "max_batch_size",
    "rounds",
}  # one answer, in rounds that the host sees


def trace(
    context: typer.Context,
    engine: EngineFlags,
    sampling: SamplingParams,
    output: Annotated[Path, typer.Argument(metavar="OUT.html", help="The HTML page, a single file.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The prompt.")],
    model: Model = DEFAULT_MODEL,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the rounds to a file, as JSON.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Treat the prompt as a user's message.")] = False,
    quiet: Quiet = False,
) -> None:
    """Show an answer token by token, with the tree of draft tokens that each round verified."""
    if output.suffix.lower() not in (".html", ".htm"):
        raise ParameterError("OUT.html", str(output), "the page's path, which ends in .html; the model comes after it")
    check_output("OUT.html", output)
    check_output("--json", as_json)
    llm = replace(engine, max_batch_size=1, rounds="host").load(model, quiet)
    from paceline.tools.bench import syntax
    from paceline.tools.bench.trace import Tracer, document, page

    parts = llm.engine.parts
    tracer = llm.engine.use_policy(Tracer(parts.policy, drafter=parts.drafter))
    text_or_tokens = llm.tokens_of_chat([{"role": "user", "content": prompt}]) if chat else prompt
    params = follow_recommendation(context, llm, sampling, quiet, chat=chat)
    (result,) = llm.generate([text_or_tokens], params, use_tqdm=False)
    tokenizer, answer = llm.requests.tokenizer, result.outputs[0]
    nodes = syntax.node_kinds(answer.pieces) if syntax.available() else []
    text = page(llm.engine.describe(), answer, tracer.traced, tokenizer.token_text, nodes)
    with written_whole(output) as part:
        part.write_bytes(text.encode("utf-8", "backslashreplace"))
    if as_json is not None:
        write_text(
            as_json, as_text(document(llm.engine.describe(), answer, tracer.traced, tokenizer.token_text)) + "\n"
        )
    if not quiet:
        note(f"{output}: {len(answer.token_ids)} tokens in {len(tracer.traced)} rounds")
        if not syntax.available():
            note(f"acceptance by node of the syntax tree is left out; it needs: {syntax.MISSING}")
