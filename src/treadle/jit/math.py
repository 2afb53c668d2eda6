"""Elementary functions for kernels: vectors in, vectors out, no libm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from treadle.jit.language import Builder, Val
from treadle.jit.types import i32

LOG2_E = 1.4426950408889634
# ln 2 in two parts. The first has trailing zeros, so n * LN2_HIGH is exact for every n in range.
LN2_HIGH = 0.693145751953125
LN2_LOW = 1.428606765330187e-06
# e**r on |r| <= ln(2) / 2: the degree-6 polynomial with f32 coefficients, ending in r + 1, of least
# relative error, 3.1e-9.
EXP = (
    0.0013820661697536707,
    0.008368674665689468,
    0.04166826605796814,
    0.1666652113199234,
    0.4999999403953552,
    1.0,
    1.0,
)
# Above 127.5 ln 2 = 88.37 the exponent field of the power is that of infinity.
EXP_MIN = -87.0
EXP_MAX = 89.0
# 2**r on |r| <= 1/2: the degree-6 polynomial of least relative error, 1.9e-9.
EXP2 = (
    0.0001534581242594868,
    0.0013399930903688073,
    0.009618489071726799,
    0.05550328642129898,
    0.24022646248340607,
    0.6931471824645996,
    1.0,
)
# The same of degree 4, error 2.9e-6: for results that are rounded to 16 bits.
EXP2_SHORT = (
    0.009582852944731712,
    0.055906426161527634,
    0.24024099111557007,
    0.6931241750717163,
    1.0,
)
EXP2_MIN = -127.0  # exponent field and fraction are 0 here: exactly 0.0
# Coefficients for gelu_erf, of u**9 to u.
TAIL = (
    0.030504804104566574,
    -0.15282846987247467,
    0.25149062275886536,
    -0.15094828605651855,
    0.16094744205474854,
    0.05102783814072609,
    0.10303021967411041,
    0.10301675647497177,
    0.10375905781984329,
)
GELU_FAR = 1e6  # the tail probability is 0 beyond it
QUICK = 1.702  # of CLIP's approximation of GELU
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0
ATANH = tuple(2 / n for n in range(15, 0, -2))  # coefficients of s**14 to 1: 2 artanh(s) / s
# tanh(x) / x in x**2, highest power (the fifth) first: below TANH_NEAR its error is 2e-9.
TANH = (-1382 / 155925, 62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0)
TANH_NEAR = 0.3
WHOLE = 12582912.0  # 1.5 * 2**23: adding it rounds a float to a whole number


def polynomial(k: Builder, x: Val, coefficients: Sequence[float]) -> Val:
    """Return a polynomial in ``x``, by Horner's rule. The coefficient of the highest power comes
    first.
    """
    return reduce(
        lambda p, c: k.fma(p, x, k.const(c, x.ty)), coefficients[1:], k.const(coefficients[0], x.ty)
    )


def exp(k: Builder, x: Val) -> Val:
    """Return ``e**x`` in f32 to about 1 unit in the last place; 0 below -87, infinity above 88.37,
    NaN for NaN.
    """
    return k.select(x < EXP_MIN, k.const(0.0, x.ty), _exp_within(k, x, EXP_MAX))


def _exp_within(k: Builder, x: Val, most: float) -> Val:
    """Return ``e**x`` for EXP_MIN <= x <= ``most``; x outside is clamped.

    Cody and Waite's reduction, ``x = n ln 2 + r``, then a polynomial in r, with n added to the
    exponent.
    """
    # x comes second, so that NaN gives NaN.
    bounded = k.min(k.const(most, x.ty), k.max(k.const(EXP_MIN, x.ty), x))
    rounded = k.fma(bounded, k.const(LOG2_E, x.ty), k.const(WHOLE, x.ty))
    n = rounded - WHOLE
    r = k.fma(n, k.const(-LN2_HIGH, x.ty), bounded)
    r = k.fma(n, k.const(-LN2_LOW, x.ty), r)
    p = polynomial(k, r, EXP)
    # The low bits of ``rounded`` are n; shift them into the exponent.
    power = (rounded.bits(i32.like(x.ty)) << 23) + (127 << 23)
    return p * power.bits(x.ty)


def exp2(k: Builder, x: Val, coefficients: Sequence[float] = EXP2) -> Val:
    """Return ``2**x`` in f32 for x <= 0, to about 1 unit in the last place; NaN for NaN.
    ``coefficients``: of the polynomial for the fraction; a shorter one is faster and less accurate.

    Exactly 0 from -127 down to -infinity: a masked key must add nothing to a sum, since even
    2**-125 could decide a rounding tie. Between -126 and -127 the error is below 2**-126.
    """
    bounded = k.max(k.const(EXP2_MIN, x.ty), x)  # x comes second, so that NaN gives NaN
    rounded = bounded + WHOLE
    r = bounded - (rounded - WHOLE)
    p = polynomial(k, r, coefficients)
    # The low bits of ``rounded`` are the whole number; shift them into the exponent.
    bits = i32.like(x.ty)
    return (p.bits(bits) + (rounded.bits(bits) << 23)).bits(x.ty)


def sigmoid(k: Builder, x: Val) -> Val:
    """Return ``1 / (1 + e**-x)``; exactly 0 for x below -87."""
    # Kept finite: a reciprocal refined by multiplications would turn infinity into NaN.
    near = k.isa.reciprocal(k, _exp_within(k, -x, -EXP_MIN) + 1.0)
    return k.select(x < EXP_MIN, k.const(0.0, x.ty), near)


def tanh(k: Builder, x: Val) -> Val:
    """Return ``2 sigmoid(2x) - 1``, with an absolute error of about 1e-7."""
    return sigmoid(k, x * 2.0) * 2.0 - 1.0


def exact_tanh(k: Builder, x: Val) -> Val:
    """Return tanh to a few units in the last place, near 0 as well; NaN for NaN."""
    near = x * polynomial(k, x * x, TANH)
    return k.select(k.abs(x) < TANH_NEAR, near, tanh(k, x))


def softplus(k: Builder, x: Val) -> Val:
    """Return ``log(1 + e**x)``, to about 4 units in the last place; NaN for NaN.

    It is ``max(x, 0) + log(1 + u)`` with ``u = e**-|x|``. The logarithm is ``2 artanh(s)`` with ``s
    = u / (2 + u)`` <= 1/3; its series up to s**15 has a relative error below 2e-9.
    """
    u = exp(k, -k.abs(x))
    s = u / (u + 2.0)
    series = polynomial(k, s * s, ATANH)
    return k.fma(s, series, k.max(k.const(0.0, x.ty), x))  # x comes second, so that NaN gives NaN


def silu(k: Builder, x: Val) -> Val:
    """Return ``x * sigmoid(x)``."""
    return x * sigmoid(k, x)


def gelu(k: Builder, x: Val) -> Val:
    """Return GELU's tanh form, written as ``x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x**3))``, which
    is equal.
    """
    twice = 1.5957691216057308  # 2 sqrt(2 / pi)
    return x * sigmoid(k, x * k.fma(x * x, k.const(0.044715 * twice, x.ty), k.const(twice, x.ty)))


def gelu_quick(k: Builder, x: Val) -> Val:
    """Return CLIP's approximation of GELU: ``x * sigmoid(1.702 x)``."""
    return x * sigmoid(k, x * QUICK)


def gelu_erf(k: Builder, x: Val) -> Val:
    """Return exact GELU: ``x`` times the normal distribution's cumulative probability at x.

    The tail beyond |x| is ``e**(-x**2 / 2)`` times a polynomial in ``u = 1 / (1 + 0.26 |x|)``
    (Hastings, 1955): degree 9, least relative error, 2.5e-8 for |x| < 14.
    """
    # Kept finite: a reciprocal refined by multiplications would turn infinity into NaN.
    near = k.min(k.const(GELU_FAR, x.ty), k.abs(x))  # x comes second, so that NaN gives NaN
    u = k.isa.reciprocal(k, near * 0.26 + 1.0)
    p = polynomial(k, u, TAIL)
    beyond = exp(k, x * x * -0.5) * (p * u)
    return x * k.select(x < 0.0, beyond, 1.0 - beyond)


def relu(k: Builder, x: Val) -> Val:
    """Return ``max(0, x)``; NaN for NaN."""
    return k.max(k.const(0.0, x.ty), x)  # x comes second, so that NaN gives NaN


def relu2(k: Builder, x: Val) -> Val:
    """Return ``max(0, x)**2``; NaN for NaN."""
    above = relu(k, x)
    return above * above


def silu_clamped(k: Builder, x: Val) -> Val:
    """Return gpt-oss's gate: ``x * sigmoid(1.702 x)`` with x clamped to at most 7."""
    x = k.min(k.const(SWIGLU_LIMIT, x.ty), x)  # x comes second, so that NaN gives NaN
    return x * sigmoid(k, x * SWIGLU_ALPHA)


def clamped_plus_one(k: Builder, x: Val) -> Val:
    """Return ``x + 1`` with x clamped to -7..7 (gpt-oss's up)."""
    x = k.max(k.const(-SWIGLU_LIMIT, x.ty), k.min(k.const(SWIGLU_LIMIT, x.ty), x))
    return x + 1.0
