"""Adapters behind the products that they add to: ``.lora_a`` and ``.lora_b`` (``kernels/lora.py``).

The constants of a step hold all adapters that a model was loaded with, packed as its kernels read
them, and are shared by all plans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.formats import by_name
from treadle.kernels.act import BLOCK
from treadle.kernels.lora import GROUP, GROUP_OF, PIECE, STRIP, Down, Up
from treadle.kernels.spec import Grid, round_up
from treadle.lowering.weights import PART, whole
from treadle.plan import Buffer, Const
from treadle.record import dataclass

if TYPE_CHECKING:
    from treadle.formats import Format
    from treadle.lowering.steps import Steps
    from treadle.lowering.values import Products
    from treadle.lowering.weights import Weights
    from treadle.models.lora import Floats, LowRank

FORMATS = ("F16", "BF16", "F32")  # the first that holds all numbers of a step is taken


@dataclass
class Packed:
    """All adapters of one product, as its two steps read them."""

    w: str  # the format of both
    a: Const
    groups: Const
    b: Const
    pieces: Const
    n_groups: int
    n_strips: int
    n_flops: int  # of a row that wants every adapter


def emit_lora(steps: Steps, of: Products, x: Buffer, y: Buffer) -> None:
    """Add what adapters make of ``x``, f32 rows, to the products in ``y``."""
    weights, key = steps.weights, tuple(of.names)
    if key not in weights.packed:
        weights.packed[key] = _pack(weights, of, y.row_bytes // 4)
    packed: Packed = weights.packed[key]
    n_columns, n_adapters = packed.n_groups * GROUP, len(weights.adapters)
    t = steps.floats(f"{of.label}.lora", n_columns)
    given: dict[str, Any] = {"t": t, "t_stride": t.row_bytes // 4}
    steps.emit(
        f"{of.label}.lora_a",
        Down(packed.w, of.x.width),
        Grid(packed.n_groups, "n_loras"),
        n_flops=packed.n_flops // n_adapters,
        shape=(n_columns, of.x.width),
        x=x,
        w=packed.a,
        groups=packed.groups,
        stride=x.row_bytes // 4,
        **given,
    )
    steps.emit(
        f"{of.label}.lora_b",
        Up(packed.w, n_adapters, packed.n_strips),
        Grid(packed.n_strips, "n_loras"),
        n_flops=packed.n_flops // n_adapters,
        shape=(sum(of.heights), n_columns),
        w=packed.b,
        pieces=packed.pieces,
        y=y,
        stride=y.row_bytes // 4,
        **given,
    )


def _pack(weights: Weights, of: Products, width: int) -> Packed:
    """``width``: of a row of the products, in f32 values."""
    n_strips, k = width // STRIP, of.x.width
    groups: list[tuple[int, float]] = []
    downs: list[Floats] = []
    ups: list[Floats] = []
    pieces = np.zeros((len(weights.adapters), n_strips), PIECE)
    n_placed = 0  # values of ``ups``
    for i, ranks in enumerate(weights.adapters):
        for name, height, column in zip(of.names, of.heights, of.columns, strict=True):
            low = ranks.get(whole(f"{name}.weight"))
            if low is None:
                continue
            rank, b = low.rank, _rows_of(low, name)
            down = np.zeros((round_up(rank, GROUP), round_up(k, BLOCK)), np.float32)
            down[:rank, :k] = low.a()
            up = np.zeros((round_up(height, STRIP), rank), np.float32)
            up[:height] = b
            strips = up.reshape(-1, STRIP, rank).transpose(0, 2, 1)
            mine = pieces[i, column // STRIP :][: len(strips)]
            mine["first"], mine["n"] = GROUP * len(groups), rank
            mine["at"] = n_placed + np.arange(len(strips)) * (rank * STRIP)
            groups += [(i, low.factor)] * (len(down) // GROUP)
            downs.append(down)
            ups.append(strips.ravel())
            n_placed += up.size
    a, b = np.concatenate(downs), np.concatenate(ups).reshape(-1, STRIP)
    fmt = next(fmt for fmt in map(by_name, FORMATS) if _holds(fmt, a) and _holds(fmt, b))
    pieces["at"] *= fmt.dtype.itemsize

    def const(what: str, array: np.ndarray) -> Const:
        return weights.storage.weights(f"{of.label}.{what}", array)

    return Packed(
        fmt.name,
        const("lora_a", fmt.quantize_rows(a)),
        const("lora_groups", np.array(groups, GROUP_OF)),
        const("lora_b", fmt.quantize_rows(b)),
        const("lora_pieces", pieces),
        len(groups),
        n_strips,
        2 * (a.size + b.size),
    )


def _rows_of(low: LowRank, name: str) -> Floats:
    """Rows of B for the matrix, or the part of one, called ``name``."""
    match = PART.fullmatch(f"{name}.weight")
    return low.b()[int(match["first"]) : int(match["end"])] if match else low.b()


def _holds(fmt: Format, values: Floats) -> bool:
    """Whether nothing is lost in this format."""
    return bool(np.array_equal(fmt.dequantize_rows(fmt.quantize_rows(values)), values))
