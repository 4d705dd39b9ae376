"""How the server listens and whom it serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from paceline.config.limits import (
    MAX_API_KEY_CHARACTERS,
    MAX_API_KEYS,
    MAX_BYTES,
    MAX_CONNECTIONS,
    MAX_COUNT,
    MAX_SECONDS,
    LogFormat,
    MetricsNames,
    Name,
    Seconds,
)
from paceline.config.ranges import FileName, Number, Texts, Whole, check, check_fields


@dataclass(frozen=True)
class Hosts:
    """Names as a Host header has them, without the port; kept as a tuple."""

    allowed: str = 'names without a port, or "*"'

    def take(self, name: str, value: Any) -> tuple[str, ...]:
        ok = isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and all(map(_is_host, value))
        check(ok, name, value, self.allowed)
        return tuple(value)


def _is_host(name: object) -> bool:
    if not isinstance(name, str):
        return False
    return name == "*" or (bool(name) and name.isascii() and not set(name) & set(" /:,@*"))


@dataclass(frozen=True)
class ServerConfig:
    """How the server listens and whom it serves.

    host, port: where it listens. served_model_name: what requests call the model; None: its own name.
    api_keys: requests must carry one of them; none: everybody who reaches the server may use it. Limits may stand
        behind a key: "KEY max_requests=N max_tokens_per_minute=N" (at a time; of prompts and answers).
    max_waiting: answers that may wait for a row; requests beyond them are refused with 429.
    max_waiting_tokens: likewise tokens, of prompts to read and of answers to make at their longest; None: as many as
        max_waiting answers of the model's length have.
    allowed_hosts: names that requests may call this server by, besides loopback names, ``host`` and addresses in
        numbers; "*": any. None given: names are checked only if there are no keys.
    max_connections: open at a time; three quarters of them may hold a request.
    max_connections_per_client: those of one address.
    header_timeout: seconds in which a request's headers must have arrived.
    keep_alive_timeout: seconds that a connection stays open between requests.
    send_timeout: seconds after which a client that reads nothing is given up.
    max_body_bytes: of a request. body_timeout: seconds in which it must have arrived.
    max_bodies_bytes: of all requests that have not been answered; of one address half of it.
    max_upload_bytes: of a form with a file for a batch, which goes to the disk as it comes and counts in neither. It
        has ``body_timeout`` once more for every ``max_body_bytes`` that have arrived.
    request_timeout: seconds after which a request is given up, where it does not say so itself; None: never.
    shutdown_timeout: seconds that running requests may still take when the server is told to end.
    stall_timeout: seconds that the engine may take over one step, before ``/health`` calls it stalled. A step is meant
        to take a fraction of one; the default leaves room for a large model's longest on a slow machine.
    capture_seconds: what the start may take to capture rounds of a GPU as CUDA graphs, the likeliest first; the others
        are captured when they are first needed, while requests wait. 0: none is captured at the start. Where rounds are
        not captured, another number than 0 or the default is refused.
    log_format: "text" for people, "json" for machines: one object a line.
    log_interval: seconds between two lines about throughput, while there is any.
    metrics_names: "vllm" gives ``/metrics`` under vLLM's names, too, so that dashboards made for vLLM read them.
    playground: whether there is a page at ``/`` to try the model on.
    batch_dir: where files and batches are kept; None: /v1/files and /v1/batches are refused.
    """

    host: Name = "127.0.0.1"
    port: Annotated[int, Whole(0, 65535)] = 8000
    served_model_name: Name | None = None
    api_keys: Annotated[Sequence[str], Texts(MAX_API_KEYS, MAX_API_KEY_CHARACTERS, secret=True)] = field(
        default=(), repr=False
    )
    allowed_hosts: Annotated[Sequence[str], Hosts()] = ()
    max_waiting: Annotated[int, Whole(0, MAX_COUNT)] = 64
    max_waiting_tokens: Annotated[int, Whole(0, MAX_BYTES)] | None = None
    max_connections: Annotated[int, Whole(16, MAX_CONNECTIONS)] = 512
    max_connections_per_client: Annotated[int, Whole(4, MAX_CONNECTIONS)] = 256
    header_timeout: Seconds = 10.0
    keep_alive_timeout: Seconds = 75.0
    send_timeout: Seconds = 30.0
    max_body_bytes: Annotated[int, Whole(1, MAX_BYTES)] = 4 * 2**20
    body_timeout: Seconds = 30.0
    max_bodies_bytes: Annotated[int, Whole(2, MAX_BYTES)] = 64 * 2**20
    max_upload_bytes: Annotated[int, Whole(1, MAX_BYTES)] = 200 * 2**20
    request_timeout: Seconds | None = None
    shutdown_timeout: Annotated[float, Number(0, MAX_SECONDS)] = 30.0
    stall_timeout: Seconds = 10.0
    capture_seconds: Annotated[float, Number(0, MAX_SECONDS)] = 30.0
    log_format: LogFormat = "text"
    log_interval: Seconds = 10.0
    metrics_names: MetricsNames = "paceline"
    playground: bool = True
    batch_dir: Annotated[str, FileName("the name of a directory")] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        least = 2 * self.max_body_bytes  # one address may have half of it
        allowed = f"at least {least}, twice max_body_bytes"
        check(self.max_bodies_bytes >= least, "max_bodies_bytes", self.max_bodies_bytes, allowed)
