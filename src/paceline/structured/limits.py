"""Limits on the cost of structures."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.limits import MAX_SCHEMA_CHARACTERS

CONCURRENT_COMPILES = 8  # structures compiled at a time, so that a simple one does not wait for a complex one
CACHED_GRAMMARS = 32  # compiled grammars in the cache; refusals are cached, too
MAX_RECOMPILE_SECONDS = 0.02  # a grammar is recompiled within a round only if that is faster; usual: 1 to 5 ms
MAX_REGEX_CHARACTERS = 4096


@dataclass(frozen=True)
class GrammarLimits:
    """Limits on the cost of one grammar.

    characters: length of a schema, pattern or grammar, and of the grammar that is made of tools.
    schema_parts: schemas within a schema, and references that are followed; an object with this many properties
        compiles in a third of a second.
    compile_cpu_seconds: CPU time of translation and trial compilation; ordinary schemas take a few milliseconds.
    compile_wall_seconds: wall-clock time of it, larger because the machine may be busy.
    compile_memory_bytes: address space beyond that of Python and llguidance.
    compile_stack_bytes: a quarter of a thread's stack, so that a grammar that passes the trial cannot overflow the
        engine's.
    trial_tokens: random tokens that a new grammar has to accept before an answer may use it.
    mask_fuel, mask_items: steps of llguidance's lexer and items of its parser for one mask. The limits correspond to
        about 15 ms; ordinary masks take 10 to 50 microseconds.
    lexer_states: about 2 kB each; ordinary grammars have a few hundred.
    """

    characters: int = MAX_SCHEMA_CHARACTERS
    schema_parts: int = 2000
    compile_cpu_seconds: float = 2.0
    compile_wall_seconds: float = 20.0
    compile_memory_bytes: int = 512 * 2**20
    compile_stack_bytes: int = 2 * 2**20
    trial_tokens: int = 24
    mask_fuel: int = 500_000
    mask_items: int = 200_000
    lexer_states: int = 10_000
