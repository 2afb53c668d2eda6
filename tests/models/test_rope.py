"""Rope frequencies against their published formulas."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from treadle.models.rope import Rope

PLAIN = Rope(dims=16, base=1e4)
BASE = 1e4 ** (-np.arange(0, 16, 2) / 16)


def test_plain_and_linear_frequencies() -> None:
    inv_freq, factor = PLAIN.frequencies()
    np.testing.assert_allclose(inv_freq, BASE, rtol=1e-15)
    assert factor == 1.0
    inv_freq, _ = Rope(16, 1e4, scaling="linear", scale=4.0).frequencies()
    np.testing.assert_allclose(inv_freq, BASE / 4, rtol=1e-15)
    inv_freq, _ = Rope(8, 1e4).frequencies()
    np.testing.assert_allclose(inv_freq, 1e4 ** (-np.arange(0, 8, 2) / 8), rtol=1e-15)


def test_factors_divide() -> None:
    factors = (1.0, 1.0, 1.0, 1.5, 2.0, 8.0, 8.0, 8.0)
    inv_freq, _ = dataclasses.replace(PLAIN, factors=factors).frequencies()
    np.testing.assert_allclose(inv_freq, BASE / factors, rtol=1e-15)


def test_yarn_keeps_short_waves_and_stretches_long_ones() -> None:
    yarn = Rope(16, 1e4, scaling="yarn", scale=4.0, n_ctx_orig=4096)
    inv_freq, factor = yarn.frequencies()
    turns = 4096 * BASE / (2 * np.pi)  # within the original context
    np.testing.assert_allclose(inv_freq[turns > 64], BASE[turns > 64], rtol=1e-15)
    np.testing.assert_allclose(inv_freq[turns < 0.5], BASE[turns < 0.5] / 4, rtol=1e-15)
    assert np.all(np.diff(inv_freq) < 0)
    assert factor == pytest.approx(1 + 0.1 * np.log(4))
    inv_freq, factor = dataclasses.replace(yarn, yarn_ext_factor=0.0).frequencies()
    np.testing.assert_allclose(inv_freq, BASE / 4, rtol=1e-15)
    assert factor == 1.0


def test_long_factors_are_chosen_by_the_context() -> None:
    short = (1.0,) * 8
    long = (1.0, 1.1, 1.3, 1.7, 2.0, 3.0, 4.0, 4.0)
    rope = dataclasses.replace(PLAIN, factors=short, long_factors=long, n_ctx_orig=64)
    for n_ctx, factors in ((0, short), (64, short), (65, long)):
        inv_freq, _ = rope.frequencies(n_ctx)
        np.testing.assert_allclose(inv_freq, BASE / factors, rtol=1e-15)
        assert rope.has_long(n_ctx) == (factors is long)


def test_yarns_own_factor_may_be_taken_back() -> None:
    """Ministral 3: the logarithm above is divided by the same, times its multiplier."""
    yarn = Rope(16, 1e4, scaling="yarn", scale=16.0, n_ctx_orig=4096, yarn_log_multiplier=1.0)
    assert yarn.frequencies()[1] == 1.0
    _, factor = dataclasses.replace(yarn, yarn_log_multiplier=0.5).frequencies()
    assert factor == pytest.approx((1 + 0.1 * np.log(16)) / (1 + 0.05 * np.log(16)))
