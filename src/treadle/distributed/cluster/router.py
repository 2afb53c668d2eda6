"""Ray Serve's choice of a replica, by what a call's prompt begins with."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from treadle.distributed.cluster.affinity import Affinity


class PrefixRouter(RequestRouter):
    """Of a handle's calls; the first argument is ``affinity.beginning`` of the body.

    A replica that is full, or gone, is left for the others.
    """

    def initialize_state(self, **_: Any) -> None:
        """Called by Ray Serve once."""
        self._affinity = Affinity()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The chosen one, then all others."""
        free = self.select_available_replicas(candidate_replicas) or candidate_replicas
        if not free or pending_request is None:
            return [free] if free else []
        replicas = {str(replica.replica_id): replica for replica in free}
        lengths = self.replica_queue_len_cache
        loads = {name: lengths.get(replica.replica_id) or 0 for name, replica in replicas.items()}
        names = pending_request.args[0] if pending_request.args else []
        chosen = self._affinity.choose(names, loads)
        others = [replica for name, replica in replicas.items() if name != chosen]
        return [[replicas[chosen]], others] if others else [[replicas[chosen]]]
