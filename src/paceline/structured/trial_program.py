"""A program that compiles a grammar and goes some steps into it: ``python trial_program.py LIMITS < GRAMMAR``.

What a request asks for may hang, grow or crash; here it does so before the engine compiles it. (llguidance 1.9
overflows its stack on ``{"const": -9223372036854775807}``.) Nothing of paceline is imported: it starts in a tenth of a
second.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_OWN_MEMORY = 64 * 2**20  # bytes of address space that Python and llguidance take, twice over


def compiled(tokens: LLTokenizer, grammar: str, limits: Mapping[str, Any]) -> LLMatcher:
    """A matcher at the beginning of a grammar, which keeps the error if there is one."""
    from llguidance import LLMatcher, LLParserLimits

    counted = LLParserLimits(
        step_lexer_fuel=limits["mask_fuel"],
        step_max_items=limits["mask_items"],
        max_lexer_states=limits["lexer_states"],
        verbose_errors=False,
    )
    return LLMatcher(tokens, grammar, log_level=0, limits=counted)


def walk(matcher: LLMatcher, ends: Collection[int], steps: int) -> None:
    """Lead a matcher along so many tokens at random; it stops at an error, which it keeps."""
    chance = random.Random(0)
    for _ in range(steps):
        mask = matcher.compute_bitmask()
        places = [place for place, byte in enumerate(mask) if byte]
        if matcher.is_error() or not places:
            return
        place = chance.choice(places)
        token = 8 * place + chance.choice([bit for bit in range(8) if mask[place] >> bit & 1])
        if token in ends or not matcher.consume_token(token):
            return


def main() -> None:
    """Say what llguidance says, as JSON; the kernel ends this process at its limits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a server that is to end still finishes its answers
    told = json.loads(sys.argv[1])
    sys.path[:0] = told["paths"]
    signal.setitimer(signal.ITIMER_PROF, told["compile_cpu_seconds"])
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_STACK, told["compile_stack_bytes"])
    _limit(resource.RLIMIT_AS, _OWN_MEMORY + told["compile_memory_bytes"])
    from llguidance import LLTokenizer

    tokens = LLTokenizer("byte")
    matcher = compiled(tokens, sys.stdin.read(), told)
    compiling = matcher.get_error()
    walk(matcher, tokens.eos_tokens, told["trial_tokens"])
    sys.stdout.write(json.dumps({"compiling": compiling, "following": matcher.get_error()}))


def _limit(kind: int, size: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


if __name__ == "__main__":
    main()
