"""A GPU behind NVIDIA's driver (``library.py``).

There is one stream, so work is done in order. A context belongs to a thread, so each method first
makes it the calling thread's.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import byref, c_float, c_int, c_size_t, c_ulonglong
from ctypes import c_void_p as handle
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.humanize import n_bytes as in_words
from treadle.devices.cuda.driver import CardFacts, Launch, Upload
from treadle.devices.cuda.library import CONSTANTS, Library, device_ptr, find_library
from treadle.errors import DeviceError, NoMemoryError
from treadle.isa.nvptx import ROWS, row
from treadle.jit.kernel import symbol

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.kernel import CompileStats
    from treadle.kernels.spec import Spec

FREE_SHARED = 48 << 10  # bytes of shared memory that a block may use without an attribute
LOG_BYTES = 8192


class CudaDriver:
    """The GPU number ``ordinal`` through NVIDIA's driver; implements
    ``devices/cuda/driver.Driver``.

    Raises DeviceError if there is no such GPU, or it is too old.
    """

    def __init__(self, ordinal: int = 0, library: Library | None = None) -> None:
        self._pid, self._call = os.getpid(), library or find_library()
        self._context, self._stream = handle(), handle()
        self._memory: dict[int, int] = {}  # bytes, by address
        self._pinned: dict[int, int] = {}
        self._modules: list[handle] = []
        self._graphs: list[handle] = []
        self._retained = False
        self._closed = False
        try:
            self._device, self.facts = self._find(ordinal)
            self.isa = self._row()
            self._call("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
            self._retained = True
            self._enter()
            self._call("cuStreamCreate", byref(self._stream), CONSTANTS["CU_STREAM_NON_BLOCKING"])
        except BaseException:
            self.close()
            raise

    def _find(self, ordinal: int) -> tuple[int, CardFacts]:
        call = self._call
        try:
            call("cuInit", 0)
        except DeviceError as error:
            if error.code == CONSTANTS["CUDA_ERROR_NO_DEVICE"]:
                raise DeviceError(
                    "the GPU driver finds no usable GPU (check CUDA_VISIBLE_DEVICES, or the "
                    "container's --gpus)"
                ) from error
            raise
        version = c_int()
        count = c_int()
        device = c_int()
        total = c_size_t()
        call("cuDriverGetVersion", byref(version))
        call("cuDeviceGetCount", byref(count))
        if not 0 <= ordinal < count.value:
            have = f"this process can use {count.value}, numbered from 0"
            raise DeviceError(f"no GPU {ordinal}: {have}")
        call("cuDeviceGet", byref(device), ordinal)
        name = ctypes.create_string_buffer(256)
        call("cuDeviceGetName", name, len(name), device.value)
        call("cuDeviceTotalMem_v2", byref(total), device.value)

        def attribute(name: str) -> int:
            value = c_int()
            number = CONSTANTS[f"CU_DEVICE_ATTRIBUTE_{name}"]
            call("cuDeviceGetAttribute", byref(value), number, device.value)
            return value.value

        facts = CardFacts(
            name.value.decode("utf-8", "replace"),
            total.value,
            attribute("MULTIPROCESSOR_COUNT"),
            (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
            (version.value // 1000, version.value % 1000 // 10),
            attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        )
        return device.value, facts

    def _enter(self) -> None:
        """Make the GPU's context the calling thread's. Raises DeviceError after ``close``, and in a
        forked process.
        """
        if self._closed:
            raise DeviceError("the model is closed, and its GPU memory is freed")
        if os.getpid() != self._pid:
            raise DeviceError(
                "a forked process cannot use its parent's GPU: load the model in the child process"
            )
        self._call("cuCtxSetCurrent", self._context)

    def _row(self) -> Isa:
        """Return the best instruction set (row of ``isa``) for the GPU. Raises DeviceError if the
        GPU is too old.
        """
        found = row(*self.facts.capability)
        if found is None:
            has = ".".join(map(str, self.facts.capability))
            needs = ".".join(str(min(ROWS)))
            raise DeviceError(
                f"{self.facts.name}: compute capability {has}, expected {needs} or newer"
            )
        return found

    # -- kernels ----------------------------------------------------------------------------------

    def code(self, spec: Spec, tally: CompileStats) -> bytes:
        """Return a kernel's PTX; the driver compiles it to machine code and caches that."""
        from treadle.devices.cuda.ptx import emit_ptx

        return emit_ptx(spec, self.isa, tally).encode()

    def load(self, spec: Spec, code: bytes) -> handle:
        self._enter()
        module = handle()
        function = handle()
        log = ctypes.create_string_buffer(LOG_BYTES)
        names = "CU_JIT_ERROR_LOG_BUFFER", "CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES"
        options = (c_int * 2)(*(CONSTANTS[name] for name in names))
        values = (handle * 2)(ctypes.addressof(log), LOG_BYTES)
        try:
            self._call("cuModuleLoadDataEx", byref(module), code + b"\0", 2, options, values)
        except DeviceError as error:
            raise self._refused(spec, error, log.value.decode("utf-8", "replace")) from error
        self._modules.append(module)
        self._call("cuModuleGetFunction", byref(function), module, symbol(spec).encode())
        return function

    def _refused(self, spec: Spec, error: DeviceError, log: str) -> DeviceError:
        """Return the error for a kernel that the driver rejects with ``error``; ``log``: the
        messages of the driver's compiler.
        """
        old = "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "CUDA_ERROR_NO_BINARY_FOR_GPU"
        if error.code in [CONSTANTS[name] for name in old]:
            version = ".".join(map(str, self.facts.version))
            return DeviceError(
                f"{self.facts.name}: its driver (CUDA {version}) is too old for treadle's kernels "
                f"({self.isa.name}, {self.isa.features}); update the NVIDIA driver"
            )
        return DeviceError(f"{self.facts.name} rejected the kernel {spec.name}: {error}\n{log}")

    # -- memory -----------------------------------------------------------------------------------

    def alloc(self, n_bytes: int) -> int:
        self._enter()
        made = device_ptr()
        try:
            self._call("cuMemAlloc_v2", byref(made), max(n_bytes, 1))
        except NoMemoryError as error:
            free, total = (in_words(n) for n in self.memory_info())
            raise NoMemoryError(
                f"out of GPU memory: {in_words(n_bytes)} needed in one block; {self.facts.name} "
                f"has {free} free of {total}"
            ) from error
        self._memory[made.value] = n_bytes
        return made.value

    def free(self, address: int) -> None:
        if self._is_freed:
            return
        self._enter()
        if self._memory.pop(address, None) is not None:
            self._call("cuMemFree_v2", address)

    @property
    def _is_freed(self) -> bool:
        """Whether all memory is freed already, or belongs to another process."""
        return self._closed or os.getpid() != self._pid

    def pinned(self, n_bytes: int) -> np.ndarray:
        self._enter()
        made = handle()
        self._call("cuMemHostAlloc", byref(made), max(n_bytes, 1), 0)
        assert made.value is not None
        self._pinned[made.value] = n_bytes
        block: Any = (ctypes.c_ubyte * n_bytes).from_address(made.value)
        data: np.ndarray = np.frombuffer(block, np.uint8)
        data[:] = 0
        return data

    def unpin(self, data: np.ndarray) -> None:
        if self._is_freed:
            return
        self._enter()
        at = int(data.ctypes.data)
        if self._pinned.pop(at, None) is not None:
            self._call("cuMemFreeHost", at)

    def clear(self, address: int, n_bytes: int) -> None:
        self._enter()
        if n_bytes:
            self._call("cuMemsetD8Async", address, 0, n_bytes, self._stream)

    def write(self, address: int, data: np.ndarray) -> None:
        self._enter()
        if data.nbytes:
            flat = np.ascontiguousarray(data)
            at = int(flat.ctypes.data)
            self._call("cuMemcpyHtoDAsync_v2", address, at, flat.nbytes, self._stream)
            self._call("cuStreamSynchronize", self._stream)

    def read(self, address: int, n_bytes: int) -> np.ndarray:
        self._enter()
        out = np.empty(n_bytes, np.uint8)
        if n_bytes:
            at = int(out.ctypes.data)
            self._call("cuMemcpyDtoHAsync_v2", at, address, n_bytes, self._stream)
        self._call("cuStreamSynchronize", self._stream)
        return out

    def copy(self, to: int, frm: int, n_bytes: int) -> None:
        self._enter()
        self._call("cuMemcpyDtoDAsync_v2", to, frm, n_bytes, self._stream)

    def memory_info(self) -> tuple[int, int]:
        self._enter()
        free = c_size_t()
        total = c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    # -- runs -------------------------------------------------------------------------------------

    def _upload(self, upload: Upload) -> None:
        at = int(upload.data.ctypes.data)
        data = upload.data
        self._call("cuMemcpyHtoDAsync_v2", upload.to, at, data.nbytes, self._stream)

    def _launch(self, launch: Launch) -> None:
        kernel, blocks, threads, shared, *words = launch
        if shared > FREE_SHARED:
            which = CONSTANTS["CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"]
            self._call("cuFuncSetAttribute", kernel, which, shared)
        values = (c_ulonglong * len(words))(*words)
        first = ctypes.addressof(values)
        params = (handle * len(words))(*(first + 8 * i for i in range(len(words))))
        size = blocks, 1, 1, threads, 1, 1, shared
        self._call("cuLaunchKernel", kernel, *size, self._stream, params, None)

    def graph(self, upload: Upload, launches: Sequence[Launch]) -> handle:
        self._enter()
        recorded = handle()
        graph = handle()
        mode = CONSTANTS["CU_STREAM_CAPTURE_MODE_RELAXED"]
        self._call("cuStreamBeginCapture_v2", self._stream, mode)
        try:
            try:
                self._upload(upload)
                for launch in launches:
                    self._launch(launch)
            finally:  # else the stream would stay in capture mode
                self._call("cuStreamEndCapture", self._stream, byref(recorded))
            self._call("cuGraphInstantiateWithFlags", byref(graph), recorded, 0)
        finally:
            if recorded:
                self._call("cuGraphDestroy", recorded)
        self._graphs.append(graph)
        return graph

    def start(self, graph: handle) -> None:
        self._enter()
        self._call("cuGraphLaunch", graph, self._stream)
        self._call("cuStreamSynchronize", self._stream)

    def drop(self, graph: handle) -> None:
        if self._is_freed:
            return
        self._enter()
        self._graphs.remove(graph)
        self._call("cuGraphExecDestroy", graph)

    def timed(self, upload: Upload, launches: Sequence[Launch]) -> list[float]:
        self._enter()
        with self._events(len(launches) + 1) as events:
            self._upload(upload)
            self._call("cuEventRecord", events[0], self._stream)
            for launch, event in zip(launches, events[1:], strict=True):
                self._launch(launch)
                self._call("cuEventRecord", event, self._stream)
            self._call("cuStreamSynchronize", self._stream)
            seconds = []
            ms = c_float()
            for began, ended in itertools.pairwise(events):
                self._call("cuEventElapsedTime", byref(ms), began, ended)
                seconds.append(ms.value / 1000)
            return seconds

    @contextmanager
    def _events(self, n: int) -> Iterator[list[handle]]:
        events: list[handle] = []
        try:
            for _ in range(n):
                event = handle()
                self._call("cuEventCreate", byref(event), 0)
                events.append(event)
            yield events
        finally:
            for event in events:
                self._call("cuEventDestroy_v2", event)

    def wait(self) -> None:
        self._enter()
        self._call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Free everything, ignoring errors: a GPU that has failed answers every call with its
        failure.
        """
        if self._is_freed or not self._retained:
            return
        steps: list[tuple[Any, ...]] = [("cuCtxSetCurrent", self._context)]
        steps += [("cuStreamSynchronize", self._stream)] * bool(self._stream)
        steps += [("cuGraphExecDestroy", graph) for graph in self._graphs]
        steps += [("cuMemFree_v2", at) for at in self._memory]
        steps += [("cuMemFreeHost", at) for at in self._pinned]
        steps += [("cuModuleUnload", module) for module in self._modules]
        steps += [("cuStreamDestroy_v2", self._stream)] * bool(self._stream)
        steps += [("cuDevicePrimaryCtxRelease_v2", self._device)]
        self._closed = True
        for step in steps:
            with suppress(DeviceError):
                self._call(*step)
        for held in (self._memory, self._pinned, self._modules, self._graphs):
            held.clear()
