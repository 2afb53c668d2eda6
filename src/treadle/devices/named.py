"""Devices by the names that people give them: ``cpu``, ``cuda``, ``cuda:1`` for the second card,
``wgpu``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from treadle.errors import UnsupportedError

if TYPE_CHECKING:
    from treadle.device import Device
    from treadle.jit.kernel import Progress


def _open_cpu(which: str, isa: str | None, n_threads: int, progress: Progress | None) -> Device:
    from treadle.devices.cpu import Cpu
    from treadle.isa import choose
    from treadle.jit.compile import host_features

    if which:
        raise UnsupportedError(f"device='cpu:{which}': the processors are one device, 'cpu'")
    return Cpu(choose(host_features(), isa), n_threads, progress)


def _open_cuda(which: str, isa: str | None, n_threads: int, progress: Progress | None) -> Device:
    from treadle.devices.cuda import Cuda
    from treadle.gpu.libcuda import CudaDriver

    if isa is not None:
        raise UnsupportedError(f"isa={isa!r}: instructions of a CPU; a GPU has its own")
    if not (which or "0").isdecimal():
        raise UnsupportedError(f"device='cuda:{which}': expected a number, as in 'cuda:1'")
    return Cuda(CudaDriver(int(which or 0)), n_threads, progress)


def _open_wgpu(which: str, isa: str | None, n_threads: int, progress: Progress | None) -> Device:
    from treadle.devices.wgpu import Wgpu

    if which or isa is not None:
        raise UnsupportedError("device='wgpu': the one adapter that WebGPU gives, without isa=")
    return Wgpu(progress)


DEVICES: dict[str, Callable[[str, str | None, int, Progress | None], Device]] = {
    "cpu": _open_cpu,
    "cuda": _open_cuda,
    "wgpu": _open_wgpu,
}


def open_device(name: str, isa: str | None, n_threads: int, progress: Progress | None) -> Device:
    """The device called ``name``; ``isa``: which instruction set, None for the best.

    Raises UnsupportedError for a name that there is not, DeviceError where the device is missing.
    """
    kind, _, which = name.partition(":")
    if kind not in DEVICES:
        raise UnsupportedError(f"device={name!r}: expected one of {', '.join(DEVICES)}")
    return DEVICES[kind](which, isa, n_threads, progress)
