"""Who asks: clients take turns where requests wait, and none of them has all the places."""

from __future__ import annotations

import hashlib
import ipaddress

from fastapi import Request

_HOME = 64  # bits of an IPv6 address that are one customer's: the others are free for the taking


def client_of(request: Request, has_keys: bool) -> str:
    """One name for all requests with the same key; without keys, for all from the same address.

    The key has been found good. The address is the one that uvicorn reports: behind a proxy that it trusts
    (FORWARDED_ALLOW_IPS), the one that the proxy forwards.
    """
    if has_keys:
        return key_name(request.headers.get("authorization", "").partition(" ")[2].strip())
    return "address " + _home(request.client.host if request.client else "")


def key_name(key: str) -> str:
    """A name that does not tell the key."""
    return "key " + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _home(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4:
        return host
    return str(ipaddress.ip_network((address.packed, _HOME), strict=False))
