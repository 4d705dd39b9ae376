"""``routing`` as a request router of Ray Serve, which creates it in the process of the front."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """A router that uses ``Affinity``; the first two arguments of a request are its flight id and its blocks."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """The preferred replica, then the others in case it accepts no more."""
        from paceline.integrations.ray.routing import AFFINITY  # here: Ray copies the class with its module's globals

        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        flight, blocks = pending_request.args[:2]
        first = by_name.pop(AFFINITY.choose(flight, blocks, list(by_name)))
        return [[first], list(by_name.values())]
