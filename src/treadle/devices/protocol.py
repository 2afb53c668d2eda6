"""What a machine must do to run plans: six verbs.

The engine, batches and the cache know a device by this alone. They know no address: memory is an
object, and what lies in it an offset. ``memory``, ``weights`` and ``copy`` are those of ``Storage``
(``plan/plan.py``); ``plan`` is the device's own lowering of a graph, ``ready`` and ``run`` are for
what it made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from treadle.plan.plan import DeviceMemory, Plan, Storage

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.kernel import CompileStats
    from treadle.kvcache.cache import KVCache
    from treadle.models.config import Config
    from treadle.plan.lowering.weights import Weights


class Device(Storage, Protocol):
    """One place where plans run; ``devices/cpu/device.py`` is the usual one."""

    @property
    def isa(self) -> Isa:
        """What its kernels are compiled for."""

    @property
    def n_threads(self) -> int:
        """Kernels that run at once: steps have items for so many."""

    @property
    def variant(self) -> str:
        """What the bits of its results depend on, beside the plan and its inputs."""

    @property
    def kernels(self) -> CompileStats:
        """What ``ready`` has compiled."""

    def plan(
        self,
        config: Config,
        weights: Weights,
        cache: KVCache,
        n_tokens: int,
        n_outputs: int,
        *,
        deterministic: bool = False,
        output: str = "logits",
    ) -> Plan:
        """The model's graph lowered: its steps for batches of up to ``n_tokens`` tokens that want
        ``output`` of up to ``n_outputs``. What a run is given is ``Plan.inputs``.

        Raises UnsupportedError, with the label, for what the device cannot make.
        """

    def ready(self, plan: Plan, arena: DeviceMemory, inputs: DeviceMemory) -> Any:
        """Compile a plan's kernels, and tell them where all is: gives what ``run`` takes.

        Buffers lie in ``arena`` as the plan has placed them. Raises CompileError, CacheError.
        """

    def run(
        self,
        ready: Any,
        steps: range | None = None,
        *,
        times: list[float] | None = None,
        stoppable: bool = False,
    ) -> bool:
        """Do a plan's steps, all of them or these, and wait for their end. ``times``: gets each
        step's seconds.

        False where a signal stopped it (only if ``stoppable``): then nothing of it counts.
        """

    def close(self) -> None:
        """Stop. Nothing may be run any more."""
