"""Operands of matrix registers in memory, for kernels other than products with weights."""

from __future__ import annotations

from treadle.jit.language import Builder, Val
from treadle.kernels.matmul.matrix import REGISTER
from treadle.kernels.run_state import LINE


def paired(k: Builder, even: Val, odd: Val) -> Val:
    """Round two rows of a product's operand b, f32 of n lanes, to bf16, and interleave them,
    ``even`` first; return ``i16 * 2n``.
    """
    n = even.ty.lanes
    both = k.isa.narrow_bf16(k, k.concat(even, odd))
    return k.shuffle(both, both, [i + n * j for i in range(n) for j in range(2)])


def turn(k: Builder, name: str, at: Val, n: int, n_side: int = 1) -> None:
    """Transpose, on machines that load operand a of a product by columns, the data of ``n`` groups
    of ``n_side`` registers, which are side by side in memory from ``at`` on. ``name`` names the
    emitted function.
    """
    matrix = k.isa.matrix
    assert matrix is not None, k.isa.name
    turn_one = matrix.turn
    if turn_one is None:
        return

    def turn_all(k: Builder, at: Val) -> None:
        with k.loop(n) as i, k.loop(n_side) as j:
            turn_one(k, at + (i * (REGISTER * n_side) + j * LINE), LINE * n_side)

    matrix.scope(k, f"turn_{name}", (at,), turn_all)
