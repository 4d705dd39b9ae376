"""``paceline demo``: a real model answers eight prompts at once, with speculation and without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from paceline.cli.console import Sheet, note, stage_notes, stdout, working
from paceline.cli.options import DEFAULT_MODEL, Model
from paceline.config import DEFAULT_SPECULATION_LENGTH, DtypeName, EngineConfig, SamplingParams
from paceline.progress import Bar
from paceline.tools.bench.measure import BatchRun, run_batch
from paceline.tools.bench.prompts import COPYING

if TYPE_CHECKING:
    from paceline.llm import LLM

REPEATS = 3
LONGEST_PROMPT = 416  # tokens, whatever the vocabulary
ABOUT_THE_PROMPTS = (
    "The prompts ask to copy, correct or edit a text, the natural field of n-gram lookup; on open questions it gains "
    "little."
)


def demo(
    model: Model = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, help="Maximum tokens of an answer.")] = 96,
    num_speculative_tokens: Annotated[
        int, typer.Option("--num-speculative-tokens", "-k", help="Draft tokens a round.")
    ] = DEFAULT_SPECULATION_LENGTH,
    dtype: Annotated[DtypeName, typer.Option("--dtype", help="Precision.")] = EngineConfig.dtype,
) -> None:
    """Complete eight prompts in one batch with and without n-gram speculation; compare texts and times."""
    from paceline.models.files import hub

    if model in hub.EMBEDDED:
        hub.pull(model)
    with working(f"loading {model}"):
        from paceline.llm import LLM

    with stage_notes(quiet=False):
        llm = LLM(
            model,
            num_speculative_tokens=num_speculative_tokens,
            dtype=dtype,
            max_batch_size=len(COPYING),
            max_model_len=LONGEST_PROMPT + max_tokens,
        )
    note(llm.engine.describe())
    speculative, plain = compare(llm, max_tokens)
    show(stdout(), llm, speculative, plain)


def compare(llm: LLM, max_tokens: int, repeats: int = REPEATS) -> tuple[BatchRun, BatchRun]:
    """The median runs of the same greedy batch with speculation and without, alternating after a warm-up."""
    prompts = [llm.tokens_of_chat([{"role": "user", "content": prompt}]) for prompt in COPYING]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, keep_prefix=False)  # no run drafts from another
    sides = [llm, llm.plain()]
    with working("warming up"):
        for side in sides:
            run_batch(side, prompts, SamplingParams(temperature=0, max_tokens=4, keep_prefix=False))
    runs: list[list[BatchRun]] = [[], []]
    with Bar("batches", 2 * repeats) as bar:
        for _ in range(repeats):
            for side, done in zip(sides, runs, strict=True):
                done.append(run_batch(side, prompts, params))
                bar.change(advance=1)
    speculative, plain = (sorted(done, key=lambda run: run.seconds)[repeats // 2] for done in runs)
    return speculative, plain


def show(console: Console, llm: LLM, speculative: BatchRun, plain: BatchRun) -> None:
    """Print the table, the verdict, and what to try next."""
    columns = ["", "tokens/s", "ms/token\na sequence", "acceptance\nrate", "mean acc.\nlength", "rounds", "speed-up"]
    rows = [_row("plain", plain, plain), _row("speculation", speculative, plain)]
    title = f"{len(COPYING)} prompts in one batch, {plain.tokens} tokens, greedy, median of {REPEATS} runs"
    console.print(ABOUT_THE_PROMPTS + "\n")
    console.print(Sheet(title, columns, rows))
    console.print(verdict(llm, speculative, plain))
    console.print("Next: paceline chat, paceline serve; paceline bench offline measures more.")


def _row(name: str, run: BatchRun, plain: BatchRun) -> list[str]:
    rate = run.acceptance_rate
    return [
        name,
        f"{run.tokens_per_second:.1f}",
        f"{run.ms_per_token:.1f}",
        "" if rate is None else f"{rate:.1%}",
        f"{run.mean_acceptance_length:.2f}",
        str(run.rounds),
        f"{plain.seconds / run.seconds:.2f}x",
    ]


def verdict(llm: LLM, speculative: BatchRun, plain: BatchRun) -> str:
    """A sentence about whether both outputs are equal token by token, and where they differ."""
    pairs = list(zip(speculative.token_ids, plain.token_ids, strict=True))
    differing = [number for number, (ours, theirs) in enumerate(pairs, 1) if ours != theirs]
    if not differing:
        return "[bold green]The two outputs are equal, token by token.[/bold green]"
    precision = str(llm.engine.models.target.dtype).removeprefix("torch.")
    return (
        f"[bold yellow]{len(pairs) - len(differing)} of {len(pairs)} outputs are equal token by token[/bold yellow]; "
        f"prompts {', '.join(map(str, differing))} part at near-ties of {precision}: `paceline verify` shows each."
    )
