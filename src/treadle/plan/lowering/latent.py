"""CPU lowering of latent attention: the ops ``latent`` and ``by_head`` of
``models/mixers/latent.py``.

Each head's matrix multiplies that head's columns of every token, in one product for all heads.
Queries are multiplied by ``k_b``, then score the cached latent rows, which all heads share.

A file may have ``k_b`` and ``v_b`` in one matrix, ``kv_b``. Its rows are grouped by head: the first
of each make its key, the last its value. They are cut apart here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from treadle.errors import UnsupportedError
from treadle.formats import by_name
from treadle.kernels.attention.latent_steps import LatentStore, PackHeads
from treadle.kernels.matmul.matrix import EDGE
from treadle.kernels.matmul.select import tokens_per_item
from treadle.kernels.spec import Grid
from treadle.plan.lowering.deferred import Floats
from treadle.plan.plan import Buffer

if TYPE_CHECKING:
    from treadle.files.tensor import Bytes, Tensor
    from treadle.formats import Format
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import PlanOps
    from treadle.plan.lowering.steps import Steps


def by_head(ops: PlanOps, label: str, x: Rows, *, weight: str, heads: int) -> Rows:
    """Return the product of each of ``heads`` equal parts of ``x`` with its own matrix, side by
    side. ``weight``: the stem of the tensor with all these matrices.
    """
    rows, column = ops.place(x)
    m = ops.steps.weights.n_rows(f"{weight}.weight") // heads
    out = ops.steps.floats(label, heads * m)
    k = x.width // heads
    _multiply(ops, label, (rows, column, k), weight, heads, k, m, out, m)
    return Floats(label, heads * m, out)


def latent(
    ops: PlanOps,
    label: str,
    q: Rows,
    kv: Rows,
    chosen: Rows | None = None,
    *,
    layer: int,
    weight: str,
    whole: str = "",
    sinks: str = "",
    normed: bool = False,
) -> Rows:
    """Return the attention of ``q`` over cached latent rows, f32 ``[N, n_head * n_kv_rank]``: for
    each head a weighted sum of rows. Queries are first multiplied by ``weight`` (``k_b``).

    kv: the batch's own latent rows, which are normed, rotated and stored.
    whole: stem of the matrix from which ``k_b`` and ``v_b`` are cut, "" if the file has these.
    chosen: the keys that an indexer has chosen; None: all.
    sinks: as in ``Ops.attend``.
    normed: the latent rows have had their norm already.
    """
    if whole:
        _split_kv_b(ops.steps, layer, f"{whole}.weight")
    steps = ops.steps
    at = ops.config.layers[layer]
    sizes = at.latent
    pool = steps.cache.pool_of(layer)
    assert sizes is not None
    (rows, column), (kv_rows, kv_column) = ops.place(q), ops.place(kv)
    out = steps.floats(f"{label}.absorbed", at.n_head * at.head_dim)
    scale = sizes.scale or ops.config.attn_scale
    source = rows, column, sizes.n_q
    _multiply(
        ops,
        f"{label}.k_b",
        source,
        weight,
        at.n_head,
        sizes.n_nope,
        sizes.n_kv_rank,
        out,
        at.head_dim,
        scale,
    )
    steps.emit(
        f"{label}.rope",
        LatentStore(
            "none" if at.rope is None else ops.config.arch.rope,
            steps.cache.kv,
            at.n_head,
            at.head_dim,
            at.head_dim_v,
            sizes.n_q,
            sizes.n_rope,
            scale,
            sizes.norm_eps,
            pool.index,
            at.rope or 0,
            norms=not normed,
        ),
        Grid(1, "n_tokens"),
        q=rows,
        kv=kv_rows,
        out=out,
        norm=None if normed else steps.vector(f"blk.{layer}.attn_kv_a_norm.weight"),
        pool=pool.const,
        stride=rows.row_bytes // 4,
        kv_stride=kv_rows.row_bytes // 4,
        out_stride=out.row_bytes // 4,
        q_column=column,
        kv_column=kv_column,
        page_bytes=pool.cell_bytes,
        layer_off=pool.layer_off(layer),
    )
    return ops.attention(label, layer, out, sinks, chosen=chosen)


def _split_kv_b(steps: Steps, layer: int, name: str) -> None:
    """Cut ``k_b`` and ``v_b`` of a layer from the tensor ``name``, which holds both, and add them
    to the derived tensors of ``Weights``; once per model.
    """
    at = steps.config.layers[layer]
    weights = steps.weights
    assert at.latent is not None
    steps.plan.tensors_used.add(name)
    if name.replace("kv_b", "v_b") not in weights.derived:
        tensor = weights.tensor(name)
        fmt = weights.format(name)
        for made in cut_heads(tensor, fmt, at.n_head, at.latent.n_nope):
            weights.derived[made.name] = made


def _multiply(
    ops: PlanOps,
    label: str,
    x: tuple[Buffer, int, int],
    weight: str,
    heads: int,
    k: int,
    m: int,
    y: Buffer,
    y_pitch: int,
    scale: float = 1.0,
) -> None:
    """Emit ``scale * x W^T`` for each head: ``k`` columns of ``x`` times the head's matrix of ``m``
    rows, from the tensor ``weight``.

    ``x``: f32 rows, the column of the first head, and the number of columns from one head to the
    next. In ``y`` the heads' products are ``y_pitch`` columns apart.
    """
    steps = ops.steps
    rows, column, pitch = x
    n = ops.steps.plan.n_tokens
    spec = steps.matmul(weight, k, heads=heads, vectors=m % EDGE != 0)
    lanes = steps.isa.lanes
    while m % spec.rows_per_item(lanes) and spec.mr % 2 == 0:
        spec = replace(spec, mr=spec.mr // 2)
    if m % spec.rows_per_item(lanes):  # a tile would overwrite the next head's columns
        raise UnsupportedError(
            f"{steps.weights.gguf.path}: {weight}.weight: {m} rows per head, expected a multiple "
            f"of {spec.rows_per_item(lanes)}"
        )
    act = spec.layout()
    per_head = steps.activations(f"{label}.heads", act)
    packed = Buffer(f"{label}.heads", heads * per_head.rows, per_head.row_bytes, "u1")
    head_bytes = per_head.rows * per_head.row_bytes
    steps.emit(
        f"{label}.heads",
        PackHeads(act.kind, k, act.group, heads, act.sub, scale, act.unit),
        act.grid(heads, "n_tokens"),
        x=rows,
        out=packed,
        stride=rows.row_bytes // 4,
        column=column,
        pitch=pitch,
        head_bytes=head_bytes,
    )
    strips = heads * spec.strips([m], lanes)
    tokens = tokens_per_item(spec, strips, n, steps.n_threads)
    steps.emit(
        label,
        spec,
        Grid(strips, spec.count, tokens),
        n_bytes=steps.weights.n_bytes(f"{weight}.weight"),
        n_flops=2 * k * m * heads,
        shape=(heads * m, k),
        x=packed,
        y=y,
        stride=y.row_bytes // 4,
        tokens=tokens,
        x_pitch=head_bytes,
        y_pitch=y_pitch,
        w=[steps.weight(f"{weight}.weight")],
        rows=[m],
        column=[0],
        pitch=[m],
    )


# -- matrices of heads, cut from kv_b -------------------------------------------------------------

F16_MOST = 65504.0


def cut_heads(whole: Tensor, fmt: Format, n_head: int, n_nope: int) -> tuple[Tensor, Tensor]:
    """Return ``k_b`` (transposed) and ``v_b`` as tensors in memory, cut from ``kv_b`` (``whole``,
    in format ``fmt``); ``n_nope``: rows of each head that make its key.

    ``v_b`` keeps the file's format. So does ``k_b`` if the format stores each weight by itself; a
    format of blocks, which lie along rows, is converted to F16, whose 11 bits exceed its codes'.
    """
    rows = fmt.join(whole.arrays).reshape(n_head, whole.shape[0] // n_head, -1)
    made = []
    for name, part, turned in (
        ("k_b", rows[:, :n_nope], True),
        ("v_b", rows[:, n_nope:], False),
    ):
        to = fmt
        part = np.ascontiguousarray(part)
        if len(whole.arrays) > 1 or (turned and fmt.block > 1):
            to, part = _numbers(fmt, part)
        if turned:
            part = np.ascontiguousarray(part.view(to.dtype).swapaxes(1, 2)).view(np.uint8)
        shape = (*part.shape[:2], (part.shape[2] - to.head_bytes) // to.dtype.itemsize * to.block)
        part.flags.writeable = False
        made.append(whole.in_memory(whole.name.replace("kv_b", name), shape, to, part.reshape(-1)))
    keys, values = made
    return keys, values


def _numbers(fmt: Format, rows: Bytes) -> tuple[Format, Bytes]:
    """Return the weights ``rows`` of format ``fmt`` converted to F16, or to F32 if a value exceeds
    F16's range, after that new format.
    """
    floats = fmt.dequantize_rows(rows)
    to = by_name("F16" if np.abs(floats).max() <= F16_MOST else "F32")
    return to, to.quantize_rows(floats)
