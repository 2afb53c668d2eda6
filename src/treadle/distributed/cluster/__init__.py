"""One model on several machines, with Ray: the extra ``treadle[cluster]``.

``load`` returns a model whose layers are split over Ray actors; ``treadle cluster serve`` serves
several replicas of a model at one address; ``treadle batch --cluster`` distributes the requests of
a file over replicas.

::

    chain.py     RayChain: pipeline stages as Ray actors
    model.py     StagedModel: a model whose layers run in such stages
    plan.py      ReplicaPlan: the number of replicas, their settings and processors
    serving.py   the front server and the replicas, on Ray Serve
    router.py    chooses a replica for a request: the interface to Ray Serve
    affinity.py  which replica has which prompt prefixes cached
    data.py      answers the lines of a batch file, on Ray Data
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

    Every machine needs the file under the same path; a stage reads only its own layers. Raises the
    errors of ``treadle.load``, TreadleError for more stages than layers or without Ray, and
    UnsupportedError for another device than a CPU and for ``cache_dir``.
    """
    if find_spec("ray") is None:
        raise TreadleError("a cluster needs ray: pip install 'treadle[cluster]'")
    from treadle.distributed.cluster.model import StagedModel

    return StagedModel(path, stages=stages, **settings)
