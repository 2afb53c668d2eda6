"""What the GPU's driver must do: a dozen verbs, of which ``devices/cuda/device.py`` makes a device.

``libcuda.py`` is the usual one. ``tests/gpu/emulated.py`` is one whose memory is this process's and
whose kernels run on the CPU. An address is a number: where bytes begin in the GPU's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np

    from treadle.isa.isa import Isa
    from treadle.jit.kernel import CompileStats
    from treadle.kernels.spec import Spec


class CardFacts(NamedTuple):
    """What a card is."""

    name: str
    n_bytes: int  # of its memory
    n_units: int  # multiprocessors: each runs some blocks at once
    capability: tuple[int, int]  # sm_90 is (9, 0)
    version: tuple[int, int]  # the newest CUDA that the driver knows
    shared_bytes: int  # that a block may have


class Launch(NamedTuple):
    """One kernel with its size and its arguments, the same in every run; see ``launch_args.py``."""

    kernel: Any  # what ``load`` gave
    blocks: int
    threads: int  # of a block
    shared: int  # bytes of a block
    args: int  # address of the slots of its arguments
    run: int  # of the run's inputs
    counter: int  # of the number that items are counted by; 0: one
    base: int
    per: int
    scratch: int  # address; 0: none


class Upload(NamedTuple):
    """Bytes that a run brings: from pinned memory to ``to``."""

    to: int
    data: np.ndarray


class Driver(Protocol):
    """One card. Verbs may be called by any thread; work is done in the order of the calls.

    Each raises DeviceError, in words, for what the driver refuses.
    """

    @property
    def facts(self) -> CardFacts:
        """What the card is."""

    @property
    def isa(self) -> Isa:
        """The row that kernels are made for."""

    def code(self, spec: Spec, tally: CompileStats) -> bytes:
        """A kernel as ``load`` takes it: from the cache, else made."""

    def load(self, spec: Spec, code: bytes) -> Any:
        """A kernel, ready for ``Launch.kernel``."""

    def alloc(self, n_bytes: int) -> int:
        """Memory of the card, of any content. Raises NoMemoryError."""

    def free(self, address: int) -> None:
        """Give it back."""

    def pinned(self, n_bytes: int) -> np.ndarray:
        """Zeros in memory of the host that the card can read: uint8 ``[n_bytes]``."""

    def unpin(self, data: np.ndarray) -> None:
        """Give it back."""

    def clear(self, address: int, n_bytes: int) -> None:
        """Write zeros."""

    def write(self, address: int, data: np.ndarray) -> None:
        """Copy uint8 from any memory of the host; done when this returns."""

    def read(self, address: int, n_bytes: int) -> np.ndarray:
        """Wait for what was asked before, and copy: uint8 ``[n_bytes]``."""

    def copy(self, to: int, frm: int, n_bytes: int) -> None:
        """Copy within the card."""

    def room(self) -> tuple[int, int]:
        """Bytes of the card's memory that are free, and all."""

    def graph(self, upload: Upload, launches: Sequence[Launch]) -> Any:
        """An upload, then kernels one behind the other, to be started as one."""

    def start(self, graph: Any) -> None:
        """Do it all, and wait for its end."""

    def drop(self, graph: Any) -> None:
        """Forget a graph."""

    def timed(self, upload: Upload, launches: Sequence[Launch]) -> list[float]:
        """The same one by one: seconds of each kernel."""

    def wait(self) -> None:
        """Wait for all that was asked."""

    def close(self) -> None:
        """Give back all that is held. Nothing may be asked any more."""
