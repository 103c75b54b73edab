"""Routing to the replica on the caller's own node: an edge's driver uses its own drafter only."""

from __future__ import annotations

from ray.serve.request_router import (
    FIFOMixin,
    LocalityMixin,
    PendingRequest,
    RequestRouter,
    RunningReplica,
)


class LocalNodeRouter(FIFOMixin, LocalityMixin, RequestRouter):
    """Never routes to another node; a request waits until its own node has a replica."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [[r for r in candidate_replicas if r.node_id == self._self_node_id]]
