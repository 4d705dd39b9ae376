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
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

_OWN_MEMORY = 64 * 2**20  # bytes of address space that Python and llguidance take, twice over


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
    told = json.loads(sys.argv[1])
    sys.path[:0] = told["paths"]
    signal.setitimer(signal.ITIMER_PROF, told["compile_seconds"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (told["compile_stack"], told["compile_stack"]))
    resource.setrlimit(resource.RLIMIT_AS, (_OWN_MEMORY + told["compile_memory"],) * 2)
    from llguidance import LLMatcher, LLTokenizer

    tokens = LLTokenizer("byte")
    matcher = LLMatcher(tokens, sys.stdin.read(), log_level=0)
    compiling = matcher.get_error()
    walk(matcher, tokens.eos_tokens, told["trial_tokens"])
    sys.stdout.write(json.dumps({"compiling": compiling, "following": matcher.get_error()}))


if __name__ == "__main__":
    main()
