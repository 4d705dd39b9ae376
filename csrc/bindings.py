"""Writes what Python knows of the C interface: ``python csrc/bindings.py``; with ``--check``, compares only.

``src/paceline/kernels/abi.py`` gets the constants and enums of the headers, the exported functions, and every struct
that one of them takes. In ``csrc/layout.h`` the compiler notes where the fields are, and Python compares that with
ctypes when it loads the library.

Of C++ this reads constants of type int; enums and structs that begin and end in the first column; fields with stars,
and arrays of a known size. Methods are skipped. Anything else ends the script with a KeyError.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

HERE = Path(__file__).resolve().parent
PYTHON, LAYOUT = HERE.parent / "src/paceline/kernels/abi.py", HERE / "layout.h"
HEADERS = ("gain.h", "kernels.h", "lookup.h", "ranks.h", "model.h")
OPAQUE = {"Kernels", "Model", "Pool", "Texts"}  # Python has their addresses only
SCALARS = {name: f"c_{name.removesuffix('_t')}" for name in ("bool", "int", "float", "int32_t", "int64_t", "uint32_t")}
SCALARS |= {"size_t": "c_size_t", "uint64_t": "c_uint64"}
RESULTS = {**SCALARS, "void": "None", "Problem": "Problem", "NewObject": "NewObject", "const char*": "c_char_p"}

PREAMBLE = '''"""The extension's interface for ctypes. Written by csrc/bindings.py: do not edit."""

# fmt: off
# ruff: noqa: I001
from __future__ import annotations

from ctypes import (
    CFUNCTYPE, POINTER, Structure,
    c_bool, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p,
)
from enum import IntEnum

Callback = CFUNCTYPE(c_int32)


class Problem(c_char_p):
    """A call's error message, or null; ``native`` reads it."""


class NewObject(c_void_p):
    """The address of an object that the library made; null if there was no memory for it."""


'''


class Interface:
    """What headers and sources declare.

    constants, and entries of enums: numbers as they stand there. functions: ctypes of the result and the parameters.
    structs: name and ctype of the fields; each struct comes after those in its fields.
    """

    def __init__(self) -> None:
        headers = "\n".join(_code(HERE / name) for name in HEADERS)
        sources = "\n".join(map(_code, sorted(HERE.glob("*.cpp"))))
        self.constants: dict[str, str] = dict(re.findall(r"^constexpr int (k\w+) = (\d+);", headers, re.M))
        self.enums: dict[str, dict[str, str]] = {}
        for enum, body in re.findall(r"^enum (?:class )?(\w+).*? \{ (.*?) \};", headers, re.M):
            entries = (entry.partition(" = ") for entry in body.split(", "))
            self.enums[enum] = {name: value or str(place) for place, (name, _, value) in enumerate(entries)}
        self._bodies = dict(re.findall(r"^struct (\w+) \{\n(.*?)^\};", headers, re.M | re.S))
        self.structs: dict[str, list[tuple[str, str]]] = {}
        exported = re.findall(r"^PL_EXPORT (.*?) ?(pl_\w+)\((.*?)\) \{", sources, re.M | re.S)
        self.functions = {name: self._signature(result, parameters) for result, name, parameters in exported}

    def _signature(self, result: str, parameters: str) -> str:
        types = [self._type(*_parts(each)[:2]) for each in parameters.split(",") if each]
        addresses = ["c_void_p" if each.startswith("POINTER") else each for each in types]
        returned = RESULTS.get(result.partition("<")[0], "c_void_p")
        return f"({returned}, ({', '.join(addresses)}{',' if len(types) == 1 else ''}))"

    def _type(self, base: str, stars: int) -> str:
        if base in self._bodies and base not in OPAQUE:
            if base not in self.structs:
                self.structs[base] = list(self._fields(self._bodies[base]))
            if stars < 2:
                return f"POINTER(C{base})" if stars else f"C{base}"
        if stars:
            return "c_char_p" if base == "char" else "c_void_p"
        return SCALARS[base]

    def _fields(self, body: str) -> Iterator[tuple[str, str]]:
        while (flat := re.sub(r"\{[^{}]*\}", ";", body)) != body:  # without the bodies of methods
            body = flat
        for statement in map(str.strip, body.split(";")):
            if callback := re.fullmatch(r"int32_t \(\*(\w+)\)\(\)", statement):
                yield callback[1], "Callback"
            elif statement and "(" not in statement:
                first, *others = statement.split(",")
                base = _parts(first)[0]
                for _, stars, name in (_parts(first), *(_parts(f"{base} {each}") for each in others)):
                    name, _, size = name.rstrip("]").partition("[")
                    yield name, self._type(base, stars) + (f" * {self._number(size)}" if size else "")

    def _number(self, name: str) -> str:
        return next(values[name] for values in (self.constants, *self.enums.values()) if name in values)


def _code(path: Path) -> str:
    """A file without its comments."""
    return re.sub(r" *//.*", "", path.read_text())


def _parts(declaration: str) -> tuple[str, int, str]:
    """The type of a declaration, its number of stars, and its name."""
    base, *others = declaration.partition("=")[0].replace("const ", "").replace("*", " * ").split()
    return base, others.count("*"), others[-1]


def _upper(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removeprefix("k")).upper()


def _filled(items: list[str], indent: str) -> str:
    """Items and commas on lines of at most 120 columns, cut between items only."""
    text = " ".join(f"{item},".replace(" ", "\0") for item in items)
    return fill(text, 120, initial_indent=indent, subsequent_indent=indent, break_long_words=False).replace("\0", " ")


def python_of(interface: Interface, digest: str) -> str:
    """The text of abi.py."""
    parts = [PREAMBLE, *(f"{_upper(name)} = {value}\n" for name, value in interface.constants.items())]
    for enum, entries in interface.enums.items():
        lines = "".join(f"    {_upper(name)} = {value}\n" for name, value in entries.items())
        parts.append(f'\n\nclass {enum}(IntEnum):\n    """csrc: {enum}."""\n\n{lines}')
    for struct, fields in interface.structs.items():
        lines = _filled([f'("{name}", {kind})' for name, kind in fields], "        ")
        parts.append(
            f'\n\nclass C{struct}(Structure):\n    """csrc: {struct}."""\n\n    _fields_ = (\n{lines}\n    )\n'
        )
    structs = _filled([f"C{name}" for name in interface.structs], "    ")
    parts.append(f"\n\nSTRUCTS: tuple[type[Structure], ...] = (\n{structs}\n)\n")
    functions = [f'"{name}": {signature},' for name, signature in interface.functions.items()]
    lines = "\n".join(fill(line, 120, initial_indent="    ", subsequent_indent="        ") for line in functions)
    parts.append(f"SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {{\n{lines}\n}}\n")
    return "".join(parts) + f'INTERFACE = "{digest}"\n'


def layout_of(interface: Interface, digest: str) -> str:
    """The text of layout.h."""
    items = []
    for struct, fields in interface.structs.items():
        items += [f"sizeof({struct})", *(f"offsetof({struct}, {name})" for name, _ in sorted(fields))]
    return (
        "// The structs of the C interface as the compiler lays them out: "
        "size of each, then offsets of its fields by name.\n"
        "// Written by csrc/bindings.py: do not edit.\n#pragma once\n\n#include <cstddef>\n\n"
        + "".join(f'#include "{name}"\n' for name in HEADERS)
        + f'\nnamespace paceline {{\n\nconstexpr const char* kInterface = "{digest}";\n'
        + f"constexpr int32_t kLayout[] = {{\n{_filled(items, '  ')}\n}};\n\n}}  // namespace paceline\n"
    )


def main() -> None:
    """Write both files, or say that they are not up to date."""
    interface = Interface()
    digest = hashlib.sha256(python_of(interface, "").encode()).hexdigest()[:16]
    texts = {PYTHON: python_of(interface, digest), LAYOUT: layout_of(interface, digest)}
    old = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        sys.exit(f"not up to date, run python csrc/bindings.py: {', '.join(map(str, old))}" if old else 0)
    for path in old:
        path.write_text(texts[path])


if __name__ == "__main__":
    main()
