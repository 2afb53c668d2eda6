"""Builders of numpy (de)quantisers from a format's ``read`` and ``write``.

``read`` unpacks blocks to numbers, ``write`` packs numbers into blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.formats.format import Blocks, Codes, F32Array, Format, Search
from treadle.formats.packing import join_bits, split_bits
from treadle.formats.rounding import to_f16

Numbers = npt.NDArray[Any]
Dequantize = Callable[[Blocks], F32Array]
Write = Callable[[Blocks, Any], None]


def scale(blocks: Blocks) -> F32Array:
    """Return the blocks' scale ``d`` as float32 [..., 1]."""
    d: F32Array = blocks["d"].astype(np.float32)[..., None]
    return d


def in_bits(bits: int, run: int) -> tuple[Callable[[Blocks], Numbers], Write]:
    """Return ``read`` and ``write`` of codes of ``bits`` bits, packed in ``qs`` in runs of ``run``
    (see packing.py).
    """

    def read(blocks: Blocks) -> Numbers:
        return split_bits(blocks["qs"], bits, run)

    def write(out: Blocks, found: Any) -> None:
        out["qs"] = join_bits(found.q, bits, run)

    return read, write


def with_scale(read: Callable[[Blocks], Numbers], offset: int = 0) -> Dequantize:
    """Return ``dequantize`` for blocks with one scale: ``w = d * (q - offset)``, plus ``m`` if the
    layout has it. ``read`` returns q [..., block].
    """

    def dequantize(blocks: Blocks) -> F32Array:
        q = read(blocks).astype(np.float32) - np.float32(offset)
        with np.errstate(invalid="ignore"):  # an infinite scale times a code of zero
            w: F32Array = q * scale(blocks)
            assert blocks.dtype.names is not None
            return w + blocks["m"].astype(np.float32)[..., None] if "m" in blocks.dtype.names else w

    return dequantize


def with_steps(
    read: Callable[[Blocks], tuple[Numbers, ...]], scale: Callable[[Blocks], F32Array] = scale
) -> Dequantize:
    """Return ``dequantize`` for blocks of n sub-blocks with a step each: ``w = d * step * y``,
    minus ``dmin * m`` if there are minimums.

    ``read`` returns steps [..., n], y [..., block], and m [..., n] if any; ``scale`` returns d
    [..., 1].
    """

    def dequantize(blocks: Blocks) -> F32Array:
        steps, y, *m = (a.astype(np.float32) for a in read(blocks))
        subs = y.reshape(*steps.shape, y.shape[-1] // steps.shape[-1])
        with np.errstate(invalid="ignore"):  # infinities times zero, and their differences
            w = (scale(blocks) * steps)[..., None] * subs
            for low in m:
                w = w - (blocks["dmin"].astype(np.float32)[..., None] * low)[..., None]
        return w.reshape(y.shape)

    return dequantize


@dataclass(frozen=True)
class Weighted:
    """The search for quantised blocks when importances are given, for a format whose values are
    otherwise rounded without a search.

    ``how``: a search over super-blocks, used here with one sub-block in each. ``numbers``: a
    function that converts its result to ``RoundedBlocks``.
    """

    how: Any
    numbers: Callable[[Any], Any]


def make_quantize(
    layout: np.dtype[Any], plain: Search, write: Write, weighted: Weighted | None = None
) -> Callable[..., Blocks]:
    """Return ``quantize``: float32 [..., block], and importances that broadcast to it, -> blocks
    [...] of ``layout`` of least (weighted) squared error.

    The search is ``plain``, or ``weighted`` if there are importances; a caller of ``quantize`` may
    pass another one. Its result for [n, block] has ``d`` [n], and ``dmin`` or ``m`` if the layout
    has them; ``write`` packs the other fields into n blocks.
    """

    def find(x: F32Array, weights: F32Array | None, search: Search | None) -> Any:
        if weights is None or weighted is None:
            return (search or plain)(x, weights)
        return weighted.numbers((search or weighted.how.run)(x, weights))

    def quantize(
        x: F32Array, weights: F32Array | None = None, search: Search | None = None
    ) -> Blocks:
        out = np.empty(x.shape[:-1], layout)
        if not out.size:
            return out
        if weights is not None:
            weights = np.ascontiguousarray(np.broadcast_to(weights, x.shape))
            weights = weights.reshape(-1, x.shape[-1])
        found = find(x.reshape(-1, x.shape[-1]), weights, search)
        flat = out.reshape(-1)
        for name in {"d", "dmin", "m"} & set(layout.names or ()):
            flat[name] = to_f16(getattr(found, name))
        write(flat, found)
        return out

    return quantize


def one_scale(
    name: str,
    ggml_id: int,
    block: int,
    layout: np.dtype[Any],
    read: Callable[[Blocks], Numbers],
    write: Write,
    search: Search,
    codes: Codes,
    offset: int = 0,
    weighted: Weighted | None = None,
) -> Format:
    """Return a format whose blocks have one scale, and perhaps a minimum. ``read``, ``offset``: see
    ``with_scale``; ``search``, ``weighted``, ``write``: see ``make_quantize``.
    """
    dequantize = with_scale(read, offset)
    quantize = make_quantize(layout, search, write, weighted)
    result = Format(name, ggml_id, block, layout, dequantize, quantize, "q8", codes)
    if weighted is None:
        return result
    return replace(result, search=weighted.how, rounds=True, aware=True)


def super_blocks(
    name: str,
    ggml_id: int,
    layout: np.dtype[Any],
    read: Callable[[Blocks], tuple[Numbers, ...]],
    write: Write,
    search: Any,
    codes: Codes,
    scale: Callable[[Blocks], F32Array] = scale,
) -> Format:
    """Return a format of 256 weights in sub-blocks with a step each. ``read``, ``scale``: see
    ``with_steps``; ``write``: see ``make_quantize``; ``search.run`` is the search.
    """
    dequantize = with_steps(read, scale)
    quantize = make_quantize(layout, search.run, write)
    made = Format(name, ggml_id, 256, layout, dequantize, quantize, "q8", codes)
    return replace(made, search=search, aware=True)
