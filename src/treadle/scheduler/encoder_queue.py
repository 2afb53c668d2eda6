"""Encoding of prompts between steps, in an encoder-decoder model: in slices, so that the tokens of
other requests are not delayed by more than one slice.

Short prompts are encoded together: a run of few tokens spends most of its time on the encoder's
weights. The first in the queue is always among them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from treadle.base.fast_classes import dataclass
from treadle.errors import TreadleError

if TYPE_CHECKING:
    from treadle.engine.engine import Engine
    from treadle.kvcache.cache import EncodedKeys
    from treadle.scheduler.request import Request


@dataclass(frozen=True, eq=False)
class PromptGroup:
    """Prompts that are being encoded together; ``keys``: where the encoder's keys and values of
    each are stored. ``encoding`` runs one slice of time for each ``next``.
    """

    keys: list[EncodedKeys]
    encoding: Generator[None, None, None]


class EncoderQueue:
    """The prompts to encode for the requests that wait for them, in order of arrival. ``clock``
    returns seconds.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._waiting: dict[EncodedKeys, list[Request]] = {}  # of this step, in order
        self._current: PromptGroup | None = None

    def begin_step(self) -> None:
        """Clear the list of waiting requests: each step collects it anew, since requests end."""
        self._waiting.clear()

    def ready(self, request: Request) -> bool:
        """Return whether an admitted request's prompt is encoded. If not, the request is added to
        those that wait for it.
        """
        assert request.seq is not None
        keys = request.seq.encoded
        if keys is None or keys.is_stored:
            return True
        self._waiting.setdefault(keys, []).append(request)
        return False

    @property
    def waits(self) -> bool:
        """Whether a request of this step waits until its prompt is encoded."""
        return bool(self._waiting)

    def run_slice(self) -> list[tuple[Request, TreadleError]]:
        """Encode for one slice of time. Return the requests whose prompt cannot be encoded, each
        with its error. The caller holds the engine's lock.
        """
        group = self._current
        # Pages of a prompt that nobody waits for may be another one's by now.
        if group is not None and not all(keys in self._waiting for keys in group.keys):
            self._drop()
        if not self._waiting:
            return []
        began = self._clock()
        compiled = self._engine.kernels.seconds
        group = self._current = self._current or self._begin()
        requests = [request for keys in group.keys for request in self._waiting[keys]]
        try:
            next(group.encoding)
        except StopIteration:
            self._current = None
        except TreadleError as error:
            self._current = None
            return [(request, error) for request in requests]
        finally:
            compiled = self._engine.kernels.seconds - compiled
            took = self._clock() - began - compiled
            for request in requests:
                request.answer.timings.prefill_s += took
                request.answer.timings.compile_s += compiled
        return []

    def _begin(self) -> PromptGroup:
        """Begin to encode the first prompt in the queue, and those after it that fit the same
        run.
        """
        encoder = self._engine.encoder
        assert encoder is not None
        prompts: list[tuple[tuple[int, ...], EncodedKeys]] = []
        room = encoder.max_batched_tokens
        for keys, requests in self._waiting.items():
            if prompts and len(requests[0].source) > room:
                break
            prompts.append((requests[0].source, keys))
            room -= len(requests[0].source)
        return PromptGroup([keys for _, keys in prompts], encoder.encode(prompts))

    def _drop(self) -> None:
        """Stop the current encoding, if any."""
        if self._current is not None:
            self._current.encoding.close()
            self._current = None
