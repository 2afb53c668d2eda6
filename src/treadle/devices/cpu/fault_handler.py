"""The compiled SIGBUS handler of ``mapping_faults.py``, as a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from treadle.base.fast_classes import dataclass
from treadle.devices.cpu.memory_layouts import HANDLER, HANDLER_FIELDS, IGNORE
from treadle.jit.types import i32, i64, ptr
from treadle.kernels.spec import Spec

if TYPE_CHECKING:
    from treadle.jit.language import Builder, Isa, Val

DEFAULT = 0  # SIG_DFL
PROT_READ = 1
CODE_OFF = 8  # of siginfo_t's si_code
NO_PAGE = 2  # BUS_ADRERR
LAST_CODE = 5  # the processor raises codes from 1 to this one


@dataclass(frozen=True)
class Handler(Spec):
    """The signal handler ``void (int, siginfo_t *, void *)``, compiled as a kernel: its arguments
    arrive in the registers of a kernel's first three.

    One call before installation, with a null siginfo_t, passes the address of its
    ``HANDLER_FIELDS`` as the first argument.
    """

    op: ClassVar[str] = HANDLER
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
        ``mended``. ``own``: address of HANDLER_FIELDS.
        """
        at = address & -self.page
        args = [at, stop - at, k.const(PROT_READ, i32), k.const(self.map_flags, i32)]
        made = k.call_pointer(_field(k, own, "mmap", ptr), i64, [*args, k.const(-1, i32), k.i64(0)])
        with k.if_(made.eq(at)):
            k.atomic_set(row + 16, address)
            mended.v = k.i64(1)

    def _pass_on(self, k: Builder, own: Val, info: Val, context: Val, code: Val) -> None:
        """Emit: call the previous handler, else let the default action end the process.

        ``own``: address of HANDLER_FIELDS; ``info``, ``context``: the signal handler's arguments;
        ``code``: si_code. A signal raised by the processor recurs when the instruction is run
        again; one sent by a process is raised anew.
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
    return k.load(own, ty, align=8, offset=8 * HANDLER_FIELDS.index(name))
