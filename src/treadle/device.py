"""What a machine must do to run plans: five verbs.

The engine, batches and the cache know a device by this alone. They know no address: memory is an
object, and what lies in it an offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from treadle.isa.isa import Isa
    from treadle.jit.kernel import Tally
    from treadle.kernels.choice import Table
    from treadle.plan import Const, Memory, Plan


class Device(Protocol):
    """One place where plans run; ``devices/cpu.py`` is the usual one."""

    @property
    def isa(self) -> Isa:
        """What its kernels are compiled for."""

    @property
    def table(self) -> Table:
        """The tiles of its matrix products."""

    @property
    def n_threads(self) -> int:
        """Kernels that run at once: steps have items for so many."""

    @property
    def kernels(self) -> Tally:
        """What ``ready`` has compiled."""

    def memory(self, n_bytes: int, *, host: bool = False) -> Memory:
        """Zeros. ``host``: for a run's inputs, which the host writes in place (``Memory.bytes``);
        what it has written when a run begins, the run reads.

        Raises MemoryError or ValueError where there is not so much.
        """

    def weights(self, name: str, array: np.ndarray) -> Const:
        """Weights that the host has mapped or made, for plans to read: copied if they must be."""

    def copy(self, memory: Memory, to: int, start: int, n_bytes: int) -> None:
        """Copy bytes within a memory of this device's."""

    def ready(self, plan: Plan, arena: Memory, inputs: Memory) -> Any:
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
