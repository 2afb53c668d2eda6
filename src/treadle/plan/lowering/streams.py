"""Ops of hyper-connections (``n`` streams of hidden states side by side, f32 ``[N, n * n_embd]``),
and of n-gram embeddings that are added to the streams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.kernels.elementwise.gated_streams import SpreadToStreams, SumStreams
from treadle.kernels.elementwise.manifold import BlendStreams, StreamWeights, WeighStreams
from treadle.kernels.elementwise.ngram import GatherRows, NgramRows
from treadle.kernels.elementwise.streams import (
    AddToStreams,
    MixStreams,
    NormStreams,
    OutputCopy,
    RepeatStreams,
    ScoreStreams,
)
from treadle.kernels.recurrent.convolution import Convolution
from treadle.kernels.run_state import round_up
from treadle.kernels.spec import Grid
from treadle.plan.lowering.deferred import Floats
from treadle.plan.plan import ALIGN, Buffer

if TYPE_CHECKING:
    from treadle.models.config import Ngrams
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import PlanOps
    from treadle.plan.plan import Const


def repeated(ops: PlanOps, label: str, x: Rows, *, n: int) -> Rows:
    """Return ``n`` streams that each equal ``x``."""
    rows = ops.floats(x)
    out = ops.steps.floats(label, n * x.width)
    ops.steps.emit(
        label,
        RepeatStreams(x.width, n),
        Grid(1, "n_tokens"),
        x=rows,
        out=out,
        stride=rows.row_bytes // 4,
        out_stride=out.row_bytes // 4,
    )
    return Floats(label, n * x.width, out)


def normed_streams(ops: PlanOps, label: str, x: Rows, *, n: int, weight: str) -> Rows:
    """Return the RMS norm of each of ``n`` streams, with a part of the vector ``weight`` for each
    stream.
    """
    rows, column = ops.place(x)
    out = ops.steps.floats(label, x.width)
    ops.steps.emit(
        label,
        NormStreams(x.width // n, n, ops.config.norm_eps),
        Grid(n, "n_tokens"),
        x=rows,
        w=ops.steps.vector(f"{weight}.weight"),
        out=out,
        stride=rows.row_bytes // 4,
        out_stride=out.row_bytes // 4,
        column=column,
    )
    return Floats(label, x.width, out)


def mixed_streams(ops: PlanOps, label: str, x: Rows, gate: Rows, *, n: int) -> Rows:
    """Return the mean over ``n`` streams of ``x * sigmoid(gate)``, f32 ``[N, n_embd]``."""
    rows, gates = ops.floats(x), ops.floats(gate)
    width = x.width // n
    out = ops.steps.floats(label, width)
    ops.steps.emit(
        label,
        MixStreams(width, n),
        Grid(1, "n_tokens"),
        x=rows,
        gate=gates,
        out=out,
        stride=rows.row_bytes // 4,
        gate_stride=gates.row_bytes // 4,
        out_stride=out.row_bytes // 4,
    )
    return Floats(label, width, out)


def add_to_streams(
    ops: PlanOps, label: str, x: Rows, y: Rows, weights: Rows, *, n: int, scale: float
) -> Rows:
    """Add ``y [N, n_embd]`` to each of ``n`` streams ``x``, in place, times ``2 * sigmoid(scale *
    weight)``; ``weights``: one per stream, ``[N, n]``.
    """
    rows, others = ops.floats(x), ops.floats(y)
    factors, column = ops.place(weights)
    ops.steps.emit(
        label,
        AddToStreams(y.width, n, scale),
        Grid(n, "n_tokens"),
        x=rows,
        y=others,
        weight=factors,
        stride=rows.row_bytes // 4,
        y_stride=others.row_bytes // 4,
        weight_stride=factors.row_bytes // 4,
        column=column,
    )
    return Floats(label, x.width, rows)


def stream_weights(
    ops: PlanOps, label: str, x: Rows, *, n: int, rounds: int, eps: float, stem: str
) -> Rows:
    """Return each token's weights ``[N, n * (2 + n)]``: n for the sum of streams that attention or
    the FFN reads, n for adding its result to the streams, n * n for mixing the streams. ``x``: the
    products that make the weights, before scale and base are applied.

    ``rounds``: rounds of Sinkhorn's normalisation of the n * n; 0: only the first n are computed.
    ``stem``: prefix of the tensors ``_scale`` and ``_base``.
    """
    rows, column = ops.place(x)
    out = ops.steps.floats(label, x.width)
    ops.steps.emit(
        label,
        StreamWeights(n, rounds, eps),
        Grid(1, "n_tokens"),
        x=rows,
        scale=ops.steps.vector(f"{stem}_scale.weight"),
        base=ops.steps.vector(f"{stem}_base.weight"),
        out=out,
        stride=rows.row_bytes // 4,
        column=column,
        out_stride=out.row_bytes // 4,
    )
    return Floats(label, x.width, out)


def weighed_streams(
    ops: PlanOps, label: str, x: Rows, weights: Rows | None = None, *, n: int
) -> Rows:
    """Return the sum over the ``n`` streams ``x``, each times its weight, f32 ``[N, n_embd]``.
    ``weights``: as ``stream_weights`` returns them; None: return the streams' mean.
    """
    rows = ops.floats(x)
    given: dict[str, Any] = {}
    if weights is not None:
        factors = ops.floats(weights)
        given = {"weight": factors, "weight_stride": factors.row_bytes // 4}
    width = x.width // n
    out = ops.steps.floats(label, width)
    ops.steps.emit(
        label,
        WeighStreams(width, n, mean=weights is None),
        Grid(1, "n_tokens"),
        x=rows,
        out=out,
        stride=rows.row_bytes // 4,
        out_stride=out.row_bytes // 4,
        **given,
    )
    return Floats(label, width, out)


def blended_streams(ops: PlanOps, label: str, x: Rows, y: Rows, weights: Rows, *, n: int) -> Rows:
    """Replace each of ``n`` streams by a weighted sum of all streams and ``y``, in place;
    ``weights``: as ``stream_weights`` returns them.
    """
    rows = ops.floats(x)
    added = ops.floats(y)
    factors = ops.floats(weights)
    spec = BlendStreams(y.width, n)
    ops.steps.emit(
        label,
        spec,
        Grid(spec.slices, "n_tokens"),
        x=rows,
        y=added,
        weight=factors,
        stride=rows.row_bytes // 4,
        y_stride=added.row_bytes // 4,
        weight_stride=factors.row_bytes // 4,
    )
    return Floats(label, x.width, rows)


def sum_of_streams(
    ops: PlanOps, label: str, x: Rows, mix: Rows, *, n: int, weights: str, eps: float
) -> Rows:
    """Return the weighted sum of ``n`` streams, f32 ``[N, n_embd]``. The weights are sigmoids of
    the first ``n`` columns of ``mix``, plus ``eps``; ``weights``: prefix of the tensors ``_scale``
    and ``_base``.
    """
    rows = ops.floats(x)
    columns, column = ops.place(mix)
    width = x.width // n
    out = ops.steps.floats(label, width)
    ops.steps.emit(
        label,
        SumStreams(width, n, eps),
        Grid(1, "n_tokens"),
        x=rows,
        mix=columns,
        scale=ops.steps.vector(f"{weights}_scale.weight"),
        base=ops.steps.vector(f"{weights}_base.weight"),
        out=out,
        stride=rows.row_bytes // 4,
        mix_stride=columns.row_bytes // 4,
        out_stride=out.row_bytes // 4,
        column=column,
    )
    return Floats(label, width, out)


def spread_to_streams(
    ops: PlanOps,
    label: str,
    x: Rows,
    y: Rows,
    mix: Rows,
    *,
    n: int,
    weights: str,
    magnitude: float,
    eps: float,
) -> Rows:
    """Add ``y [N, n_embd]`` to each of ``n`` streams ``x``, in place, times a weight: ``magnitude``
    times a sigmoid of columns ``n`` to ``2 n - 1`` of ``mix``, plus ``eps``. ``weights``: as in
    ``sum_of_streams``.
    """
    rows, others = ops.floats(x), ops.floats(y)
    columns, column = ops.place(mix)
    ops.steps.emit(
        label,
        SpreadToStreams(y.width, n, magnitude, eps),
        Grid(n, "n_tokens"),
        x=rows,
        y=others,
        mix=columns,
        scale=ops.steps.vector(f"{weights}_scale.weight"),
        base=ops.steps.vector(f"{weights}_base.weight"),
        stride=rows.row_bytes // 4,
        y_stride=others.row_bytes // 4,
        mix_stride=columns.row_bytes // 4,
        column=column + n,
    )
    return Floats(label, x.width, rows)


def output_rows(ops: PlanOps, label: str, x: Rows) -> Rows:
    """Return a copy of the rows of ``x`` for which outputs are requested."""
    rows = ops.floats(x)
    out = ops.steps.floats(label, x.width)  # a product packs as many rows as the batch has
    ops.steps.emit(
        label,
        OutputCopy(x.width),
        Grid(1, "n_outputs"),
        x=rows,
        out=out,
        stride=rows.row_bytes // 4,
        out_stride=out.row_bytes // 4,
    )
    return Floats(label, x.width, out, outputs=True)


def ngrams(ops: PlanOps, label: str, x: Rows, *, layer: int, n: int, weights: str) -> Rows:
    """Return the ``n`` streams ``x`` with the embeddings of each token's n-grams added.
    ``weights``: prefix of the matrices, norms and taps.

    Rows of the n-gram table give a key for each stream, and one value. A stream gets the value
    times a score, by how well the key fits the stream's norm; and a convolution in time of these
    products.
    """
    steps = ops.steps
    grams = ops.config.layers[layer].ngrams
    assert grams is not None
    embd = _embeddings(ops, label, layer, grams)
    names = [f"{weights}_key", f"{weights}_value"]
    key, value = ops.linears(f"{label}.key_value", embd, names)
    key = normed_streams(ops, f"{label}.norm_key", key, n=n, weight=f"{weights}_norm_key")
    query = normed_streams(ops, f"{label}.norm_query", x, n=n, weight=f"{weights}_norm_query")
    rows, column = ops.place(value)
    keys, queries = ops.floats(key), ops.floats(query)
    out = steps.floats(f"{label}.score", x.width)
    steps.emit(
        f"{label}.score",
        ScoreStreams(x.width // n, n),
        Grid(n, "n_tokens"),
        key=keys,
        query=queries,
        value=rows,
        out=out,
        stride=out.row_bytes // 4,
        value_stride=rows.row_bytes // 4,
        column=column,
    )
    scored = Floats(f"{label}.score", x.width, out)
    more = normed_streams(ops, f"{label}.norm_conv", scored, n=n, weight=f"{weights}_norm_conv")
    normed = ops.floats(more)
    states = steps.cache.states_of(layer, beside=True)
    spec = Convolution(x.width, grams.n_conv, dilation=grams.n)
    steps.emit(
        f"{label}.conv",
        spec,
        Grid(spec.tiles, "n_parts"),
        x=normed,
        w=steps.vector(f"{weights}_conv1d.weight", turned=True),
        states=states.const,
        stride=normed.row_bytes // 4,
        column=0,
        cell_bytes=states.cell_bytes,
        state_off=states.layer_off(layer),
    )
    sum_ = ops.add(x, scored)
    return ops.add(sum_, Floats(f"{label}.conv", x.width, normed))


def _embeddings(ops: PlanOps, label: str, layer: int, grams: Ngrams) -> Rows:
    """Emit the hashes of each token's n-grams, and the read of these rows of the table. Return the
    rows side by side, f32 ``[N, n_heads * n_row]``.
    """
    steps = ops.steps
    states = steps.cache.states_of(layer, beside=True)
    n_bytes = round_up(8 * grams.n_heads, ALIGN)
    numbers = Buffer(f"{label}.rows", steps.plan.n_tokens, n_bytes, "i8")
    steps.emit(
        f"{label}.rows",
        NgramRows(grams.n, grams.heads, grams.end),
        Grid(1, "n_parts"),
        out=numbers,
        hash=_hash_of(ops, label, grams),
        states=states.const,
        stride=n_bytes // 8,
        cell_bytes=states.cell_bytes,
        state_off=states.layer_off(layer) + 4 * grams.n_before * _width(ops, layer),
    )
    name = "per_layer_token_embd.weight"
    out = steps.floats(f"{label}.embd", grams.n_embd)
    read: dict[str, Any] = steps.row_of(name)
    steps.emit(
        f"{label}.embd",
        GatherRows(steps.weights.format(name).name, grams.n_row, grams.n_heads),
        Grid(grams.n_heads, "n_tokens"),
        w=steps.weight(name),
        rows=numbers,
        x=out,
        rows_stride=n_bytes // 8,
        stride=out.row_bytes // 4,
        n_bytes=read["n_bytes"],
        read_share=min(1.0, grams.n_heads * read["read_share"]),
        shape=(grams.n_embd,),
    )
    return Floats(f"{label}.embd", grams.n_embd, out)


def _width(ops: PlanOps, layer: int) -> int:
    """Return the number of values in a token's streams."""
    hyper = ops.config.layers[layer].hyper
    assert hyper is not None
    return hyper.n * ops.config.n_embd


def _hash_of(ops: PlanOps, label: str, grams: Ngrams) -> Const:
    """Return the constant that the n-gram hash reads, i64: multipliers, then size and offset of
    each of its heads (parts of the table). All plans share one copy.
    """
    weights = ops.steps.weights
    key = f"{label}:hash"
    if key not in weights.consts:
        heads = [each for pair in zip(grams.sizes, grams.offsets, strict=True) for each in pair]
        array = np.array([*grams.multipliers, *heads], np.int64)
        weights.consts[key] = (weights.storage.weights(key, array),)
    (found,) = weights.consts[key]
    return found
