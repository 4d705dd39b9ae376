"""``paceline eval``: quality of a model's answers within time budgets."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli.command import Command
from paceline.cli.console import Sheet, note, stderr, working
from paceline.cli.document import command_line, end, need_matplotlib
from paceline.cli.flags import KEPT_FILES, with_flags
from paceline.cli.options import DEFAULT_MODEL, EngineFlags, Model, Quiet, numbers, whole_numbers
from paceline.config import SamplingParams
from paceline.config.files import check_directory, write_text
from paceline.errors import MissingPackageError
from paceline.progress import steps_with_bar

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.tools.evaluation.curves import MeanWithError
    from paceline.tools.evaluation.journal import ProblemAnswers
    from paceline.tools.evaluation.problems import Problem
    from paceline.tools.evaluation.run import Configuration, ConfigurationResult, EvaluationPlan
    from paceline.tools.evaluation.sandbox import Sandbox

app = typer.Typer(no_args_is_help=True, help="Measure the quality of answers.")

StyleOption = Annotated[
    Literal["auto", "chat", "completion"],
    typer.Option("--style", help="Form of the problems; auto: chat if the model has a chat template."),
]
FILES = ("journal.jsonl", "samples.jsonl", "humaneval.json", "humaneval.png")
DEFAULT_ANSWERS, DEFAULT_BUDGETS, DEFAULT_MAX_TOKENS, DEFAULT_TEMPERATURE = "1,4,8", "1,2,3,5,8", 384, 0.8


def humaneval(
    engine: EngineFlags,
    model: Model = DEFAULT_MODEL,
    n: Annotated[
        str, typer.Option("--n", help="Answers to each problem; several numbers are compared.")
    ] = DEFAULT_ANSWERS,
    budget_max: Annotated[
        float | None, typer.Option("--budget-max", help="Seconds after which answers are cut. Default: never.")
    ] = None,
    budgets: Annotated[
        str, typer.Option("--budgets", help="Budgets in seconds that the table compares; those below --budget-max.")
    ] = DEFAULT_BUDGETS,
    style: StyleOption = "auto",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Maximum tokens of an answer.")] = DEFAULT_MAX_TOKENS,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = DEFAULT_TEMPERATURE,
    top_p: Annotated[float, typer.Option("--top-p", help="Nucleus, in [0, 1].")] = SamplingParams.top_p,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the first problem; the others count up.")] = 0,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Number of problems, from the first. Default: all.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", help="A directory for journal, samples, JSON document and plot.")
    ] = Path("humaneval"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue where the journal in --output ends.")] = False,
    weak_sandbox: Annotated[
        bool, typer.Option("--weak-sandbox", help="Run programs even where they can see this machine's files.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """HumanEval within time budgets: Pass@First and Pass@All of n answers, plain and with speculation.

    The programs that the model writes are run in a sandbox. The last line of stdout is one JSON document.
    """
    from paceline.tools.evaluation.problems import human_eval, style_of
    from paceline.tools.evaluation.run import EvaluationPlan, configurations_of
    from paceline.tools.evaluation.sandbox import Sandbox

    answers = tuple(sorted(set(whole_numbers("--n", n))))
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, time_budget=budget_max)
    looks = _budgets(budgets, budget_max)
    problems = human_eval()[:limit]
    need_matplotlib("eval")
    check_directory("--output", output, FILES[1:])
    box = Sandbox(weak=weak_sandbox)
    if not quiet or box.isolation.missing:
        note("programs run in a sandbox: " + "; ".join(box.isolation.holds))
        for missing in box.isolation.missing:
            note(f"missing on this machine: {missing}")
    llm = replace(engine, max_batch_size=max(answers)).load(model, quiet)
    form = style_of(llm.requests.tokenizer) if style == "auto" else style
    plan = EvaluationPlan(problems, answers, form, params, seed)
    configurations = configurations_of(llm, answers)
    answers_by_problem = _run(plan, configurations, box, output / FILES[0], resume, quiet)
    _finish(llm, plan, configurations, box, answers_by_problem, looks, output)


def _budgets(text: str, longest: float | None) -> list[float]:
    allowed = "seconds above 0, separated by commas"
    budgets = sorted(set(numbers("--budgets", text, float, lambda budget: 0 < budget < math.inf, allowed)))
    return [budget for budget in budgets if longest is None or budget < longest]


def _run(
    plan: EvaluationPlan, configurations: list[Configuration], box: Sandbox, path: Path, resume: bool, quiet: bool
) -> dict[str, ProblemAnswers]:
    """All problems' answers, those of an earlier run included."""
    from paceline.tools.evaluation.journal import Journal
    from paceline.tools.evaluation.run import evaluate, settings

    with working("identifying the models"):
        journal = Journal(path, settings(plan, configurations, box), resume=resume)
    wanted = [problem.task_id for problem in plan.problems]
    done = sum(name in journal.problems for name in wanted)

    def progress(steps: Iterable[Problem]) -> Iterable[Problem]:
        return steps_with_bar(steps, "problems", total=len(wanted), shown=not quiet, done=done)

    evaluate(plan, configurations, box, journal, progress)
    return {name: journal.problems[name] for name in wanted}


def _finish(
    llm: LLM,
    plan: EvaluationPlan,
    configurations: list[Configuration],
    box: Sandbox,
    answers_by_problem: dict[str, ProblemAnswers],
    looks: list[float],
    output: Path,
) -> None:
    """Print the tables; write the files and the document."""
    from paceline.tools.bench.offline import document
    from paceline.tools.evaluation.plot import draw
    from paceline.tools.evaluation.run import different_texts, failures, half_way, results, samples

    problems = list(answers_by_problem.values())
    measured = results(configurations, problems, looks)
    for sheet in _tables(measured, len(problems)):
        stderr().print(sheet)
    if (failed := failures(problems)) is not None:
        note(failed)
    lines = [json.dumps(sample) for sample in samples(answers_by_problem, configurations[-1])]
    write_text(output / FILES[1], "".join(f"{line}\n" for line in lines))
    draw(measured, output / FILES[3], f"HumanEval, {len(problems)} problems. {llm.engine.describe()}")
    about: dict[str, Any] = {
        "problems": list(answers_by_problem),
        "style": plan.style,
        "sampling": {**asdict(plan.params), "seed": plan.seed},
        "sandbox": asdict(box.isolation) | {"limits": asdict(box.limits)},
        "samples_of": configurations[-1].name,
        "half_way": [asdict(each) for each in half_way(configurations, problems)],
        "texts_changed_by_speculation": different_texts(configurations, problems),
        "files": {Path(name).suffix.strip("."): str(output / name) for name in FILES if name.endswith(("png", "json"))}
        | {"journal": str(output / FILES[0]), "samples": str(output / FILES[1])},
    }
    full = document(llm, command_line(), "HumanEval", []) | about | {"results": [asdict(result) for result in measured]}
    end(full, output / FILES[2])


def _tables(results: list[ConfigurationResult], problems: int) -> Iterable[Sheet]:
    """Three tables of at most 80 columns: two by budget, one for ranking and time."""
    budgets = [reading.budget for reading in results[0].at]
    columns = ["", *("end" if budget is None else f"{budget:g} s" for budget in budgets)]
    names = [f"{result.mode}, n={result.n}" for result in results]
    first = [[name, *(_percent(r.first) for r in result.at)] for name, result in zip(names, results, strict=True)]
    every = [[name, *(_percent(r.all) for r in result.at)] for name, result in zip(names, results, strict=True)]
    yield Sheet(f"Pass@First of {problems} problems, in percent", columns, first)
    yield Sheet("Pass@All, in percent", columns, every)
    columns = ["at the end, in percent", "pass@1", "ranked first less pass@1", "cut", "seconds", "all n", "accepted"]
    yield Sheet(
        "Ranking and time (± one standard error)",
        columns,
        [
            [
                name,
                _with_error(result.pass_at[1]),
                _with_error(result.ranking, sign="+"),
                f"{result.cut:.0%}",
                f"{result.seconds:.1f}",
                f"{result.seconds_to_all:.1f}",
                "" if result.acceptance_rate is None else f"{result.acceptance_rate:.0%}",
            ]
            for name, result in zip(names, results, strict=True)
        ],
    )


def _percent(share: MeanWithError) -> str:
    return f"{100 * share.mean:.1f}"


def _with_error(share: MeanWithError, sign: str = "") -> str:
    error = "" if share.error is None else f" ± {100 * share.error:.1f}"
    return f"{100 * share.mean:{sign}.1f}{error}"


app.command(cls=Command)(with_flags(humaneval, without={"max_batch_size", *KEPT_FILES}))  # it has --n


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lm_eval(context: typer.Context) -> None:
    """lm-evaluation-harness, with this engine as its model "paceline". All arguments are its own: lm_eval run --help.

    For example: paceline eval lm-eval run --model paceline --model_args pretrained=smollm2-135m --tasks arc_easy
    """
    try:
        import_module("paceline.tools.evaluation.harness")  # it registers the model
        main = import_module("lm_eval.__main__")
    except ModuleNotFoundError as error:
        raise MissingPackageError(error.name, "eval") from error
    device = ["--device", "auto"] if _lacks_device(context.args) else []
    sys.argv = ["paceline eval lm-eval", *context.args, *device]
    main.cli_evaluate()


def _lacks_device(arguments: Sequence[str]) -> bool:
    """Whether lm_eval would evaluate on its own default, cuda:0, because neither a flag nor a file names a device."""
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--device")
    flags.add_argument("--config", "-C")
    given, _ = flags.parse_known_args(arguments)
    if given.device or list(arguments) in ([], ["run"]) or arguments[0] in ("ls", "validate"):
        return False
    if given.config is None:
        return True
    config = import_module("lm_eval.config.evaluate_config").EvaluatorConfig
    return "device" not in config.load_yaml_config(given.config)
