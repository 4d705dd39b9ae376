"""Identity of a client: waiting requests of different clients take turns, limits hold per client, keys cache apart."""

from __future__ import annotations

import hashlib
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from starlette.types import Scope

from paceline.config import ServerConfig
from paceline.server.http_heads import header

_NETWORK_BITS = 64  # prefix length in bits of one customer's IPv6 network


def client_of(scope: Scope, has_keys: bool) -> str:
    """Return one name for all requests with the same API key, or without keys from the same address.

    The caller has already verified the key. The address is the one that uvicorn reports: behind a trusted proxy
    (FORWARDED_ALLOW_IPS) that is the forwarded address.
    """
    if has_keys:
        return key_name(key_in(header(scope, b"authorization"), header(scope, b"x-api-key")))
    return "address " + _network(scope["client"][0] if scope.get("client") else "")


def prefix_owner(config: ServerConfig, client: str) -> str:
    """Return the name under which a client's prompts are cached: its key's, or the one that all clients share.

    client: as ``client_of`` returns it.
    """
    return client if config.api_keys and not config.share_prefixes else ""


def key_in(authorization: bytes, x_api_key: bytes) -> str:
    """Return the API key that a request's headers carry: OpenAI's clients send the first, Anthropic's either.

    Some clients send keys beyond ASCII in UTF-8, others in Latin-1. Bytes that are not UTF-8 are read as Latin-1.
    """
    scheme, _, key = authorization.partition(b" ")
    sent = key if scheme.lower() == b"bearer" else x_api_key
    try:
        return sent.decode().strip()
    except UnicodeDecodeError:
        return sent.decode("latin-1").strip()


def key_name(key: str) -> str:
    """Return a name derived from the key that does not reveal it."""
    return "key " + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """The address that a host is in numbers; None for a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def _network(host: str) -> str:
    address = address_of(host)
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or ip_network((address.packed, _NETWORK_BITS), strict=False))
    return host
