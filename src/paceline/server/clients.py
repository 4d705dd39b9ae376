"""Identity of a client: waiting requests of different clients take turns, and limits hold per client."""

from __future__ import annotations

import hashlib
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from fastapi import Request

_NETWORK_BITS = 64  # prefix length in bits of one customer's IPv6 network


def client_of(request: Request, has_keys: bool) -> str:
    """Return one name for all requests with the same API key, or without keys from the same address.

    The caller has already verified the key. The address is the one that uvicorn reports: behind a trusted proxy
    (FORWARDED_ALLOW_IPS) that is the forwarded address.
    """
    if has_keys:
        headers = request.headers
        return key_name(key_in(headers.get("authorization", ""), headers.get("x-api-key", "")))
    return "address " + _network(request.client.host if request.client else "")


def key_in(authorization: str, x_api_key: str) -> str:
    """Return the API key that a request's headers carry: OpenAI's clients send the first, Anthropic's either."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else x_api_key.strip()


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
