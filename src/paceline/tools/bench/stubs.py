"""Sixteen functions to complete: signature and docstring. The answer repeats the stub, which flatters n-gram drafts."""

from __future__ import annotations

STUBS: tuple[str, ...] = (
    '''def merge_intervals(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join all intervals that overlap or touch.

    The input may be in any order, and start <= end holds for each pair. The result is sorted by start.
    An empty list gives an empty list. The input is not changed.

    >>> merge_intervals([(5, 8), (1, 3), (2, 4)])
    [(1, 4), (5, 8)]
    """''',
    '''def run_length_encode(text: str) -> list[tuple[str, int]]:
    """Describe a text as runs of equal characters, each with its length.

    The runs come in the order of the text, so joining char * count gives the text again.
    An empty text has no runs. Upper and lower case are different characters.

    >>> run_length_encode("aaabcc")
    [('a', 3), ('b', 1), ('c', 2)]
    """''',
    '''def binary_search(values: list[int], wanted: int) -> int:
    """Find the first position of wanted in values, which are sorted in ascending order.

    If wanted occurs several times, the leftmost position is returned. If it does not occur, -1 is returned.
    An empty list holds nothing. Takes logarithmic time.

    >>> binary_search([1, 3, 3, 7], 3)
    1
    """''',
    '''def roman_numeral(number: int) -> str:
    """Write a number from 1 to 3999 as a Roman numeral in its shortest form.

    Fours and nines are written by subtraction: IV, IX, XL, XC, CD, CM. Numbers outside the range raise
    a ValueError that names the number.

    >>> roman_numeral(1994)
    'MCMXCIV'
    """''',
    '''def matrix_transpose(rows: list[list[float]]) -> list[list[float]]:
    """Turn rows into columns: entry (i, j) of the result is entry (j, i) of the argument.

    All rows must have the same length, otherwise a ValueError is raised. A matrix without rows stays empty.
    The argument is not changed.

    >>> matrix_transpose([[1.0, 2.0], [3.0, 4.0]])
    [[1.0, 3.0], [2.0, 4.0]]
    """''',
    '''def word_frequencies(text: str, most: int) -> list[tuple[str, int]]:
    """Count the words of a text, without regard to case, and return the most frequent ones.

    Words are runs of letters; everything else separates them. Ties are broken alphabetically.
    At most `most` pairs are returned, the most frequent word first.

    >>> word_frequencies("The cat and the dog", 2)
    [('the', 2), ('and', 1)]
    """''',
    '''def is_balanced(text: str) -> bool:
    """Tell whether all brackets of a text are closed in the right order.

    Round, square and curly brackets count, all other characters are passed over. A closing bracket
    without its opening one makes the text unbalanced. The empty text is balanced.

    >>> is_balanced("f(a[0], {1: 2})")
    True
    """''',
    '''def sieve_of_primes(limit: int) -> list[int]:
    """List all primes up to and including limit, in ascending order.

    Uses the sieve of Eratosthenes and crosses out multiples from the square of each prime on.
    A limit below 2 gives an empty list. Negative limits are allowed.

    >>> sieve_of_primes(13)
    [2, 3, 5, 7, 11, 13]
    """''',
    '''def shortest_path(graph: dict[str, list[str]], start: str, goal: str) -> list[str] | None:
    """Find a path with the fewest edges from start to goal, by breadth-first search.

    The path holds both ends. If start equals goal, it is one node long. If there is no path, None is returned.
    Nodes without an entry in graph have no neighbours.

    >>> shortest_path({"a": ["b"], "b": ["c"]}, "a", "c")
    ['a', 'b', 'c']
    """''',
    '''def moving_average(values: list[float], window: int) -> list[float]:
    """Average every run of `window` neighbouring values, in linear time.

    The result has len(values) - window + 1 entries, and none if the window is longer than the list.
    A window below 1 raises a ValueError.

    >>> moving_average([1.0, 2.0, 3.0, 4.0], 2)
    [1.5, 2.5, 3.5]
    """''',
    '''def parse_key_values(text: str) -> dict[str, str]:
    """Read lines of the form "key = value" into a dictionary.

    Blanks around key and value are removed. Empty lines and lines that begin with # are passed over.
    A later line wins over an earlier one. A line without an equals sign raises a ValueError with its number.

    >>> parse_key_values("a = 1")
    {'a': '1'}
    """''',
    '''def levenshtein(first: str, second: str) -> int:
    """Count the fewest insertions, deletions and replacements of one character that turn first into second.

    Uses dynamic programming with two rows, so the memory is linear in the length of the second text.
    Two equal texts have distance 0.

    >>> levenshtein("kitten", "sitting")
    3
    """''',
    '''def flatten(nested: list[object]) -> list[object]:
    """Unfold lists inside lists, however deep, into one flat list in the same order.

    Only lists are unfolded; strings and tuples are kept as they are. Works without recursion, so that very
    deep lists do not exceed the recursion limit.

    >>> flatten([1, [2, [3, []]], "ab"])
    [1, 2, 3, 'ab']
    """''',
    '''def caesar_cipher(text: str, shift: int) -> str:
    """Move every letter of the Latin alphabet by shift places, from z on to a again.

    Case is kept; digits, blanks and punctuation stay as they are. A negative shift moves backwards, and shifts
    of more than 26 are allowed.

    >>> caesar_cipher("Hello, z!", 1)
    'Ifmmp, a!'
    """''',
    '''def group_anagrams(words: list[str]) -> list[list[str]]:
    """Put words that consist of the same letters into one group.

    The groups come in the order of their first word, the words of a group in the order of the list.
    Words are compared in lower case but returned as they were given.

    >>> group_anagrams(["tea", "tan", "Eat", "nat"])
    [['tea', 'Eat'], ['tan', 'nat']]
    """''',
    '''def topological_order(dependencies: dict[str, set[str]]) -> list[str]:
    """Order tasks so that each comes after all tasks that it depends on.

    A task that is only named as a dependency depends on nothing. Among tasks that are ready, the alphabetically
    first one comes first. A cycle raises a ValueError.

    >>> topological_order({"b": {"a"}, "c": {"b"}})
    ['a', 'b', 'c']
    """''',
)
