"""The layers in front of the routes: connections, host names, keys, bodies, request ids."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import pytest

from paceline.config import ServerConfig
from paceline.errors import ParameterError
from paceline.server.errors import ApiError
from paceline.server.quotas import SharedLimit
from paceline.server.security import AllowedHosts
from paceline.server.sockets import listen
from polling import wait_until
from server_support import Live, start
from web import client as web

pytestmark = pytest.mark.usefixtures("one_thread")

KEY = {"Authorization": "Bearer secret"}
HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def narrow(tiny: str) -> Iterator[Live]:
    """A server with low limits on connections and bytes and long timeouts."""
    config = ServerConfig(
        port=0, served_model_name="tiny", max_connections=32, max_connections_per_client=24, header_timeout=60,
        keep_alive_timeout=60, body_timeout=60, max_body_bytes=100_000, max_bodies_bytes=200_000,
    )  # fmt: skip
    yield from start(config, tiny)


@pytest.fixture(scope="module")
def hasty(tiny: str) -> Iterator[Live]:
    """A server with short timeouts."""
    config = ServerConfig(port=0, header_timeout=0.3, keep_alive_timeout=0.3, body_timeout=0.5, send_timeout=0.3)
    yield from start(config, tiny)


@pytest.fixture(scope="module")
def guarded(tiny: str) -> Iterator[Live]:
    yield from start(ServerConfig(port=0, api_keys=["secret"], max_body_bytes=1 << 20), tiny)


def connected(live: Live, sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    made = socket.create_connection((host, int(port)), timeout=20, source_address=(source, 0))
    made.sendall(sent)
    return made


def answer(client: socket.socket) -> bytes:
    """Read until the server closes; b"" if it sent nothing."""
    try:
        return b"".join(iter(lambda: client.recv(65536), b""))
    except ConnectionError:
        return b""


def is_closed(client: socket.socket, sent: bytes) -> bool:
    """Return whether the server has closed the connection; a full send buffer counts as open."""
    try:
        client.sendall(sent)
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return False


def post(path: str, length: int, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length}", *headers, "", ""]
    return "\r\n".join(lines).encode()


# --- connections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET", HALF], ids=["nothing", "a word", "half"])
def test_a_connection_without_complete_headers_is_closed(hasty: Live, sent: bytes) -> None:
    began = time.monotonic()
    with connected(hasty, sent) as client:
        assert answer(client) == b""
    assert 0.2 < time.monotonic() - began < ServerConfig.header_timeout


def test_slowly_arriving_headers_do_not_extend_the_timeout(hasty: Live) -> None:
    with connected(hasty, HALF) as client:
        wait_until(lambda: is_closed(client, b"X-A: 1\r\n"))


def test_an_idle_keep_alive_connection_is_closed(hasty: Live) -> None:
    with connected(hasty, HALF + b"\r\n") as client:
        found = answer(client)
        assert found.startswith(b"HTTP/1.1 200")
    with connected(hasty, HALF + b"\r\n" + HALF) as client:  # and a connection with half a request after a complete one
        assert answer(client).count(b"HTTP/1.1 200") == 1


def test_a_prompt_request_is_served_however_many_connections_are_open(narrow: Live) -> None:
    for source in ("127.0.0.1", "127.0.0.2"):
        with ExitStack() as stack:
            for number in range(200):
                stack.enter_context(connected(narrow, HALF if number % 2 else b"", source=source))
            assert narrow.get("/health").status_code == 200
            assert narrow.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


@contextmanager
def slow_bodies(live: Live, count: int, source: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        made = [connected(live, post("/v1/completions", 90), source) for _ in range(count)]
        for each in made:
            stack.enter_context(each)
        yield made


def test_slow_bodies_of_one_address_do_not_block_others(narrow: Live) -> None:
    def others_are_heard_while_it_is_not() -> bool:
        with slow_bodies(narrow, 18):  # three quarters of 24
            if narrow.post("/v1/completions", {"prompt": "a"}).status_code != 429:
                return False  # this connection was there first and took one of their places
            assert narrow.get("/health").status_code == 200
            body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
            headers = "Content-Type: application/json", "Connection: close"
            with connected(narrow, post("/v1/completions", len(body), *headers) + body, "127.0.0.2") as other:
                assert answer(other).startswith(b"HTTP/1.1 200")
        return True

    wait_until(others_are_heard_while_it_is_not)
    wait_until(lambda: narrow.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200)


def test_health_responds_when_all_request_slots_are_taken(narrow: Live) -> None:
    def health_answers_and_nothing_else() -> bool:
        with slow_bodies(narrow, 12), slow_bodies(narrow, 12, "127.0.0.2"):
            status = narrow.post("/v1/completions", {"prompt": "a"}).status_code
            assert narrow.get("/health").status_code == 200
        return status == 503  # otherwise it was there first and took one of their places

    wait_until(health_answers_and_nothing_else)


def test_a_slow_body_gets_408_and_the_connection_is_closed(hasty: Live) -> None:
    with slow_bodies(hasty, 1) as (client,):
        began = time.monotonic()
        reply = answer(client)
    assert reply.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in reply.lower()
    assert time.monotonic() - began < ServerConfig.body_timeout / 2


def test_the_connection_of_a_client_that_does_not_read_is_closed(hasty: Live) -> None:
    page = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(hasty) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(0.05)
        wait_until(lambda: is_closed(client, page * 100))


def test_an_unread_stream_is_closed_even_if_it_fits_into_socket_buffers(hasty: Live) -> None:
    """The whole stream would fit into socket buffers. Rounds take as long as those of a large model."""
    body = json.dumps({"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True, "metrics": True}).encode()
    request = post("/v1/completions", len(body), "Content-Type: application/json") + body
    engine, ended = hasty.context.llm.engine, hasty.metric("request_success_total")
    with pytest.MonkeyPatch.context() as patched, socket.socket() as client:
        patched.setattr(engine, "step", lambda engine_step=engine.step: (time.sleep(0.05), engine_step())[1])
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = hasty.url.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        client.sendall(request)
        wait_until(lambda: hasty.context.dispatcher.admission.inside)
        hasty.wait_until_idle()
    assert hasty.metric("request_success_total") == ended, "the answer finished by itself"


# --- half-closed clients ----------------------------------------------------------------------------------------------


def final(reply: bytes) -> bytes:
    """Return the reply without interim responses."""
    while reply.startswith(b"HTTP/1.1 1"):
        reply = reply.partition(b"\r\n\r\n")[2]
    return reply


def half_closed(live: Live, sent: bytes) -> bytes:
    with connected(live, sent) as client:
        client.shutdown(socket.SHUT_WR)
        return final(answer(client))


def completion(**more: object) -> bytes:
    body = json.dumps({"prompt": "a", "max_tokens": 6, "ignore_eos": True, "seed": 1, **more}).encode()
    return post("/v1/completions", len(body), "Content-Type: application/json") + body


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_client_gets_its_response(live: Live, stream: bool) -> None:
    reply = half_closed(live, completion(stream=stream, num_speculative_tokens=0))
    assert reply.startswith(b"HTTP/1.1 200")
    assert reply.rstrip().endswith(b"0" if stream else b"}")
    assert not stream or b"[DONE]" in reply


@pytest.mark.usefixtures("unhurried")
def test_a_half_closed_client_that_disconnects_frees_its_row(live: Live) -> None:
    """Behind some proxies the server sees the half-close at once, and the disconnect when it sends something."""
    ended = live.metric("request_success_total")
    with connected(live, completion(max_tokens=400, num_speculative_tokens=0)) as client:
        client.shutdown(socket.SHUT_WR)
        wait_until(lambda: live.context.llm.engine.scheduler.running)
        assert client.recv(65536).startswith(b"HTTP/1.1 102")
    live.wait_until_idle()
    assert live.metric("request_success_total") == ended, "the answer finished by itself"


def test_a_half_closed_client_gets_all_pipelined_responses(live: Live) -> None:
    assert half_closed(live, 3 * (HALF + b"\r\n")).count(b'{"status":"ready"}') == 3
    assert half_closed(live, HALF + b"\r\n" + HALF).count(b"HTTP/1.1 200") == 1
    assert half_closed(live, HALF) == b""


# --- heads ------------------------------------------------------------------------------------------------------------


def status_of(reply: bytes) -> int:
    return int(final(reply).split(b" ", 2)[1])


def test_a_request_with_two_lengths_closes_its_connection(live: Live) -> None:
    smuggled = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for path in ("/v1/completions", "/health"):
        body = b"0\r\n\r\n"
        with connected(live, post(path, len(body), "Transfer-Encoding: chunked") + body + smuggled) as client:
            reply = answer(client)
        assert status_of(reply) == 400
        assert reply.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in reply.lower()


def test_an_unknown_path_is_told_the_paths_that_there_are(live: Live) -> None:
    for reply in (live.get("/v1/nothing"), live.post("/v1/message", {})):
        message = reply.json()["error"]["message"]
        assert reply.status_code == 404
        assert "/v1/chat/completions, " in message
        assert "/v1/messages, " in message


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost:8000/v1/models", "localhost", 200),
        ("HTTP://LOCALHOST/v1/models?a=b", "localhost", 200),
        ("http://localhost", "localhost", 200),
        ("http://evil.example/v1/models", "localhost", 421),
        ("http://localhost/v1/models", "evil.example", 200),
        ("http://localhost@evil.example/v1/models", "localhost", 400),
        ("ftp://localhost/v1/models", "localhost", 404),
        ("/http://localhost/v1/models", "localhost", 404),
        ("/v1/models", "localhost:80@evil.example", 400),
        ("/v1/models", "a:80@b", 400),
        ("/v1/models", "localhost:x", 400),
        ("/v1/models", "localhost/", 400),
        ("/v1/models", "[::1", 400),
        ("/health", "a:80@b", 400),
        ("/v1/models", "[::1]:80", 200),
        ("/v1/models", "", 200),
    ],
)
def test_targets_and_host_headers(live: Live, target: str, host: str, status: int) -> None:
    with connected(live, f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()) as client:
        assert status_of(answer(client)) == status


def test_an_unknown_path_lists_the_known_ones(live: Live) -> None:
    reply = live.get("/v1/chat/completion")
    assert reply.status_code == 404
    message = reply.json()["error"]["message"]
    assert all(path in message for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/metrics"))


# --- bodies -----------------------------------------------------------------------------------------------------------


def flood(client: socket.socket, sent: bytes, megabytes: int) -> int:
    """Return the bytes of a body that the server took before it closed or stopped reading."""
    client.sendall(sent)
    client.settimeout(0.5)
    taken, chunk = 0, bytes(1 << 16)
    try:
        while taken < megabytes << 20:
            taken += client.send(chunk)
    except (TimeoutError, ConnectionError):
        pass
    return taken


@pytest.mark.parametrize("path", ["/", "/health", "/playground/main.js", "/v1/completions", "/stats", "/nowhere"])
def test_without_a_key_bodies_are_not_read(guarded: Live, path: str) -> None:
    with connected(guarded) as client:
        assert flood(client, post(path, 1 << 30), 64) < 16 << 20  # the kernel's buffers hold some


def test_a_client_that_sends_its_whole_body_first_gets_the_refusal(guarded: Live) -> None:
    reply = guarded.post("/v1/completions", {"prompt": "a" * 900_000})
    assert reply.status_code == 401
    assert web.request("GET", f"{guarded.url}/health", content=b"hello").status_code == 200


def test_the_memory_limit_of_all_bodies_is_released(narrow: Live) -> None:
    def is_refused() -> bool:
        with ExitStack() as stack:
            for source in ("127.0.0.1", "127.0.0.2"):
                held = stack.enter_context(connected(narrow, post("/v1/completions", 100_000), source))
                held.sendall(bytes(99_000))
            return narrow.post("/v1/completions", {"prompt": "a" * 5000}).status_code in (429, 503)

    wait_until(is_refused)  # if it comes first, one of the slow bodies is refused instead
    wait_until(lambda: narrow.post("/v1/completions", {"prompt": "a" * 5000}).status_code == 400)  # too long, but read


def test_encoded_bodies_are_refused(narrow: Live) -> None:
    bomb = gzip.compress(bytes(50 << 20))
    assert len(bomb) < 100_000
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    reply = web.post(f"{narrow.url}/v1/completions", content=bomb, headers=headers)
    assert reply.status_code == 415
    assert "uncompressed" in reply.json()["error"]["message"]


def test_shared_limit_holds_in_total_and_per_client() -> None:
    shares = SharedLimit(10, 6)
    assert shares.take("a", 6) is None
    assert shares.take("a") == "client"
    assert shares.take("b", 5) == "server"
    assert shares.take("b", 4) is None
    shares.give("a", 6)
    assert shares.take("b", 2) is None
    shares.give("b", 6)
    assert (shares.taken, dict(shares._by_client)) == (0, {})


# --- names ------------------------------------------------------------------------------------------------------------


def test_dns_rebinding_does_not_reach_a_server_without_keys(live: Live) -> None:
    reply = live.get("/v1/models", headers={"Host": "evil.example:8000"})
    assert reply.status_code == 421
    assert "--allowed-hosts" in reply.json()["error"]["message"]
    assert live.get("/health", headers={"Host": "evil.example"}).status_code == 200


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "localhost.", "127.0.0.1:8000", "[::1]:8000", "10.0.0.7", ""]
)
def test_host_names_that_cannot_be_rebound_are_admitted(host: str) -> None:
    AllowedHosts(ServerConfig()).check(host.encode())


@pytest.mark.parametrize(
    ("config", "host", "passes"),
    [
        (ServerConfig(host="box.lan"), "box.lan:8000", True),
        (ServerConfig(host="0.0.0.0"), "box.lan", False),
        (ServerConfig(host="0.0.0.0", api_keys=["k"]), "box.lan", True),
        (ServerConfig(api_keys=["k"], allowed_hosts=["box.lan"]), "other", False),
        (ServerConfig(allowed_hosts=["box.lan"]), "Box.Lan:1", True),
        (ServerConfig(allowed_hosts=["*"]), "anything", True),
        (ServerConfig(), "localhost.evil.example", False),
        (ServerConfig(), "127.0.0.1.evil.example", False),
        (ServerConfig(), "2130706433", False),
    ],
)
def test_allowed_host_names(config: ServerConfig, host: str, passes: bool) -> None:
    with nullcontext() if passes else pytest.raises(ApiError, match="--allowed-hosts"):
        AllowedHosts(config).check(host.encode())


@pytest.fixture(scope="module")
def shared_with_pages(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = str(tmp_path_factory.mktemp("batches"))
    origins = ["https://app.example,http://localhost:3000"]
    yield from start(ServerConfig(port=0, api_keys=["secret"], allowed_origins=origins, batch_dir=folder), tiny)


def test_a_page_of_an_allowed_origin_asks_first_without_a_key_and_reads_replies(shared_with_pages: Live) -> None:
    origin = {"Origin": "https://app.example"}
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    asked = web.options(f"{shared_with_pages.url}/v1/chat/completions", headers=origin | preflight)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == "https://app.example"
    assert "authorization" in asked.headers["access-control-allow-headers"].lower()
    for headers, status in ((origin | KEY, 200), (origin, 401)):
        reply = shared_with_pages.get("/v1/models", headers=headers)
        assert reply.status_code == status
        assert reply.headers["access-control-allow-origin"] == "https://app.example"
        assert "X-Request-Id" in reply.headers["access-control-expose-headers"]
    form = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", b"")}}
    codes = [
        web.post(f"{shared_with_pages.url}/v1/files", headers=KEY | {"Origin": each}, **form).status_code
        for each in ("https://app.example", "https://evil.example")
    ]
    assert codes[1] == 403
    assert codes[0] != 403


def test_a_page_of_another_origin_is_not_admitted_by_those_that_are(shared_with_pages: Live) -> None:
    origin = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    asked = web.options(f"{shared_with_pages.url}/v1/chat/completions", headers=origin)
    assert asked.status_code == 400
    assert "access-control-allow-origin" not in asked.headers
    assert "access-control-allow-origin" not in shared_with_pages.get("/v1/models", headers=origin | KEY).headers


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://app.example/path", "https://*", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ParameterError, match="allowed_origins"):
        ServerConfig(allowed_origins=[origin])


def test_pages_of_other_sites_can_neither_read_nor_send_json(live: Live) -> None:
    origin = {"Origin": "https://evil.example"}
    replies = [live.get("/v1/models", headers=origin), web.options(f"{live.url}/v1/completions", headers=origin)]
    assert [name for reply in replies for name in reply.headers if name.startswith("access-control")] == []
    simple = web.post(f"{live.url}/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert simple.status_code in (400, 415)  # what a page may send without a preflight request


# --- names of requests ------------------------------------------------------------------------------------------------


def test_every_response_has_a_request_id(live: Live) -> None:
    assert live.get("/health", headers={"X-Request-Id": "my-1.2_3"}).headers["x-request-id"] == "my-1.2_3"
    for unclean in ("a b", "x" * 65, "a\tb", '"'):
        made = live.get("/nowhere", headers={"X-Request-Id": unclean}).headers["x-request-id"]
        assert made.startswith("req-")
    first, second = (live.get("/v1/models").headers["x-request-id"] for _ in range(2))
    assert first != second


# --- small things -----------------------------------------------------------------------------------------------------


def test_health_under_other_paths_and_as_head_request(live: Live) -> None:
    for path in ("/health", "/ping"):
        assert live.get(path).json() == {"status": "ready"}
        head = web.head(live.url + path)
        assert (head.status_code, head.content) == (200, b"")
    assert live.get("/load").json() == {"server_load": 0}
    assert live.post("/v1/tokenize", {"prompt": "abc"}).json() == live.post("/tokenize", {"prompt": "abc"}).json()
    assert live.post("/v1/detokenize", {"tokens": [70]}).json() == live.post("/detokenize", {"tokens": [70]}).json()


def test_short_responses_are_sent_without_delay() -> None:
    """asyncio disables Nagle's algorithm only if the socket names TCP. Nagle delays every second packet by 40 ms."""
    sockets = listen(ServerConfig(port=0))
    try:
        assert {each.proto for each in sockets} == {socket.IPPROTO_TCP}
    finally:
        for each in sockets:
            each.close()


def test_a_body_of_tiny_chunks_is_refused_before_parsing(live: Live) -> None:
    """Parsing a chunk costs the same for one byte and for a kilobyte: eight such clients would block the server."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = json.dumps({"prompt": "a", "max_tokens": 1, "metadata": {"a": "x" * 3000}}).encode()

    def chunked(size: int) -> bytes:
        parts = [body[at : at + size] for at in range(0, len(body), size)]
        return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"

    head += b"Connection: close\r\nTransfer-Encoding: Chunked\r\n\r\n"
    for size, status in ((1, b"400"), (100, b"200"), (3000, b"200")):
        with connected(live, head + chunked(size)) as client:
            assert answer(client).split(b" ", 2)[1] == status, size
        with connected(live, head) as client:
            time.sleep(0.05)  # the head alone
            client.sendall(chunked(size))
            assert answer(client).split(b" ", 2)[1] == status, size
