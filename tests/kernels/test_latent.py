"""Latent attention's own kernels against their numpy twins; products by head to the bit against the
same product of each head by itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import HEADS, LATENTS, PACK_HEADS
from tests.kernels.test_rope import STEPS, check_pool
from treadle.formats import by_name
from treadle.isa.isa import Isa
from treadle.kernels.activation_layout import BLOCK, BYTE_TOP, WORD_TOP
from treadle.kernels.attention.hadamard import points, rotate_ref
from treadle.kernels.attention.latent_steps import LatentStore, PackHeads
from treadle.kernels.attention.page_layout import KV_FORMATS, PageLayout
from treadle.kernels.matmul import select
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.run_state import PAGE


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", LATENTS, ids=registry.name)
def test_latent_store(
    spec: LatentStore, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    n = 5
    page = spec.page
    rank = spec.dims_v
    n_q = spec.n_head * spec.head_dim_q
    n_out = spec.n_head * spec.head_dim
    n_pages = 4
    layer_off = 64
    page_bytes = layer_off + 2 * page.layer_bytes
    angles = rng.uniform(0, 100, (n, spec.rope_dims // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    slots = np.array([2 * PAGE + 3, 0, PAGE - 1, 3 * PAGE + 31, PAGE + 7])
    run = Run(n, ropes={spec.table: table}, slots={spec.pool: slots})
    # Queries begin at the third column; rows of keys lie behind them, as a product leaves them.
    q_column = 3
    kv_column = n_q + 5
    stride = n_q + spec.head_dim + 6
    out_stride = n_out + 2
    x = rng.standard_normal((n, stride)).astype(np.float32)
    before = rng.standard_normal((n, out_stride)).astype(np.float32)
    norm = (1 + rng.random(rank)).astype(np.float32)
    args: dict[str, Any] = {"stride": stride, "kv_stride": stride, "out_stride": out_stride}
    args |= {"q_column": q_column, "kv_column": kv_column}
    args |= {"page_bytes": page_bytes, "layer_off": layer_off}
    expected = before.astype(np.float64)
    pool_ref = np.full(n_pages * page_bytes, 0xFF, np.uint8)
    given = {"q": x, "kv": x, "out": expected, "pool": pool_ref, "norm": norm}
    spec.run_ref(spec.args(**given, **args), run)
    for front in (False, True):
        source = memory.copy(x, name="x", front=front)
        out = memory.copy(before, name="out", front=front)
        pool = memory.array(n_pages * page_bytes, name="pool", front=front)
        made = {"q": source, "kv": source, "out": out, "pool": pool}
        made["norm"] = memory.copy(norm, name="norm", front=front)
        call(spec, isa, memory, {**args, **made}, run, n)
        # As RopeStore's: the chain of the mean square, six products, three roundings of a turn.
        relative = ((rank / 8 + 12) / 2 + 10) * U32
        if (
            page.keys.fmt.rotated
        ):  # sums of m values over sqrt(m), that is of lengths; see test_rotate
            m = points(rank)
            relative = np.sqrt(m) * (relative + (np.log2(m) + 2) * U32)
        assert_close(out, expected, 2 * np.abs(expected).max() * relative, f"{spec.name}: queries")
        heads, old = (a[:, :n_out].reshape(n, spec.n_head, -1)[..., :rank] for a in (out, before))
        if not page.keys.fmt.rotated:
            assert np.array_equal(heads, old)
        check_pool(spec, page, pool, pool_ref, slots, (page_bytes, layer_off), relative)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", PACK_HEADS, ids=registry.name)
def test_pack_heads(spec: PackHeads, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """What ``emit_store`` rounds is for ``test_pack`` to say: here a head's own columns."""
    n = 7
    column = 2
    pitch = spec.k + 3
    act = spec.layout()
    stride = column + spec.heads * pitch
    x = rng.standard_normal((n, stride)).astype(np.float32)
    head_bytes = act.n_bytes(n) + act.group_bytes  # one group more than there are tokens
    args = {"stride": stride, "column": column, "pitch": pitch, "head_bytes": head_bytes}
    twin = np.zeros(spec.heads * head_bytes, np.uint8)
    spec.run_ref(spec.args(x=x, out=twin, **args), Run(n))
    for front in (False, True):
        out = memory.array(spec.heads * head_bytes, name="out", front=front)
        given = {**args, "x": memory.copy(x, name="x", front=front), "out": out}
        n_items = act.grid(spec.heads, "n_tokens").items({"n_tokens": n})
        call(spec, isa, memory, given, Run(n), n_items)
        for head in range(spec.heads):
            mine = slice(head * head_bytes, (head + 1) * head_bytes)
            found, near = (act.read_ref(a[mine], n) for a in (out, twin))
            exact = x[:, column + head * pitch :][:, : spec.k].astype(np.float64) * spec.scale
            units = {
                "q8": 1.01 / 127,
                "q8x2": 1.01 / BYTE_TOP["q8x2"],
                "q16": 1.01 / WORD_TOP,
                "bf16": 2.0**-8,
                "f32": U32,
            }
            unit = units[spec.act]
            for each in (found, near):
                assert_close(each, exact, unit * np.abs(exact).max(), spec.name)
            assert (out[mine][act.n_bytes(n) :] == 0xFF).all()


def compare(spec: Matmul, isa: Isa, memory: Memory, rng: np.random.Generator, n: int) -> None:
    """Each head's columns are to the bit what its matrix and its x make by themselves; the twin's
    are near them.
    """
    layout = spec.layout()
    fmt = spec.fmt
    heads = spec.heads
    m = 2 * spec.rows_per_item(isa.lanes)
    y_pitch = m + 5
    padded = -(-n // spec.nr) * spec.nr
    stride = heads * y_pitch
    x_pitch = layout.n_bytes(padded) + layout.group_bytes
    x = rng.standard_normal((heads, n, spec.k)).astype(np.float32)
    raw = np.zeros(heads * x_pitch, np.uint8)
    for head in range(heads):
        layout.write_ref(raw[head * x_pitch :], x[head])
    w = fmt.quantize_rows(rng.standard_normal((heads * m, spec.k)).astype(np.float32))
    arrays = tuple(memory.copy(np.ascontiguousarray(a)) for a in fmt.split(w))
    common = {"tokens": padded, "rows": [m], "column": [0]}
    y = memory.array((padded, stride), np.float32, name="y")
    args = {**common, "x": memory.copy(raw), "y": y, "stride": stride, "w": [arrays]}
    args |= {"x_pitch": x_pitch, "y_pitch": y_pitch, "pitch": [m]}
    strips = spec.strips([m], isa.lanes)
    call(spec, isa, memory, args, Run(n), heads * strips)
    twin = np.full(y.shape, np.nan)
    spec.run_ref(spec.args(**{**args, "x": raw, "y": twin}), Run(n))
    alone = replace(spec, heads=0)
    for head in range(heads):
        columns = slice(head * y_pitch, head * y_pitch + m)
        own = memory.array((padded, m), np.float32, name="own")
        n_rows = len(w) // heads
        mine = tuple(
            memory.copy(np.ascontiguousarray(a))
            for a in fmt.split(w[head * n_rows : (head + 1) * n_rows])
        )
        given = {**common, "x": memory.copy(raw[head * x_pitch :][:x_pitch]), "y": own}
        call(alone, isa, memory, {**given, "stride": m, "w": [mine]}, Run(n), strips)
        assert np.array_equal(y[:n, columns], own[:n]), (spec.name, head)
        assert_close(twin[:n, columns], own[:n], 1e-4 * np.abs(own[:n]).max(), spec.name)
        assert np.isnan(y[:, columns.stop : columns.stop + 5]).all(), "another head's columns"


@pytest.mark.parametrize("isa", [rows.ALL[0], rows.VECTORS[-1]], ids=rows.name)
@pytest.mark.parametrize("spec", HEADS, ids=registry.name)
def test_products_by_head(spec: Matmul, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    for n in (spec.nr, 2 * spec.nr + 1) if isinstance(spec, Gemm) else (spec.nr,):
        compare(spec, isa, memory, rng, n)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "BF16"])
def test_products_by_head_as_they_are_chosen(
    name: str, memory: Memory, rng: np.random.Generator
) -> None:
    fmt = by_name(name)
    isa = rows.VECTORS[-1]
    spec = select.gemm(fmt, isa, 256, matrix=False)
    compare(replace(spec, heads=2), isa, memory, rng, 13)


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_a_page_whose_values_are_keys(kv: str, rng: np.random.Generator) -> None:
    page, plain = (PageLayout(kv, 1, 96, 64, latent) for latent in (True, False))
    assert page.layer_bytes == plain.v_off < plain.layer_bytes
    home = np.zeros(page.head_bytes, np.uint8)
    key = rng.standard_normal(96).astype(np.float32)
    page.write_ref(home, 7, key, key)
    keys, values = page.read_ref(home)
    assert np.array_equal(values, keys[:, :64])
    # A step, at most: in four bits what lies opposite to the largest is cut.
    unit = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8, **STEPS}
    assert np.abs(keys[7] - key).max() <= np.abs(key).max() * unit[kv]
    page.blank(home, 7)
    assert not home.any()


def test_rotated_scores_and_sums_stay(rng: np.random.Generator) -> None:
    """The parts are rotated each for itself: so scores over whole rows stay, and what is summed of
    first dims alone is rotated back by that part's matrix.
    """
    store = LatentStore("none", "q4_0", 1, 160, 96, 80, 64, 1.0, 0.0)
    page = store.page
    slots = np.arange(9)
    places = {"page_bytes": page.layer_bytes, "layer_off": 0, "q_column": 0, "kv_column": 0}
    strides = {"stride": 80, "kv_stride": 160, "out_stride": 160}
    q, row, absorbed = (rng.standard_normal((9, n)) for n in (80, 160, 160))
    made = absorbed.copy()
    pool = np.zeros(page.layer_bytes, np.uint8)
    given = {"q": q, "kv": row, "out": made, "pool": pool, "norm": np.ones(96)}
    store.run_ref(store.args(**given, **places, **strides), Run(9, slots={0: slots}))
    absorbed[:, 96:] = q[:, 16:]
    normed = row.copy()
    normed[:, :96] /= np.sqrt((row[:, :96] ** 2).mean(-1, keepdims=True))
    keys = np.hstack([rotate_ref(normed[:, :96]), rotate_ref(normed[:, 96:])])
    np.testing.assert_allclose(made @ keys.T, absorbed @ normed.T, atol=1e-12)
    np.testing.assert_allclose(rotate_ref(keys[:, :96]), normed[:, :96], atol=1e-13)
    kept, values = (a[:9] for a in page.read_ref(page.head_ref(pool, 0, page.layer_bytes, 0, 0)))
    top = np.abs(keys).reshape(9, -1, BLOCK).max(-1).repeat(BLOCK, -1)
    assert (np.abs(kept - keys) <= top * (1 / 8 + 2.0**-20)).all()
    assert np.array_equal(values, kept[:, :96])
