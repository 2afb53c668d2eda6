"""RopeStore against its numpy twin, and the pages of keys and values that it fills."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels import rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call, step
from tests.kernels.pairwise import cases
from tests.kernels.registry import ROPES, ROPES_TURNED
from treadle.errors import UnsupportedError
from treadle.isa.isa import Isa
from treadle.kernels.activation_layout import BLOCK
from treadle.kernels.attention.indexer import IndexStore
from treadle.kernels.attention.latent_steps import LatentStore
from treadle.kernels.attention.page_layout import KV_FORMATS, PageLayout
from treadle.kernels.attention.rope import RopeStore
from treadle.kernels.run_state import PAGE, round_up

# The largest distance of two numbers of a format, of the largest of a block.
STEPS = {"q8_0": 1 / 127, "q4_0": 1 / 8, "iq4_nl": 24 / 127, "q5_0": 1 / 16, "q5_1": 2 / 31}


@cases([*ROPES, *ROPES_TURNED], rows.DISTINCT)
def test_rope_store(spec: RopeStore, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    n = 5
    dims = spec.head_dim
    page = spec.page
    k_column = spec.n_head * dims
    v_column = k_column + spec.n_head_kv * dims
    stride = round_up(v_column + spec.n_head_kv * spec.dims_v + 1, step(isa))
    n_pages = 4
    layer_off = 64
    page_bytes = layer_off + 2 * page.layer_bytes
    angles = rng.uniform(0, 100, (n, spec.rope_dims // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    slots = np.array([2 * PAGE + 3, 0, PAGE - 1, 3 * PAGE + 31, PAGE + 7])
    other: np.ndarray = table[::-1] / 2
    ropes = {spec.queries_table: other, spec.table: table}
    run = Run(n, ropes=ropes, slots={spec.pool: slots})
    x = rng.standard_normal((n, stride)).astype(np.float32)
    x[0, v_column : v_column + spec.dims_v] = 0  # a block of zeros has scale 0
    norms = [(1 + rng.random(dims)).astype(np.float32) for _ in range(2)]
    args: dict[str, Any] = {"stride": stride, "k_column": k_column, "v_column": v_column}
    args |= {"page_bytes": page_bytes, "layer_off": layer_off}

    x_ref = x.astype(np.float64)
    pool_ref = np.full(n_pages * page_bytes, 0xFF, np.uint8)
    weights = dict(zip(("q_norm", "k_norm"), norms, strict=True))
    spec.run_ref(spec.args(qkv=x_ref, pool=pool_ref, **weights, **args), run)
    for front in (False, True):
        qkv = memory.copy(x, name="qkv", front=front)
        pool = memory.array(n_pages * page_bytes, name="pool", front=front)
        args |= {name: memory.copy(w, name=name, front=front) for name, w in weights.items()}
        args |= {"qkv": qkv, "pool": pool}
        call(spec, isa, memory, args, run, n * spec.n_head_kv)

        # Norm: gamma of the mean square's chain, halved by the root, and six products; a turn
        # adds three roundings of two terms, and the twin's own table is the f32 one.
        relative = ((dims / 8 + 12) / 2 + 10) * U32
        q = qkv[:, :k_column]
        q_ref = x_ref[:, :k_column]
        heads = np.abs(q_ref).reshape(n, -1, dims).max(-1).repeat(dims, -1)
        assert_close(q, q_ref, 2 * heads * relative, f"{spec.name}: queries")
        assert (qkv[:, k_column:] == x[:, k_column:]).all(), "keys and values stay where they were"
        if spec.queries_only:
            assert (pool == 0xFF).all()
        else:
            check_pool(spec, page, pool, pool_ref, slots, (page_bytes, layer_off), relative)


def check_pool(
    spec: RopeStore | LatentStore | IndexStore,
    page: PageLayout,
    pool: np.ndarray,
    expected: np.ndarray,
    slots: np.ndarray,
    places: tuple[int, int],
    relative: float,
) -> None:
    untouched = np.ones(len(pool), bool)
    for slot in slots:
        for head in range(spec.n_head_kv):
            at = (int(slot) // PAGE, *places, head)
            got, want = (page.head_ref(p, *at) for p in (pool, expected))
            start = got.ctypes.data - pool.ctypes.data
            untouched[start : start + page.head_bytes] = False
            scaled = page.keys.fmt.scaled
            poisoned = np.isnan(page.read_ref(want)[0]) if not scaled else None
            sides = (page.keys.fmt, page.values.fmt)
            for name, fmt, a, b in zip(
                "kv", sides, page.read_ref(got), page.read_ref(want), strict=True
            ):
                a = a[int(slot) % PAGE]
                b = b[int(slot) % PAGE]
                # Rounding to the page's format may fall either way: one whole unit of it.
                unit = {
                    "f16": np.abs(b) * 2.0**-10 + 2.0**-24,
                    "bf16": np.abs(b) * 2.0**-7,
                    "f32": np.abs(b) * 2.0**-23,
                }.get(fmt.name)
                if unit is None:
                    top = np.abs(b).reshape(-1, BLOCK).max(-1).repeat(BLOCK)
                    unit = top * STEPS[fmt.name] * (1 + 4 * relative)
                assert_close(
                    a, b, unit + 2 * relative * np.abs(b).max(), f"{spec.name}: {name} at {slot}"
                )
            if poisoned is not None:
                others = np.isnan(page.read_ref(got)[0])
                assert (others == poisoned).all(), "another place in the page was written"
    assert (pool[untouched] == 0xFF).all(), "another head's or layer's bytes were written"


def test_f16_pages_clamp(memory: Memory) -> None:
    """An infinity would turn a masked key's zero weight into NaN."""
    spec = ROPES[0]
    isa = rows.DISTINCT[-1]
    stride = (spec.n_head + 2 * spec.n_head_kv) * spec.head_dim
    qkv = memory.copy(np.full((1, stride), 1e6, np.float32))
    table = np.stack([np.ones((1, 4)), np.zeros((1, 4))], 1).astype(np.float32)
    run = Run(1, ropes={0: table}, slots={0: np.zeros(1, np.int64)})
    pool = memory.array(spec.page.layer_bytes)
    k_column = spec.n_head * spec.head_dim
    v_column = k_column + spec.n_head_kv * spec.head_dim
    args = {"qkv": qkv, "pool": pool, "stride": stride, "k_column": k_column}
    args |= {"v_column": v_column, "page_bytes": spec.page.layer_bytes, "layer_off": 0}
    call(spec, isa, memory, args, run, spec.n_head_kv)
    for head in range(spec.n_head_kv):
        for part in spec.page.read_ref(spec.page.head_ref(pool, 0, spec.page.layer_bytes, 0, head)):
            assert (part[0] == 65504).all()


def test_page_layout_refuses() -> None:
    with pytest.raises(UnsupportedError, match="unknown KV format 'q4_1'"):
        PageLayout("q4_1", 2, 64, 64)
    with pytest.raises(
        UnsupportedError, match="multiple of 32, but this model has 80; use f16, bf16 or f32"
    ):
        PageLayout("q8_0", 2, 64, 80)
    with pytest.raises(
        UnsupportedError,
        match="q4_0 needs head dims that are a multiple of 32, but this model has 48",
    ):
        PageLayout("q4_0", 1, 48, 32, latent=True)
    with pytest.raises(UnsupportedError, match="multiple of 32, but this model has 48"):
        PageLayout("q8_0", 2, 48, 64)
    with pytest.raises(UnsupportedError, match=r"unknown KV format 'q9'; .* two of them, KEYS-VAL"):
        PageLayout("q8_0-q9", 2, 64, 64)
    with pytest.raises(UnsupportedError, match=r"KV format q5_1 needs head dims .* has 48"):
        PageLayout("f16-q5_1", 2, 64, 48)
    PageLayout("q5_1-f16", 2, 64, 48)
    PageLayout("f16-q5_1", 1, 48, 40, latent=True)  # values are keys


@pytest.mark.parametrize("kv", [*KV_FORMATS, "q8_0-q4_0", "q5_1-f16"])
@pytest.mark.parametrize("dims_v", [32, 64, 96])
def test_page_twin_round_trip(kv: str, dims_v: int, rng: np.random.Generator) -> None:
    page = PageLayout(kv, 1, 64, dims_v)
    head = np.zeros(page.head_bytes, np.uint8)
    key, value = (rng.standard_normal(n).astype(np.float32) for n in (64, dims_v))
    page.write_ref(head, 5, key, value)
    for stored, x in zip(page.read_ref(head), (key, value), strict=True):
        # What lies opposite to the largest is cut, by a step at most.
        fmt = (page.keys if x is key else page.values).fmt
        off = STEPS.get(fmt.name, 2.0**-7)
        assert_close(stored[5], x, np.abs(x).max() * off, kv)
        assert not stored[4].any()
