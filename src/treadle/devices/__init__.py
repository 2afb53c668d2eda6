"""Devices that run plans: one engine, several kinds of hardware.

::

    protocol.py    Device: the interface (memory, weights, copy, plan, ready, run)
    cpu/           threads that run compiled kernels in this process's memory
    cuda/          NVIDIA GPUs: kernels as PTX, a plan as a graph of launches
    wgpu/          any GPU through WebGPU: kernels as WGSL shaders

``open_device`` opens one by its name: ``cpu``, ``cuda``, ``cuda:1`` for the second card, ``wgpu``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from treadle.base.interrupts import in_main_interpreter
from treadle.errors import UnsupportedError

if TYPE_CHECKING:
    from treadle.devices.protocol import Device
    from treadle.jit.kernel import Progress


def _open_cpu(which: str, isa: str | None, n_threads: int, progress: Progress | None) -> Device:
    from treadle.devices.cpu.chosen_isa import choose_stored
    from treadle.devices.cpu.device import Cpu
    from treadle.jit.host import host_features

    return Cpu(choose_stored(host_features(), isa), n_threads, progress)


def _open_cuda(which: str, isa: str | None, n_threads: int, progress: Progress | None) -> Device:
    from treadle.devices.cuda.device import Cuda
    from treadle.devices.cuda.libcuda import CudaDriver

    if isa is not None:
        raise UnsupportedError(f"isa={isa!r}: applies to device 'cpu' only; remove it for a GPU")
    return Cuda(CudaDriver(int(which or 0)), n_threads, progress)


def _open_wgpu(which: str, isa: str | None, n_threads: int, progress: Progress | None) -> Device:
    from treadle.devices.wgpu.device import Wgpu

    if isa is not None:
        raise UnsupportedError(f"isa={isa!r}: applies to device 'cpu' only; remove it for a GPU")
    return Wgpu(progress)


Opener = Callable[[str, str | None, int, "Progress | None"], "Device"]
# Each with a pattern for the part after a colon, and the error text for anything else.
DEVICES: dict[str, tuple[Opener, str, str]] = {
    "cpu": (_open_cpu, "", "'cpu' takes no number"),
    "cuda": (_open_cuda, "[0-9]*", "expected a number, as in 'cuda:1'"),
    "wgpu": (_open_wgpu, "", "'wgpu' takes no number"),
}


def check_name(name: str) -> None:
    """Raise UnsupportedError if ``name`` is not of the form of a device name; opens nothing."""
    kind, _, which = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind not in DEVICES:
        raise UnsupportedError(f"device={name!r}: expected one of {', '.join(DEVICES)}")
    _, allowed, expected = DEVICES[kind]
    if not re.fullmatch(allowed, which):
        raise UnsupportedError(f"device={name!r}: {expected}")


def open_device(name: str, isa: str | None, n_threads: int, progress: Progress | None) -> Device:
    """Open the device called ``name``; ``isa``: the CPU's instruction set, None for the best.

    Raises UnsupportedError for an unknown name, an ``isa`` for a GPU, and in a subinterpreter;
    DeviceError if the device is missing.
    """
    check_name(name)
    if not in_main_interpreter():
        raise UnsupportedError(
            "this is a subinterpreter of Python, where a model's signals and threads do not work: "
            "load it in the main interpreter (mod_wsgi: WSGIApplicationGroup %{GLOBAL})"
        )
    kind, _, which = name.partition(":")
    return DEVICES[kind][0](which, isa, n_threads, progress)
