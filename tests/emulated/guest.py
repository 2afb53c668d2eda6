"""Kernels of a foreign machine, run by qemu-user beside the tests.

Python, numpy and the tests stay on this machine. Memory that both sides see lies at one address on
either: a file without a name, mapped here and there. The guest is a program of one loop: it waits
for a byte, calls the function whose address and arguments stand in the mailbox (or asks its system
for something, to close a page), and answers with a byte.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import select
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.kernel_study import elf
from bench.kernel_study.elf import EXIT, MMAP, MPROTECT, READ, SYSCALL, WRITE
from treadle.jit.compile import emit_object
from treadle.jit.kernel import object_code, symbol

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.kernels.spec import Spec

PROGRAM = 0x1000_0000  # where the loop lies
BASE = 0x6000_0000  # address of the shared memory
PAGE = 4096
CODE = 96 << 20  # bytes of it, first; the first page is the mailbox
DATA = 160 << 20  # bytes of it, behind the code
PATIENCE = 300.0  # seconds for one call: emulated, on a busy machine
READ_WRITE_RUN = 7
SHARED_FIXED = 0x11


def loop(fd: int) -> str:
    """The guest's program; ``fd``: the file that is the shared memory."""
    return f"""
@mailbox = external hidden global [128 x i8]
declare i64 @system(i64, i64, i64, i64, i64, i64, i64)
define void @_start() noreturn nounwind {{
  call i64 @system(i64 {MMAP}, i64 {BASE}, i64 {CODE + DATA}, i64 {READ_WRITE_RUN},
                   i64 {SHARED_FIXED}, i64 {fd}, i64 0)
  %where = ptrtoint ptr @mailbox to i64
  %p1 = getelementptr i64, ptr @mailbox, i64 1
  %p2 = getelementptr i64, ptr @mailbox, i64 2
  %p3 = getelementptr i64, ptr @mailbox, i64 3
  %p4 = getelementptr i64, ptr @mailbox, i64 4
  %p5 = getelementptr i64, ptr @mailbox, i64 5
  br label %wait
wait:
  %got = call i64 @system(i64 {READ}, i64 0, i64 %where, i64 1, i64 0, i64 0, i64 0)
  %one = icmp eq i64 %got, 1
  br i1 %one, label %work, label %leave
work:
  %function = load ptr, ptr %p1
  %a = load i64, ptr %p2
  %b = load i64, ptr %p3
  %c = load i64, ptr %p4
  %d = load i64, ptr %p5
  %none = icmp eq ptr %function, null
  br i1 %none, label %ask, label %run
ask:
  %answer = call i64 @system(i64 %a, i64 %b, i64 %c, i64 %d, i64 0, i64 0, i64 0)
  store i64 %answer, ptr %p1
  br label %done
run:
  %p6 = getelementptr i64, ptr @mailbox, i64 6
  %e = load i64, ptr %p6
  call void %function(i64 %a, i64 %b, i64 %c, i64 %d, i64 %e)
  br label %done
done:
  call i64 @system(i64 {WRITE}, i64 1, i64 %where, i64 1, i64 0, i64 0, i64 0)
  br label %wait
leave:
  call i64 @system(i64 {EXIT}, i64 0, i64 0, i64 0, i64 0, i64 0, i64 0)
  unreachable
}}"""


class GuestError(AssertionError):
    """The guest died or did not answer: a kernel stepped outside its buffers, has an instruction
    that the CPU lacks, or never ended.
    """


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


class Shared:
    """The memory that all guests see, at ``BASE``: code from the front, data behind it.

    Neither is ever given back. Data starts over where it is full: the tests that had it are over.
    Code starts over with new guests: qemu translates a page once, and does not see what this side
    writes there later.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("treadle-guest")
        os.ftruncate(self.fd, CODE + DATA)
        fixed = 0x100001  # MAP_SHARED | MAP_FIXED_NOREPLACE
        got = _libc.mmap(BASE, CODE + DATA, 3, fixed, self.fd, 0)
        if got != BASE:
            raise OSError(ctypes.get_errno(), f"{BASE:#x} is taken")
        self.memory = memoryview((ctypes.c_uint8 * (CODE + DATA)).from_address(BASE)).cast("B")
        self.bytes: np.ndarray = np.frombuffer(self.memory, np.uint8)
        self.code = PAGE
        self.data = CODE

    def pages(self, n_bytes: int) -> int:
        """Offset of that many bytes, of whole pages."""
        assert n_bytes % PAGE == 0
        assert n_bytes <= DATA, "more than the guests' memory"
        if self.data + n_bytes > CODE + DATA:
            self.data = CODE
        at = self.data
        self.data = self.data + n_bytes
        return at


class Guest:
    """One emulated CPU. ``command``: qemu and its arguments."""

    _shared: Shared | None = None

    def __init__(self, command: list[str], isa: Isa) -> None:
        self.command, self.arch = command, isa.triple.partition("-")[0]
        self.shared = Guest._shared = Guest._shared or Shared()
        stub = emit_object(loop(self.shared.fd), isa)
        system = bytes.fromhex(SYSCALL[self.arch])
        self._folder = tempfile.TemporaryDirectory(prefix="treadle-guest-")
        self.program = Path(self._folder.name) / "loop"
        made, _ = elf.program(stub, PROGRAM, {"mailbox": BASE}, {"system": system})
        self.program.write_bytes(made)
        self.program.chmod(0o755)
        self.functions: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    # -- what a machine does for a test ---------------------------------------------------------

    def kernel(self, spec: Spec, isa: Isa) -> Callable[..., None]:
        """The kernel as a function of five numbers."""
        return self.function(symbol(spec), lambda: object_code(spec, isa), isa.name)

    def function(self, name: str, code: Callable[[], bytes], key: str = "") -> Callable[..., None]:
        """A function of an object, which is put into the guest's memory once."""
        key = f"{key}:{name}"
        if key not in self.functions:
            self.functions[key] = self._put(code(), name)
        address = self.functions[key]
        return lambda *args: self._call(address, args)

    def arrays_function(self, name: str, ir_text: str, isa: Isa) -> Callable[..., None]:
        """The function ``name`` of five pointers; takes up to five arrays, whose bytes it may
        change.
        """
        run = self.function(name, lambda: emit_object(ir_text, isa))
        held: list[np.ndarray] = []

        def call(*arrays: np.ndarray) -> None:
            assert all(a.flags.c_contiguous for a in arrays)
            if [a.nbytes for a in held] != [a.nbytes for a in arrays]:
                rooms = [self.pages(-(-max(a.nbytes, 1) // PAGE) * PAGE) for a in arrays]
                held[:] = [room[: a.nbytes] for room, a in zip(rooms, arrays, strict=True)]
            for there, a in zip(held, arrays, strict=True):
                there[:] = a.reshape(-1).view(np.uint8)
            run(*(there.ctypes.data for there in held))
            for there, a in zip(held, arrays, strict=True):
                if a.flags.writeable:
                    a.reshape(-1).view(np.uint8)[:] = there

        return call

    def pages(self, n_bytes: int) -> np.ndarray:
        """Whole pages of memory, open."""
        at = self.shared.pages(n_bytes)
        self._must(MPROTECT, BASE + at, n_bytes, READ_WRITE_RUN)
        return self.shared.bytes[at : at + n_bytes]

    def close_page(self, address: int) -> None:
        """Let a page be neither read nor written by kernels."""
        self._must(MPROTECT, address, PAGE, 0)

    def system(self, number: int, *args: int) -> int:
        """What a system call of up to four arguments answers there."""
        self._call(0, (number, *args))
        return int(struct.unpack_from("<q", self.shared.memory, 8)[0])

    # -- the other side -------------------------------------------------------------------------

    def _put(self, code: bytes, name: str) -> int:
        at = -(-self.shared.code // PAGE) * PAGE
        image, symbols = elf.place(code, BASE + at)
        assert at + len(image) <= CODE, "the guests' memory for code is full"
        self.shared.code = at + len(image)
        self.shared.bytes[at : at + len(image)] = np.frombuffer(bytes(image), np.uint8)
        return symbols[name]

    def _must(self, number: int, *args: int) -> None:
        answer = self.system(number, *args)
        assert answer == 0, f"the guest's system call {number} failed: {answer}"

    def _call(self, function: int, args: tuple[int, ...]) -> None:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        words = [function, *args, *[0] * (5 - len(args))]
        struct.pack_into("<6q", self.shared.memory, 8, *words)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"x")
            process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE)
        if not (ready and process.stdout.read(1)):
            self.stop(kill=not ready)
            raise GuestError(self._reason(process.returncode, bool(ready)))

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            ["nice", "-n", "15", *self.command, str(self.program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            pass_fds=(self.shared.fd,),
        )
        return self._process

    def _reason(self, code: int | None, answered: bool) -> str:
        if not answered:
            return f"no answer in {PATIENCE:.0f} s"
        names = {-11: "SIGSEGV: outside its buffers", -4: "SIGILL: no such instruction"}
        return f"the emulated CPU stopped: {names.get(code or 0, f'exit status {code}')}"

    def stop(self, *, kill: bool = False) -> None:
        """End the process; the next call starts another, in which every page is open."""
        process = self._process
        self._process = None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        if kill:
            process.kill()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()
        process.stdout.close()

    def close(self) -> None:
        """End the process for good."""
        self.stop()
        self._folder.cleanup()


# Where tools/fetch_emulators.py puts what it fetches.
FOLDER = Path(
    os.environ.get("TREADLE_EMULATORS", Path(__file__).resolve().parents[2] / ".emulators")
)


def found(name: str) -> str | None:
    """Path of an emulator: a fetched one, or one on PATH."""
    fetched = FOLDER / "bin" / name
    return str(fetched) if fetched.is_file() else shutil.which(name)
