"""A program that translates a structure, compiles it and follows it for a few tokens.

``python trial_program.py SETTINGS < JOB``, both JSON. A requested structure may take for ever to translate or compile,
use too much memory, or crash llguidance (1.9 overflows its stack on ``{"const": -9223372036854775807}``). This process
takes that risk before the engine compiles the grammar. Of paceline it imports only what translates, without torch and
numpy, so it starts in a tenth of a second.
"""

from __future__ import annotations

import json
import random
import signal
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

OWN_MEMORY_BYTES = 64 * 2**20  # twice the address space of Python and llguidance


def compiled(tokens: LLTokenizer, grammar: str, limits: Mapping[str, Any]) -> LLMatcher:
    """A matcher at the start of a grammar. If compilation fails, ``get_error`` of the matcher returns the error.

    limits: the fields of ``GrammarLimits``.
    """
    from llguidance import LLMatcher, LLParserLimits

    parser_limits = LLParserLimits(
        step_lexer_fuel=limits["mask_fuel"],
        step_max_items=limits["mask_items"],
        max_lexer_states=limits["lexer_states"],
        verbose_errors=False,
    )
    return LLMatcher(tokens, grammar, log_level=0, limits=parser_limits)


def walk(matcher: LLMatcher, ends: Collection[int], steps: int) -> None:
    """Advance a matcher by up to ``steps`` random tokens. It stops at an error, which ``get_error`` returns."""
    generator = random.Random(0)
    for _ in range(steps):
        mask = matcher.compute_bitmask()
        nonzero = [index for index, byte in enumerate(mask) if byte]
        if matcher.is_error() or not nonzero:
            return
        index = generator.choice(nonzero)
        token = 8 * index + generator.choice([bit for bit in range(8) if mask[index] >> bit & 1])
        if token in ends or not matcher.consume_token(token):
            return


def main() -> None:
    """Print the grammar and llguidance's errors, or why the structure is refused, as JSON.

    The kernel kills this process at its limits, or its parent where the kernel has none.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # a server that shuts down still finishes its answers
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(sys.argv[1])
    sys.path[:0] = settings["paths"]
    limits = settings["limits"]
    if settings["limits_itself"]:
        _limit_itself(limits)
    sys.stdout.write(json.dumps(_tried(json.load(sys.stdin), limits)))


def _tried(job: Mapping[str, Any], limits: Mapping[str, Any]) -> dict[str, Any]:
    from llguidance import LLTokenizer

    from paceline.errors import StructureError
    from paceline.structured.translation import translation

    try:
        result = translation(limits=limits, **job)
    except StructureError as error:
        return {"refused": str(error), "field": error.field}
    tokens = LLTokenizer("byte")
    matcher = compiled(tokens, result.trial, limits)
    compiling = matcher.get_error()
    walk(matcher, tokens.eos_tokens, limits["trial_tokens"])
    return {
        "grammar": result.grammar,
        "notes": result.notes,
        "compiling": compiling,
        "following": matcher.get_error(),
    }


def _limit_itself(limits: Mapping[str, Any]) -> None:
    import resource  # Windows has none

    signal.setitimer(signal.ITIMER_PROF, limits["compile_cpu_seconds"])
    sizes = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_STACK: limits["compile_stack_bytes"],
        resource.RLIMIT_AS: OWN_MEMORY_BYTES + limits["compile_memory_bytes"],
    }
    for kind, size in sizes.items():
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


if __name__ == "__main__":
    main()
