"""What an instruction set is to treadle: one row of facts and the few operations it does better
than the portable way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from treadle.base.fast_dataclass import dataclass

if TYPE_CHECKING:
    from treadle.jit.values import Val

Op: TypeAlias = "Callable[..., Val]"
Effect: TypeAlias = "Callable[..., None]"
Several: TypeAlias = "Callable[..., list[Val]]"


@dataclass(frozen=True)
class MatrixUnit:
    """Eight matrix registers, by number, each 16 rows of 64 bytes: 0 to 3 hold sums, 4 and 5 rows
    of a, 6 and 7 rows of b.

    ``begin(k, p)``: this thread may use them from here on, ``end(k)``: it no longer does; ``p``: 64
    bytes to write. Between them, ``scope(k, name, args, build)`` emits ``build(k, *args)``, and all
    that follows is for there alone: no vector of the machine's others is touched there, and no
    register lasts longer. ``zero(k, r)`` and ``store(k, r, p, stride)`` of sums; ``load(k, r, p,
    stride)``: rows from ``p`` on, ``stride`` bytes from one to the next; of a and b that memory
    must not change before their dots. ``load_passing``: the same of a, whose lines are not needed
    again soon. ``dots_bf16(k)``: for m and n of 0 and 1, c register 2 m + n,
    a 4 + m and b 6 + n, ``c[i, j] += sum over l of a[i, 2 l] b[l, 2 j] + a[i, 2 l + 1] b[l, 2 j +
    1]``, c in f32 and 16 by 16, a and b in bf16 and 16 by 32, where what is smaller than 2**-126
    may count as zero. ``turn(k, p, stride)``: where the machine takes a by columns, rows of it in
    memory and dwords in them change places, once, before they are loaded; else None. ``ordered``:
    of a product of 32 values the even and the odd ones are summed apart, one fused multiplication
    after the other, then both are added, and the result to c.

    ``begin_bytes(k, p, n)``, for ``begin``: a has ``n`` bytes a row and b ``n / 4`` rows of 64, and
    ``dot_bytes(k, c, a, b)``: ``c[i, j] += sum over l of a[i, l] b[l / 4, 4 j + l % 4]``, c in i32,
    a and b in i8; None where the machine has nothing of the kind.
    """

    begin: Effect
    end: Effect
    zero: Effect
    load: Effect
    load_passing: Effect
    store: Effect
    dots_bf16: Effect
    scope: Effect
    turn: Effect | None = None
    begin_bytes: Effect | None = None
    dot_bytes: Effect | None = None
    ordered: bool = False
    vector_tokens: int = 16  # up to so many tokens vectors are faster: a tile is mostly empty
    float_tokens: int = 16  # the same of weights that are floats in the file
    parts: int = 2  # the most bf16 that one value may be, and be faster than in vectors
    panel_rows: int = 256  # of weights, at most
    panel_bytes: int = 1 << 20  # the same in bytes: the panel lies in the second-level cache
    near: int = 512  # values of 32 tokens that stay in the first-level cache


@dataclass(frozen=True)
class Simt:
    """What one thread of a block may do, where threads run in blocks that share memory: a GPU's.

    Every thread of a block (a warp, for those marked so) must come by each of them at the same
    place. ``tid(k)``: the thread's number in its block, ``cta(k)``: the block's, ``n_ctas(k)``: how
    many blocks there are; i64. ``shared(k)``: where the memory begins that the block's threads
    share, aligned to 128 bytes. ``barrier(k)``: waits for the block's other threads; what they
    wrote before can be read after.

    ``copy_async(k, to, frm, n_bytes=16)``: shared memory at ``to`` will be what is at ``frm``, 4, 8
    or 16 bytes, both aligned to as many. ``commit(k)``: the thread's copies since the last commit
    are one group. ``wait(k, n)``: all but its last ``n`` groups are there, for this thread; for
    others after a barrier.

    By warp, of 32 threads (lanes) with neighbouring numbers: ``warp_barrier(k)``: a barrier of the
    warp's. ``shuffle(k, v, lanes)``: the ``v`` of 32 bits that the thread whose lane is this one's
    exclusive-or ``lanes`` gave.
    ``load_matrix(k, p)``: four matrices of 8 rows of 8 values of 16 bits; lane 8 i + j says where
    row j of matrix i is in shared memory, 16 bytes aligned to 16; result i, u32, is the two values
    of row ``lane // 4`` from column ``2 (lane % 4)`` on. ``load_matrix_t``: of the matrices
    transposed. ``mma_f16(k, c, a, b)`` and ``mma_bf16``: four f32 of ``C += A B``, summed in f32 in
    any order; A is 16 by 16, B 16 by 8, C 16 by 8. With ``g, t = lane // 4, lane % 4``: ``a``, four
    u32 of two values, is rows g, g + 8, g, g + 8 of A, from column 2 t, 2 t, 2 t + 8, 2 t + 8 on;
    ``b``, two u32, is column g of B, from row 2 t and 2 t + 8 on; ``c`` is row g, then g + 8 of C,
    columns 2 t and 2 t + 1.
    """

    tid: Op
    cta: Op
    n_ctas: Op
    shared: Op
    barrier: Effect
    copy_async: Effect
    commit: Effect
    wait: Effect
    warp_barrier: Effect
    shuffle: Op
    load_matrix: Several
    load_matrix_t: Several
    mma_f16: Several
    mma_bf16: Several
    warp: int = 32
    tile_rows: int = 64  # queries of an attention item of many tokens, at most
    tile_dims: int = 256  # of its heads: more leave no registers for the sums


@dataclass(frozen=True)
class Tiles:
    """How much a kernel takes at a time: what the registers hold, or what was measured.

    A gemm's tile is vectors of rows, then tokens. On bytes it keeps i32 sums of a block beside
    the f32 sums; of the latter some may spill, and twice as often where a scale is for 16 values.
    One of outer products keeps its i16 or i32 sums alone.
    """

    floats: tuple[int, int] = (2, 5)
    bytes: tuple[int, int] = (2, 2)  # a scale for every 32 values
    bytes16: tuple[int, int] = (2, 2)  # a scale for every 16 values
    gemv: tuple[tuple[int, int], ...] = ((1, 4), (2, 4), (4, 2))  # tokens, rows walked together
    # The same at most, of blocks of 256. Of one token: from memory two are faster, by up to 17 %.
    gemv_large: tuple[tuple[int, int], ...] = ((1, 2), (2, 2), (4, 2))
    gemv_ahead: int = 0  # bytes, where rows walked together are runs of their own; ``Gemv``
    peak: tuple[int, int] = (2, 5)  # vectors of w and of x whose dots hide a dot's latency
    # On i16, where prompts of some formats are faster so (``choice_act.by_words``); 0: none are.
    words: tuple[int, int] = (0, 0)
    by_lane: bool = False  # a dot takes any lane of x: tokens are loaded a vector at a time
    # Values of K that a product of bytes takes of a row: 4, dots of dwords (``dot4``); 1, outer
    # products (a vector by a scalar), where moving lanes is slow; 8, two rows by two tokens
    # (``pairs``).
    unit: int = 4
    bytes_i32: tuple[int, int] = (2, 2)  # outer products too large to be added up in i16
    # Vectors of rows for batches of up to so many tokens, where these have a tile of their own.
    few: tuple[int, int] = (0, 0)
    # The most tokens of a batch that stand in the lanes of vectors (``LanesGemm``); 0: none. And of
    # one that meets floats (``FloatLanes``).
    lanes: int = 0
    float_lanes: int = 0


@dataclass(frozen=True)
class Shorts:
    """Dots that are added up in i16, as many as it holds, and then in i32: for machines whose
    ``dot4`` is two steps, of which a tile may put off the second.

    ``dot(k, acc, w, x, size)``: ``acc[i] += w[2i] x[2i] + w[2i+1] x[2i+1]`` in i16, ``acc`` None
    for zeros; w ``u8`` or ``i8``, x ``i8`` in -127..127; ``size`` None, or ``|x|`` in ``u8`` where
    that is at hand and w signed, above -128: then no ``|w|`` is made. ``widen(k, acc, s)``:
    ``acc[i] += s[2i] + s[2i+1]``, acc in i32. ``scale(k, acc, s, f)``: ``acc[i] += s[2i] f[2i] +
    s[2i+1] f[2i+1]``. ``high(k, a, b)``: ``(a[i] b[i] + 2**14) >> 15``, of a register of i16.
    """

    dot: Op
    widen: Op
    scale: Op
    high: Op

    @staticmethod
    def room(w_max: int) -> int:
        """How many dots an i16 holds, of codes of at most this size; 0: not one."""
        return 32767 // (2 * 127 * w_max)


@dataclass(frozen=True)
class Isa:
    """One instruction set. An op has one meaning, written in ``portable.py``; a row may replace how
    it is emitted.

    ``dot4(k, acc, w, x, w_max)``: ``acc[i] += sum of w[4i..4i+3] * x[4i..4i+3]``, w ``u8`` of at
    most ``w_max``, or ``i8`` where ``dot4_least`` is negative, x ``i8`` in -127..127, acc i32.
    ``pairs(k, acc, w, x)``: ``acc[2i + j] += sum of w[8i + l] * x[8j + l]`` over l, i and j 0 or 1,
    w 16 bytes of either sign, x and acc as above. ``dot_bf16(k, acc, a, b)``: ``acc[i] += a[2i]
    b[2i] + a[2i+1] b[2i+1]`` in f32, or None where the machine has no such instruction (bf16
    weights are then widened to f32). ``dot_words(k, acc, a, b)``: the same of i16, in i32, or None
    where f32 is as fast. ``pause(k)``: a hint to the core that it is in a loop that
    waits. ``lookup(k, table, index)``: lane i is byte ``index[i] % 16`` (u8) of the ``table`` of 16
    numbers; at least 16 lanes. ``lookup_words(k, table, index)``: lane i is the word ``index[i] %
    32`` of ``table``, ``i16 * 32``, index ``u16 * 32``; None where that is no single instruction.
    ``gather(k, table, index, ty)``: lane i is element ``index[i]`` (an
    integer, never negative) of ``ty``'s scalars at ``table``. ``bit_extract(k, v, shift, width,
    to)``, ``multishift(k, v, at)`` and ``bit_spread(k, v, at, to)``: as ``formats/kernel_bits.py``
    says. ``widen_f16``/``narrow_f16``: between ``f16 * n`` and ``f32 * n``. ``narrow_bf16(k, x)``:
    bits of the nearest bf16, ``i16 * n``, ties to even; for |x| < 2**-126 perhaps zero.
    ``reciprocal(k, x)``: ``1 / x`` in f32 to 2 units in the last place, for 2**-126 <= |x| <=
    2**126, and NaN for NaN. ``matrix``: matrix registers, or None.
    ``simt``: what threads of blocks may do, or None. ``shorts``: dots in i16, or None.
    """

    name: str
    needs: frozenset[str]  # LLVM's names of the CPU features that must be there
    cpu: str  # LLVM's -mcpu
    features: str  # LLVM's -mattr
    vector_bits: int
    regs: int  # vector registers
    dot4: Op
    pairs: Op
    dot_bf16: Op | None
    widen_f16: Op
    narrow_f16: Op
    narrow_bf16: Op
    pause: Effect
    lookup: Op
    gather: Op
    reciprocal: Op
    bit_extract: Op
    multishift: Op
    bit_spread: Op
    lookup_words: Op | None = None
    dot_words: Op | None = None
    matrix: MatrixUnit | None = None
    simt: Simt | None = None
    shorts: Shorts | None = None
    tiles: Tiles = Tiles()
    fused: bool = False  # multiply-add rounds once, in hardware
    dot4_least: int = 0  # the smallest w that dot4 takes: -128 where it multiplies signed bytes
    dot4_top: int = 255  # the largest that it takes at full speed
    slow_with: frozenset[str] = frozenset()  # features of CPUs on which the row before is faster
    # Registers have ``vector_bits`` and no more, which LLVM is told: it takes RISC-V's for as long
    # as features say or longer, and then cannot tell one register from the next.
    exact: bool = False
    halves: bool = False  # lanes move faster within the halves of a register than across
    # Bytes that tensors are aligned to, and scalars to their own size up to so many. What is not
    # known to be aligned, some machines load byte by byte.
    aligned: int = 1
    # Whether activations are rounded to int8 where codes meet them; else they stay floats, bf16 in
    # products of many tokens.
    rounds: bool = True
    triple: str = ""  # of the architecture that it is for; empty: any that LLVM knows

    @property
    def lanes(self) -> int:
        """f32 values in a vector register."""
        return self.vector_bits // 32

    def above(self, name: str, more: str, **better: Any) -> Isa:
        """The row of machines that have ``more`` features than this one needs, and so do some
        things ``better``.
        """
        features = ",".join(filter(None, [self.features, *(f"+{f}" for f in more.split())]))
        needs = self.needs.union(more.split())
        return replace(self, name=name, needs=needs, features=features, **better)
