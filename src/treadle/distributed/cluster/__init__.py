"""Several machines, with Ray: the extra ``treadle[cluster]``.

``load`` returns a model whose layers are split over Ray actors; ``treadle cluster serve`` serves
several models at one address; ``treadle batch --cluster`` distributes a file of requests.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from treadle.errors import TreadleError

if TYPE_CHECKING:
    from treadle.distributed.cluster.model import StagedModel

__all__ = ["load"]


def load(path: Any = None, *, stages: int, **settings: Any) -> StagedModel:
    """Load a model in ``stages``, each a Ray actor with ``threads`` processors; the other settings
    are those of ``treadle.load``. Call ``ray.init`` first, else Ray starts on this machine.

    Every machine needs the file under the same path; it is mapped, and each reads its own layers.
    Raises the errors of ``treadle.load``, and TreadleError for more stages than layers, or without
    Ray.
    """
    if find_spec("ray") is None:
        raise TreadleError("a cluster needs ray: pip install 'treadle[cluster]'")
    from treadle.distributed.cluster.model import StagedModel

    return StagedModel(path, stages=stages, **settings)
