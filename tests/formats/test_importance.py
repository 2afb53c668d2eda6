"""Importances: which formats heed them, and what they buy there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from treadle.devices.cpu.weight_quantizer import quantize_rows
from treadle.formats import FORMATS, Format

F32Array = npt.NDArray[np.float32]

AWARE = [fmt for fmt in FORMATS.values() if fmt.aware]
UNAWARE = [fmt for fmt in FORMATS.values() if not fmt.aware]
BY_NUMPY: Callable[..., npt.NDArray[np.uint8]] = Format.quantize_rows


def of(formats: list[Format]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fmt", formats, ids=lambda fmt: fmt.name)


def sample(seed: int, n_rows: int = 16) -> tuple[F32Array, F32Array]:
    """Rows of 256 weights, and columns of which few matter much, as in a trained model."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n_rows, 256)).astype(np.float32) * np.float32(0.02)
    return x, rng.gamma(0.5, size=256).astype(np.float32)


def weighted_error(fmt: Format, packed: npt.NDArray[np.uint8], x: F32Array, w: F32Array) -> float:
    off = fmt.dequantize_rows(packed).astype(np.float64) - x
    return float((off**2 * w).sum())


def test_which_formats_heed_them() -> None:
    names = {fmt.name for fmt in UNAWARE}
    assert names == {
        *("F32", "F16", "BF16", "F64", "Q8_0"),
        *("TQ1_0", "TQ2_0", "Q1_0", "Q2_0"),  # for weights that have as few values
    }


@pytest.mark.slow
@of(AWARE)
@pytest.mark.parametrize("quantize", [BY_NUMPY, quantize_rows], ids=["numpy", "kernel"])
def test_they_change_blocks_and_lower_the_weighted_error(
    fmt: Format, quantize: Callable[..., npt.NDArray[np.uint8]]
) -> None:
    x, w = sample(1)
    plain = quantize(fmt, x)
    aware = quantize(fmt, x, w)
    assert not np.array_equal(plain, aware)
    ratio = weighted_error(fmt, aware, x, w) / weighted_error(fmt, plain, x, w)
    assert ratio < (0.99 if fmt.name == "MXFP4" else 0.95), ratio  # whose scales are powers of 2


@of(UNAWARE)
def test_elsewhere_they_change_nothing(fmt: Format) -> None:
    x, w = sample(2)
    assert np.array_equal(fmt.quantize_rows(x), fmt.quantize_rows(x, w))


@pytest.mark.slow
@of([fmt for fmt in AWARE if fmt.block < 256])
def test_a_kernel_is_as_good_as_numpy(fmt: Format) -> None:
    x, w = sample(3, 64)
    for weights in (None, w):
        by_numpy = weighted_error(fmt, fmt.quantize_rows(x, weights), x, w)
        by_kernel = weighted_error(fmt, quantize_rows(fmt, x, weights), x, w)
        assert by_kernel < by_numpy * 1.001
        if weights is None and fmt.rounds:
            assert np.array_equal(fmt.quantize_rows(x), quantize_rows(fmt, x))


@of([fmt for fmt in AWARE if fmt.block < 256])
def test_only_their_ratios_count(fmt: Format) -> None:
    x, w = sample(4)
    assert np.array_equal(fmt.quantize_rows(x, w), fmt.quantize_rows(x, w * np.float32(2**20)))


def least_error_of_q4_0(x: np.ndarray, w: np.ndarray) -> float:
    """By trying some thousand scales of either sign for each block."""
    best = np.full(len(x), np.inf)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    for code in np.arange(3, 14, 0.01):
        for d in (largest / code, -largest / code):
            q = np.rint(x / d).clip(-8, 7)
            fitted = (w * x * q).sum(-1) / np.maximum((w * q * q).sum(-1), 1e-30)
            best = np.minimum(best, (w * (x - fitted[:, None] * q) ** 2).sum(-1))
    return float(best.sum())


def test_q4_0_is_near_the_best_there_is() -> None:
    fmt = next(fmt for fmt in AWARE if fmt.name == "Q4_0")
    x, w = sample(5)
    found = weighted_error(fmt, fmt.quantize_rows(x, w), x, w)
    every = np.broadcast_to(w, x.shape).reshape(-1, 32).astype(np.float64)
    assert found < 1.02 * least_error_of_q4_0(x.reshape(-1, 32).astype(np.float64), every)


@pytest.mark.slow
@of([fmt for fmt in AWARE if fmt.block < 256])
@pytest.mark.parametrize("offset", [0.0, 1.0, -1.0])
def test_blocks_far_from_zero_of_one_value_or_of_none(fmt: Format, offset: float) -> None:
    x, w = sample(6)
    x[0] = 0
    x[1] = 0.375
    x[2] += np.float32(offset)
    w[:64] = 0
    y = fmt.dequantize_rows(quantize_rows(fmt, x, w))
    assert (y[0] == 0).all()
    assert np.abs(y[1] - 0.375).max() < 0.375 * 2.0**-3
    step = np.abs(x[2]).max() / 4
    assert np.abs(y - x)[2:].max() < 2 * step
