"""Driver: the interface to one GPU, from which ``devices/cuda/device.py`` makes a device.

``libcuda.py`` has the usual driver. ``tests/devices/cuda/emulated.py`` has one whose memory is this
process's and whose kernels run on the CPU. An address is an integer, the place of a byte in the
GPU's memory.
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
    """Properties of a GPU."""

    name: str
    n_bytes: int  # of its memory
    n_units: int  # multiprocessors: each runs several blocks at once
    capability: tuple[int, int]  # sm_90 is (9, 0)
    version: tuple[int, int]  # the newest CUDA that the driver supports
    shared_bytes: int  # of a block, at most


class Launch(NamedTuple):
    """One kernel with its size and arguments, which are the same in every run. It runs ``base *
    ceil(count / per)`` items; see ``launch_args.py``.
    """

    kernel: Any  # returned by ``load``
    blocks: int
    threads: int  # of a block
    shared: int  # bytes of a block
    args: int  # address of the arguments
    run: int  # address of the run's inputs
    counter: int  # address of the item count; 0: the count is 1
    base: int  # items for each ``per`` of the count
    per: int
    scratch: int  # address of all threads' scratch memory; 0: none


class Upload(NamedTuple):
    """A run's inputs: ``data``, pinned host memory, is copied to address ``to``."""

    to: int
    data: np.ndarray


class Driver(Protocol):
    """One GPU. Methods may be called from any thread; the GPU does the work in the order of the
    calls.

    Every method raises DeviceError, with a readable message, if the driver fails.
    """

    @property
    def facts(self) -> CardFacts:
        """Properties of the GPU."""

    @property
    def isa(self) -> Isa:
        """The instruction set that kernels are compiled for."""

    def code(self, spec: Spec, tally: CompileStats) -> bytes:
        """Return the code of a kernel in the form that ``load`` takes: from the cache, else
        compiled, which ``tally`` counts. Raises CompileError.
        """

    def load(self, spec: Spec, code: bytes) -> Any:
        """Load a kernel's code; return the handle for ``Launch.kernel``."""

    def alloc(self, n_bytes: int) -> int:
        """Allocate GPU memory, uninitialised; return its address. Raises NoMemoryError."""

    def free(self, address: int) -> None:
        """Free GPU memory at an address that ``alloc`` returned."""

    def pinned(self, n_bytes: int) -> np.ndarray:
        """Return zeroed, page-locked host memory: uint8 ``[n_bytes]``."""

    def unpin(self, data: np.ndarray) -> None:
        """Free host memory that ``pinned`` returned."""

    def clear(self, address: int, n_bytes: int) -> None:
        """Fill GPU memory with zeros; may return before it is done."""

    def write(self, address: int, data: np.ndarray) -> None:
        """Copy uint8 data from any host memory to the GPU's ``address``; done when this returns."""

    def read(self, address: int, n_bytes: int) -> np.ndarray:
        """Wait for all earlier work, then copy from the GPU: uint8 ``[n_bytes]``."""

    def copy(self, to: int, frm: int, n_bytes: int) -> None:
        """Copy ``n_bytes`` within the GPU's memory; may return before it is done."""

    def memory_info(self) -> tuple[int, int]:
        """Return the free and the total bytes of the GPU's memory."""

    def graph(self, upload: Upload, launches: Sequence[Launch]) -> Any:
        """Record an upload and a sequence of kernels as a graph, for ``start``."""

    def start(self, graph: Any) -> None:
        """Run a recorded graph, and wait for its end."""

    def drop(self, graph: Any) -> None:
        """Free a recorded graph."""

    def timed(self, upload: Upload, launches: Sequence[Launch]) -> list[float]:
        """Run an upload and kernels one by one; return the seconds of each kernel."""

    def wait(self) -> None:
        """Wait for all earlier work."""

    def close(self) -> None:
        """Free all memory, kernels and graphs. The driver must not be used afterwards."""
