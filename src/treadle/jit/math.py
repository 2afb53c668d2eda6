"""Elementary functions for kernels: vectors in, vectors out, no libm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.jit.types import i32

if TYPE_CHECKING:
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

LOG2_E = 1.4426950408889634
# ln 2 in two parts: the first has trailing zeros, so n * LN2_HIGH is exact for every n in range.
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.428606765330187e-06
# Taylor coefficients of (e**r - 1 - r) / r**2 up to r**5: on |r| <= ln(2)/2 the rest is below 3e-8.
EXP_TAIL = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2)
# Above 127.5 ln 2 = 88.37 the power's exponent field is that of infinity.
EXP_MIN, EXP_MAX = -87.0, 89.0
# 2**r on |r| <= 1/2: the polynomial of degree 6 with the least relative error, 1.9e-9.
EXP2 = (
    0.0001534581242594868,
    0.0013399930903688073,
    0.009618489071726799,
    0.05550328642129898,
    0.24022646248340607,
    0.6931471824645996,
    1.0,
)
EXP2_MIN = -125.0
WHOLE = 12582912.0  # 1.5 * 2**23: a float that this is added to is rounded to a whole number


def exp(k: Builder, x: Val) -> Val:
    """``e**x`` in f32 to about 1 unit in the last place; 0 below -87, infinity above 88.37, NaN for
    NaN.

    Cody and Waite's reduction, ``x = n ln 2 + r``, then a polynomial in r and n put into the
    exponent.
    """
    # x comes second: where it is NaN, so is the result.
    bounded = k.min(k.const(EXP_MAX, x.ty), k.max(k.const(EXP_MIN, x.ty), x))
    n = k.round(bounded * LOG2_E)
    r = k.fma(n, k.const(-LN2_HIGH, x.ty), bounded)
    r = k.fma(n, k.const(-LN2_LOW, x.ty), r)
    p = k.const(EXP_TAIL[0], x.ty)
    for c in EXP_TAIL[1:]:
        p = k.fma(p, r, k.const(c, x.ty))
    p = k.fma(p * r, r, r) + 1.0
    power = ((n.to(i32) + 127) << 23).bits(x.ty)
    return k.select(x < EXP_MIN, k.const(0.0, x.ty), p * power)


def exp2(k: Builder, x: Val) -> Val:
    """``2**x`` in f32 for x <= 0, to about 1 unit in the last place; NaN for NaN.

    Below -125 it stays at 2**-125: beside a sum of 1 or more, that is nothing.
    """
    bounded = k.max(k.const(EXP2_MIN, x.ty), x)  # x comes second: where it is NaN, so is the result
    rounded = bounded + WHOLE
    r = bounded - (rounded - WHOLE)
    p = k.const(EXP2[0], x.ty)
    for c in EXP2[1:]:
        p = k.fma(p, r, k.const(c, x.ty))
    # The whole number stands in the low bits of ``rounded``: from there into the exponent.
    bits = i32.like(x.ty)
    return (p.bits(bits) + (rounded.bits(bits) << 23)).bits(x.ty)


def sigmoid(k: Builder, x: Val) -> Val:
    """``1 / (1 + e**-x)``."""
    return 1.0 / (exp(k, -x) + 1.0)


def tanh(k: Builder, x: Val) -> Val:
    """``2 sigmoid(2x) - 1``: absolute error of about 1e-7."""
    return sigmoid(k, x * 2.0) * 2.0 - 1.0


def silu(k: Builder, x: Val) -> Val:
    """``x * sigmoid(x)``."""
    return x * sigmoid(k, x)


def gelu(k: Builder, x: Val) -> Val:
    """GELU's tanh form: ``x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x**3))``, which is the same
    function.
    """
    inner = x * k.fma(x * x, k.const(0.044715, x.ty), k.const(1.0, x.ty))
    return x * sigmoid(k, inner * 1.5957691216057308)
