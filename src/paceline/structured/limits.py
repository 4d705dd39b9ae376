"""What a structure may cost."""

from __future__ import annotations

from dataclasses import dataclass

AT_ONCE = 8  # compiling side by side: they share the processor, so a short one waits for no long one
NICE = 5  # while compiling: answers that are being decoded go before
KEPT = 16  # grammars that nobody uses, kept for the next request that asks for them
REFUSED_KEPT = 1024  # grammars that were too much: refused without another trial
MOST_TEXT = 2**18  # characters of a schema
MOST_PATTERN = 4096  # characters of a regular expression


@dataclass(frozen=True)
class Limits:
    """Of one grammar. Seconds are of the processor, waits of the clock; bytes are of address space.

    Ordinary schemas compile in some milliseconds, each counted place of a text in up to 20; a mask takes 10 to 200
    microseconds.

    compile_seconds, compile_wait, compile_memory: to compile it and to try it out; a busy machine gives a compiling
        process little of its time. trial_tokens: a new grammar is led through so many tokens before an answer depends
        on it.
    mask_seconds: for all masks of a round, besides ``place_seconds`` for each. mask_wait: the longest that a round
        stands still for its grammars.
    place_seconds: for a mask on the average; a grammar may be ``mask_seconds`` behind.
    follow_memory: bytes beyond those that it has when it is compiled.
    """

    compile_seconds: float = 5.0
    compile_wait: float = 20.0
    compile_memory: int = 512 * 2**20
    trial_tokens: int = 24
    mask_seconds: float = 0.5
    mask_wait: float = 2.0
    place_seconds: float = 0.01
    follow_memory: int = 128 * 2**20
