"""What a cluster is to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from treadle.base.fast_dataclass import dataclass
from treadle.server.requests.service import ServerSettings

if TYPE_CHECKING:
    from treadle.api.model import Model


@dataclass(frozen=True)
class ReplicaPlan:
    """``replicas`` of a model. ``load``: settings of ``treadle.load``; with more than one of
    ``stages`` each replica's layers are split over so many actors.
    """

    path: str | None
    replicas: int = 1
    stages: int = 1
    load: Mapping[str, Any] = field(default_factory=dict)
    settings: ServerSettings = field(default_factory=ServerSettings)

    @property
    def threads(self) -> int:
        """Of a replica, or of each stage."""
        return int(self.load.get("threads") or 1)

    @property
    def cpus(self) -> float:
        """Processors that a replica's own actor asks Ray for; stages have theirs beside it."""
        return self.threads if self.stages == 1 else 0.1

    @property
    def n_cpus(self) -> float:
        """All that are asked for: one is for what stands before the replicas."""
        stages = self.threads * self.stages if self.stages > 1 else 0
        return self.replicas * (self.cpus + stages) + 1

    def open(self) -> Model:
        """A replica's model."""
        import treadle
        from treadle.distributed.cluster import load

        own = {**self.load, "threads": self.threads}
        if self.stages > 1:
            return load(self.path, stages=self.stages, **own)
        return treadle.load(self.path, **own)
