"""A libcuda made of Python functions, behind the driver's real C signatures.

What it is given has gone through ctypes, so a wrong type or a wrong number of arguments shows. It
keeps what is held of each kind, so that a test sees what was not given back, and it checks what the
driver checks: a context in each thread, memory that is there, a stream that records or does not.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from ctypes import c_int
from functools import partial
from typing import Any

import numpy as np

from treadle.devices.cuda.library import CONSTANTS, SIGNATURES

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
INVALID_CONTEXT = 201
INVALID_HANDLE = 400
CONTEXT = 0xC0


class FakeCuda:
    """One card of ``room`` bytes. ``fails``: what a function answers, by its name."""

    def __init__(
        self,
        *,
        room: int = 1 << 28,
        capability: tuple[int, int] = (9, 0),
        version: int = 12040,
        count: int = 1,
        without: str = "",
    ) -> None:
        self.room = room
        self.capability = capability
        self.version = version
        self.count = count
        self.calls: list[str] = []
        self.fails: dict[str, int] = {}
        self.broken: list[BaseException] = []  # what went wrong in here: tests look at it
        self.memory: dict[int, np.ndarray] = {}
        self.held: dict[int, str] = {}  # by handle: modules, streams, graphs, events, host
        self.launched: list[tuple[Any, ...]] = []
        self.asked_shared: dict[int, int] = {}
        self.ptx: list[bytes] = []
        self.log = b""
        self._next = 0x1000
        self._retained = 0
        self._current = threading.local()
        self._recording: list[Any] | None = None
        self._graphs: dict[int, list[Any]] = {}
        self._host: dict[int, Any] = {}
        self._texts: list[Any] = []
        for name, types in SIGNATURES.items():
            if name != without:
                setattr(self, name, ctypes.CFUNCTYPE(c_int, *types)(partial(self._answer, name)))

    def _answer(self, name: str, *args: Any) -> int:
        self.calls.append(name)
        try:
            if name in self.fails:
                return self.fails[name]
            needs = not name.startswith(("cuInit", "cuD", "cuCtx", "cuGetError"))
            if needs and getattr(self._current, "context", None) != CONTEXT:
                return INVALID_CONTEXT
            result = getattr(self, f"_{name.removesuffix('_v2')}")(*args)
        except BaseException as error:  # ctypes would only print it
            self.broken.append(error)
            return 999
        return result or 0

    @property
    def kept(self) -> Counter[str]:
        """What is held, by kind."""
        kept = Counter(self.held.values()) + Counter(memory=len(self.memory))
        return kept + Counter(context=self._retained)

    def _new(self, kind: str) -> int:
        self._next += 0x10
        self.held[self._next] = kind
        return self._next

    def _drop(self, kind: str, of: int) -> int:
        return 0 if self.held.pop(of, None) == kind else INVALID_HANDLE

    def _at(self, address: int, n_bytes: int) -> np.ndarray:
        for base, data in self.memory.items():
            if base <= address and address + n_bytes <= base + len(data):
                return data[address - base : address - base + n_bytes]
        raise AssertionError(f"{n_bytes} bytes at {address:#x}: no memory of the card")

    def _do(self, stream: int, act: Any) -> None:
        assert self.held.get(stream) == "stream"
        if self._recording is None:
            act()
        else:
            self._recording.append(act)

    # -- the driver's functions, without their versions --------------------------------------------

    def _cuInit(self, flags: int) -> None:
        assert flags == 0

    def _cuDriverGetVersion(self, out: Any) -> None:
        out[0] = self.version

    def _cuGetErrorName(self, code: int, out: Any) -> int:
        names = {number: name for name, number in CONSTANTS.items() if name.startswith("CUDA_")}
        if code not in names:
            return INVALID_VALUE
        self._texts.append(ctypes.c_char_p(names[code].encode()))
        out[0] = self._texts[-1]
        return 0

    def _cuGetErrorString(self, code: int, out: Any) -> None:
        self._texts.append(ctypes.c_char_p(b"words of the driver"))
        out[0] = self._texts[-1]

    def _cuDeviceGetCount(self, out: Any) -> None:
        out[0] = self.count

    def _cuDeviceGet(self, out: Any, ordinal: int) -> None:
        out[0] = 7 + ordinal

    def _cuDeviceGetName(self, out: Any, size: int, device: int) -> None:
        for i, byte in enumerate(b"Fake 9000\0"):
            out[i] = byte

    def _cuDeviceGetAttribute(self, out: Any, which: int, device: int) -> None:
        short = {number: name for name, number in CONSTANTS.items() if "ATTRIBUTE" in name}[which]
        values = {
            "MULTIPROCESSOR_COUNT": 4,
            "COMPUTE_CAPABILITY_MAJOR": self.capability[0],
            "COMPUTE_CAPABILITY_MINOR": self.capability[1],
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 << 10,
        }
        out[0] = values[short.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    def _cuDeviceTotalMem(self, out: Any, device: int) -> None:
        out[0] = self.room

    def _cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> None:
        self._retained += 1
        out[0] = CONTEXT

    def _cuDevicePrimaryCtxRelease(self, device: int) -> None:
        self._retained -= 1

    def _cuCtxSetCurrent(self, context: int) -> None:
        assert context == CONTEXT
        self._current.context = context

    def _free(self) -> int:
        return self.room - sum(map(len, self.memory.values()))

    def _cuMemGetInfo(self, free: Any, total: Any) -> None:
        free[0] = self._free()
        total[0] = self.room

    def _cuMemAlloc(self, out: Any, n_bytes: int) -> int:
        if not n_bytes:
            return INVALID_VALUE
        if n_bytes > self._free():
            return OUT_OF_MEMORY
        data = np.full(n_bytes, 0xFF, np.uint8)
        out[0] = at = int(data.ctypes.data)
        self.memory[at] = data
        return 0

    def _cuMemFree(self, at: int) -> int:
        return 0 if self.memory.pop(at, None) is not None else INVALID_VALUE

    def _cuMemHostAlloc(self, out: Any, n_bytes: int, flags: int) -> int:
        if not n_bytes:
            return INVALID_VALUE
        block = (ctypes.c_ubyte * n_bytes)()
        out[0] = at = ctypes.addressof(block)
        self._host[at] = block
        self.held[at] = "host"
        return 0

    def _cuMemFreeHost(self, at: int) -> int:
        return self._drop("host", at)

    def _cuMemcpyHtoDAsync(self, to: int, frm: int, n_bytes: int, stream: int) -> None:
        def act() -> None:
            self._at(to, n_bytes)[:] = np.frombuffer(ctypes.string_at(frm, n_bytes), np.uint8)

        self._do(stream, act)

    def _cuMemcpyDtoHAsync(self, to: int, frm: int, n_bytes: int, stream: int) -> None:
        data = self._at(frm, n_bytes)
        self._do(stream, lambda: ctypes.memmove(to, data.ctypes.data, n_bytes))

    def _cuMemcpyDtoDAsync(self, to: int, frm: int, n_bytes: int, stream: int) -> None:
        def act() -> None:
            self._at(to, n_bytes)[:] = self._at(frm, n_bytes).copy()

        self._do(stream, act)

    def _cuMemsetD8Async(self, at: int, value: int, n_bytes: int, stream: int) -> None:
        self._do(stream, lambda: self._at(at, n_bytes).fill(value))

    def _cuModuleLoadDataEx(
        self, out: Any, image: int, n_options: int, options: Any, values: Any
    ) -> None:
        given = {options[i]: values[i] for i in range(n_options)}
        at, size = (
            given[CONSTANTS[name]]
            for name in ("CU_JIT_ERROR_LOG_BUFFER", "CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES")
        )
        assert len(self.log) < size
        ctypes.memmove(at, self.log + b"\0", len(self.log) + 1)
        self.ptx.append(ctypes.string_at(image))
        out[0] = self._new("module")

    def _cuModuleUnload(self, module: int) -> int:
        return self._drop("module", module)

    def _cuModuleGetFunction(self, out: Any, module: int, name: bytes) -> None:
        assert self.held[module] == "module"
        assert name in self.ptx[-1], name
        out[0] = module + 1

    def _cuFuncSetAttribute(self, function: int, which: int, value: int) -> None:
        assert which == CONSTANTS["CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"]
        self.asked_shared[function] = value

    def _cuStreamCreate(self, out: Any, flags: int) -> None:
        assert flags == CONSTANTS["CU_STREAM_NON_BLOCKING"]
        out[0] = self._new("stream")

    def _cuStreamSynchronize(self, stream: int) -> int:
        assert self.held[stream] == "stream"
        return INVALID_VALUE if self._recording is not None else 0

    def _cuStreamDestroy(self, stream: int) -> int:
        return self._drop("stream", stream)

    def _cuStreamBeginCapture(self, stream: int, mode: int) -> int:
        assert mode == CONSTANTS["CU_STREAM_CAPTURE_MODE_RELAXED"]
        if self._recording is not None:
            return INVALID_VALUE
        self._recording = []
        return 0

    def _cuStreamEndCapture(self, stream: int, out: Any) -> int:
        if self._recording is None:
            return INVALID_VALUE
        out[0] = at = self._new("recorded")
        self._graphs[at] = self._recording
        self._recording = None
        return 0

    def _cuGraphInstantiateWithFlags(self, out: Any, graph: int, flags: int) -> None:
        out[0] = at = self._new("graph")
        self._graphs[at] = self._graphs[graph]

    def _cuGraphLaunch(self, graph: int, stream: int) -> None:
        assert self.held[graph] == "graph"
        for act in self._graphs[graph]:
            act()

    def _cuGraphExecDestroy(self, graph: int) -> int:
        return self._drop("graph", graph)

    def _cuGraphDestroy(self, graph: int) -> int:
        return self._drop("recorded", graph)

    def _cuLaunchKernel(self, function: int, *rest: Any) -> int:
        *size, shared, stream, params, extra = rest
        assert self.held[function - 1] == "module"
        assert not extra
        if shared > max(48 << 10, self.asked_shared.get(function, 0)):
            return INVALID_VALUE
        words = [ctypes.c_int64.from_address(params[i]).value for i in range(6)]
        self._do(stream, lambda: self.launched.append((function, *size, shared, *words)))
        return 0

    def _cuEventCreate(self, out: Any, flags: int) -> None:
        out[0] = self._new("event")

    def _cuEventRecord(self, event: int, stream: int) -> None:
        assert self.held[event] == "event"
        assert self.held[stream] == "stream"

    def _cuEventElapsedTime(self, out: Any, began: int, ended: int) -> None:
        out[0] = float(ended - began)  # a millisecond for each number between them

    def _cuEventDestroy(self, event: int) -> int:
        return self._drop("event", event)
