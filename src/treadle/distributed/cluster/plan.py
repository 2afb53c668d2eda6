"""Configuration of the replicas of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from treadle.base.fast_classes import dataclass
from treadle.server.http.http_io import MAX_BODY, MAX_MEDIA_BODY
from treadle.server.requests.service import ServerSettings

if TYPE_CHECKING:
    from treadle.api.model import Model


@dataclass(frozen=True)
class ReplicaPlan:
    """Number and settings of a model's replicas. ``path``: the model, as for ``treadle.load``;
    ``load``: the other arguments of ``treadle.load``. With ``stages`` > 1, the layers of each
    replica are split over that many Ray actors.
    """

    path: str | None
    replicas: int = 1
    stages: int = 1
    load: Mapping[str, Any] = field(default_factory=dict)
    settings: ServerSettings = field(default_factory=ServerSettings)

    @property
    def max_body(self) -> int:
        """Maximum bytes of a request body that the front server accepts. The larger limit, for
        pictures, applies unless stages or ``mmproj=False`` exclude pictures; a replica that reads
        none refuses large bodies itself.
        """
        may_read_media = self.stages == 1 and self.load.get("mmproj") is not False
        return MAX_MEDIA_BODY if may_read_media else MAX_BODY

    @property
    def threads(self) -> int:
        """Threads of a replica, or of each stage."""
        return int(self.load.get("threads") or 1)

    @property
    def cpus(self) -> float:
        """Processors that a replica's own actor requests from Ray; stages request theirs in
        addition.
        """
        return self.threads if self.stages == 1 else 0.1

    @property
    def n_cpus(self) -> float:
        """All requested processors, one of them for the front server."""
        stages = self.threads * self.stages if self.stages > 1 else 0
        return self.replicas * (self.cpus + stages) + 1

    def open(self) -> Model:
        """Load the model of one replica; return it."""
        import treadle
        from treadle.distributed.cluster import load

        own = {**self.load, "threads": self.threads}
        if self.stages > 1:
            return load(self.path, stages=self.stages, **own)
        return treadle.load(self.path, **own)
