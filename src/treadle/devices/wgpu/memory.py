"""GPU memory: buffers, and weights that are uploaded when they are first bound.

WebGPU transfers whole words of 4 bytes; these classes transfer any bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.humanize import n_bytes as in_words
from treadle.devices.wgpu.shader import WORD
from treadle.errors import NoMemoryError
from treadle.kernels.run_state import round_up
from treadle.plan.plan import DeviceMemory

if TYPE_CHECKING:
    from treadle.devices.wgpu.device import Wgpu

CHUNK = 16 << 20  # bytes of weights uploaded at a time
STORAGE = "STORAGE|COPY_SRC|COPY_DST"


class GpuMemory(DeviceMemory):
    """A buffer of the GPU. ``bytes``: the host's copy, for a run's inputs, uploaded before each
    run; None unless ``host``.
    """

    def __init__(self, device: Wgpu, n_bytes: int, *, host: bool = False) -> None:
        self._device = device
        self.n_bytes = n_bytes
        self.buffer = device.create(n_bytes)
        self.bytes = np.zeros(self.buffer.size, np.uint8) if host else None

    def _read(self, at: int, n_bytes: int) -> np.ndarray:
        start = at // WORD * WORD
        end = round_up(at + n_bytes, WORD)
        if not n_bytes:
            return np.zeros(0, np.uint8)
        data = self._device.gpu.queue.read_buffer(self.buffer, start, end - start)
        return np.frombuffer(data, np.uint8)[at - start :][:n_bytes]

    def _write(self, at: int, data: np.ndarray) -> None:
        start = at // WORD * WORD
        end = round_up(at + data.nbytes, WORD)
        if not data.nbytes:
            return
        if (start, end) != (at, at + data.nbytes):  # pad to whole words
            whole = self.read(start, min(end, self.n_bytes) - start).copy()
            whole = np.pad(whole, (0, end - start - len(whole)))
            whole[at - start :][: data.nbytes] = data
            data = whole
        self._device.gpu.queue.write_buffer(self.buffer, start, np.ascontiguousarray(data))


class BufferSlice:
    """Some rows of a tensor in a buffer of their own, uploaded when a plan first binds it."""

    def __init__(self, device: Wgpu, data: np.ndarray) -> None:
        self._device = device
        self._data = data
        self._buffer: Any = None

    @property
    def buffer(self) -> Any:
        if self._buffer is None:
            self._buffer = self._upload()
        return self._buffer

    def _upload(self) -> Any:
        """Create and fill the buffer, with one extra word: a shader assembles unaligned words from
        two.
        """
        data = self._data
        buffer = self._device.create(data.nbytes + WORD)
        for at in range(0, data.nbytes, CHUNK):
            part = data[at : at + CHUNK]
            part = np.pad(part, (0, -part.nbytes % WORD)) if part.nbytes % WORD else part
            self._device.gpu.queue.write_buffer(buffer, at, np.ascontiguousarray(part))
        return buffer


class GpuWeights(DeviceMemory):
    """A tensor of the model's file, in one buffer; or in several of whole rows each, if it exceeds
    the binding limit.
    """

    bytes = None

    def __init__(self, device: Wgpu, name: str, array: np.ndarray) -> None:
        self._device = device
        self._name = name
        self._array = array.reshape(-1).view(np.uint8)
        self.n_bytes = self._array.nbytes
        self._parts: dict[int, list[tuple[BufferSlice, int, int]]] = {}

    def _read(self, at: int, n_bytes: int) -> np.ndarray:
        return self._array[at : at + n_bytes]

    def _write(self, at: int, data: np.ndarray) -> None:
        raise AssertionError(f"{self._name}: weights are not written")

    @property
    def buffer(self) -> Any:
        """The whole tensor, in one buffer. Raises NoMemoryError if it exceeds the binding limit."""
        ((part, _, _),) = self.parts(self._array.nbytes)
        return part.buffer

    def parts(self, row_bytes: int) -> list[tuple[BufferSlice, int, int]]:
        """Return the tensor's buffers, each with its first row and number of rows, for rows of
        ``row_bytes``. Raises NoMemoryError if a row exceeds the binding limit.
        """
        if row_bytes not in self._parts:
            n_rows = self._array.nbytes // row_bytes
            most = self._device.most // row_bytes
            if not most:
                raise NoMemoryError(
                    f"{self._name}: a row of {in_words(row_bytes)} exceeds the binding limit of "
                    f"{self._device.name}, {in_words(self._device.most)}"
                )
            self._parts[row_bytes] = [
                (
                    BufferSlice(self._device, self._array[first * row_bytes :][: most * row_bytes]),
                    first,
                    min(most, n_rows - first),
                )
                for first in range(0, n_rows, most)
            ]
        return self._parts[row_bytes]
