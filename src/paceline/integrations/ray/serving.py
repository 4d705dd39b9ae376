"""``paceline serve --replicas``: Ray Serve places, monitors and replaces the replicas; the front is this process."""

from __future__ import annotations

import logging
import secrets
import socket
from typing import Any

from paceline.config import ServerConfig
from paceline.core.hardware import default_threads
from paceline.errors import PacelineError, ParameterError
from paceline.integrations.ray.cluster import LOCAL, Recipe, Share, joined, need_ray, shared
from paceline.integrations.ray.front import Front
from paceline.integrations.ray.replica import Replica
from paceline.server import logs
from paceline.server.ending import watch_signals
from paceline.server.run import LAST_STEP, LAST_WORDS, Server, say_where
from paceline.server.sockets import listen

log = logging.getLogger("paceline.server")

_HEALTH_EVERY = 2.0  # seconds between Ray Serve's health checks of a replica
_RAY_ENDS = 30.0  # seconds for Ray to stop the replicas


def serve(config: ServerConfig, recipe: Recipe, replicas: int, address: str) -> None:
    """Serve until a signal arrives. Raises ParameterError for options that cannot be combined with replicas.

    Raises PacelineError if the replicas cannot be started.
    """
    need_ray()
    check(config, recipe, replicas)
    sockets = listen(config)
    cores = max(default_threads(), replicas * (recipe.options.get("threads") or 0))
    with logs.to_stderr(config.log_format, config.log_level), joined(address, cores) as ray:
        recipe, share = shared(ray, recipe, replicas)
        log.info("%d replicas on Ray (%s): %s; prefix-affine routing", replicas, address, share)
        failure = _serve(config, deployment(ray, config, recipe, replicas, share), sockets, local=address == LOCAL)
    if failure is not None:
        raise PacelineError(f"the replicas could not be started: {failure}") from failure


def check(config: ServerConfig, recipe: Recipe, replicas: int) -> None:
    """Raise ParameterError for options that would mean something else, or nothing, with replicas."""
    if replicas < 1:
        raise ParameterError("replicas", replicas, "at least 1")
    if (ranks := recipe.options.get("tensor_parallel", 1)) != 1:
        raise ParameterError("tensor_parallel", ranks, "1 with --replicas: each replica is one process")
    if config.batch_dir is not None:
        allowed = "left out with --replicas: batch files belong to one engine; use paceline batch instead"
        raise ParameterError("batch_dir", config.batch_dir, allowed)
    if config.log_format != "text":
        allowed = '"text" with --replicas: Ray adds a prefix to the log lines of replicas'
        raise ParameterError("log_format", config.log_format, allowed)
    if any(len(key.split()) > 1 for key in config.api_keys):
        allowed = "keys without limits with --replicas: each replica would count for itself"
        raise ParameterError("api_keys", "a key with limits", allowed)


def deployment(ray: Any, config: ServerConfig, recipe: Recipe, replicas: int, share: Share) -> Deployment:
    """The deployment in Ray Serve's options."""
    options = {
        "num_replicas": replicas,
        "ray_actor_options": share.ray_options,
        "max_ongoing_requests": config.max_connections,  # replicas refuse by themselves what exceeds their limits
        "health_check_period_s": _HEALTH_EVERY,
        "health_check_timeout_s": config.stall_timeout,
        "graceful_shutdown_timeout_s": 1.0,  # the front has drained them
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},  # replicas write their own logs
        "request_router_config": {"request_router_class": "paceline.integrations.ray.router:PrefixRouter"},
    }
    made = ray.serve.deployment(Replica, name="paceline", **options).bind(config, recipe)
    return Deployment(ray, made, f"paceline-{secrets.token_hex(4)}")


class Deployment:
    """The replicas in Ray Serve, under a name that no other server has."""

    def __init__(self, ray: Any, made: Any, name: str) -> None:
        self._ray, self._made, self._name = ray, made, name

    @property
    def lost(self) -> tuple[type[Exception], ...]:
        """The exceptions by which Ray reports that a replica is gone."""
        errors = self._ray.exceptions
        return (errors.RayActorError, errors.ActorUnavailableError, errors.RaySystemError, errors.ObjectLostError)

    def start(self) -> Any:
        """A handle to the replicas, once all of them are ready. Raises RuntimeError if they do not become ready."""
        serve = self._ray.serve
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        return serve.run(self._made, name=self._name, route_prefix=None)

    def end(self, *, local: bool) -> None:
        """Stop the replicas. local: stop everything else that Ray Serve runs, too."""
        if local:
            self._ray.serve.shutdown()
        else:
            self._ray.serve.delete(self._name)


def _serve(
    config: ServerConfig, made: Deployment, sockets: list[socket.socket], *, local: bool
) -> BaseException | None:
    def end() -> None:
        server.should_exit = True

    front = Front(config, made.start, end, made.lost)
    server = Server(front.app(), config, front.give_up)
    limit = config.shutdown_timeout + LAST_WORDS + LAST_STEP + _RAY_ENDS
    watch_signals(limit, lambda: False)  # Ray must be told to stop the replicas even while they load
    say_where(config, sockets)
    try:
        server.run(sockets)
    finally:
        made.end(local=local)
    return front.failure
