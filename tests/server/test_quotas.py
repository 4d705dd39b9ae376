"""Limits of API keys: strict parsing, and enforcement per key."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.config import ServerConfig
from paceline.errors import ParameterError
from paceline.server import errors
from paceline.server.clients import client_of, key_name
from paceline.server.quotas import ApiKey, Quotas, read_key
from server_support import Live, start

pytestmark = pytest.mark.usefixtures("one_thread")


def test_keys_and_limits_are_parsed_strictly() -> None:
    assert read_key("secret") == ApiKey("secret")
    assert read_key("secret  max_tokens_per_minute=5 max_requests=2") == ApiKey("secret", 2, 5)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "max_requests=3",
        "secret max_requests",
        "secret max_requests=",
        "secret max_requests=0",
        "secret max_requests=-1",
        "secret max_requests=1.5",
        "secret max_requests=٣",
        "secret max_requests=9999999999",
        "secret max_requests=1 max_requests=1",
        "secret max_request=1",
        "secret more words",
        "secret max_requests = 1",
    ],
)
def test_invalid_key_lines_are_refused_without_showing_them(line: str) -> None:
    with pytest.raises(ParameterError, match="max_requests=N") as caught:
        Quotas([line])
    assert "secret" not in str(caught.value)


def test_duplicate_keys_are_refused() -> None:
    with pytest.raises(ParameterError, match="twice"):
        Quotas(["a", "a max_requests=1"])


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("localhost", "localhost"),
    ],
)
def test_clients_without_keys_are_addresses_or_networks(host: str, name: str) -> None:
    assert client_of({"type": "http", "client": (host, 1), "headers": []}, has_keys=False) == f"address {name}"


def test_the_token_bucket_refills_with_time_and_returns_unused_tokens() -> None:
    now = [0.0]
    quotas, client = Quotas(["a max_tokens_per_minute=60"], lambda: now[0]), key_name("a")

    def use(asked: int, used: int) -> int:
        """Return the seconds to wait; 0 if the request was admitted."""
        try:
            with quotas.hold(client, asked):
                quotas.charge(client, used)
        except errors.ApiError as error:
            return error.retry_after or 0
        return 0

    assert use(60, 10) == 0
    assert use(50, 50) == 0
    assert use(30, 30) == 30
    now[0] += 30
    assert use(30, 30) == 0
    assert use(1000, 0) == 60, "more than a minute's tokens: needs a full bucket"
    now[0] += 60
    assert use(1000, 90) == 0
    assert use(1, 1) == 31
    with quotas.hold("address 1.2.3.4", 10**9):
        pass


@pytest.fixture(scope="module")
def keyed(tiny: str) -> Iterator[Live]:
    keys = ("free", "few max_requests=1", "slow max_tokens_per_minute=20")
    yield from start(ServerConfig(port=0, api_keys=keys), tiny)


def test_a_keys_limit_does_not_affect_other_keys(keyed: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = keyed.context.dispatcher.quotas._accounts[key_name("slow")]
    monkeypatch.setattr(slow, "_clock", lambda: slow._at)  # stops the clock, however slow the machine

    def ask(key: str, **body: object) -> tuple[int, str | None]:
        whole = {"prompt": "abcd", "max_tokens": 8, "ignore_eos": True, **body}
        reply = keyed.post("/v1/completions", whole, headers={"Authorization": f"Bearer {key}"})
        return reply.status_code, reply.headers.get("retry-after")

    assert ask("slow", max_tokens=6) == (200, None)
    assert ask("slow", max_tokens=8) == (429, "6"), "10 of 20 are used, and 12 more are needed"
    assert ask("free", max_tokens=60) == ask("few") == (200, None)
    assert ask("few max_requests=1")[0] == ask("slow max_tokens_per_minute=20")[0] == 401
    account = keyed.context.dispatcher.quotas._accounts[key_name("few")]
    assert account._requests == 0
    account._requests = 1  # as if one request were running
    try:
        assert ask("few") == (429, "1")
        assert ask("free") == (200, None)
    finally:
        account._requests = 0
    keyed.wait_until_idle()
