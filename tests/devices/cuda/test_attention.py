"""Attention and merge by blocks of threads, against their numpy twins, on the batch and within the
bounds of tests/kernels/test_attention.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.devices.cuda.machine import ISA, some
from tests.kernels import registry
from tests.kernels.harness import Memory, assert_close, call
from tests.kernels.registry import ATTENTIONS
from tests.kernels.test_attention import (
    BATCH,
    Cache,
    build_run,
    cache_of,
    distances_of,
    rel_logits_of,
    sinks_of,
    tolerance,
)
from treadle.devices.cuda.kernels.attention import SimtAttention
from treadle.devices.cuda.kernels.attention_tile import TileAttention
from treadle.devices.cuda.kernels.block import convert_spec
from treadle.devices.cuda.kernels.merge import SimtMerge
from treadle.isa.isa import Isa
from treadle.kernels.attention.paged import Attention
from treadle.kernels.run_state import numbered

# Scales, groups, windows, both ways, sinks, latent values, slopes, odd dims.
ORDER = (7, 2, 3, 10, 13, 17, 24, 18, 23, 6, 15, 4, 9)
PLAIN = [spec for spec in ATTENTIONS if not spec.spans]  # pictures are read on the CPU
VECTORS = [PLAIN[i] for i in ORDER]
OTHERS = [spec for spec in PLAIN if spec not in VECTORS]
VECTORS += OTHERS
VECTORS.append(Attention("f32", 4, 2, 64, 2, softcap=20.0))


TILES = [
    Attention("f16", 8, 2, 64, 4),
    Attention("bf16", 6, 2, 96, 9, 21, 1, head_dim_v=64, causal=False),
    Attention("q8_0", 6, 2, 32, 5, 33),
    Attention("f16", 6, 2, 32, 20, 50, 1, sinks=True),
    Attention("bf16", 4, 2, 256, 12, 45),
    Attention("q8_0", 4, 1, 64, 16, head_dim_v=128, softcap=20.0),
    Attention("bf16", 3, 3, 128, 40, 33, 3),
    Attention("f16", 4, 2, 80, 7, head_dim_v=16),
]


def unit_of(spec: Attention) -> float:
    """Of tensor cores' operands."""
    return 2.0 ** (-8 if spec.kv == "bf16" else -11)


def rounding(spec: Attention, allowed: float, q: np.ndarray, cache: Cache) -> float:
    """What tensor cores may miss beyond that: queries, keys of q8_0 and weights are rounded to 11
    bits, to 8 in bf16, and values of q8_0; weights below 2**-14 in f16 to 2**-25.
    """
    unit = unit_of(spec)
    keys, values = (
        max(
            float(np.nanmax(np.abs(x), initial=0.0))
            for home in cache.pool.reshape(-1, cache.page_bytes)[:, cache.layer_off :].reshape(
                -1, spec.page.head_bytes
            )
            for x in [spec.page.read_ref(home)[i]]
        )
        for i in range(2)
    )
    score = 2 * unit * float(np.abs(q).reshape(-1, spec.head_dim).sum(-1).max()) * keys
    n = max(s.history + s.n for s in BATCH)
    return allowed + (2 * score + 3 * unit + n * 2.0**-24) * values


@pytest.mark.parametrize("spec", some(TILES, 5), ids=registry.name)
def test_tiles(spec: Attention, blocks: Memory, rng: np.random.Generator) -> None:
    check(convert_spec(TileAttention, spec), ISA, blocks, rng)


@pytest.mark.parametrize("spec", some(VECTORS, 8), ids=registry.name)
def test_attention(spec: Attention, blocks: Memory, rng: np.random.Generator) -> None:
    check(convert_spec(SimtAttention, spec), ISA, blocks, rng)


MUTANTS = [(TILES[3], "barrier"), (TILES[3], "wait")]  # of several warps
MUTANTS += [(VECTORS[0], "barrier"), (VECTORS[0], "warp_barrier")]


@pytest.mark.parametrize(("spec", "without"), MUTANTS, ids=str)
def test_nothing_that_waits_can_be_left_out(
    spec: Attention, without: str, blocks: Memory, rng: np.random.Generator
) -> None:
    assert ISA.simt is not None
    lacking: dict[str, Any] = {without: lambda *given: None}
    isa = replace(ISA, name=f"no_{without}", simt=replace(ISA.simt, **lacking))
    kind = TileAttention if spec in TILES else SimtAttention
    with pytest.raises(AssertionError):
        check(convert_spec(kind, spec), isa, blocks, rng)


def check(spec: Attention, isa: Isa, blocks: Memory, rng: np.random.Generator) -> None:
    """The kernel of ``spec``, with histories cut and joined, under two orders of threads."""
    cache = cache_of(spec.page)
    n = sum(sequence.n for sequence in BATCH)
    width = spec.n_head * spec.head_dim
    out_width = spec.n_head * spec.dims_v
    stride = width + 8
    out_stride = out_width + 4
    x = rng.standard_normal((n, stride)).astype(np.float32) * spec.head_dim**-0.5
    x[:, width:] = np.nan
    args: dict[str, Any] = {"stride": stride, "out_stride": out_stride, **cache.places}
    args["sinks"] = blocks.copy(sinks_of(spec, rng), name="sinks")
    args["distances"] = blocks.copy(distances_of(spec, rng), name="distances")
    args["rel_logits"] = blocks.copy(rel_logits_of(spec, rng), name="rel_logits")
    whole, _ = build_run(spec, cache, split=False)
    expected = np.full((n, out_stride), np.nan)
    spec.run_ref(spec.args(qkv=x, pool=cache.pool, out=expected, few=0, **args), whole)
    merge = SimtMerge(spec.n_groups, spec.heads, spec.tokens, spec.dims_v, spec.pool, spec.sinks)
    outs = []
    for few in (False, True):  # another order of threads
        run, n_partials = build_run(spec, cache, few=few)
        args |= {"qkv": blocks.copy(x, name="qkv"), "pool": blocks.copy(cache.pool, name="pool")}
        out = blocks.array((n, out_stride), np.float32, name="out")
        args["partials"] = blocks.array(n_partials * spec.partial_values, np.float32)
        args["out"], args["few"] = out, int(few)
        count = "n_attn_few" if few else "n_attn_items"
        n_items = run[numbered(count, spec.pool)] * spec.n_groups
        call(spec, isa, blocks, args, run, n_items)
        n_merges = run[numbered("n_attn_merges", spec.pool)] * merge.n_groups
        joined = {name: args[name] for name in ("partials", "out", "out_stride", "sinks")}
        call(merge, isa, blocks, joined, run, n_merges)
        allowed = tolerance(spec, x[:, :width], cache)
        if isinstance(spec, TileAttention):
            allowed = rounding(spec, allowed, x[:, :width], cache)
        assert_close(out[:, :out_width], expected[:, :out_width], allowed, spec.name)
        if isinstance(spec, TileAttention):  # those bounds are the worst case's
            off = np.linalg.norm(out[:, :out_width] - expected[:, :out_width])
            assert off <= unit_of(spec) * np.linalg.norm(expected[:, :out_width])
        assert np.isnan(out[:, out_width:]).all()
        outs.append(out[:, :out_width].copy())
    assert np.array_equal(outs[0], outs[1])
