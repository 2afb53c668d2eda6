"""Attention and merge by blocks of threads, against their numpy twins, on the batch and within the
bounds of tests/kernels/test_attention.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu.machine import ISA, some
from tests.kernels import registry
from tests.kernels.harness import Memory, assert_close, call
from tests.kernels.registry import ATTENTIONS
from tests.kernels.test_attention import BATCH, Cache, build_run, sinks_of, tolerance
from treadle.gpu.kernels.attention import SimtAttention
from treadle.gpu.kernels.block import instead
from treadle.gpu.kernels.merge import SimtMerge
from treadle.kernels.attention import Attention
from treadle.kernels.spec import numbered

ORDER = (7, 2, 3, 10, 13, 6, 15, 4, 9)  # scales, groups, windows, both ways, sinks, odd dims
VECTORS = [ATTENTIONS[i] for i in ORDER]
VECTORS += [spec for spec in ATTENTIONS if spec not in VECTORS and not spec.latent]
VECTORS.append(Attention("f32", 4, 2, 64, 2, softcap=20.0))


@pytest.mark.parametrize("spec", some(VECTORS, 6), ids=registry.name)
def test_attention(spec: Attention, blocks: Memory, rng: np.random.Generator) -> None:
    made = instead(SimtAttention, spec)
    cache = Cache(spec, rng)
    n = sum(sequence.n for sequence in BATCH)
    width, out_width = spec.n_head * spec.head_dim, spec.n_head * spec.dims_v
    stride, out_stride = width + 8, out_width + 4
    x = rng.standard_normal((n, stride)).astype(np.float32) * spec.head_dim**-0.5
    x[:, width:] = np.nan
    args: dict[str, Any] = {"stride": stride, "out_stride": out_stride, **cache.places}
    args["sinks"] = blocks.copy(sinks_of(spec, rng), name="sinks")
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
        call(made, ISA, blocks, args, run, n_items)
        n_merges = run[numbered("n_attn_merges", spec.pool)] * merge.n_groups
        joined = {name: args[name] for name in ("partials", "out", "out_stride", "sinks")}
        call(merge, ISA, blocks, joined, run, n_merges)
        allowed = tolerance(spec, x[:, :width], cache)
        assert_close(out[:, :out_width], expected[:, :out_width], allowed, made.name)
        assert np.isnan(out[:, out_width:]).all()
        outs.append(out[:, :out_width].copy())
    assert np.array_equal(outs[0], outs[1])
