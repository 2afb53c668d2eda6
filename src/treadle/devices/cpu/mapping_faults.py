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
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from treadle.base.fast_dataclass import dataclass
from treadle.base.fork_safety import free_lock
from treadle.devices.cpu.thread_team import ENTRY, HostMemory
from treadle.errors import CacheError, CompileError
from treadle.files.mapping import FAULTS
from treadle.isa.portable import PORTABLE
from treadle.jit.kernel import load_kernels
from treadle.jit.types import i32, i64, ptr
from treadle.kernels.spec import Spec
from treadle.system import SYSTEM

if TYPE_CHECKING:
    from treadle.jit.language import Builder, Isa, Val


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


DEFAULT = 0  # SIG_DFL
IGNORE = 1  # SIG_IGN
PROT_READ = 1
CODE_OFF = 8  # of siginfo_t's si_code
NO_PAGE = 2  # BUS_ADRERR
LAST_CODE = 5  # the processor raises codes from 1 to this one
FIELDS = (
    "faults",  # *row of FAULTS
    "signal",  # SIGBUS
    "previous",  # the previous handler, DEFAULT or IGNORE
    "default",  # *struct sigaction of SIG_DFL
    "mmap",
    "sigaction",
    "raise",
)


@dataclass(frozen=True)
class Handler(Spec):
    """The signal handler ``void (int, siginfo_t *, void *)``, compiled as a kernel: its arguments
    arrive in the registers of a kernel's first three.

    One call before installation, with a null siginfo_t, passes the address of its ``FIELDS`` as the
    first argument.
    """

    op: ClassVar[str] = "sigbus"
    address_off: int  # as in SignalLayout, like ``map_flags``
    map_flags: int
    page: int  # bytes
    rows: int  # number of rows of FAULTS
    row_bytes: int  # bytes of a row of FAULTS

    def emit(
        self, k: Builder, isa: Isa, args: Val, run: Val, begin: Val, end: Val, scratch: Val
    ) -> None:
        own = k.static("own")
        with k.if_else(run.eq(k.zero(ptr))) as (told, called):
            with told:
                k.store(own, args, align=8)
            with called:
                self._handle(k, k.load(own, ptr, align=8), run, begin)

    def _handle(self, k: Builder, own: Val, info: Val, context: Val) -> None:
        code = k.load(info, i32, offset=CODE_OFF)
        address = k.load(info, i64, offset=self.address_off)
        mended = k.var(k.i64(0))
        with k.if_(code.eq(NO_PAGE)), k.loop(self.rows) as i:
            row = _field(k, own, "faults", ptr) + i * self.row_bytes
            first = k.load(row, i64, align=8)
            stop = k.load(row, i64, align=8, offset=8)
            with k.if_((address >= first) & (address < stop)):
                self._mend(k, own, row, address, stop, mended)
        with k.if_(mended.v.eq(0)):
            self._pass_on(k, own, info, context, code)

    def _mend(self, k: Builder, own: Val, row: Val, address: Val, stop: Val, mended: Any) -> None:
        """Emit: map zeros from the page of ``address`` to ``stop``; earlier pages stay as they are.
        If that succeeds, store ``address`` in ``row`` (of FAULTS), and 1 in the variable
        ``mended``. ``own``: address of FIELDS.
        """
        at = address & -self.page
        args = [at, stop - at, k.const(PROT_READ, i32), k.const(self.map_flags, i32)]
        made = k.call_pointer(_field(k, own, "mmap", ptr), i64, [*args, k.const(-1, i32), k.i64(0)])
        with k.if_(made.eq(at)):
            k.atomic_set(row + 16, address)
            mended.v = k.i64(1)

    def _pass_on(self, k: Builder, own: Val, info: Val, context: Val, code: Val) -> None:
        """Emit: call the previous handler, else let the default action end the process.

        ``own``: address of FIELDS; ``info``, ``context``: the signal handler's arguments; ``code``:
        si_code. A signal raised by the processor recurs when the instruction is run again; one sent
        by a process is raised anew.
        """
        number = _field(k, own, "signal").to(i32)
        previous = _field(k, own, "previous")
        is_sent = (code < 1) | (code > LAST_CODE)
        with k.if_else(previous > IGNORE) as (handled, by_default):
            with handled:
                k.call_pointer(_field(k, own, "previous", ptr), None, [number, info, context])
            with by_default, k.if_(previous.eq(DEFAULT) | (is_sent.eq(0))):
                args = [number, _field(k, own, "default", ptr), k.zero(ptr)]
                k.call_pointer(_field(k, own, "sigaction", ptr), i32, args)
                with k.if_(is_sent):
                    k.call_pointer(_field(k, own, "raise", ptr), i32, [number])


def _field(k: Builder, own: Val, name: str, ty: Any = i64) -> Val:
    return k.load(own, ty, align=8, offset=8 * FIELDS.index(name))


class FaultHandler:
    """This process's SIGBUS handler: compiled and initialised; ``install`` makes it active."""

    def __init__(self, layout: SignalLayout) -> None:
        table = len(FAULTS), FAULTS.itemsize
        spec = Handler(layout.address_off, layout.map_flags, mmap.PAGESIZE, *table)
        self.layout, self.libc = layout, ctypes.CDLL(None)
        self.address = load_kernels([spec], PORTABLE)[spec.name]
        self.memory, self.default = HostMemory(8 * len(FIELDS)), HostMemory(layout.n_bytes)
        self.before: Any = None  # the previous struct sigaction, once installed
        self._set("faults", int(FAULTS.ctypes.data))
        self._set("signal", layout.number)
        self._set("default", self.default.address)
        for name in ("mmap", "sigaction", "raise"):
            self._set(name, ctypes.cast(getattr(self.libc, name), ctypes.c_void_p).value or 0)
        ENTRY(self.address)(self.memory.address, 0, 0, 0, 0)

    def _set(self, field: str, value: int) -> None:
        self.memory.bytes.view(np.int64)[FIELDS.index(field)] = value

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
