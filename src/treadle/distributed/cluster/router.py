"""Prefix routing for Ray Serve: chooses a replica by the beginning of a request's prompt."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from treadle.distributed.cluster.affinity import Affinity


class PrefixRouter(RequestRouter):
    """Ray Serve's request router for replicas. The first argument of each routed call must be the
    list of prefix hashes that ``affinity.beginning`` returns.

    A replica that is full or gone is skipped.
    """

    def initialize_state(self, **_: Any) -> None:
        """Create the affinity; Ray Serve calls it once."""
        self._affinity = Affinity()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return ``[[chosen], others]``, as Ray Serve tries these groups in order: the replica that
        ``Affinity.choose`` returns, then the others. Without a request, return all free replicas as
        one group.
        """
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
