"""A hostile client against ``paceline serve`` in its own process, with a real model.

During each attack another process polls /health: the 99th percentile of its response times must be below 100 ms.
A second one asks ordinary questions on four routes: all are answered as before the attack (``honest.py``).
Afterwards the server's memory is the same within 10 %, and a seeded request gets the same answer.

``python -m pytest -m slow tests/server/test_hostile.py tests/server/test_floods.py`` ends with a table of the figures.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from honest import HonestClient, check_honest, note
from polling import wait_until
from served import HealthProbe, Served, check_health, resident, slowness
from web import client as web

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m"
FLAGS = ("--max-batch-size", "8", "--max-waiting", "32", "--max-model-len", "2048")
BODY_TIMEOUT = 2.0  # seconds, on a machine that runs nothing else: the attacks' own clients must be fast enough
SEEDED = {"prompt": "The sea is", "max_tokens": 40, "seed": 7, "temperature": 1.0, "n": 2}
BOUND = 4000  # bytes of an error response
ATTACKER = ("127.0.0.2", 0)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("hostile") / "log"
    body_timeout = f"{BODY_TIMEOUT * slowness():.1f}"
    server = Served(MODEL, log, *FLAGS, "--body-timeout", body_timeout, "--send-timeout", "3", engine=[])
    with server.ready():
        yield server


def texts(served: Served) -> list[str]:
    reply = served.post(SEEDED)
    assert reply.status_code == 200, reply.text
    return [choice["text"] for choice in reply.json()["choices"]]


def idle(served: Served) -> bool:
    stats, load = (web.get(f"{served.url}{path}").json() for path in ("/stats", "/load"))
    return not (stats["running"] or stats["waiting"] or load["server_load"])


def wait_until_idle(served: Served) -> None:
    wait_until(lambda: idle(served), "places are still taken")


@contextmanager
def unharmed(served: Served, name: str) -> Iterator[None]:
    """/health responds within 100 ms and an honest client gets its answers; memory is the same after the block."""
    expected, before, probe = texts(served), resident(served), HealthProbe(served)
    honest = HonestClient(served.url)
    try:
        yield
    finally:
        figures = probe.figures() | honest.figures()
    wait_until_idle(served)
    figures |= {"resident_mib_before": round(before / 2**20), "grown": round(resident(served) / before - 1, 3)}
    note(name, figures)
    assert texts(served) == expected
    check_honest(figures)
    check_health(figures)
    assert figures["grown"] < 0.1, figures


def post(served: Served, path: str, body: Any, seconds: float = 60) -> int:
    """Return the status, or 0 on a timeout of the client. Error responses must be short."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        reply = web.post(
            served.url + path, content=content, headers={"content-type": "application/json"}, timeout=seconds
        )
    except httpx.TimeoutException:
        return 0
    if reply.status_code != 200:
        assert len(reply.content) < BOUND, reply.text[:BOUND]
    return reply.status_code


def flood(work: Callable[[int], int], times: int, clients: int = 8) -> Counter[int]:
    with ThreadPoolExecutor(clients) as pool:
        return Counter(pool.map(work, range(times)))


@pytest.fixture(scope="module", autouse=True)
def warm(served: Served) -> None:
    """Initialize everything lazy: threads, long texts, log-probabilities, a full queue, rows of full length."""
    score = {"prompt": ["once upon a time " * 60] * 2, "echo": True, "max_tokens": 1, "logprobs": 20}
    flood(lambda _: post(served, "/v1/completions", score), 2)
    flood(lambda _: post(served, "/v1/completions", {"prompt": [None] * 100_000}), 8)
    flood(lambda _: post(served, "/tokenize", {"prompt": "word " * 3000}), 8)
    flood(lambda _: post(served, "/v1/completions", {**SEEDED, "n": 8, "max_tokens": 100, "logprobs": 20}), 2)
    flood(lambda i: post(served, "/v1/completions", {"prompt": f"{i}" + " word" * 2000, "max_tokens": 20}), 8)
    wait_until_idle(served)


def test_without_an_attack(served: Served) -> None:
    """The figures that the others are compared with."""
    with unharmed(served, "none"):
        time.sleep(10)


# --- too many answers -------------------------------------------------------------------------------------------------


def test_too_many_answers_or_prompts(served: Served) -> None:
    text = "word " * 1900
    echo = {"prompt": "a", "echo": True, "max_tokens": 0}
    bodies: list[dict[str, Any]] = [
        {**echo, "n": 10**9},
        {**echo, "n": 10**6, "stream": True},
        {**echo, "best_of": 10**9},
        {"prompt": [text] * 400, "echo": True, "max_tokens": 0, "logprobs": 5},
        {"prompt": [[1] * 1900] * 30, "echo": True, "max_tokens": 0, "logprobs": 1},
        {"prompt": [text] * 40, "max_tokens": 1, "n": 1},
        {"prompt": [text] * 20, "echo": True, "max_tokens": 1, "n": 2},
        {"prompt": "a", "n": 40, "max_tokens": 2000, "logprobs": 20},
        {"prompt": "a " * 2**21},
    ]
    with unharmed(served, "work without bound"):
        found = flood(lambda n: post(served, "/v1/completions", bodies[n % len(bodies)], seconds=3), 45)
        chat = {"messages": [{"role": "user", "content": "a"}], "n": 10**9}
        assert post(served, "/v1/chat/completions", chat) == 400
    assert found.keys() <= {0, 200, 400, 413, 429}
    assert found[400] >= 5 * 5


# --- long bodies ------------------------------------------------------------------------------------------------------


def long_bodies() -> list[bytes]:
    """Bodies of 4 MiB that are slow to parse."""
    size = 2**22 - 100
    wrong = {
        "prompt": b"null,",
        "stop": b"1,",
        "stop_token_ids": b'"a",',
        "messages": b'{"role":1,"content":2,"x":3},',
        "logit_bias": b"[],",
    }
    bodies = [
        b'{"prompt":"a","%s":[' % name.encode() + item * (size // len(item)) + item[:-1] + b"]}"
        for name, item in wrong.items()
    ]
    fields = b",".join(b'"%07d":1' % n for n in range(size // 12))
    bodies += [
        b"{" + fields + b"}",
        b'{"prompt":"a","logit_bias":{' + fields + b"}}",
        b"[" * size,
        b'{"prompt":[' + b"1," * 200_000 + b"1]}",
        b'{"prompt":[' + b",".join(b'"%x"' % n for n in range(200_000)) + b"]}",
        b'{"prompt":"a","seed":' + b"9" * size + b"}",
        b'{"prompt":"' + b"\\u00e9" * (size // 6) + b'"}',
        b'{"prompt":"a","user":"' + b"x" * size + b'"}',
        b'{"prompt":"a","model":"' + b"x" * size + b'"}',
        b'{"prompt":"a","' + b"x" * size + b'":1}',
    ]
    return bodies


def test_long_bodies_of_invalid_items(served: Served) -> None:
    bodies = long_bodies()
    with unharmed(served, "4 MiB of wrong items"):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            found = flood(lambda n, path=path: post(served, path, bodies[n % len(bodies)]), len(bodies), clients=4)
            assert found.keys() <= {400, 404, 429}, found


# --- unread streams ---------------------------------------------------------------------------------------------------


def connected(served: Served, request: bytes, source: tuple[str, int] = ATTACKER, window: int = 4096) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    made.bind(source)
    host, port = served.url.removeprefix("http://").split(":")
    made.settimeout(20)
    made.connect((host, int(port)))
    made.sendall(request)
    return made


def everything(client: socket.socket) -> bytes:
    """Return all bytes until the server closes."""
    chunks: list[bytes] = []
    with suppress(ConnectionError, TimeoutError):
        while chunk := client.recv(65536):
            chunks.append(chunk)
    return b"".join(chunks)


def http(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def test_unread_streams(served: Served) -> None:
    """Each stream is about 9 MB, more than all buffers on the way; five of them take the whole queue."""
    body = {"prompt": "word " * 1800, "n": 8, "max_tokens": 40, "stream": True, "logprobs": 20, "echo": True}
    request = http("/v1/completions", json.dumps({**body, "ignore_eos": True}).encode())
    with unharmed(served, "unread streams"), ExitStack() as stack:
        clients = [stack.enter_context(connected(served, request)) for _ in range(5)]
        wait_until(lambda: post(served, "/v1/completions", SEEDED, 120) != 429, "the places are not given back", 120)
        assert post(served, "/v1/completions", SEEDED, 120) == 200
        wait_until_idle(served)
        time.sleep(5)  # longer than the send timeout
        assert not any(everything(client).endswith(b"0\r\n\r\n") for client in clients), (
            "the server closed it before the end"
        )


# --- connections and bodies -------------------------------------------------------------------------------------------


def test_endless_connections_and_bodies(served: Served) -> None:
    half = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n"
    with unharmed(served, "half requests"), ExitStack() as stack, suppress(ConnectionError):
        for number in range(600):
            request = half if number % 2 else half + b"\r\n" + b"a" * 60_000
            stack.enter_context(connected(served, request, window=2**16))
        for _ in range(3):
            assert post(served, "/v1/completions", SEEDED) == 200


# --- structured outputs -----------------------------------------------------------------------------------------------


def structured(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return {"messages": [{"role": "user", "content": "Answer."}], "max_tokens": 8, "response_format": form, **more}


def words(pattern: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}


CHAIN = {"1899": {"type": "null"}} | {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in reversed(range(1899))}
SCHEMAS = [
    {"oneOf": [{"$ref": "#/$defs/0"}] * 4000, "$defs": CHAIN},  # 4000 walks along the chain without a limit
    words("^(.{1,128}.{1,128}){1,128}$"),
    words(r"^(\w{1,20}\s?){1,20}$"),
    words("^((a|b|c|d|e|f){1,100}(x|y){1,100}z?){1,16}$"),
    {
        "type": "object",
        "properties": {name: {"type": "string", "maxLength": 100} for name in "abcde"},
        "required": list("abcde"),
    },
    {"enum": [f"{number:x}" * 4 for number in range(20_000)]},
    {
        "type": "object",
        "properties": {f"p{number}": {"type": "integer"} for number in range(300)},
        "additionalProperties": True,
    },
    {"$ref": "#"},
    {"type": "array", "items": {"type": "string"}, "minItems": -1},
]


def longest_pause(served: Served, seconds: float) -> float:
    """Longest time in seconds between two events of a running stream."""
    body = {"prompt": "once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    longest, end = 0.0, time.monotonic() + seconds
    with web.stream("POST", f"{served.url}/v1/completions", json=body) as reply:
        last = time.monotonic()
        for _ in reply.iter_lines():
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            if now > end:
                break
    return longest


def test_structures_that_compile_forever(served: Served) -> None:
    """Each structure is refused or followed, while other streams continue and simple structures still compile."""
    easy = structured(words("^[a-z]{1,4}$"), max_tokens=30)
    assert post(served, "/v1/chat/completions", easy) == 200  # starts the compiling processes
    bodies = [structured(schema, timeout=30) for schema in SCHEMAS]
    with unharmed(served, "structures that take for ever"), ThreadPoolExecutor(1) as pool:
        pause = pool.submit(longest_pause, served, 8)
        found = flood(lambda n: post(served, "/v1/chat/completions", bodies[n % len(bodies)]), 24)
        assert post(served, "/v1/chat/completions", easy) == 200
        print(
            json.dumps({"structures": {str(status): count for status, count in found.items()}, "pause": pause.result()})
        )
        assert found.keys() <= {200, 400, 429, 504}, found
        assert pause.result() < 2.5


# --- malformed requests -----------------------------------------------------------------------------------------------

FIELDS = {
    "prompt": ("a",), "messages": ([{"role": "user", "content": "a"}],), "n": (1,), "max_tokens": (2,),
    "temperature": (0.5,), "top_p": (0.9,), "seed": (1,), "stop": ("x", ["x"]), "stop_token_ids": ([1],),
    "logit_bias": ({"1": 1},), "stream": (True,), "user": ("me",), "echo": (True,), "logprobs": (1,),
    "priority": (1,), "timeout": (5,), "response_format": ({"type": "text"},),
}  # fmt: skip
WRONG_TYPES: tuple[Any, ...] = ({}, {"a": 1}, [{}], [[[]]], [None], {"type": {}}, [{"role": "user"}], 1e308, [1.5])
HUGE = (
    b"1e400",
    b"-1e400",
    b"9" * 400,
    b"9" * 5000,
    b"-" + b"9" * 300,
    b"1" + b"0" * 22,
    b"NaN",
    b"Infinity",
    b"0x1",
    b"01",
)
TEXTS = (b'"\\ud800"', b'"\\udc00x"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\x00"', b'"\\x41"', b'"\xc3"', b'"\\u12"')
NUMBERS = (
    "n",
    "max_tokens",
    "min_tokens",
    "top_k",
    "num_speculative_tokens",
    "stop_token_ids",
    "timeout",
    "best_of",
    "deadline_ms",
)
CHUNKS = (
    b"zz\r\nabc\r\n0\r\n\r\n", b"-5\r\nabc\r\n0\r\n\r\n", b"fffffffffffffffff\r\nabc", b"5\r\nabc\r\n0\r\n\r\n",
    b"3;" + b"x" * 40_000 + b"\r\nabc\r\n0\r\n\r\n",
    b"3\r\n{\"a\r\n0\r\n\r\n", b"0\r\n\r\n", b"1\r\n{\r\n" * 50 + b"0\r\n\r\n",
)  # fmt: skip
HEADS = (
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\nHost: localhost\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\nHost: localhost\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999999999999\r\nHost: localhost\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\nHost: localhost\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nBad Header: x\r\nHost: localhost\r\n\r\n",
    b"BREW /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    b"POST /v1/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
    b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n",
)


def _nested(draw: random.Random, _: bytes) -> bytes:
    depth = draw.choice([250, 2_000, 50_000])
    opening, closing = draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
    inside = opening * depth + b"1" + closing * draw.choice([0, depth])
    return b'{"prompt":"a","messages":[{"role":"user","content":"a"}],"%s":%s}' % (b"stop", inside)


def _huge(draw: random.Random, needed: bytes) -> bytes:
    name = draw.choice(["temperature", "top_p", "seed", "logit_bias", *NUMBERS])
    value = draw.choice(HUGE)
    value = {"stop_token_ids": b"[%s]", "logit_bias": b'{"1": %s}'}.get(name, b"%s") % value
    return b'{%s,"%s":%s}' % (needed, name.encode(), value)


def _typed(draw: random.Random, needed: bytes) -> bytes:
    names = [
        name for name in FIELDS if name.encode() not in needed and name not in ("response_format", "prompt", "messages")
    ]
    return b'{%s,"%s":%s}' % (needed, draw.choice(names).encode(), json.dumps(draw.choice(WRONG_TYPES[:-2])).encode())


def _letters(draw: random.Random, needed: bytes) -> bytes:
    return b'{%s,"%s":%s}' % (needed, draw.choice([b"user", b"stop", b"model"]), draw.choice(TEXTS))


def _cut(draw: random.Random, needed: bytes) -> bytes:
    whole = b'{%s,"stop":["x","y"],"logit_bias":{"1":2}}' % needed
    return whole[: draw.randrange(1, len(whole))]


def _unknown(draw: random.Random, needed: bytes) -> bytes:
    name = bytes(draw.choices(b"abcdefghijklmnopqrstuvwxyz_0123456789", k=draw.choice([3, 30, 30_000]))) + b"_"
    return b'{%s,"%s":%d}' % (needed, name, draw.randrange(9))


MAKERS = (_nested, _huge, _typed, _letters, _cut, _unknown)
PATHS = {
    "/v1/completions": b'"prompt":"a"',
    "/v1/chat/completions": b'"messages":[{"role":"user","content":"a"}]',
    "/tokenize": b'"prompt":"a"',
    "/detokenize": b'"tokens":[1]',
    "/v1/messages": b'"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":"a"}]',
    "/v1/responses": b'"input":"a"',
    "/v1/embeddings": b'"input":"a"',
}


def malformed(number: int) -> bytes:
    """Return a request that every server must refuse."""
    draw = random.Random(number)
    path, needed = draw.choice(list(PATHS.items()))
    close = "Connection: close"
    kind = number % 9
    if kind == 6:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{close}\r\n"
        return head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + draw.choice(CHUNKS)
    if kind == 7:
        return draw.choice(HEADS).replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    if kind == 8:
        types = (
            "text/plain",
            "multipart/form-data",
            "application/x-www-form-urlencoded",
            "application/",
            "*/*",
            "\x01",
        )
        return http(path, b"{" + needed + b"}", close).replace(b"application/json", draw.choice(types).encode())
    return http(path, MAKERS[kind % len(MAKERS)](draw, needed), close)


def answered(served: Served, request: bytes) -> bytes:
    with connected(served, b"", ("127.0.0.1", 0), window=2**16) as client:
        with suppress(ConnectionError):  # refused before the request was complete
            client.sendall(request)
        return everything(client)


def test_malformed_requests(served: Served) -> None:
    def outcome(number: int) -> int:
        reply = answered(served, malformed(number))
        status = int(reply.split(b" ", 2)[1]) if reply.startswith(b"HTTP/1.1 ") else 0
        assert 400 <= status < 500, (number, malformed(number)[:300], reply[:500])
        assert len(reply) < BOUND, (number, len(reply))
        head, _, body = reply.partition(b"\r\n\r\n")
        if b"application/json" in head:
            error = json.loads(body)["error"]
            assert set(error) in ({"message", "type", "param", "code"}, {"message", "type"}), "the second: /v1/messages"
        return status

    with unharmed(served, "malformed requests"):
        found = flood(outcome, 450, clients=8)
    print(json.dumps({"malformed": sum(found.values()), **{str(status): count for status, count in found.items()}}))


def test_the_log_has_no_server_error(served: Served) -> None:
    """Must run last: checks all lines above INFO."""
    assert [line for line in served.log if line["level"] not in ("info", "warning")] == []
    assert Path(f"/proc/{served.process.pid}").exists()
