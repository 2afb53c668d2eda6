"""The device protocol: memory, weights, copy, plan, ready and run.

The engine, batches and the KV cache use a device only through it. They know no addresses: memory is
an object, and a place in it an offset. ``memory``, ``weights`` and ``copy`` belong to ``Storage``
(``plan/plan.py``). ``plan`` is the device's own lowering of a graph; ``ready`` and ``run`` take its
plans.
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
    """A place where plans run; ``devices/cpu/device.py`` is the default."""

    @property
    def isa(self) -> Isa:
        """The instruction set that its kernels are compiled for."""

    @property
    def n_threads(self) -> int:
        """The number of kernels that run at once; steps are split into items for so many."""

    @property
    def variant(self) -> str:
        """A key of everything besides the plan and its inputs that affects result bits."""

    @property
    def kernels(self) -> CompileStats:
        """Statistics of the kernels that ``ready`` has compiled."""

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
        """Lower the model's graph for batches of up to ``n_tokens`` tokens that need ``output`` of
        up to ``n_outputs``.

        ``Plan.inputs`` lists the inputs of a run. Raises UnsupportedError, with the label, for an
        op that the device does not support.
        """

    def ready(self, plan: Plan, arena: DeviceMemory, inputs: DeviceMemory) -> Any:
        """Compile a plan's kernels and bind their arguments to memory; the result is for ``run``.

        Buffers lie in ``arena`` at the plan's offsets. Raises CompileError, CacheError.
        """

    def run(
        self,
        ready: Any,
        steps: range | None = None,
        *,
        times: list[float] | None = None,
        stoppable: bool = False,
    ) -> bool:
        """Run a plan's steps, all or a range, and wait until they are done.

        ``times`` receives each step's seconds. Returns False if a signal stopped the run (only if
        ``stoppable``); its results are then invalid.
        """

    def close(self) -> None:
        """Stop the device; it must not be used afterwards."""
