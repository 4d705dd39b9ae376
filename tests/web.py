"""HTTP client for servers on this machine: one connection per request, without certificates and proxies.

httpx's module functions read the system's certificates for every request, which takes 25 ms.
"""

from __future__ import annotations

import httpx

client = httpx.Client(
    timeout=120, verify=False, trust_env=False, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
)
