"""What a structure may cost."""

from __future__ import annotations

from dataclasses import dataclass

CONCURRENT_COMPILES = 8  # tried out side by side: they share the processor, so a short one waits for no long one
CACHED_GRAMMARS = 32  # grammars that are kept, and what was too much: refused without another trial
MAX_RECOMPILE_SECONDS = 0.02  # to compile a grammar again in the middle of a round; ordinary ones take 1 to 5 ms
MAX_SCHEMA_CHARACTERS = 2**18  # characters of a schema
MAX_REGEX_CHARACTERS = 4096  # characters of a regular expression


@dataclass(frozen=True)
class GrammarLimits:
    """What one grammar may cost.

    compile_cpu_seconds: of the processor; ordinary schemas take some milliseconds. compile_wall_seconds: seconds of the clock; a
        busy machine gives a process little of its time. compile_memory_bytes: bytes of address space more than Python and
        llguidance take. compile_stack_bytes: bytes; a quarter of what threads have, so that what that process survives the
        engine survives, too. trial_tokens: a new grammar is led through so many before an answer depends on it.
    mask_fuel, mask_items: what llguidance may work out of its lexer and of its parser for a mask: up to 15 ms;
        ordinary ones take 10 to 50 microseconds.
    lexer_states: with some 2 kB each; ordinary grammars have some hundreds.
    """

    compile_cpu_seconds: float = 2.0
    compile_wall_seconds: float = 20.0
    compile_memory_bytes: int = 512 * 2**20
    compile_stack_bytes: int = 2 * 2**20
    trial_tokens: int = 24
    mask_fuel: int = 500_000
    mask_items: int = 200_000
    lexer_states: int = 10_000
