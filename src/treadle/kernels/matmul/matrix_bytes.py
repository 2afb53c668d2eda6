"""Few tokens on matrix registers: codes as bytes, with each block's sums scaled separately.

Codes of 16 rows times activations, both int8, fill one register of sums for each scale of a row:
32 values of K, or 16. That leaves most of a product's speed unused, and with many tokens scaling
would dominate (see ``matrix.py``). But nothing is rounded to bf16, and packing only unpacks codes,
without reordering (``byte_strips.py``). The next strip is unpacked while one is multiplied, which
keeps memory, vectors and registers busy together.
"""

from __future__ import annotations

from collections.abc import Iterator

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Val, Var
from treadle.jit.types import f32, i8, i32
from treadle.kernels.activation_layout import DWORD
from treadle.kernels.matmul.byte_strips import AT_ONCE, ByteStrips
from treadle.kernels.matmul.matrix import REGISTER, SIDE, matrix_of
from treadle.kernels.matmul.strips import Strip, Tokens
from treadle.kernels.run_state import LINE


@dataclass(frozen=True)
class BytesGemm(ByteStrips):
    """Strip product on matrix registers, for at most 16 tokens, in bytes; ``nr`` is 16."""

    @property
    def name(self) -> str:
        return f"{super().name}_bytes"

    @property
    def unscaled_bytes(self) -> int:
        return AT_ONCE * REGISTER

    @property
    def n_held(self) -> int:
        return 2

    def begin(self, k: Builder, made: Val) -> None:
        matrix = matrix_of(k)
        assert matrix.begin_bytes is not None, k.isa.name
        matrix.begin_bytes(k, made, self.per_scale)

    def end(self, k: Builder) -> None:
        matrix_of(k).end(k)

    def stored(self, k: Builder, codes: Val) -> Val:
        return (codes - self.codes.offset).bits(i8.like(codes.ty))

    def sums(
        self, k: Builder, strip: Strip, tokens: Tokens, made: Val, soon: Strip
    ) -> Iterator[tuple[Val | int, Var]]:
        """Yield each of the strip's 16 rows with its sums with a group of tokens. Scaling earlier
        products, computing later ones, and unpacking the next strip ``soon`` are interleaved.
        ``made``: scratch for products that are not scaled yet.
        """
        held = strip.held
        sums = [k.var(k.zero(f32 * SIDE)) for _ in range(SIDE)]
        begun = min(self.n_products, AT_ONCE)
        turns, rest = divmod(self.n_products - begun, AT_ONCE)
        for i in range(AT_ONCE):
            if i < begun:
                self._multiply(k, held, tokens, k.i64(i), i, made)
            self.unpack_part(k, soon, k.i64(0), i)
        with k.loop(turns) as c:
            for i in range(AT_ONCE):
                at = c * AT_ONCE + i
                self._scale(k, held, tokens, at, made + i * REGISTER, sums)
                self._multiply(k, held, tokens, at + AT_ONCE, i, made)
                self.unpack_part(k, soon, c + 1, i)
        for i in range(begun + rest):
            at = k.i64(turns * AT_ONCE + i)
            self._scale(k, held, tokens, at, made + i % AT_ONCE * REGISTER, sums)
            if i < rest:
                self._multiply(k, held, tokens, at + AT_ONCE, i, made)
        for i in range(AT_ONCE if rest else 0):
            self.unpack_part(k, soon, k.i64(turns + 1), i)
        yield from enumerate(sums)

    def _multiply(self, k: Builder, strip: Val, tokens: Tokens, at: Val, i: int, made: Val) -> None:
        """Compute the ``at``-th product of a strip in sum register ``i``, and store it to the
        ``i``-th register's place in ``made``.
        """
        matrix = k.isa.matrix
        n = self.per_scale
        assert matrix is not None, k.isa.name
        assert matrix.dot_bytes is not None, k.isa.name
        matrix.zero(k, i)
        matrix.load(k, 4 + i % 2, strip + at * n, self.row_pitch)
        matrix.load(k, 6 + i % 2, tokens.x + at * (n // DWORD * LINE), LINE)
        matrix.dot_bytes(k, i, 4 + i % 2, 6 + i % 2)
        matrix.store(k, i, made + i * REGISTER, LINE)

    def _scale(
        self, k: Builder, strip: Val, tokens: Tokens, at: Val, made: Val, sums: list[Var]
    ) -> None:
        """Add the ``at``-th product, which is at ``made``, to ``sums``, times its scales; and
        minimums times the sums of the tokens' values. ``strip``: address of the unpacked strip.
        """
        d = tokens.scales(at)
        ty = f32 * SIDE
        values = tokens.sums(at) if self.codes.has_m else None

        def of_row(r: int, off: int) -> Val:
            place = strip + at * 4 + (r * self.row_pitch + off)
            return k.splat(k.load(place, f32, align=4), ty)

        for r, total in enumerate(sums):
            dot = k.load(made, i32 * SIDE, offset=r * LINE, align=LINE)
            total.v = k.fma(dot.to(f32), d * of_row(r, self.scale_offs[0]), total.v)
            if values is not None:
                total.v = k.fma(of_row(r, self.scale_offs[1]), values, total.v)
        k.fence()
