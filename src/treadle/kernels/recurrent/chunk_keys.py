"""Keys and queries of 32 tokens (a *chunk*), prepared for all heads of their group on matrix
registers.

For each chunk and group, with ``N = n_state``: registers of a with the queries ``[2, N/32]``;
registers of a with the keys transposed, rows of N and tokens along K, ``[N/16]``; the products of
each query with each key, f32 ``[32, 32]``. With ``solves`` (the delta rule) also the keys, laid out
as the queries, and the products of each key with each key.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, i32
from treadle.kernels.activation_layout import BLOCK, from_bf16_bits, in_bf16, to_bf16_bits
from treadle.kernels.matmul.matrix import EDGE, REGISTER, SIDE
from treadle.kernels.matmul.matrix_registers import paired, turn
from treadle.kernels.run_state import LINE
from treadle.kernels.spec import Args, Frame, Spec
from treadle.kernels.transpose import transpose

CHUNK = EDGE  # tokens of a chunk
PITCH = 4 * CHUNK  # bytes of a row of 32 products, or of 32 columns
DOTS = 4 * CHUNK * CHUNK  # bytes of the products of all tokens with all tokens


@dataclass(frozen=True)
class ChunkKeys(Spec):
    """Write the registers and products that the module's docstring lists, for each chunk of 32
    tokens and each group, to ``n_bytes`` bytes of ``out``.

    ``x``: f32 rows of the run's tokens, ``stride`` values apart, with each group's ``n_state``
    query values from column ``queries`` on and its key values from column ``keys`` on. ``solves``:
    also for the delta rule. A last chunk of fewer tokens repeats the last one. Items: chunks x
    groups.
    """

    op: ClassVar[str] = "chunk_keys"
    args = Args("x:in out:out stride keys queries")
    n_state: int
    n_group: int
    solves: bool = False

    @property
    def rows_bytes(self) -> int:
        """Bytes of the registers that hold the queries, or the keys, of a chunk."""
        return 2 * CHUNK * self.n_state

    @property
    def transposed_off(self) -> int:
        """Byte offset of the transposed keys."""
        return self.rows_bytes

    @property
    def query_products_off(self) -> int:
        """Byte offset of the products of each query with each key."""
        return 2 * self.rows_bytes

    @property
    def keys_off(self) -> int:
        """Byte offset of the keys, laid out as the queries; only with ``solves``."""
        return self.query_products_off + DOTS

    @property
    def key_products_off(self) -> int:
        """Byte offset of the products of each key with each key; only with ``solves``."""
        return self.keys_off + self.rows_bytes

    @property
    def n_bytes(self) -> int:
        """Bytes of the output for one chunk of one group."""
        return self.key_products_off + DOTS if self.solves else self.keys_off

    def scratch(self, lanes: int) -> int:
        # The registers' configuration; keys as registers of a; keys as those of b.
        return LINE + 2 * self.rows_bytes

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        matrix = isa.matrix
        assert matrix is not None, isa.name
        matrix.begin(k, frame.scratch)
        with k.loop(frame.end, start=frame.begin) as item:
            first = item // self.n_group * CHUNK
            group = item % self.n_group
            home = frame.out + item * self.n_bytes
            at_group = group * self.n_state
            keys = home + self.keys_off if self.solves else frame.scratch + LINE
            right = frame.scratch + (LINE + self.rows_bytes)
            with k.loop(SIDE) as pair:
                tokens = [k.min(first + (pair * 2 + j), frame.run("n_tokens") - 1) for j in (0, 1)]
                rows = [frame.x + (token * frame.stride + at_group) * 4 for token in tokens]
                with k.loop(self.n_state, step=BLOCK) as n:
                    both_at = (n + frame.queries, n + frame.keys)
                    loaded = [[k.load(row + a * 4, f32 * BLOCK) for row in rows] for a in both_at]
                    for to, both in zip((home, keys), loaded, strict=True):
                        for j, x in enumerate(both):
                            row = pair * 2 + j
                            place = row // SIDE * (self.rows_bytes // 2) + row % SIDE * LINE
                            k.store(to + (place + n // BLOCK * REGISTER), in_bf16(k, x, 1)[0])
                    halves = zip(*(k.split(x, SIDE) for x in loaded[1]), strict=True)
                    for h, (even, odd) in enumerate(halves):
                        place = (n // SIDE + h) * REGISTER + pair * LINE
                        k.store(home + self.transposed_off + place, paired(k, even, odd))
            n_registers = self.n_state // SIDE
            self._transpose(k, keys, right, n_registers)
            self._transpose(k, home + self.transposed_off, home + self.transposed_off, n_registers)
            turn(k, "queries", home, n_registers)
            turn(k, "turned", home + self.transposed_off, n_registers)
            if self.solves:
                turn(k, "keys", keys, n_registers)
            self._multiply_keys(k, home, right, home + self.query_products_off)
            if self.solves:
                self._multiply_keys(k, keys, right, home + self.key_products_off)
        matrix.end(k)

    def _transpose(self, k: Builder, source: Val, to: Val, n: int) -> None:
        """Transpose ``n`` registers of 16 by 16 dwords in memory, from address ``source`` to
        ``to``.
        """
        with k.loop(n) as i:
            at = i * REGISTER
            rows = [k.load(source + at, i32 * SIDE, offset=LINE * r) for r in range(SIDE)]
            for c, column in enumerate(transpose(k, rows, k.isa.lanes)):
                for j, v in enumerate(column):
                    k.store(to + at, v, offset=LINE * c + j * v.ty.n_bytes)

    def _multiply_keys(self, k: Builder, rows: Val, right: Val, to: Val) -> None:
        """Store the products of each of 32 rows at ``rows`` with each key, f32 ``[32, 32]``, at
        ``to``. ``right``: the keys as registers of b ``[2, N/32]``.
        """
        matrix = k.isa.matrix
        apart = self.rows_bytes // 2
        assert matrix is not None

        def multiply(k: Builder, rows: Val, right: Val, to: Val) -> None:
            multiply_block(
                k, self.n_state // BLOCK, (rows, REGISTER, apart), (right, REGISTER, apart), to
            )

        matrix.scope(k, "see", (rows, right, to), multiply)

    # -- numpy's view ---------------------------------------------------------------------------

    def read_ref(self, chunk: np.ndarray, *, turns: bool = False) -> dict[str, np.ndarray]:
        """Decode the output for one chunk of one group, float64: ``queries``, ``keys`` and
        ``turned`` (the transposed keys, transposed back), ``[32, N]``; ``seen`` (query by key) and
        ``known`` (key by key), ``[32, 32]``. ``keys`` and ``known`` are there only with ``solves``.
        ``turns``: the machine transposes registers of a (``MatrixUnit.turn``).
        """
        n = self.n_state

        def registers(at: int) -> np.ndarray:
            dwords = chunk[at : at + self.rows_bytes].view(np.uint32).reshape(-1, SIDE, SIDE)
            dwords = dwords.transpose(0, 2, 1) if turns else dwords
            return from_bf16_bits(np.ascontiguousarray(dwords).view(np.uint16))

        def rows(at: int) -> np.ndarray:
            parts = registers(at).reshape(2, n // BLOCK, SIDE, BLOCK)
            return parts.transpose(0, 2, 1, 3).reshape(CHUNK, n)

        def dots(at: int) -> np.ndarray:
            return chunk[at : at + DOTS].view(np.float32).reshape(CHUNK, CHUNK).astype(np.float64)

        turned = registers(self.transposed_off).reshape(n, CHUNK).T
        result = {"queries": rows(0), "turned": turned, "seen": dots(self.query_products_off)}
        if self.solves:
            result |= {"keys": rows(self.keys_off), "known": dots(self.key_products_off)}
        return result

    def run_ref(self, args: Any, run: Any) -> None:
        n = self.n_state
        rows = args.x.reshape(-1, args.stride)
        chunks = args.out.reshape(-1, self.n_group, self.n_bytes)
        for chunk, group in np.ndindex(-(-int(run["n_tokens"]) // CHUNK), self.n_group):
            tokens = np.minimum(np.arange(CHUNK) + chunk * CHUNK, int(run["n_tokens"]) - 1)
            queries, keys = (
                to_bf16_bits(rows[tokens, at + group * n :][:, :n])
                for at in (args.queries, args.keys)
            )
            out = chunks[chunk, group]

            def put(at: int, values: np.ndarray, out: np.ndarray = out) -> None:
                raw = np.ascontiguousarray(values).view(np.uint8).ravel()
                out[at : at + raw.size] = raw

            def registers(bits: np.ndarray) -> np.ndarray:
                return bits.reshape(2, SIDE, n // BLOCK, BLOCK).transpose(0, 2, 1, 3)

            wide = [from_bf16_bits(bits) for bits in (queries, keys)]
            put(0, registers(queries))
            put(self.transposed_off, keys.T)
            put(self.query_products_off, (wide[0] @ wide[1].T).astype(np.float32))
            if self.solves:
                put(self.keys_off, registers(keys))
                put(self.key_products_off, (wide[1] @ wide[1].T).astype(np.float32))


Side: TypeAlias = "tuple[Val, int, int]"


def load_pair(k: Builder, first: int, at: Val, apart: int) -> None:
    """Load matrix registers ``first`` and ``first + 1`` from address ``at`` and ``apart`` bytes
    after it.
    """
    matrix = k.isa.matrix
    assert matrix is not None, k.isa.name
    for half in range(2):
        matrix.load(k, first + half, at + half * apart, LINE)


def multiply_block(k: Builder, n: int, left: Side, right: Side, to: Val) -> None:
    """Multiply 32 rows (``left``) by 32 columns (``right``), summed over ``n`` blocks of 32 values,
    and store the sums at ``to``, f32 ``[32, 32]``. A side is (address, bytes from one block's
    register to the next, bytes from the first 16 rows' register to the others').
    """
    matrix = k.isa.matrix
    assert matrix is not None, k.isa.name
    for c in range(4):
        matrix.zero(k, c)
    with k.loop(n) as b:
        for first, (at, step, apart) in ((4, left), (6, right)):
            load_pair(k, first, at + b * step, apart)
        matrix.dots_bf16(k)
    for c, place in enumerate(sums(to, PITCH)):
        matrix.store(k, c, place, PITCH)


def sums(to: Val, stride: Val | int) -> list[Val]:
    """Return the addresses at which the four registers of sums (16 by 16) begin in an array f32
    ``[32, 32]`` at ``to``, whose rows are ``stride`` bytes apart.
    """
    return [to + (stride * (c // 2 * SIDE) + c % 2 * LINE) for c in range(4)]
