"""Regular expressions: what is followed, and what is refused by name."""

from __future__ import annotations

import re
import time

import pytest

from paceline.errors import StructureError
from paceline.structured.patterns import alphabet, class_of, common, rewritten, union, without
from paceline.structured.schemas import grammar_of

EVERYTHING = alphabet(())


def plain(pattern: object) -> str:
    return rewritten(pattern, EVERYTHING)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("^(.{1,128}.{1,128}){1,128}$", "32770 characters"),
        ("a{3,900}", "900"),
        ("((a{100}){100}){100}", "1000000"),
        ("a^b", "an anchor inside"),
        ("a$b", "an anchor inside"),
        ("(^a)", "an anchor inside"),
        (r"\Aab", "an anchor that not all"),
        (r"ab\Z", "an anchor that not all"),
        ("a(?=b)", "looks around"),
        ("(?i)a", "sets flags"),
        ("(?P<n>a)", "has a name"),
        ("(?>a)", "never goes back"),
        (r"\bword", "look around"),
        (r"(a)\1", "matched before"),
        ("[]a]", "empty class"),
        ("a{,3}", "count without its beginning"),
        ("a++", "possessive"),
        ("(", "broken"),
        ("*", "broken"),
        (r"\p{L}", "broken"),
        ("[\ud800-\udfff]", "spell U\\+D800"),
        (3, "is a text"),
        (None, "is a text"),
    ],
)
def test_what_would_not_be_followed_is_refused_at_once(pattern: object, says: str) -> None:
    started = time.process_time()
    with pytest.raises(StructureError, match=says):
        plain(pattern)
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("^a|b$", ["a", "b"], ["ab", ""]),
        (r"\d+\s?\w{2,3}", ["12 ab", "1abc"], ["٣ab", "1", "1 abcd"]),
        (r"\D\S\W", ["xé-", "é.é"], ["1x-", "x\xa0-", "xyz"]),
        ("a.c", ["abc", "a-c", "a\tc"], ["a\nc", "a\u2028c", "ac"]),
        (r"[^a-c\]]*?", ["xyz", "", "\n"], ["a", "]"]),
        (r"\\\[\/\-\.\x41\u00e9", ["\\[/-.Aé"], ["a"]),
        ("(?:a|b(c|d)){2}", ["abc", "bdbd"], ["a", "abd bd"]),
        (r"[\\\[^-]+", ["\\[^-"], ["a"]),
        ("", [""], ["a"]),
    ],
)
def test_a_pattern_means_what_it_says(pattern: str, yes: list[str], no: list[str]) -> None:
    """What is written anew has one meaning in all dialects, so Python's tells it, too."""
    anew = re.compile(plain(pattern))
    assert all(anew.fullmatch(text) for text in yes)
    assert not any(anew.fullmatch(text) for text in no)


def test_sets_of_characters() -> None:
    assert union([(5, 9), (1, 4)], [(20, 30)]) == ((1, 9), (20, 30))
    assert without(((0, 100),), [(0, 3), (10, 20), (99, 200)]) == ((4, 9), (21, 98))
    assert common(((0, 10), (20, 30)), ((5, 25),)) == ((5, 10), (20, 25))
    assert re.fullmatch(class_of(((ord("\\"), ord("^")), (ord("-"), ord("-")))) + "+", "\\]^-")


def test_the_alphabet_leaves_out_what_begins_with_a_byte_that_has_no_token() -> None:
    missing = {0x04, 0xC0, 0xC1, 0xC3, 0xE2, 0xF1, *range(0xF5, 0x100)}
    spelled = alphabet(missing)
    for code in [*range(0x3000), *range(0xD700, 0x11000), *range(0x10000, 0x110000, 997)]:
        surrogate = 0xD800 <= code <= 0xDFFF
        fits = not surrogate and not set(chr(code).encode()) & missing
        assert any(low <= code <= high for low, high in spelled) == fits, hex(code)


def test_a_class_lets_nothing_through_but_utf8() -> None:
    """Every beginning of two bytes."""
    llguidance = pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")
    grammar = grammar_of("regex", class_of(alphabet([])) + "{2}")
    start = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    sample = [*range(0x1100), *range(0x1100, 0x110000, 64)]
    begin = {bytes(chr(code).encode()[:2]) for code in sample if not 0xD800 <= code < 0xE000}
    for first in range(0x80, 0x100):
        for second in range(0x70, 0xD0):
            two = bytes([first, second])
            assert (start.deep_copy().try_consume_tokens(list(two)) == 2) == (two in begin), two.hex()
