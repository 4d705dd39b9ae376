"""Regular expressions: which are supported, and which are refused by name."""

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
    ("pattern", "message"),
    [
        ("^(.{1,128}.{1,128}){1,128}$", "32770 characters"),
        ("a{3,900}", "900"),
        ("((a{100}){100}){100}", "1000000"),
        ("a^b", "an anchor inside"),
        ("a$b", "an anchor inside"),
        ("(^a)*", "an anchor inside"),
        ("(a(^b))", "an anchor inside"),
        ("(|x)^b", "an anchor inside"),
        ("(|^)" * 20, "more than 64 alternatives"),
        (r"\Aab", "an anchor that not all"),
        (r"ab\Z", "an anchor that not all"),
        ("a(?=b)", "a lookaround"),
        ("(?i)a", "flags"),
        ("(?P<n>a)", "a named"),
        ("(?>a)", "an atomic group"),
        (r"\bword", "a word boundary"),
        (r"(a)\1", "a backreference"),
        ("[]a]", "empty class"),
        ("a{,3}", "count without a minimum"),
        (r"[a-z(]\((?=b)", "a lookaround"),
        (r"\\\\(?=a)", "a lookaround"),
        (r"[^(?]+(?i)", "flags"),
        (r"[\b]", "a word boundary"),
        ("[" * 4096, "broken"),
        ("[" * 16384, "16384 characters"),
        (r"[(?=a\b]", "a word boundary"),
        ("a++", "possessive"),
        ("(", "broken"),
        ("*", "broken"),
        (r"\p{L}", "broken"),
        ("[\ud800-\udfff]", "spell U\\+D800"),
        (3, "has to be a text"),
        (None, "has to be a text"),
    ],
)
def test_unsupported_patterns_are_refused_quickly(pattern: object, message: str) -> None:
    started = time.process_time()
    with pytest.raises(StructureError, match=message):
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
        ("^a$|^b$", ["a", "b"], ["ab", "^a"]),
        (r"^foo$|^foobar$|^\d+$", ["foo", "foobar", "12"], ["foob", ""]),
        (r"^$|^b$", ["", "b"], ["a"]),
        (r"[^\s@]+", ["a.b"], ["a\u00a0b", "a b", "\u2003"]),
        (r"[^\S]+", [" \t"], ["\u00a0", "a"]),
        (r"^\(?\d{3}\)?[-. ]?\d{4}$", ["(030) 1234", "030-1234"], ["030--1234"]),
        (r"[a-z.,!(?)]+\{,x", ["(why?){,x"], ["{,x"]),
        ("((^a)|(b$))", ["a", "b"], ["ab", "^a"]),
    ],
)
def test_the_rewritten_pattern_matches_the_same_texts(pattern: str, yes: list[str], no: list[str]) -> None:
    """A rewritten pattern has the same meaning in all dialects, so Python's can test it."""
    rewritten_pattern = re.compile(plain(pattern))
    assert all(rewritten_pattern.fullmatch(text) for text in yes)
    assert not any(rewritten_pattern.fullmatch(text) for text in no)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (r"\S", ["J", " John ", "\n.\n"], ["", " \t"]),
        ("^https?://", ["http://", "https://a.b/c"], ["see http://", "ftp://"]),
        ("a$", ["a", "\nba"], ["ab", "a\n", ""]),
        ("^a$", ["a"], ["aa", "a\n", "ba"]),
        ("^a|b$", ["a", "axx", "b", "xxb"], ["xa", "bx"]),
        ("^(a|b)$|c", ["a", "b", "xcx"], ["ab", ""]),
        ("^a$|^b$|^cd", ["a", "b", "cde"], ["ab", "xa", "bx", "xcd"]),
        ("(^|,)a(,|$)", ["a", "b,a", "a,b", "x,a,y"], ["ab", "ba", "b,ab"]),
        ("((^a)|(b$))", ["ax", "xb"], ["xa", "bx"]),
        ("^(a$|b)", ["a", "bx"], ["ax", "xb"]),
        ("", ["", "x\n"], []),
        ("^$", [""], ["x", "\n"]),
        ("^", ["", "x"], []),
    ],
)
def test_the_pattern_of_a_schema_is_searched(pattern: str, yes: list[str], no: list[str]) -> None:
    """As ECMA's test() does: unlike Python's, its $ matches only at the very end."""
    found = re.compile(rewritten(pattern, EVERYTHING, searched=True))
    assert [text for text in yes if not found.fullmatch(text)] == []
    assert [text for text in no if found.fullmatch(text)] == []


def test_sets_of_characters() -> None:
    assert union([(5, 9), (1, 4)], [(20, 30)]) == ((1, 9), (20, 30))
    assert without(((0, 100),), [(0, 3), (10, 20), (99, 200)]) == ((4, 9), (21, 98))
    assert common(((0, 10), (20, 30)), ((5, 25),)) == ((5, 10), (20, 25))
    assert re.fullmatch(class_of(((ord("\\"), ord("^")), (ord("-"), ord("-")))) + "+", "\\]^-")


def test_the_alphabet_has_no_characters_that_begin_with_a_byte_without_token() -> None:
    missing = {0x04, 0xC0, 0xC1, 0xC3, 0xE2, 0xF1, *range(0xF5, 0x100)}
    spelled = alphabet(missing)
    for code in [*range(0x3000), *range(0xD700, 0x11000), *range(0x10000, 0x110000, 997)]:
        surrogate = 0xD800 <= code <= 0xDFFF
        fits = not surrogate and not set(chr(code).encode()) & missing
        assert any(low <= code <= high for low, high in spelled) == fits, hex(code)


def test_a_class_allows_only_valid_utf8() -> None:
    """Checked for every pair of first bytes."""
    llguidance = pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")
    grammar = grammar_of("regex", class_of(alphabet([])) + "{2}")
    start = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    sample = [*range(0x1100), *range(0x1100, 0x110000, 64)]
    begin = {bytes(chr(code).encode()[:2]) for code in sample if not 0xD800 <= code < 0xE000}
    for first in range(0x80, 0x100):
        for second in range(0x70, 0xD0):
            two = bytes([first, second])
            assert (start.deep_copy().try_consume_tokens(list(two)) == 2) == (two in begin), two.hex()
