"""A GPU that is not there: ``treadle.devices.cuda.driver.Driver`` in this process's memory, on the
CPU.

Its memory is filled with NaN before it is given out; whatever is asked of memory that is not held
fails, and so does a launch that names any. Kernels whose items are blocks run in the emulator, each
launch with another order of threads; items of those that take an item a thread are done by plain
code, in pieces, in a shuffled order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tests.devices.cuda import emulator
from treadle.devices.cpu.thread_team import ENTRY
from treadle.devices.cuda.driver import CardFacts, Launch, Upload
from treadle.devices.cuda.launch_args import PerBlock
from treadle.errors import NoMemoryError
from treadle.isa.nvptx import SM_80
from treadle.jit.kernel import CompileStats, load_kernels
from treadle.kernels.spec import Spec

FACTS = CardFacts("emulated GPU", 1 << 30, 2, (8, 0), (12, 0), 96 << 10)
PIECES = 4  # of a launch, an item a thread
ISA = emulator.emulated(SM_80)
CTAS = 3  # blocks of a launch, at most


class Graph(tuple[Any, ...]):
    """What was recorded: an upload and launches."""


class EmulatedDriver:
    """A card of ``FACTS``; ``calls`` has the name of each verb that was asked for."""

    def __init__(self, n_bytes: int = FACTS.n_bytes, *, seed: int = 1) -> None:
        self.facts = FACTS._replace(n_bytes=n_bytes)
        self.isa = ISA
        self.calls: list[str] = []
        self.held: dict[int, np.ndarray] = {}  # by address
        self.pins: dict[int, np.ndarray] = {}
        self.graphs: list[Graph] = []
        self.closed = False
        self._raw: dict[int, np.ndarray] = {}
        self._order = np.random.default_rng(seed)

    def _called(self, verb: str) -> None:
        assert not self.closed, f"{verb} of a driver that is closed"
        self.calls.append(verb)

    # -- kernels ----------------------------------------------------------------------------------

    def code(self, spec: Spec, tally: CompileStats) -> bytes:
        self._called("code")
        if not isinstance(spec, PerBlock):
            load_kernels([spec], self.isa, tally=tally)
        return spec.name.encode()

    def load(self, spec: Spec, code: bytes) -> Any:
        self._called("load")
        assert code == spec.name.encode()
        if isinstance(spec, PerBlock):
            return spec, emulator.load(spec, self.isa).launch
        return spec, ENTRY(load_kernels([spec], self.isa)[spec.name])

    # -- memory -----------------------------------------------------------------------------------

    def alloc(self, n_bytes: int) -> int:
        self._called("alloc")
        if n_bytes > self.memory_info()[0]:
            free = self.memory_info()[0] >> 10
            raise NoMemoryError(f"{self.facts.name}: {free} KiB free, not {n_bytes} bytes")
        raw = np.full(n_bytes + 256, 0xFF, np.uint8)
        start = -raw.ctypes.data % 256
        data = raw[start : start + n_bytes]
        address = int(raw.ctypes.data) + start
        self.held[address] = data
        self._raw[address] = raw
        return address

    def free(self, address: int) -> None:
        if not self.closed:
            self._called("free")
            self.held.pop(address)[:] = 0xFF
            del self._raw[address]

    def pinned(self, n_bytes: int) -> np.ndarray:
        self._called("pinned")
        data = np.zeros(n_bytes + 64, np.uint8)
        data = data[-data.ctypes.data % 64 :][:n_bytes]
        self.pins[int(data.ctypes.data)] = data
        return data

    def unpin(self, data: np.ndarray) -> None:
        if not self.closed:
            self._called("unpin")
            del self.pins[int(data.ctypes.data)]

    def _bytes(self, address: int, n_bytes: int) -> np.ndarray:
        """Bytes of memory that is held: all of them, or the test fails."""
        bases = sorted(self.held)
        i = bisect_right(bases, address) - 1
        assert i >= 0, f"{address:#x} lies before all memory that is held"
        data = self.held[bases[i]]
        at = address - bases[i]
        assert at + n_bytes <= len(data), f"{n_bytes} bytes at {address:#x}: not held"
        return data[at : at + n_bytes]

    def clear(self, address: int, n_bytes: int) -> None:
        self._called("clear")
        self._bytes(address, n_bytes)[:] = 0

    def write(self, address: int, data: np.ndarray) -> None:
        self._called("write")
        self._bytes(address, data.nbytes)[:] = data

    def read(self, address: int, n_bytes: int) -> np.ndarray:
        self._called("read")
        return self._bytes(address, n_bytes).copy()

    def copy(self, to: int, frm: int, n_bytes: int) -> None:
        self._called("copy")
        self._bytes(to, n_bytes)[:] = self._bytes(frm, n_bytes)

    def memory_info(self) -> tuple[int, int]:
        return self.facts.n_bytes - sum(map(len, self.held.values())), self.facts.n_bytes

    # -- runs -------------------------------------------------------------------------------------

    def graph(self, upload: Upload, launches: Sequence[Launch]) -> Graph:
        self._called("graph")
        made = Graph((upload, *launches))
        self.graphs.append(made)
        return made

    def start(self, graph: Graph) -> None:
        self._called("start")
        assert any(graph is other for other in self.graphs)
        upload, *launches = graph
        self._upload(upload)
        for launch in launches:
            self._launch(launch)

    def drop(self, graph: Graph) -> None:
        if not self.closed:
            self._called("drop")
            self.graphs.remove(graph)

    def timed(self, upload: Upload, launches: Sequence[Launch]) -> list[float]:
        self._called("timed")
        self._upload(upload)
        for launch in launches:
            self._launch(launch)
        return [1.0] * len(launches)

    def _upload(self, upload: Upload) -> None:
        assert int(upload.data.ctypes.data) in self.pins
        self._bytes(upload.to, len(upload.data))[:] = upload.data

    def _launch(self, launch: Launch) -> None:
        spec, entry = launch.kernel
        assert launch.blocks > 0, launch
        assert launch.threads % 32 == 0, launch
        self._check(spec, launch.args)
        self._bytes(launch.run, 64)
        if isinstance(spec, PerBlock):
            assert launch.threads == spec.threads
            assert launch.shared == spec.shared_bytes
            entry(
                launch.args,
                launch.run,
                count=launch.counter,
                base=launch.base,
                per=launch.per,
                scratch=launch.scratch,
                n_ctas=min(launch.blocks, CTAS),
                seed=int(self._order.integers(1 << 30)),
            )
            return
        n = int(self._bytes(launch.counter, 8).view(np.int64)[0]) if launch.counter else 1
        total = launch.base * -(-n // launch.per)
        cuts = [0, *sorted(self._order.integers(0, total + 1, PIECES - 1)), total]
        pieces = list(pairwise(map(int, cuts)))
        for i in self._order.permutation(len(pieces)):
            begin, end = pieces[i]
            if begin < end:
                entry(launch.args, launch.run, begin, end, launch.scratch)

    def _check(self, spec: Spec, args: int) -> None:
        """What a kernel is given lies in memory that is held; of several tensors the first."""
        slots: list[str] = []
        for kind in spec.args.kinds.values():
            arrays = len(spec.fmt.strides) if kind == "tensor" else 1  # type: ignore[attr-defined]
            slots += [kind] * arrays
        given = self._bytes(args, 8 * len(slots)).view(np.int64)
        for kind, value in zip(slots, given.tolist(), strict=True):
            if kind and value:
                self._bytes(value, 1)

    def wait(self) -> None:
        self._called("wait")

    def close(self) -> None:
        self.closed = True
        for held in (self.held, self.pins, self._raw, self.graphs):
            held.clear()
