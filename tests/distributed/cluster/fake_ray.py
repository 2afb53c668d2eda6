"""Ray in this process, without Ray: the calls that ``distributed/cluster`` makes, and their errors.

Actors are objects here, and a call of one is made at once. An actor may be dead, hang, or raise.
The tests in this folder that use Ray itself show that it does the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import treadle.distributed.cluster

OURS = ("chain", "data", "model", "router", "serving")  # modules that import Ray


class RayError(Exception):
    """The base of Ray's errors."""


class RayTaskError(RayError):
    """An error that a call raised, with its cause."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class RayActorError(RayError):
    """The actor's process has ended."""


class GetTimeoutError(RayError):
    """The value did not come in time."""


class ObjectLostError(RayError):
    """The value was lost with its machine."""


class TaskUnschedulableError(RayError):
    """No machine can run it."""


ERRORS = (RayError, RayTaskError, RayActorError, GetTimeoutError, ObjectLostError)


class Ref:
    """A value that is to come, or the error in place of it."""

    def __init__(self, value: Any = None, error: RayError | None = None) -> None:
        self.value = value
        self.error = error


class ActorMethod:
    """A method of an actor; ``remote`` calls it."""

    def __init__(self, actor: Actor, name: str) -> None:
        self._actor = actor
        self._name = name

    def remote(self, *args: Any) -> Ref:
        if self._actor.error is not None:
            return Ref(error=self._actor.error)
        try:
            given = [get(arg) if isinstance(arg, Ref) else arg for arg in args]
            return Ref(getattr(self._actor.object, self._name)(*given))
        except RayError as error:  # of a call whose result this one takes
            return Ref(error=error)
        except Exception as error:
            return Ref(error=RayTaskError(error))


class Actor:
    """An actor: its object, and the error that each of its calls ends in, if any."""

    def __init__(self, made: Any, options: dict[str, Any]) -> None:
        self.object = made
        self.options = options
        self.error: RayError | None = None

    def __getattr__(self, name: str) -> ActorMethod:
        return ActorMethod(self, name)


def get(ref: Ref, timeout: float | None = None) -> Any:
    """The value of a reference."""
    if ref.error is not None:
        raise ref.error
    return ref.value


class FakeRay:
    """What was asked of Ray, and its modules."""

    def __init__(self) -> None:
        self.n_starts = 0
        self.put: list[Any] = []  # values that were stored once
        self.made: list[Actor] = []
        self.killed: list[Actor] = []
        self.hangs = False  # no machine has a free processor: new actors do not start
        self.data_calls: list[dict[str, Any]] = []
        self.serve_calls: list[tuple[str, dict[str, Any]]] = []
        self.data_context = SimpleNamespace(
            execution_options=SimpleNamespace(preserve_order=False), enable_progress_bars=True
        )

    # -- actors -----------------------------------------------------------------------------------

    def _init(self, **_: Any) -> None:
        self.n_starts += 1

    def _put(self, value: Any) -> Ref:
        self.put.append(value)
        return Ref(value)

    def _kill(self, actor: Actor) -> None:
        self.killed.append(actor)
        if actor.error is not None:
            raise ValueError("no such actor")

    def _remote(self, kind: Callable[..., Any]) -> Any:
        def options(**options: Any) -> Any:
            def remote(*args: Any) -> Actor:
                actor = Actor(kind(*args), options)
                actor.error = GetTimeoutError() if self.hangs else None
                self.made.append(actor)
                return actor

            return SimpleNamespace(remote=remote)

        return SimpleNamespace(options=options)

    # -- data -------------------------------------------------------------------------------------

    def _from_items(self, items: list[dict[str, Any]], override_num_blocks: int) -> Any:
        import numpy as np

        def map_batches(kind: Callable[..., Any], **more: Any) -> Any:
            self.data_calls.append({"n": len(items), "n_blocks": override_num_blocks, **more})
            answer = kind(*more["fn_constructor_args"])
            size = more["batch_size"]
            rows: list[dict[str, Any]] = []
            for start in range(0, len(items), size):
                part = items[start : start + size]
                columns = {
                    name: np.array([each[name] for each in part], object) for name in part[0]
                }
                made = answer(columns)
                rows += (
                    {name: column[i] for name, column in made.items()} for i in range(len(part))
                )
            return SimpleNamespace(iter_rows=lambda: iter(rows))

        return SimpleNamespace(map_batches=map_batches)

    # -- serve ------------------------------------------------------------------------------------

    def _deployment(self, kind: type, **settings: Any) -> Any:
        self.serve_calls.append((kind.__name__, settings))
        return SimpleNamespace(bind=lambda *args: (kind.__name__, *args))

    def modules(self) -> dict[str, ModuleType]:
        """The modules by name."""
        errors = {each.__name__: each for each in (*ERRORS, TaskUnschedulableError)}
        data = module(
            "ray.data",
            DataContext=SimpleNamespace(get_current=lambda: self.data_context),
            ActorPoolStrategy=lambda size: ("pool", size),
            from_items=self._from_items,
        )
        serve = module(
            "ray.serve",
            start=lambda **settings: self.serve_calls.append(("start", settings)),
            run=lambda bound, **settings: self.serve_calls.append(
                ("run", {"bound": bound, **settings})
            ),
            deployment=self._deployment,
        )
        ray = module(
            "ray",
            is_initialized=lambda: self.n_starts > 0,
            init=self._init,
            put=self._put,
            get=get,
            kill=self._kill,
            remote=self._remote,
            util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7"),
            data=data,
            serve=serve,
        )
        others = [
            module("ray.exceptions", **errors),
            module("ray.serve.config", RequestRouterConfig=SimpleNamespace),
            module(
                "ray.serve.request_router",
                PendingRequest=SimpleNamespace,
                RequestRouter=FakeRouter,
                RunningReplica=SimpleNamespace,
            ),
        ]
        return {each.__name__: each for each in (ray, data, serve, *others)}


class FakeRouter:
    """The base of Ray Serve's routers: replicas that are full, and their queues' lengths."""

    def __init__(self, full: Set[str], lengths: dict[str, int]) -> None:
        self._full = full
        self.replica_queue_len_cache = lengths

    def select_available_replicas(self, candidates: list[Any]) -> list[Any]:
        return [each for each in candidates if each.replica_id not in self._full]


def module(name: str, **attributes: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)  # by which ``find_spec`` finds it
    vars(made).update(attributes)
    return made


@contextmanager
def faked() -> Iterator[FakeRay]:
    """Our modules of the cluster, imported anew on the fake; afterwards they are as they were."""
    fake = FakeRay()
    package = vars(treadle.distributed.cluster)
    paths = {name: f"{package['__name__']}.{name}" for name in OURS}
    modules = {path: sys.modules.pop(path, None) for path in (*paths.values(), *fake.modules())}
    attributes = {name: package.pop(name, None) for name in OURS}
    sys.modules.update(fake.modules())
    try:
        for path in paths.values():
            import_module(path)
        yield fake
    finally:
        for table, before in ((sys.modules, modules), (package, attributes)):
            for name, value in before.items():
                table.pop(name, None)
                if value is not None:
                    table[name] = value
