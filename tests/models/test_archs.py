"""Rows of traits, windows by layer, and rope frequencies against their published formulas."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from treadle.models.archs import (
    ARCHS,
    LAYER_TENSORS,
    Arch,
    layer_rope,
    layer_window,
    rope_frequencies,
)
from treadle.models.config import Config

PLAIN = Config(
    arch=ARCHS["llama"], n_layer=4, n_embd=64, n_ff=96, n_head=4, n_head_kv=2, head_dim=16,
    head_dim_v=16, n_vocab=100, n_ctx_train=256, norm_eps=1e-5, embd_scale=1.0, attn_scale=0.25,
    attn_softcap=0.0, logit_softcap=0.0, sliding_window=0, local_layers=(False,) * 4, rope_dims=16,
    rope_base=1e4, rope_base_local=1e3, rope_scaling="none", rope_scale=1.0, rope_attn_factor=1.0,
    rope_factors=None, n_ctx_orig=64, yarn_ext_factor=1.0, yarn_beta_fast=32.0, yarn_beta_slow=1.0,
    optional=frozenset(), ignored=(),
)  # fmt: skip
BASE = 1e4 ** (-np.arange(0, 16, 2) / 16)


def config(**changes: Any) -> Config:
    return dataclasses.replace(PLAIN, **changes)


def test_rows_are_keyed_by_their_names_and_need_known_tensors() -> None:
    optional = {row.name for row in LAYER_TENSORS if row.optional}
    for name, arch in ARCHS.items():
        assert name == arch.name
        assert arch.needs <= optional
    assert len(dataclasses.fields(Arch)) <= 12


def test_windows_and_rope_tables_follow_the_layer() -> None:
    local = config(sliding_window=32, local_layers=(True, True, False, True))
    assert [layer_window(local, i) for i in range(4)] == [32, 32, 0, 32]
    assert [layer_rope(local, i) for i in range(4)] == [1, 1, 0, 1]
    assert [layer_window(PLAIN, i) for i in range(4)] == [0] * 4


def test_plain_and_linear_frequencies() -> None:
    inv_freq, factor = rope_frequencies(PLAIN, local=False)
    np.testing.assert_allclose(inv_freq, BASE, rtol=1e-15)
    assert factor == 1.0
    inv_freq, _ = rope_frequencies(config(rope_scaling="linear", rope_scale=4.0), local=False)
    np.testing.assert_allclose(inv_freq, BASE / 4, rtol=1e-15)
    inv_freq, _ = rope_frequencies(config(rope_dims=8), local=False)
    np.testing.assert_allclose(inv_freq, 1e4 ** (-np.arange(0, 8, 2) / 8), rtol=1e-15)


def test_factors_divide() -> None:
    factors = (1.0, 1.0, 1.0, 1.5, 2.0, 8.0, 8.0, 8.0)
    inv_freq, _ = rope_frequencies(config(rope_factors=factors), local=False)
    np.testing.assert_allclose(inv_freq, BASE / factors, rtol=1e-15)


@pytest.mark.parametrize("scaling", ["linear", "yarn"])
def test_local_layers_are_never_stretched(scaling: str) -> None:
    stretched = config(rope_scaling=scaling, rope_scale=8.0, rope_factors=(2.0,) * 8)
    inv_freq, factor = rope_frequencies(stretched, local=True)
    np.testing.assert_allclose(inv_freq, 1e3 ** (-np.arange(0, 16, 2) / 16), rtol=1e-15)
    assert factor == 1.0


def test_yarn_keeps_short_waves_and_stretches_long_ones() -> None:
    yarn = config(rope_scaling="yarn", rope_scale=4.0, n_ctx_orig=4096)
    inv_freq, factor = rope_frequencies(yarn, local=False)
    turns = 4096 * BASE / (2 * np.pi)  # within the original context
    np.testing.assert_allclose(inv_freq[turns > 64], BASE[turns > 64], rtol=1e-15)
    np.testing.assert_allclose(inv_freq[turns < 0.5], BASE[turns < 0.5] / 4, rtol=1e-15)
    assert np.all(np.diff(inv_freq) < 0)
    assert factor == pytest.approx(1 + 0.1 * np.log(4))
    inv_freq, factor = rope_frequencies(dataclasses.replace(yarn, yarn_ext_factor=0.0), local=False)
    np.testing.assert_allclose(inv_freq, BASE / 4, rtol=1e-15)
    assert factor == 1.0
