"""Kernels as objects for every system: their form, their symbols, the convention of their calls.

Nothing of them runs here but Windows' on x86-64, by way of a thunk. On Windows the JIT links ELF
objects too: LLVM's name for that system ends in -elf.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.jit.emit import ir_text
from tests.kernels import registry, rows, test_attention, test_elementwise, test_matmul
from tests.kernels.conftest import rng
from tests.kernels.harness import Memory
from tests.kernels.machine import SIGNATURE, Here
from treadle.devices.cpu.step_loop import StepLoop
from treadle.isa import ROWS
from treadle.isa.isa import Isa
from treadle.isa.portable import PORTABLE
from treadle.jit.builder import Builder
from treadle.jit.compile import Linker, emit_assembly, emit_object
from treadle.jit.kernel import symbol, trace
from treadle.jit.types import i64
from treadle.jit.values import Val
from treadle.kernels.attention.paged import Attention
from treadle.kernels.elementwise.elementwise import Norm
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.gemv import Gemv
from treadle.kernels.spec import Spec

__all__ = ["rng"]  # the fixture of the kernels' tests

WINDOWS = "x86_64-pc-windows-msvc-elf"
WINDOWS_ARM = "aarch64-pc-windows-msvc-elf"
TRIPLES = {
    "x86_64-unknown-linux-gnu": ("avx2", "avx512_bf16"),
    "x86_64-apple-darwin": ("avx2",),
    WINDOWS: ("avx2", "avx512_bf16"),
    "x86_64-unknown-freebsd": ("avx2",),
    "aarch64-unknown-linux-gnu": ("neon_i8mm",),
    "aarch64-unknown-freebsd": ("neon_i8mm",),
    "arm64-apple-darwin": ("neon_i8mm",),
    WINDOWS_ARM: ("neon_i8mm",),
    "riscv64-unknown-linux-gnu": ("rvv256",),
}
BLOCKS, ROWS_OF_BLOCKS = Gemm("Q8_0", "q8", 352, 2, 4), Gemv("Q4_K", "q8", 768, 4, 1)
SPECS: list[Spec] = [BLOCKS, ROWS_OF_BLOCKS, Attention("f16", 8, 2, 64, 1), StepLoop()]
# Position-independent code may name the table of offsets; a kernel calls nothing.
ALLOWED = {"", "_GLOBAL_OFFSET_TABLE_"}
ELF = b"\x7fELF"
MACH_O = b"\xcf\xfa\xed\xfe"


def symbols(code: bytes) -> tuple[set[str], set[str]]:
    """Names that an object defines, and names that others must."""
    found: tuple[set[str], set[str]] = set(), set()
    for name, is_defined in {ELF: of_elf, MACH_O: of_mach_o}[code[:4]](code):
        found[not is_defined].add(name)
    return found


def text_at(code: bytes, at: int) -> str:
    return code[at : code.index(b"\0", at)].decode()


def of_elf(code: bytes) -> Iterator[tuple[str, bool]]:
    (table,) = struct.unpack_from("<Q", code, 40)
    size, n, _ = struct.unpack_from("<HHH", code, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, table + i * size) for i in range(n)]
    (_, _, _, _, start, n_bytes, strings, *_) = next(s for s in sections if s[1] == 2)
    for at in range(start, start + n_bytes, 24):
        name, _, _, section = struct.unpack_from("<IBBH", code, at)
        yield text_at(code, sections[strings][4] + name), bool(section)


def of_mach_o(code: bytes) -> Iterator[tuple[str, bool]]:
    (n,) = struct.unpack_from("<I", code, 16)
    at = 32
    for _ in range(n):
        kind, size = struct.unpack_from("<II", code, at)
        if kind == 2:  # LC_SYMTAB
            start, count, strings, _ = struct.unpack_from("<IIII", code, at + 8)
            for i in range(count):
                name, flags, *_ = struct.unpack_from("<IBBHQ", code, start + 16 * i)
                yield text_at(code, strings + name), flags & 0x0E == 0x0E  # N_SECT
        at += size


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=registry.name)
@pytest.mark.parametrize("triple", TRIPLES)
def test_an_object_asks_for_nothing(triple: str, spec: Spec) -> None:
    for row in TRIPLES[triple]:
        isa = ROWS[row]
        code = emit_object(trace(spec, isa), isa, triple)
        assert code[:4] == (MACH_O if "apple" in triple else ELF)
        defined, missing = symbols(code)
        assert ("_" if "apple" in triple else "") + symbol(spec) in defined
        assert missing <= ALLOWED


def test_calls_by_each_convention() -> None:
    """Where the two addresses come in, and what a function must leave as it was."""
    isa = ROWS["avx2"]
    asm = {t: emit_assembly(trace(BLOCKS, isa), isa, t) for t in TRIPLES if t.startswith("x86")}
    for triple, text in asm.items():
        address = re.search(r"\tmovq\t\d*\(%(r\w+)\)", text)
        assert address is not None
        assert address[1] in (("rcx", "rdx") if triple == WINDOWS else ("rdi", "rsi"))
    saved = set(re.findall(r"\tv?movaps\t%(xmm\d+), \d+\(%rsp\)", asm[WINDOWS]))
    assert {f"xmm{i}" for i in range(6, 13)} <= saved
    # Below the stack's end Windows lets nobody write; the others leave 128 bytes to a function.
    assert not re.search(r"-\d+\(%rsp\)", asm[WINDOWS])


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=registry.name)
@pytest.mark.parametrize("triple", ["arm64-apple-darwin", WINDOWS_ARM])
def test_the_platforms_register_is_left_alone(triple: str, spec: Spec) -> None:
    """x18 is the system's on macOS and Windows."""
    isa = ROWS["neon_i8mm"]
    assert not re.search(r"\b[xw]18\b", emit_assembly(trace(spec, isa), isa, triple))


def large(n_bytes: int) -> Callable[..., None]:
    """A function with so many bytes on its stack."""

    def build(k: Builder, n: Val) -> None:
        room = k.room(n_bytes)
        with k.loop(k.load(n, i64)) as i:
            k.store(room, i, offset=i * 8)
        k.store(n, k.load(room, i64, offset=n_bytes - 8))

    return build


@pytest.mark.slow
def test_frames_of_more_than_a_page() -> None:
    """Windows gives a thread's stack page by page, so there a function with more than a page calls
    one of ntdll's, which touches each.
    """
    for triple, (row, *_) in TRIPLES.items():
        isa = ROWS["neon"] if row.startswith("neon") else PORTABLE
        if triple.startswith("riscv64"):
            isa = ROWS[row]
        _, missing = symbols(emit_object(ir_text(isa, 1, large(20_000)), isa, triple))
        assert missing - ALLOWED == ({"__chkstk"} if "windows" in triple else set())
    # the only kernel of that row
    spec = Gemm("Q4_K", "f32", 512, 1, 4)
    isa = ROWS["avx2"]
    assert symbols(emit_object(trace(spec, isa), isa, WINDOWS))[1] - ALLOWED == {"__chkstk"}


# -- Windows' convention, run ---------------------------------------------------------------------

THUNK = """
target triple = "x86_64-unknown-linux-gnu"
define void @{name}(ptr %args, ptr %run, i64 %begin, i64 %end, ptr %scratch) {{
  %f = inttoptr i64 {address} to ptr
{before}  call win64cc void %f(ptr %args, ptr %run, i64 %begin, i64 %end, ptr %scratch)
{after}  ret void
}}
"""


class ByWindows(Here):
    """This process, and kernels as they are compiled for Windows on x86-64."""

    def __init__(self) -> None:
        super().__init__()
        self._linker = Linker()

    def kernel(self, spec: Spec, isa: Isa) -> Callable[..., None]:
        """Called by a thunk that the machine's own convention calls."""
        code = emit_object(trace(spec, isa), isa, WINDOWS)
        return SIGNATURE(self.thunk(symbol(spec), self._linker.link(symbol(spec), code)))

    def thunk(self, name: str, address: int, before: str = "", after: str = "") -> int:
        """Its address. ``before`` and ``after`` the call: IR."""
        name = f"{name}_thunk{len(self._linker._libraries)}"
        text = THUNK.format(name=name, address=address, before=before, after=after)
        return self._linker.link(name, emit_object(text, PORTABLE))


AVX2 = ROWS["avx2"]
here = pytest.mark.skipif(AVX2 not in rows.ALL, reason="this CPU has no AVX2")


@pytest.fixture
def by_windows() -> Memory:
    return Memory(ByWindows())


@here
@pytest.mark.parametrize(
    "spec",
    [BLOCKS, ROWS_OF_BLOCKS, Gemm("F32", "f32", 172, 2, 6, residual=True)],
    ids=registry.name,
)
def test_products(spec: Gemm | Gemv, by_windows: Memory, rng: np.random.Generator) -> None:
    test_matmul.test_random_numbers(spec, AVX2, by_windows, rng)


@here
def test_a_norm(by_windows: Memory, rng: np.random.Generator) -> None:
    spec = next(s for s in registry.NORMS if s.add)
    assert isinstance(spec, Norm)
    test_elementwise.test_norm(spec, AVX2, by_windows, rng)


@pytest.mark.slow
@here
def test_a_batch_of_queries(by_windows: Memory, rng: np.random.Generator) -> None:
    spec = next(s for s in registry.ALL if isinstance(s, Attention))
    test_attention.test_attention(spec, AVX2, by_windows, rng)


def moves(n: int, start: int, stop: int) -> tuple[str, str]:
    """IR that loads ``n`` vectors from ``args + start``, and IR that stores them at ``+ stop``."""
    loads = "".join(
        f"  %p{i} = getelementptr i8, ptr %args, i64 {start + 16 * i}\n"
        f"  %v{i} = load volatile <4 x float>, ptr %p{i}, align 4\n"
        for i in range(n)
    )
    stores = "".join(
        f"  %q{i} = getelementptr i8, ptr %args, i64 {stop + 16 * i}\n"
        f"  store volatile <4 x float> %v{i}, ptr %q{i}, align 4\n"
        for i in range(n)
    )
    return loads, stores


@here
def test_a_kernel_leaves_the_callers_registers() -> None:
    """Ten vectors live over the call: in xmm6 to xmm15, which a kernel that uses all must save."""
    machine = ByWindows()
    loads, stores = moves(16, 0, 256)
    signature = "ptr %args, ptr %run, i64 %begin, i64 %end, ptr %scratch"
    text = f"define void @uses_all({signature}) {{\n{loads}{stores}  ret void\n}}\n"
    address = machine._linker.link("uses_all", emit_object(text, PORTABLE, WINDOWS))
    call = SIGNATURE(machine.thunk("leaves", address, *moves(10, 1024, 2048)))
    args = np.zeros(4096, np.uint8)
    values = args.view(np.float32)
    values[:64], values[256:296] = -1, np.arange(40)
    call(args.ctypes.data, 0, 0, 0, 0)
    assert (values[64:128] == -1).all()
    assert (values[512:552] == np.arange(40)).all()
