"""SIGBUS handler for a mapped file that lost pages: zeros and an error, instead of a crash.

A read beyond the end of a truncated file raises SIGBUS in the thread that reads, most likely a
worker in compiled code, without the GIL. So the handler is compiled too, like the kernels. If the
address lies in a row of ``FAULTS`` (``files/mapping.py``), the handler maps zeros over the rest of
the file, stores the address in the row, and returns; the processor repeats the read. Code that used
the data must call ``check`` of the mapping. Any other SIGBUS goes to the previous handler, or ends
the process as usual.

Without faults this costs nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import struct
from functools import lru_cache
from typing import Any

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.base.fork_safety import free_lock
from treadle.devices.cpu.chosen_isa import PORTABLE
from treadle.devices.cpu.memory_layouts import HANDLER, HANDLER_FIELDS, IGNORE
from treadle.devices.cpu.thread_team import ENTRY, HostMemory
from treadle.errors import CacheError, CompileError
from treadle.files.mapping import FAULTS
from treadle.jit.kernel import load_cached, load_kernels
from treadle.system import SYSTEM


@dataclass(frozen=True)
class SignalLayout:
    """Signal constants and struct offsets of a system's 64-bit C library; ``struct sigaction``
    begins with the handler's address.
    """

    number: int  # of SIGBUS
    n_bytes: int  # of struct sigaction
    flags_off: int  # of its sa_flags
    flags: int  # SA_SIGINFO | SA_ONSTACK | SA_NODEFER
    address_off: int  # of siginfo_t's si_addr
    map_flags: int  # MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS


class FaultHandler:
    """This process's SIGBUS handler: compiled and initialised; ``install`` makes it active."""

    def __init__(self, layout: SignalLayout) -> None:
        sizes = {
            "address_off": layout.address_off,
            "map_flags": layout.map_flags,
            "page": mmap.PAGESIZE,
            "rows": len(FAULTS),
            "row_bytes": FAULTS.itemsize,
        }
        self.layout, self.libc = layout, ctypes.CDLL(None)
        self.address = _compiled(sizes)
        self.memory, self.default = HostMemory(8 * len(HANDLER_FIELDS)), HostMemory(layout.n_bytes)
        self.before: Any = None  # the previous struct sigaction, once installed
        self._set("faults", int(FAULTS.ctypes.data))
        self._set("signal", layout.number)
        self._set("default", self.default.address)
        for name in ("mmap", "sigaction", "raise"):
            self._set(name, ctypes.cast(getattr(self.libc, name), ctypes.c_void_p).value or 0)
        ENTRY(self.address)(self.memory.address, 0, 0, 0, 0)

    def _set(self, field: str, value: int) -> None:
        self.memory.bytes.view(np.int64)[HANDLER_FIELDS.index(field)] = value

    def install(self) -> None:
        """Install the handler in front of the current one.

        Does nothing if another handler was installed after this one: that one calls this one, and
        each would pass the signal to the other.
        """
        found = self._sigaction(None)
        now = _handler_of(found)
        if now == self.address or (self.before is not None and now > IGNORE):
            return
        self.before = found
        self._set("previous", now)
        made = ctypes.create_string_buffer(self.layout.n_bytes)
        struct.pack_into("=q", made, 0, self.address)
        struct.pack_into("=i", made, self.layout.flags_off, self.layout.flags)
        self._sigaction(made)

    def remove(self) -> None:
        """Restore the previous handler, unless another one was installed after this one."""
        if _handler_of(self._sigaction(None)) == self.address:
            self._sigaction(self.before)

    def _sigaction(self, new: Any) -> Any:
        """Return the current ``struct sigaction`` of SIGBUS, and set ``new`` unless it is None."""
        old = ctypes.create_string_buffer(self.layout.n_bytes)
        self.libc.sigaction(self.layout.number, new, old)
        return old


def _compiled(sizes: dict[str, int]) -> int:
    """Return the address of the compiled handler with the fields ``sizes`` (``Handler``)."""
    name = "_".join((HANDLER, *(f"{field}{size}" for field, size in sizes.items())))
    found = load_cached([name], PORTABLE)
    if found is None:
        from treadle.devices.cpu.fault_handler import Handler  # a warm start does not build it

        found = load_kernels([Handler(**sizes)], PORTABLE.row)
    return found[name]


def _handler_of(action: Any) -> int:
    handler: int = struct.unpack_from("=q", action)[0]
    return handler


@lru_cache(maxsize=1)
def _guard() -> FaultHandler | None:
    found = SYSTEM.sigbus()
    if found is None:
        return None
    try:
        result = FaultHandler(SignalLayout(**found))
    except (CacheError, CompileError) as error:
        from logging import getLogger  # 4 ms that most starts save

        getLogger("treadle").warning(
            "%s; without this handler, truncating a model file while it is read crashes the "
            "process",
            error,
        )
        return None
    atexit.register(result.remove)  # compiled code is freed as Python ends
    return result


def guard_mappings() -> None:
    """Install the handler: missing pages of files mapped by ``map_file`` read as zeros, and
    ``check`` of the mapping reports them.

    If the handler cannot be compiled, a warning says so once, and files are mapped unguarded.
    """
    with _lock:
        guard = _guard()
        if guard is not None:
            guard.install()


_lock = free_lock()
