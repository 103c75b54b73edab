"""Which replica takes a call: the session's own verifier, and the drafter of the caller's node.

Both routers keep the replicas they know when Serve takes the last one away. An application that is
removed loses all its replicas at once, while the answers under way may still be finished: the
replicas go on until they are drained, but only their callers' routers know how to reach them.
"""

from __future__ import annotations

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import (
    FIFOMixin,
    LocalityMixin,
    PendingRequest,
    RequestRouter,
    RunningReplica,
)


class StickyRouter(ConsistentHashRouter):
    """Routes by session, so that a session's calls find the replica that holds it."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        if replicas:
            super().update_replicas(replicas)


class LocalNodeRouter(FIFOMixin, LocalityMixin, RequestRouter):
    """Never routes to another node; a request waits until its own node has a replica."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        if replicas:
            super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [[r for r in candidate_replicas if r.node_id == self._self_node_id]]
