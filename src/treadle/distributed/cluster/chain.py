"""Stages as Ray actors: each passes its output to the next, not through the front engine."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskUnschedulableError,
)

from treadle.distributed.stages.pipeline import StageLostError
from treadle.distributed.stages.stage import Batch, Given, Stage
from treadle.errors import TreadleError

START_S = 300.0  # for an actor to be scheduled and to open the model
INLINE = 1 << 16  # largest batch in bytes sent with each call; larger ones are stored once
T = TypeVar("T")


class StageActor:
    """One stage, in its own process."""

    def __init__(self, path: str, layers: range, settings: dict[str, Any]) -> None:
        self._stage = Stage(path, layers, **settings)

    def where(self) -> str:
        """Return the address of the machine that this actor runs on."""
        address: Any = ray.util.get_node_ip_address
        return str(address())

    def run(self, batch: Batch, given: Given) -> Given:
        """Run one batch on the stage, and return its outputs. ``given``: the outputs of the
        previous stage, {} for the first one.
        """
        return self._stage.run_laid_out(batch, given)

    def read(self, name: str) -> np.ndarray:
        """Return the output called ``name`` of the last run, as bytes: uint8 ``[n_bytes]``."""
        return self._stage.read(name)


class RayChain:
    """A ``StageChain`` (``distributed/stages/pipeline.py``) of actors, spread over all machines:
    one for the layers of each of ``parts``. ``settings``: arguments of ``Stage``.
    """

    def __init__(self, path: str, parts: list[range], settings: dict[str, Any]) -> None:
        self._path = path
        self._parts = parts
        self._settings = settings
        self.actors: list[Any] = [None] * len(parts)
        self._where = [""] * len(parts)
        if not ray.is_initialized():
            ray.init(include_dashboard=False)
        try:
            self.restart()
        except BaseException:
            self.close()
            raise

    def restart(self) -> None:
        """Start an actor for each stage that has none or has ended, and wait until all are ready.
        Raises TreadleError if no machine has enough free processors within START_S seconds.
        """
        kind: Any = ray.remote(StageActor)
        options = {
            "num_cpus": self._settings["n_threads"],
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,  # a new process has no pages: the front engine recomputes them
        }
        for i, actor in enumerate(self.actors):
            if actor is not None and not self._is_alive(actor):
                self.actors[i] = None
        for i, part in enumerate(self._parts):
            if self.actors[i] is None:
                args = self._path, part, self._settings
                self.actors[i] = kind.options(**options).remote(*args)
        for i, actor in enumerate(self.actors):
            try:
                self._where[i] = ray.get(actor.where.remote(), timeout=START_S)
            except GetTimeoutError:
                raise TreadleError(
                    f"{self._name(i)}: no machine had {self._settings['n_threads']} free "
                    f"processors within {START_S:g} s"
                ) from None
            except RayError as error:
                self._raise(error)

    def _is_alive(self, actor: Any) -> bool:
        try:
            ray.get(actor.where.remote(), timeout=START_S)
        except RayError:
            return False
        return True

    def run(self, batch: Batch) -> Given:
        """Run a batch through all actors, and return the last stage's outputs except the logits.
        Raises StageLostError, and errors that stages raise.
        """
        sent: Any = ray.put(batch) if len(batch.inputs) > INLINE else batch
        given: Any = {}
        for actor in self.actors:
            given = actor.run.remote(sent, given)
        result: Given = self._get(given)
        return result

    def read(self, name: str) -> np.ndarray:
        """Return the output called ``name`` of the last stage, as bytes: uint8 ``[n_bytes]``.
        Raises StageLostError.
        """
        found: np.ndarray = self._get(self.actors[-1].read.remote(name))
        return found

    def _get(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except RayError as error:
            self._raise(error)

    def _raise(self, error: RayError) -> None:
        """Raise the TreadleError behind a Ray error, or StageLostError if an actor has ended."""
        cause: Any = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, TreadleError):
            raise cause from None
        if isinstance(cause, RayActorError | ObjectLostError | TaskUnschedulableError):
            lost = [i for i, actor in enumerate(self.actors) if not self._is_alive(actor)]
            names = " and ".join(map(self._name, lost)) or "a stage"
            raise StageLostError(f"{names} ended: {_first_line(cause)}") from None
        raise error

    def _name(self, i: int) -> str:
        layers = self._parts[i]
        where = self._where[i]
        on = f" on {where}" if where else ""
        return f"stage {i + 1} of {len(self._parts)} (layers {layers[0]} to {layers[-1]}{on})"

    def close(self) -> None:
        """Kill the actors. Idempotent."""
        actors = self.actors
        self.actors = []
        for actor in actors:
            if actor is not None and ray.is_initialized():
                with contextlib.suppress(Exception):
                    ray.kill(actor)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]
