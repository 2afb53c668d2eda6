"""Bounds of the kernels' rounding errors, derived from how each kernel adds.

With u = 2**-24, a sum in chains of c additions is off by at most about ``c u`` times the sum of
magnitudes (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, chapter 4). A bound is
for one element, from the inputs of the kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.kernels.activation_layout import (
    BLOCK,
    BYTE_TOP,
    BYTES,
    BYTES_TOP,
    NARROW,
    SPAN,
    SPANNED,
    WORD_LENGTH,
    WORD_MOST,
    WORD_TOP,
    ActivationLayout,
)
from treadle.kernels.activations import split_limit
from treadle.kernels.matmul.gemv import Gemv

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.kernels.elementwise.column_norm import ColumnNorm
    from treadle.kernels.elementwise.elementwise import Norm
    from treadle.kernels.matmul.matmul import Matmul

U32 = 2.0**-24  # unit roundoff of f32
U16 = 2.0**-9  # unit roundoff of bf16
TINY = 1e-37  # below it f32 has fewer bits

# e**y is good to 2 u of its own plus, where the machine has no FMA, the reduction's; then 1 +, 1 /,
# and two products. GELU's inner polynomial is rounded before the exponential: |y| <= 87 times 3 u;
# that of the error function, y**2 / 2 <= 87, once, and P adds 16.
ACTIVATION_ERROR = {
    "copy": 0.0,
    "silu": 10 * U32,
    "gelu": (10 + 3 * 87) * U32,
    "gelu_quick": (10 + 2 * 87) * U32,  # 1.702, and its product, are rounded
    "gelu_erf": (26 + 2 * 87) * U32,
    "relu": 0.0,
    "relu2": U32,
}
OTHER_ACTIVATION = (26 + 3 * 87) * U32  # the largest of these
# The twin's 1 + tanh cancels for negative y, where the kernel's sigmoid does not.
TWIN_ERROR = 2.0**-53
SLOPE = 1.13  # the largest slope of an activation but the square of relu


def activation_error(fn: str) -> float:
    """Return the relative error of the activation function ``fn``, or of a gated one."""
    return ACTIVATION_ERROR.get(split_limit(fn)[0], OTHER_ACTIVATION) + 2 * U32


def sum_chain(k: int, isa: Isa) -> int:
    """Return the largest number of additions in sequence that one value passes through in the sum
    of a row of ``k`` values.
    """
    chain = -(-k // (4 * isa.lanes)) + 2 + isa.lanes.bit_length()
    # By a block: those of a thread's vectors, of its lanes, of the warp's values, of the warps.
    return max(chain, 4 + 2 + 5 + 16) if isa.simt else chain


def norm_error(k: int, isa: Isa) -> float:
    """Return the relative error of one value of a norm over ``k`` values: half of the mean square's
    error, then that of eps, the square root, the reciprocal and two products.
    """
    return (sum_chain(k, isa) / 2 + 8) * U32


def centring_error(spec: Norm | ColumnNorm, isa: Isa, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return the error that subtracting the mean (LayerNorm) adds to each value of rows ``x``,
    float64 ``[.., k]``; zeros for a norm without it. ``w``: the norm's weights.

    The mean is off by ``e``: the bound of the sum's chain, times the mean magnitude. Each value is
    off by ``e`` and one rounding, and the variance by twice the mean product of that and the
    distance from the mean.
    """
    if not spec.centred:
        return np.zeros_like(x)
    e = (sum_chain(spec.k, isa) + 2) * U32 * np.abs(x).mean(-1, keepdims=True)
    d = np.abs(x - x.mean(-1, keepdims=True))
    each = e + U32 * d
    var = (d**2).mean(-1, keepdims=True) + spec.eps
    off = (each * d).mean(-1, keepdims=True) / var + (each**2).mean(-1, keepdims=True) / var
    bound: np.ndarray = (each + d * off) / np.sqrt(var) * np.abs(w)
    return bound


def stored_error(
    act: ActivationLayout,
    exact: np.ndarray,
    relative: float,
    absolute: np.ndarray | float = TINY,
) -> np.ndarray:
    """Return how far activations stored in the layout ``act`` may be from ``exact [n, k]``, float64
    ``[n, k]``. The kernel's values have a ``relative`` and an ``absolute`` error before they are
    stored; the rounding of the layout's kind is added.
    """
    n = len(exact)
    tolerance: np.ndarray = np.abs(exact) * relative + absolute
    if not n:
        return tolerance
    if act.kind in NARROW:  # what is left of 2**-9 of it is rounded to 2**-9, and so on
        tolerance += np.abs(exact) * 2.0 ** (1 - 9 * NARROW[act.kind]) * (1 + relative) + 2.0**-126
    if act.kind in BYTES:
        most = BYTE_TOP[act.kind]
        top = np.abs(exact).reshape(n, -1, BLOCK).max(-1, keepdims=True)
        step = np.broadcast_to(top / most, (n, act.kb, BLOCK)).reshape(n, -1)
        # d and 127 / max are each rounded twice: 127 quants of 4 u each, beside the half step.
        tolerance += step * (0.5 + most * (4 * U32 + relative))
    if act.kind in SPANNED:
        padded = np.zeros((n, act.kb * SPAN))
        padded[:, : act.k] = np.abs(exact)
        spans = padded.reshape(n, -1, SPAN)
        top = spans.max(-1)
        if act.kind == "q16n":
            length = np.maximum(np.linalg.norm(spans, axis=-1), top * (WORD_LENGTH / WORD_MOST))
            tolerance += (length / WORD_LENGTH).repeat(SPAN, -1)[:, : act.k] * (0.5 + 2.0**-8)
        else:
            most = BYTES_TOP if act.kind == "q16x2" else WORD_TOP
            step = (top / most).repeat(SPAN, -1)[:, : act.k]
            tolerance += step * (0.5 + most * (4 * U32 + relative))
    return tolerance


def product_error(
    spec: Matmul,
    x: np.ndarray,
    weights: np.ndarray,
    raw: np.ndarray,
    added: np.ndarray | float = 0.0,
) -> np.ndarray:
    """Return a bound of the error of each product, ``[n, m]``, of activations ``x [n, k]``, as
    stored, and weights, float64 ``[m, k]``. ``raw``: the weights' bytes ``[m, row_bytes]``;
    ``added``: the magnitudes of bias and residual.

    A sum of terms is off by u times the longest chain of additions, times the sum of magnitudes:

    - q8: a term is a block: an exact integer (below 2**24; of q8x2 below 2**28, and rounded once
      more) times d_w d_x, rounded once. Blocks are added in a chain, in gemv also across 8 lanes; a
      sum starts from the compensation ``offset * sum(x)``. A minimum adds a term and two roundings
      to each block.
    - floats: gemm adds K products in a chain; gemv has shorter chains.
    - bf16, for weights of another format: they are rounded to bf16 first, as in the twin, but from
      an f32 that may differ in its last bit. One in some ten thousand then becomes the next bf16,
      at most 2**-8 off; three in each product are allowed for.
    - q16, q16x2: a term is a span, and its words are the twin's.
    - q16n: the twin multiplies the file's weights, of which each word is off by half a unit.
    - q16 in gemv: the weights are the file's; eight blocks are a chain, which the span's scale
      multiplies; then lanes are added up.

    Bias and residual are added last.

    Where a block has scales of its own (``Codes.scales``), the magnitudes of code, offset and
    minimum are bounded by those of the weights. Some codes of a quantised block are near the end of
    their range (else a smaller scale would do). So offset and minimum are about as large as the
    block's largest weight at most, and code and offset or minimum together are below three times
    that. Of 32 weights in two sub-blocks of 16 the larger one counts; of a larger group with one
    scale, the largest weight of the group.
    """
    layout = spec.layout()
    x = np.abs(x)
    m = len(weights)
    codes = spec.fmt.codes
    chain = spec.k
    if isinstance(spec, Gemv) and spec.act == "q16":
        chain = layout.kb + SPAN // BLOCK + 8
    elif spec.act in SPANNED:
        chain = layout.kb + 8
    elif spec.act in BYTES:
        chain = (2 if codes and codes.has_m else 1) * layout.ks + 8 + (spec.act == "q8x2")
    values = np.abs(weights)
    rounded = spec.act == "bf16" and spec.fmt.act != "bf16"  # the weights are none yet
    largest: Any = 3 * 2.0**-8 * np.outer(x.max(-1), values.max(-1)) if rounded else 0.0
    if spec.act == "q16n":
        largest = _half_words(x, values)
    elif spec.act in ("q16", "q16x2"):
        pass
    elif codes and codes.scales:
        group = spec.fmt.block if spec.fmt.parts else 32
        top = values.reshape(m, -1, group).max(-1).repeat(group, -1)
        values = values + 3 * top
    elif codes:
        blocks = raw.reshape(-1).view(spec.fmt.dtype).reshape(m, -1)
        fields = {name: np.abs(blocks[name].astype(np.float64)) for name in ("d", codes.m) if name}
        per_block = fields["d"] * 2 * codes.offset + (2 * fields[codes.m] if codes.m else 0)
        values = values + per_block.repeat(32, -1)
    # Two bf16 each: three chains, without the product of what is below 2**-9 of either. Three: six,
    # without products of what is below 2**-9 of one and 2**-18 of the other.
    left_out, chains = {"bf16x2": (2.0**-18, 3), "bf16x3": (2.0**-25, 6)}.get(spec.act, (0.0, 1))
    sizes = x @ values.T
    total = sizes * ((chains * chain + 4) * U32 + left_out) + largest
    made: np.ndarray = total + 2 * U32 * added + 2 * U32 * sizes
    return made


def _half_words(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the largest error of products ``[n, m]`` of magnitudes ``x [n, k]`` and ``weights [m,
    k]``, if each weight is off by half a unit of its q16n word.
    """
    missing = (0, 0), (0, -x.shape[1] % SPAN)
    tokens, rows = (np.pad(a, missing).reshape(len(a), -1, SPAN) for a in (x, weights))
    length = np.maximum(np.linalg.norm(rows, axis=-1), rows.max(-1) * (WORD_LENGTH / WORD_MOST))
    return np.asarray(tokens.sum(-1) @ length.T * (0.5 / WORD_LENGTH) * (1 + 2.0**-15))


def gated_error(
    fn: str,
    gate: np.ndarray,
    up: np.ndarray,
    value: np.ndarray,
    result: np.ndarray,
    errors: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    """Return the error of ``result = value * up``, where ``value = fn(gate)``. ``errors``: those of
    gate and up. All arrays have one shape.
    """
    off_gate, off_up = errors
    slope: Any = 2 * (np.abs(gate) + off_gate) if fn.startswith("relu2") else SLOPE
    off = slope * off_gate * (np.abs(up) + off_up + 1.0 * (fn == "swiglu_clamped"))
    made: np.ndarray = off + np.abs(value) * off_up + 16 * U32 * np.abs(result)
    return made


def rotation_error(dims: int, *, hadamard: bool = False) -> float:
    """Return the error of a normed and rotated head of ``dims`` values, as a share of its largest
    value.

    Norm: the bound of the mean square's chain, halved by the root, and six products; a turn adds
    three roundings of two terms. ``hadamard``: the head is multiplied by a Hadamard matrix as well,
    which may gather the errors of all dims in one.
    """
    error = ((dims / 8 + 12) / 2 + 10) * U32
    return float(np.sqrt(dims) * (error + (np.log2(dims) + 2) * U32)) if hadamard else error
