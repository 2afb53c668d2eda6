"""A kernel of a foreign machine run once by qemu-user: its results, and the instructions it took.

The kernel becomes a program of its own. It takes memory at a fixed address, reads all buffers from
standard input, calls the kernel, and writes the buffers to standard output. With a log of the
translated blocks that lie within the kernel, and of their executions, the count is exact.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.kernel_study import elf
from treadle.base.fast_classes import dataclass
from treadle.errors import TreadleError
from treadle.jit.compile import emit_object
from treadle.jit.kernel import symbol, trace

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.kernels.spec import Spec

# addresses
PROGRAM = 0x1000_0000
DATA = 0x6000_0000
# between two buffers, bytes that no kernel may change
ALIGN = 64
CANARY = 0xA5
READ_WRITE = 3
PRIVATE_FIXED_ANONYMOUS = 0x32
PATIENCE = 120.0  # seconds for one run, emulated, on a busy machine
EXECUTED = re.compile(r"^Trace \d+: 0x[0-9a-f]+ \[[0-9a-f]+/([0-9a-f]+)/", re.MULTILINE)
TRANSLATED = re.compile(r"^0x([0-9a-f]+):", re.MULTILINE)


class EmulatorError(TreadleError):
    """qemu is absent, or a kernel failed in it: a step outside its memory, or an instruction that
    the emulated CPU lacks.
    """


@dataclass(frozen=True)
class EmulatorRun:
    """Buffers by name as the kernel left them; instructions that it executed, if counted."""

    arrays: dict[str, np.ndarray]
    instructions: int | None


@dataclass(frozen=True)
class Emulator:
    """qemu-user. ``path``: its program; ``cpu``: what it emulates; ``options``: more of its own."""

    path: str
    cpu: str
    options: tuple[str, ...] = ()

    def run(
        self,
        spec: Spec,
        isa: Isa,
        arrays: Mapping[str, np.ndarray],
        numbers: Mapping[str, int],
        *,
        items: int = 1,
        count: bool = False,
    ) -> EmulatorRun:
        """Run items 0 to ``items``. Raises EmulatorError."""
        layout, size = _layout(arrays)
        image = np.full(size, CANARY, np.uint8)
        for name, array in arrays.items():
            image[layout[name] :][: array.nbytes] = array.reshape(-1).view(np.uint8)
        given = {**numbers, **{name: DATA + at for name, at in layout.items()}}
        slots = [int(given[name]) for name in spec.args.kinds]
        args = struct.pack(f"<{len(slots)}q", *slots)
        whole = image.tobytes() + args
        code = emit_object(_program(spec, isa, size, len(whole), items), isa)
        system = bytes.fromhex(elf.SYSCALL[isa.triple.partition("-")[0]])
        made, places = elf.program(code, PROGRAM, {}, {"system": system})
        extent = next(s.size for s in elf.Object(code).symbols if s.name == symbol(spec))
        begin = places[symbol(spec)]
        with tempfile.TemporaryDirectory(prefix="treadle-study-") as folder:
            program = Path(folder, "program")
            log = Path(folder, "log")
            program.write_bytes(made)
            program.chmod(0o755)
            within = f"{begin:#x}+{extent:#x}"
            watch = ["-d", "exec,nochain,in_asm", "-dfilter", within, "-D", str(log)]
            done = self._start(watch if count else [], program, whole)
            counted = instructions(log.read_text("utf-8", "replace")) if count else None
        after = np.frombuffer(done, np.uint8)
        _check_canaries(after, layout, arrays)
        found = {
            name: after[at : at + arrays[name].nbytes]
            .view(arrays[name].dtype)
            .reshape(arrays[name].shape)
            for name, at in layout.items()
        }
        return EmulatorRun(found, counted)

    def _start(self, options: list[str], program: Path, given: bytes) -> bytes:
        command = [self.path, "-cpu", self.cpu, *self.options, *options, str(program)]
        try:
            done = subprocess.run(command, input=given, capture_output=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise EmulatorError(f"{self.path}: no end after {PATIENCE:.0f} s") from None
        except OSError as error:
            raise EmulatorError(f"{self.path}: {error.strerror}") from error
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip()[-500:]
            raise EmulatorError(f"{self.path} -cpu {self.cpu}: status {done.returncode}: {said}")
        return done.stdout


def find(name: str, folders: Iterable[Path] = ()) -> str:
    """Path of a program, in ``folders`` or on PATH. Raises EmulatorError."""
    for folder in folders:
        if (folder / name).is_file():
            return str(folder / name)
    found = shutil.which(name)
    if found is None:
        raise EmulatorError(f"{name} is absent: install it, or run tools/fetch_emulators.py")
    return found


def instructions(log: str) -> int:
    """Count executed instructions in qemu's log ``exec,nochain,in_asm``: each execution of a block
    counts its instructions.
    """
    sizes: dict[int, int] = {}
    for block in log.split("----------------\n")[1:]:
        listed = [int(at, 16) for at in TRANSLATED.findall(block.partition("\nTrace ")[0])]
        if listed:
            sizes[listed[0]] = len(listed)
    return sum(sizes[int(at, 16)] for at in EXECUTED.findall(log))


def _layout(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, int], int]:
    """Byte offsets of the buffers, ALIGN bytes and more between them, and bytes of all."""
    at = ALIGN
    places = {}
    for name, array in arrays.items():
        places[name] = at
        at += -(-array.nbytes // ALIGN) * ALIGN + ALIGN
    return places, at


def _check_canaries(
    after: np.ndarray, layout: Mapping[str, int], arrays: Mapping[str, np.ndarray]
) -> None:
    free = np.ones(len(after), bool)
    for name, at in layout.items():
        free[at : at + arrays[name].nbytes] = False
    wrong = np.flatnonzero(free & (after != CANARY))
    if len(wrong):
        raise EmulatorError(f"byte {wrong[0]} lies outside every buffer, and was written")


def _program(spec: Spec, isa: Isa, args: int, n_bytes: int, items: int) -> str:
    """The kernel's IR and a ``_start``. Memory of ``n_bytes``: buffers, and from byte ``args`` on
    the kernel's arguments.
    """
    room = n_bytes + 4096
    return f"""{trace(spec, isa)}
declare i64 @system(i64, i64, i64, i64, i64, i64, i64)
define void @_start() noreturn nounwind {{
  call i64 @system(i64 {elf.MMAP}, i64 {DATA}, i64 {room}, i64 {READ_WRITE},
                   i64 {PRIVATE_FIXED_ANONYMOUS}, i64 -1, i64 0)
  br label %read
read:
  %have = phi i64 [0, %0], [%more, %fill]
  %left = sub i64 {n_bytes}, %have
  %full = icmp eq i64 %left, 0
  br i1 %full, label %run, label %fill
fill:
  %to = add i64 {DATA}, %have
  %got = call i64 @system(i64 {elf.READ}, i64 0, i64 %to, i64 %left, i64 0, i64 0, i64 0)
  %more = add i64 %have, %got
  %bad = icmp slt i64 %got, 1
  br i1 %bad, label %fail, label %read
run:
  %args = inttoptr i64 {DATA + args} to ptr
  %none = inttoptr i64 {DATA + n_bytes} to ptr
  call void @{symbol(spec)}(ptr %args, ptr %none, i64 0, i64 {items}, ptr %none)
  br label %write
write:
  %out = phi i64 [0, %run], [%next, %put]
  %rest = sub i64 {args}, %out
  %done = icmp eq i64 %rest, 0
  br i1 %done, label %end, label %put
put:
  %from = add i64 {DATA}, %out
  %went = call i64 @system(i64 {elf.WRITE}, i64 1, i64 %from, i64 %rest, i64 0, i64 0, i64 0)
  %next = add i64 %out, %went
  %lost = icmp slt i64 %went, 1
  br i1 %lost, label %fail, label %write
end:
  call i64 @system(i64 {elf.EXIT}, i64 0, i64 0, i64 0, i64 0, i64 0, i64 0)
  unreachable
fail:
  call i64 @system(i64 {elf.EXIT}, i64 1, i64 0, i64 0, i64 0, i64 0, i64 0)
  unreachable
}}"""
