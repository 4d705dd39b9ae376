"""Uploaded forms: parsed to the byte in constant memory, or refused."""

from __future__ import annotations

import pytest

from paceline.server.batch.forms import FormPart, FormReader
from paceline.server.errors import ApiError

FORM = 'multipart/form-data; boundary="b"'
GOOD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nx\r\n--b--\r\n'


def parts_of(kind: str, body: bytes, size: int) -> tuple[list[FormPart], bytes]:
    """Parse a form in pieces of ``size`` bytes; return its fields and the content of its files."""
    contents: list[bytes] = []
    reader = FormReader(kind, contents.append)
    for place in range(0, len(body), size):
        reader.feed(body[place : place + size])
    return reader.end(), b"".join(contents)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", GOOD),
        ("multipart/mixed; boundary=b", GOOD),
        ("multipart/form-data; boundary=" + "b" * 71, GOOD),
        ("text/plain", GOOD),
        ("", GOOD),
        (FORM, b""),
        (FORM, b"--b--"),
        (FORM, GOOD[:-4] + b"\r\n"),
        (FORM, b"x" + GOOD),
        (FORM, GOOD.replace(b"form-data;", b"attachment;")),
        (FORM, GOOD.replace(b"\r\n\r\n", b"\r\n")),
        (FORM, GOOD.replace(b"form-data", b"form-data" + b" " * 5000)),
        (FORM, b"--b\r\n\r\n" * 1000 + b"--b--"),
        (FORM, GOOD.replace(b'name="f"', b"name*=idna''f")),  # valid in e-mail
        (FORM, GOOD.replace(b'name="f"', b"name*=a\0b''f")),
        (FORM, GOOD.replace(b'name="f"', b"name*=unicode_escape''%5cud800")),
        (FORM, GOOD.replace(b'name="file"', b"name*=undefined''file")),
        ("multipart/form-data; boundary*=idna''b", GOOD),
        ("multipart/form-data; boundary*=unicode_escape''%5cud800", GOOD),
        (f"multipart/form-data; boundary*{'9' * 5000}=b", GOOD),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_invalid_forms_are_refused(kind: str, body: bytes, size: int) -> None:
    with pytest.raises(ApiError) as refusal:
        parts_of(kind, body, size)
    assert refusal.value.status in (400, 415)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 40, 10**6])
def test_a_form_is_parsed_to_the_byte(size: int) -> None:
    inside = b"x--b\r\n\r\n\x00\xff--b\r\n--\r\n-"
    field = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    (field_part, part), content = parts_of(FORM, field + GOOD.replace(b"\r\n\r\nx", b"\r\n\r\n" + inside), size)
    assert (field_part.name, field_part.filename, field_part.content) == ("purpose", None, b"batch")
    assert (part.name, part.filename, content) == ("file", "f", inside)


@pytest.mark.parametrize("name", [b'name="\xc3\xa9"', b"name*=utf-8''%c3%a9", b"name*=ISO-8859-1'en'%E9"])
def test_a_file_name_may_use_another_charset(name: bytes) -> None:
    (part,), _ = parts_of(FORM, GOOD.replace(b'name="f"', name), 10**6)
    assert part.filename == "\u00e9"


def test_a_form_is_parsed_in_constant_memory() -> None:
    written: list[int] = []
    reader = FormReader(FORM, lambda content: written.append(len(content)))
    reader.feed(GOOD[: GOOD.index(b"x\r\n")])
    for _ in range(100):
        reader.feed(b"\r" * 10**4)
    assert 10**6 - sum(written) < 100
    with pytest.raises(ApiError, match="not a file"):
        FormReader(FORM, written.append).feed(GOOD.replace(b'; filename="f"', b"").replace(b"x", b"x" * 5000))  # type: ignore[arg-type]
