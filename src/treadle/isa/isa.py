"""Description of an instruction set: facts, and the few operations that it does better than
portable code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from treadle.base.fast_classes import dataclass

if TYPE_CHECKING:
    from treadle.jit.values import Val

Op: TypeAlias = "Callable[..., Val]"
Effect: TypeAlias = "Callable[..., None]"
Several: TypeAlias = "Callable[..., list[Val]]"


@dataclass(frozen=True)
class MatrixUnit:
    """Eight matrix registers, by number, each 16 rows of 64 bytes: 0 to 3 hold sums, 4 and 5 rows
    of a, 6 and 7 rows of b.

    ``begin(k, p)``: the thread acquires the registers; ``end(k)``: it releases them; ``p``: 64
    writable bytes. Between them, ``scope(k, name, args, build)`` emits ``build(k, *args)``, and the
    operations below may be used only there. No ordinary vector is touched in a scope, and no matrix
    register outlives it.

    ``zero(k, r)`` and ``store(k, r, p, stride)`` are for registers of sums. ``load(k, r, p,
    stride)`` loads rows from ``p``, ``stride`` bytes apart; the memory of a and b must not change
    before their dots. ``load_passing``: the same for a whose cache lines are not needed again soon.

    ``dots_bf16(k)``: for m and n of 0 and 1, c register 2 m + n, a 4 + m and b 6 + n, ``c[i, j] +=
    sum over l of a[i, 2 l] b[l, 2 j] + a[i, 2 l + 1] b[l, 2 j + 1]``, c in f32 and 16 by 16, a and
    b in bf16 and 16 by 32. Values below 2**-126 may count as zero. ``turn(k, p, stride)``:
    transposes rows of a in memory, as dwords, once before they are loaded, on machines that take a
    by columns; else None. ``ordered``: in a product of 32 values the even and the odd ones are
    summed apart, one fused multiply-add after the other; then both sums are added, and the result
    to c.

    ``begin_bytes(k, p, n)`` replaces ``begin``: a has ``n`` bytes a row and b ``n / 4`` rows of 64.
    ``dot_bytes(k, c, a, b)``: ``c[i, j] += sum over l of a[i, l] b[l / 4, 4 j + l % 4]``, c in i32,
    a and b in i8. Both are None on machines without products of bytes.
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
    vector_tokens: int = 16  # up to this many tokens vectors are faster: a tile is mostly empty
    float_tokens: int = 16  # the same for weights that are floats in the file
    parts: int = 2  # at most this many bf16 a value: with more, vectors are faster
    panel_rows: int = 256  # rows of weights, at most
    panel_bytes: int = 1 << 20  # the same in bytes: the panel fits the second-level cache
    near: int = 512  # values of K of 32 tokens that fit the first-level cache


@dataclass(frozen=True)
class Simt:
    """Operations of a GPU thread, one of a block of threads that share memory.

    Every thread of a block (of a warp, for the warp operations) must execute each operation at the
    same place. ``tid(k)``: the thread's number in its block; ``cta(k)``: the block's number;
    ``n_ctas(k)``: the number of blocks; i64. ``shared(k)``: the start of the block's shared memory,
    aligned to 128 bytes. ``barrier(k)``: waits for the block's other threads; their earlier writes
    can be read after it.

    ``copy_async(k, to, frm, n_bytes=16)``: copies 4, 8 or 16 bytes from ``frm`` to shared memory at
    ``to``, both aligned to the size. ``commit(k)``: closes a group of the thread's copies since the
    last commit. ``wait(k, n)``: waits until all but the thread's last ``n`` groups are complete;
    other threads see them after a barrier.

    By warp, of 32 threads (lanes) with consecutive numbers: ``warp_barrier(k)``: a barrier for the
    warp. ``shuffle(k, v, lanes)``: returns the ``v``, 32 bits, of the lane whose number is this
    lane's XOR ``lanes``. ``load_matrix(k, p)``: loads four matrices of 8 rows of 8 values of 16
    bits. Lane 8 i + j gives the address of row j of matrix i in shared memory, 16 bytes aligned to
    16; result i, u32, is the two values of row ``lane // 4`` from column ``2 (lane % 4)`` on.
    ``load_matrix_t``: the same, transposed.

    ``mma_f16(k, c, a, b)`` and ``mma_bf16``: four f32 of ``C += A B``, summed in f32 in any order;
    A is 16 by 16, B 16 by 8, C 16 by 8. With ``g, t = lane // 4, lane % 4``: ``a``, four u32 of two
    values, is rows g, g + 8, g, g + 8 of A, from column 2 t, 2 t, 2 t + 8, 2 t + 8 on; ``b``, two
    u32, is column g of B, from row 2 t and 2 t + 8 on; ``c`` is row g, then g + 8 of C, columns 2 t
    and 2 t + 1.
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
    tile_rows: int = 64  # at most this many queries in an attention item of many tokens
    tile_dims: int = 256  # largest head dim: more leave no registers for the accumulators


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of kernels: the most that the registers hold, or the fastest measured.

    A gemm's tile is a pair: vectors of rows of weights, and tokens. A tile of bytes keeps a block's
    i32 sums beside the f32 sums. Some f32 sums may spill, twice as often with a scale for every 16
    values. A tile of outer products keeps only its i16 or i32 sums.
    """

    floats: tuple[int, int] = (2, 5)
    bytes: tuple[int, int] = (2, 2)  # a scale for every 32 values
    bytes16: tuple[int, int] = (2, 2)  # a scale for every 16 values
    gemv: tuple[tuple[int, int], ...] = ((1, 4), (2, 4), (4, 2))  # tokens, rows processed together
    # At most this, for blocks of 256. With one token from memory, two rows are up to 17 % faster.
    gemv_large: tuple[tuple[int, int], ...] = ((1, 2), (2, 2), (4, 2))
    # Tokens of one more gemv, beyond GEMV_TOKENS, for float weights only; 0: none.
    float_gemv: int = 0
    gemv_ahead: int = 0  # prefetch distance in bytes, if rows are in separate runs; see ``Gemv``
    peak: tuple[int, int] = (2, 5)  # vectors of w and of x whose dots hide the dot's latency
    # Tile of i16, for formats whose prefill is faster so (``select_activation.prefers_q16``); 0:
    # none.
    words: tuple[int, int] = (0, 0)
    by_lane: bool = False  # a dot takes any lane of x, so tokens are loaded as vectors
    # Values of K in a step of a product of bytes. 4: dots of dwords (``dot4``); 1: outer products
    # (a vector by a scalar), for machines that move lanes slowly; 8: two rows by two tokens
    # (``pairs``).
    unit: int = 4
    bytes_i32: tuple[int, int] = (2, 2)  # outer products whose sums do not fit i16
    # Vectors of rows, and tokens, of the tile for small batches, if they have their own.
    few: tuple[int, int] = (0, 0)
    # The largest batch whose tokens are the lanes of vectors (``LanesGemm``), 0: none; and the same
    # for float weights (``FloatLanes``).
    lanes: int = 0
    float_lanes: int = 0


@dataclass(frozen=True)
class Shorts:
    """Dots that accumulate in i16 as long as they fit, then in i32, for machines whose ``dot4``
    takes two instructions: a tile postpones the second.

    ``dot(k, acc, w, x, size)``: ``acc[i] += w[2i] x[2i] + w[2i+1] x[2i+1]`` in i16; ``acc`` None
    means zeros; w ``u8`` or ``i8``, x ``i8`` in -127..127. ``size`` is None or ``|x|`` in ``u8``,
    if available and w is signed, above -128: it saves computing ``|w|``. ``widen(k, acc, s)``:
    ``acc[i] += s[2i] + s[2i+1]``, acc in i32. ``scale(k, acc, s, f)``: ``acc[i] += s[2i] f[2i] +
    s[2i+1] f[2i+1]``. ``high(k, a, b)``: ``(a[i] b[i] + 2**14) >> 15``, for a register of i16.
    """

    dot: Op
    widen: Op
    scale: Op
    high: Op

    @staticmethod
    def room(w_max: int) -> int:
        """Return how many results of ``dot`` can be summed in i16 without overflow, for weights of
        magnitude at most ``w_max``; 0: none.
        """
        return 32767 // (2 * 127 * w_max)


@dataclass(frozen=True)
class Isa:
    """One instruction set. Each operation has one meaning, defined by ``portable.py``; a row may
    replace the code it emits.

    ``dot4(k, acc, w, x, w_max)``: ``acc[i] += sum of w[4i..4i+3] * x[4i..4i+3]``, w ``u8`` of at
    most ``w_max``, or ``i8`` if ``dot4_least`` is negative, x ``i8`` in -127..127, acc i32.
    ``pairs(k, acc, w, x)``: ``acc[2i + j] += sum of w[8i + l] * x[8j + l]`` over l, i and j 0 or 1,
    w 16 signed or unsigned bytes, x and acc as above.

    ``dot_bf16(k, acc, a, b)``: ``acc[i] += a[2i] b[2i] + a[2i+1] b[2i+1]`` in f32; None on machines
    without such an instruction (bf16 weights are then widened to f32). ``dot_words(k, acc, a, b)``:
    the same of i16, in i32; None if f32 is as fast. ``pause(k)``: a hint to the core that this is a
    spin loop.

    ``lookup(k, table, index)``: lane i is byte ``index[i] % 16`` (u8) of the ``table`` of 16
    numbers; at least 16 lanes. ``lookup_words(k, table, index)``: lane i is the word ``index[i] %
    32`` of ``table``, ``i16 * 32``, index ``u16 * 32``; None if that is no single instruction.
    ``gather(k, table, index, ty)``: lane i is element ``index[i]`` (an integer, never negative) of
    ``ty``'s scalars at ``table``. ``bit_extract(k, v, shift, width, to)``, ``multishift(k, v, at)``
    and ``bit_spread(k, v, at, to)``: defined in ``formats/kernel_bits.py``.

    ``widen_f16``/``narrow_f16``: between ``f16 * n`` and ``f32 * n``. ``narrow_bf16(k, x)``: bits
    of the nearest bf16, ``i16 * n``, ties to even; for |x| < 2**-126 perhaps zero. ``reciprocal(k,
    x)``: ``1 / x`` in f32 to 2 units in the last place, for 2**-126 <= |x| <= 2**126, and NaN for
    NaN. ``matrix``: matrix registers, or None. ``simt``: GPU thread operations, or None.
    ``shorts``: dots in i16, or None.
    """

    name: str
    needs: frozenset[str]  # LLVM's names of the required CPU features
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
    fused: bool = False  # multiply-add is fused in hardware: it rounds once
    dot4_least: int = 0  # the smallest w of dot4: -128 for machines that multiply signed bytes
    dot4_top: int = 255  # the largest w at full speed
    dot4_single: bool = False  # one instruction
    slow_with: frozenset[str] = frozenset()  # features of CPUs on which the previous row is faster
    # Registers have exactly ``vector_bits``, and LLVM is told so. Otherwise it assumes RISC-V's may
    # be longer than the features say, and cannot tell one register from the next.
    exact: bool = False
    memory_operands: bool = False  # arithmetic takes an operand from memory at no cost
    halves: bool = False  # moving lanes is faster within halves of a register than across
    # Alignment of tensors in bytes; scalars are aligned to their own size, up to this. Some
    # machines load data of unknown alignment byte by byte.
    aligned: int = 1
    # Whether activations are rounded to int8 for products with codes. If not they stay floats, bf16
    # in products of many tokens.
    rounds: bool = True
    triple: str = ""  # of the target architecture; empty: any that LLVM knows

    @property
    def lanes(self) -> int:
        """Number of f32 values in a vector register."""
        return self.vector_bits // 32

    @property
    def word_dots(self) -> Op:
        """``dot_words``; where it is None, ``shorts.scale``, which computes the same."""
        if self.dot_words is not None:
            return self.dot_words
        assert self.shorts is not None, self.name
        return self.shorts.scale

    def above(self, name: str, more: str, **better: Any) -> Isa:
        """Return a new row ``name`` for machines that also have the features ``more`` (LLVM's
        names, separated by spaces), with the fields in ``better`` replaced.
        """
        features = ",".join(filter(None, [self.features, *(f"+{f}" for f in more.split())]))
        needs = self.needs.union(more.split())
        return replace(self, name=name, needs=needs, features=features, **better)
