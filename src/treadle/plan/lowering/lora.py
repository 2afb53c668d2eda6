"""LoRA steps after the adapted products: ``.lora_a`` and ``.lora_b``.

The kernels are ``kernels/matmul/lora.py``, for experts ``kernels/matmul/lora_experts.py``. For the
embedding table, ``.lora_rows`` comes first. A step's constants hold all adapters loaded with the
model, packed for its kernels, and are shared by all plans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.formats import by_name
from treadle.kernels.activation_layout import BLOCK
from treadle.kernels.elementwise.elementwise import Embed
from treadle.kernels.matmul.lora import GROUP, GROUP_OF, PIECE, STRIP, LoraDown, LoraUp
from treadle.kernels.matmul.lora_experts import ExpertAdapterWeights, ExpertDown, ExpertUp
from treadle.kernels.run_state import round_up
from treadle.kernels.spec import Grid
from treadle.models.lora import LowRank
from treadle.models.ops import TensorSlice, tensor_of
from treadle.plan.plan import Buffer, Const
from treadle.plan.weights import tensor_of_slice

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from treadle.formats import Format
    from treadle.models.lora import Floats
    from treadle.models.ops import TensorName
    from treadle.plan.lowering.deferred import Branch, ExpertMatrix, Products
    from treadle.plan.lowering.steps import Steps
    from treadle.plan.weights import Weights

FORMATS = ("F16", "BF16", "F32")  # the first that holds all numbers of a step exactly


@dataclass
class PackedAdapters:
    """All adapters of one product, packed for its two steps (``_pack``): ``a``, ``groups`` for
    ``LoraDown`` and ``b``, ``pieces`` for ``LoraUp``, or for their twins for experts.
    """

    w: str  # the format of a and b
    a: Const
    groups: Const
    b: Const
    pieces: Const
    n_groups: int
    n_strips: int
    n_experts: int  # 1 for a matrix without experts
    n_flops: int  # of a row that uses every adapter and every expert


def emit_lora(steps: Steps, of: Products, x: Buffer, y: Buffer) -> None:
    """Add the adapters' products of ``x``, f32 rows, to ``y``, which holds the products ``of``
    several matrices side by side.
    """
    weights = steps.weights
    key = tuple(of.stems)
    if key not in weights.packed:
        placed = of.heights, of.columns, of.x.width, y.row_bytes // 4
        weights.packed[key] = _pack(weights, weights.adapters, of.label, of.stems, *placed)
    packed: PackedAdapters = weights.packed[key]
    n_columns = packed.n_groups * GROUP
    n_adapters = len(weights.adapters)
    given: dict[str, Any] = {"t": steps.floats(f"{of.label}.lora", n_columns)}
    into = {"y": y, "stride": y.row_bytes // 4}
    down = LoraDown(packed.w, of.x.width)
    up = LoraUp(packed.w, n_adapters, packed.n_strips)
    n_flops = packed.n_flops // n_adapters
    height = sum(of.heights)
    _emit(
        steps, packed, down, up, lambda base: Grid(base, "n_loras"), n_flops, height, x, into, given
    )


def emit_embedding_lora(
    steps: Steps, label: str, names: Sequence[str], y: Buffer, width: int, scale: float
) -> None:
    """Add the adapters' part of the embedding tables ``names``, times ``scale``, to the embeddings
    in ``y``, which are ``width`` values wide.

    Each token reads one row of all B matrices, side by side; each adapter's columns of it are
    multiplied by its A.
    """
    weights = steps.weights
    key = tuple(names)
    if key not in weights.packed:
        table, selecting = _tables(weights, names)
        placed = [width], [0], table.shape[1], y.row_bytes // 4
        packed = _pack(weights, selecting, label, names[:1], *placed)
        const = weights.storage.weights(f"{label}.lora_table", table)
        weights.packed[key] = packed, const, *table.shape
    packed, const, n_rows, k = weights.packed[key]
    x = steps.floats(f"{label}.lora_rows", k)
    t = packed.n_groups * GROUP
    steps.emit(
        x.name,
        Embed("F32", k, scale, n_rows if n_rows < steps.config.n_vocab else 0),
        Grid(1, "n_tokens"),
        n_bytes=4 * k * n_rows,
        read_share=1 / n_rows,
        w=(const,),
        x=x,
        stride=x.row_bytes // 4,
        shape=(k,),
    )
    down = LoraDown(packed.w, k)
    up = LoraUp(packed.w, len(weights.adapters), packed.n_strips)
    n_flops = packed.n_flops // len(weights.adapters)
    given = {"t": steps.floats(f"{label}.lora", t)}
    into = {"y": y, "stride": y.row_bytes // 4}
    _emit(steps, packed, down, up, lambda n: Grid(n, "n_loras"), n_flops, width, x, into, given)


def _tables(
    weights: Weights, names: Sequence[str]
) -> tuple[Floats, list[dict[TensorName, LowRank]]]:
    """Return all B matrices of the tables ``names`` side by side, ``[n_vocab, columns]``, and for
    each adapter a low-rank pair under the first name: its A selects the adapter's columns, its B is
    the adapter's A, transposed.

    A B of one row is the same for all tokens.
    """
    each = [
        [ranks[f"{name}.weight"] for name in names if f"{name}.weight" in ranks]
        for ranks in weights.adapters
    ]
    n_columns = round_up(sum(low.rank for lows in each for low in lows), BLOCK)
    table = np.zeros((weights.n_rows(f"{names[0]}.weight"), n_columns), np.float32)
    selecting: list[dict[TensorName, LowRank]] = []
    at = 0
    for lows in each:
        first = at
        for low in lows:
            table[:, at : at + low.rank] = low.b()
            at += low.rank
        a = np.eye(at - first, n_columns, first, np.float32)
        b = [low.a().T * np.float32(low.factor) for low in lows]
        made = _low_rank(a, np.concatenate(b, 1)) if lows else None
        selecting.append({f"{names[0]}.weight": made} if made else {})
    return table, selecting


def _low_rank(a: Floats, b: Floats) -> LowRank:
    return LowRank(len(a), 1.0, lambda: a, lambda: b, a.shape, b.shape)


def emit_experts_lora(
    steps: Steps,
    branch: Branch,
    matrices: Sequence[ExpertMatrix],
    x: Buffer,
    y: Buffer,
    first: int,
    n_used: int,
    of_tokens: bool,
) -> None:
    """Add the adapters' products of ``x``, f32 rows, with the experts' ``matrices`` to their
    products in ``y``, from row ``first`` on. ``n_used``: experts of a token; ``of_tokens``: ``x``
    has one row per token, not one per row of the branch.
    """
    weights = steps.weights
    key = tuple(each.stem for each in matrices)
    label = f"{branch.label}.{y.name.rpartition('.')[-1]}"
    k = weights.tensor(tensor_of(key[0], "weight")).shape[-1]
    name = f"{label}.lora"
    if key not in weights.packed:
        heights = [each.height for each in matrices]
        width = y.row_bytes // 4
        columns = [i * (width // len(matrices)) for i in range(len(matrices))]
        placed = heights, columns, k, width
        weights.packed[key] = _pack(weights, weights.adapters, label, key, *placed)
    packed: PackedAdapters = weights.packed[key]
    n_columns = packed.n_groups * GROUP
    n_adapters = len(weights.adapters)
    if steps.wants is None:
        steps.wants = Buffer("lora.wants", steps.plan.n_tokens, 4 * n_adapters)
        steps.emit("lora.wants", ExpertAdapterWeights(n_adapters), Grid(1), out=steps.wants)
    given: dict[str, Any] = {"t": Buffer(name, branch.n_rows, n_columns * 4), "wants": steps.wants}
    given |= {"tiles": branch.tiles, "rows": branch.rows}
    given |= {"read_share": n_used / packed.n_experts, "rows_per_expert": branch.rows_per_expert}
    shape = packed.w, packed.n_experts, n_used, n_adapters, branch.rows is not None
    down = ExpertDown(*shape, k, packed.n_groups, of_tokens)
    up = ExpertUp(*shape, packed.n_strips)
    n_flops = packed.n_flops // packed.n_experts * n_used // n_adapters

    def grid(base: int) -> Grid:
        return Grid(base, "tiles") if branch.rows else Grid(base * n_used, "n_tokens")

    height = sum(each.height for each in matrices)
    into = {"y": y, "first": first, "stride": y.row_bytes // 4}
    _emit(steps, packed, down, up, grid, n_flops, height, x, into, given)


def _emit(
    steps: Steps,
    packed: PackedAdapters,
    down: LoraDown | ExpertDown,
    up: LoraUp | ExpertUp,
    grid: Callable[[int], Grid],
    n_flops: int,
    height: int,
    x: Buffer,
    into: dict[str, Any],
    given: dict[str, Any],
) -> None:
    """Emit the two steps of adapters: ``t = x A^T`` by the kernel ``down``, then ``y += t B^T`` by
    ``up``.

    ``grid(n)`` returns the grid for ``n`` items per tile or choice; ``height``: columns of the
    products in ``y``; ``into``: the arguments that name ``y``; ``given``: ``t`` and the other
    arguments of both steps.
    """
    t = given["t"]
    n_columns = packed.n_groups * GROUP
    given["t_stride"] = t.row_bytes // 4
    steps.emit(
        f"{t.name}_a",
        down,
        grid(packed.n_groups),
        n_flops=n_flops,
        shape=(n_columns, down.k),
        x=x,
        w=packed.a,
        groups=packed.groups,
        stride=x.row_bytes // 4,
        **given,
    )
    steps.emit(
        f"{t.name}_b",
        up,
        grid(packed.n_strips),
        n_flops=n_flops,
        shape=(height, n_columns),
        w=packed.b,
        pieces=packed.pieces,
        **into,
        **given,
    )


def _pack(
    weights: Weights,
    adapters: Sequence[Mapping[TensorName, LowRank]],
    label: str,
    stems: Sequence[TensorName],
    heights: Sequence[int],
    columns: Sequence[int],
    k: int,
    width: int,
) -> PackedAdapters:
    """Return the adapters of the matrices ``stems``, packed for both steps. ``heights``,
    ``columns``: rows of each matrix, and where its products begin in ``y``; ``k``: columns of the
    matrices; ``width``: f32 values in a row of ``y``.

    A matrix without experts is packed as that of one expert.
    """
    n_strips = width // STRIP
    n = 1
    groups: list[tuple[int, float]] = []
    downs: list[Floats] = []
    ups: list[Floats] = []
    pieces = np.zeros((len(adapters), n_strips), PIECE)
    n_placed = 0  # values in ``ups``
    for i, ranks in enumerate(adapters):
        for stem, height, column in zip(stems, heights, columns, strict=True):
            low = ranks.get(tensor_of(stem, "weight"))
            first = 0
            if low is None and isinstance(stem, TensorSlice):  # an adapter of the whole matrix
                low = ranks.get(f"{tensor_of_slice(stem)}.weight")
                first = stem.first
            if low is None:
                continue
            rank = low.rank
            a = low.a()
            b = low.b()[..., first : first + height, :]
            n = len(a) if a.ndim > 2 else 1
            down = np.zeros((n, round_up(rank, GROUP), round_up(k, BLOCK)), np.float32)
            down[:, :rank, :k] = a
            up = np.zeros((n, round_up(height, STRIP), rank), np.float32)
            up[:, :height] = b
            strips = up.reshape(n, -1, STRIP, rank).swapaxes(2, 3)
            mine = pieces[i, column // STRIP :][: strips.shape[1]]
            mine["first"] = GROUP * len(groups)
            mine["n"] = rank
            mine["at"] = n_placed + np.arange(strips.shape[1]) * (rank * STRIP)
            mine["pitch"] = strips[0].size
            groups += [(i, low.factor)] * (down.shape[1] // GROUP)
            by_group = down.reshape(n, -1, GROUP, down.shape[2]).swapaxes(0, 1)
            downs.append(by_group.reshape(-1, down.shape[2]))
            ups.append(strips.ravel())
            n_placed += up.size
    a = np.concatenate(downs)
    b = np.concatenate(ups).reshape(-1, STRIP)
    fmt = next(
        fmt for fmt in map(by_name, FORMATS) if _is_exact_in(fmt, a) and _is_exact_in(fmt, b)
    )
    for field in ("at", "pitch"):
        pieces[field] *= fmt.dtype.itemsize

    def const(what: str, array: np.ndarray) -> Const:
        return weights.storage.weights(f"{label}.{what}", array)

    return PackedAdapters(
        fmt.name,
        const("lora_a", fmt.quantize_rows(a)),
        const("lora_groups", np.array(groups, GROUP_OF)),
        const("lora_b", fmt.quantize_rows(b)),
        const("lora_pieces", pieces),
        len(groups),
        n_strips,
        n,
        2 * (a.size + b.size),
    )


def _is_exact_in(fmt: Format, values: Floats) -> bool:
    """Return whether ``fmt`` holds all values exactly."""
    return bool(np.array_equal(fmt.dequantize_rows(fmt.quantize_rows(values)), values))
