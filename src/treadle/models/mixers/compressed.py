"""Attention to the rows of the last tokens, and to rows that stand for units of earlier ones
(DeepSeek V4, 2026)::

    row  = rope(norm(kv(h)))                            key and value of all heads
    unit = rope(norm(sum_t softmax_t(gate(h_t) + bias_t) kv'(h_t)))     over the unit's tokens t
    y    = rope_back(attention(rope(norm(q_b(norm(q_a(h))))), rows and units))
    out  = output_b(output_a(y))                        output_a: a matrix for each group of heads

In layers with small units a lightning indexer, with rows of units of its own, chooses those that a
query sees.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.config import PoolSpec, StateSpec
from treadle.models.structure import Sizes, Sublayer, TensorRow, with_bias

if TYPE_CHECKING:
    from treadle.models.config import Compressed, Indexer, Layer
    from treadle.models.ops import Ops, Rows

SUMS = 3  # numbers that a column of an unfinished unit has (``kernels/recurrent/compress.py``)


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``output_b(output_a(y))``, where y is attention's result in layer ``i`` for the normed
    states ``h``.
    """
    layer = g.config.layers[i]
    sizes = _sizes_of(layer)
    at = f"L{i}.attn"
    blk = f"blk.{i}."
    names = [f"{blk}attn_q_a", f"{blk}attn_kv"]
    if sizes.unit:
        names += [f"{blk}attn_compressor_kv", f"{blk}attn_compressor_gate"]
    if layer.indexer:
        names += [f"{blk}indexer_compressor_kv", f"{blk}indexer_compressor_gate"]
        names += [f"{blk}indexer.proj"]
    q, kv, *more = g.linears(f"{at}.q_a_kv", h, names)
    rank = g.norm(f"{at}.q_a_norm", q, f"{blk}attn_q_a_norm")
    if sizes.unit:
        given = {"layer": i, "stem": f"{blk}attn_compressor", "index": False}
        g.call("units_stored", f"{at}.units", *more[:2], **given)
    chosen: tuple[Rows, ...] = ()
    if layer.indexer:
        given = {"layer": i, "stem": f"{blk}indexer_compressor", "index": True}
        g.call("units_stored", f"L{i}.index.units", *more[2:4], **given)
        asked = g.linear(f"L{i}.index.q", rank, f"{blk}indexer.attn_q_b")
        chosen = (g.call("rows_chosen", f"L{i}.index", asked, more[4], layer=i),)
    q = g.linear(f"{at}.q_b", rank, f"{blk}attn_q_b")
    given = {"layer": i, "norm": f"{blk}attn_kv_a_norm", "sinks": f"{blk}attn_sinks"}
    y = g.call("rows_attended", at, q, kv, *chosen, **given)
    stem = f"{blk}attn_output_a"
    y = g.call("by_head", f"{at}.output_a", y, weight=stem, heads=sizes.n_groups)
    return g.linear(f"{at}.output_b", y, f"{blk}attn_output_b")


def _sizes_of(layer: Layer) -> Compressed:
    assert layer.compressed is not None
    return layer.compressed


def _indexer_of(layer: Layer) -> Indexer:
    assert layer.indexer is not None
    return layer.indexer


def _columns(layer: Layer, width: int) -> int:
    """Return the number of values that a token contributes to units whose rows are ``width`` wide:
    ``width``, or twice that if units overlap, since it then contributes to two units.
    """
    return width * (1 + _sizes_of(layer).overlap)


def _sizes(layer: Layer) -> Sizes:
    sizes = _sizes_of(layer)
    return {
        "n_head": layer.n_head,
        "n_q_rank": sizes.n_q_rank,
        "n_q": layer.n_head * layer.head_dim,
        "n_row": layer.head_dim,
        "n_of_group": layer.n_head * layer.head_dim // sizes.n_groups,
        "n_out_rank": sizes.n_groups * sizes.n_o_rank,
    }


def _memory(layer: Layer) -> tuple[PoolSpec | StateSpec, ...]:
    dims = layer.head_dim
    window = layer.window if layer.causal else 0  # a block's tokens see the window before it
    return (PoolSpec("kv_rows", (), 1, dims, dims, window, layer.causal, latent=True, unit=1),)


ROWS = Sublayer(
    label="attn",
    before="attn_norm",
    after="",
    after_sum="",
    build=build,
    rows=(
        *with_bias("attn_norm", "n_embd"),
        TensorRow("attn_sinks.weight", ("n_head",)),
        TensorRow("attn_q_a.weight", ("n_q_rank", "n_embd")),
        TensorRow("attn_q_a_norm.weight", ("n_q_rank",)),
        TensorRow("attn_q_b.weight", ("n_q", "n_q_rank")),
        TensorRow("attn_kv.weight", ("n_row", "n_embd")),
        TensorRow("attn_kv_a_norm.weight", ("n_row",)),
        TensorRow("attn_output_a.weight", ("n_out_rank", "n_of_group")),
        TensorRow("attn_output_b.weight", ("n_embd", "n_out_rank")),
    ),
    sizes=_sizes,
    memory=_memory,
)


def _unit_sizes(layer: Layer) -> Sizes:
    sizes = {"n_unit": _sizes_of(layer).unit, "n_unit_columns": _columns(layer, layer.head_dim)}
    return {**_sizes(layer), **sizes}


def _unit_memory(layer: Layer) -> tuple[PoolSpec | StateSpec, ...]:
    dims = layer.head_dim
    unit = _sizes_of(layer).unit
    pool = PoolSpec("kv_units", (), 1, dims, dims, 0, latent=True, unit=unit)
    return *_memory(layer), pool, StateSpec("unit_sums", (), SUMS * _columns(layer, dims))


ROWS_AND_UNITS = replace(
    ROWS,
    rows=(
        *ROWS.rows,
        TensorRow("attn_compressor_kv.weight", ("n_unit_columns", "n_embd")),
        TensorRow("attn_compressor_gate.weight", ("n_unit_columns", "n_embd")),
        TensorRow("attn_compressor_ape.weight", ("n_unit", "n_unit_columns")),
        TensorRow("attn_compressor_norm.weight", ("n_row",)),
    ),
    sizes=_unit_sizes,
    memory=_unit_memory,
)


def _index_sizes(layer: Layer) -> Sizes:
    index = _indexer_of(layer)
    return {
        **_unit_sizes(layer),
        "n_index_head": index.n_head,
        "n_index": index.head_dim,
        "n_index_q": index.n_head * index.head_dim,
        "n_index_columns": _columns(layer, index.head_dim),
    }


def _index_memory(layer: Layer) -> tuple[PoolSpec | StateSpec, ...]:
    dims = _indexer_of(layer).head_dim
    rows, units, state = _unit_memory(layer)
    assert isinstance(state, StateSpec)
    unit = _sizes_of(layer).unit
    index = PoolSpec("kv_index", (), 1, dims, dims, 0, latent=True, index=True, unit=unit)
    state = replace(state, n_values=state.n_values + SUMS * _columns(layer, dims))
    return rows, units, index, state


ROWS_AND_CHOSEN_UNITS = replace(
    ROWS_AND_UNITS,
    rows=(
        *ROWS_AND_UNITS.rows,
        TensorRow("indexer.proj.weight", ("n_index_head", "n_embd")),
        TensorRow("indexer.attn_q_b.weight", ("n_index_q", "n_q_rank")),
        TensorRow("indexer_compressor_kv.weight", ("n_index_columns", "n_embd")),
        TensorRow("indexer_compressor_gate.weight", ("n_index_columns", "n_embd")),
        TensorRow("indexer_compressor_ape.weight", ("n_unit", "n_index_columns")),
        TensorRow("indexer_compressor_norm.weight", ("n_index",)),
    ),
    sizes=_index_sizes,
    memory=_index_memory,
)
