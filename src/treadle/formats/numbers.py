"""Blocks in numpy: what reading and writing them has in common, whatever the format.

A format says which numbers its bits are (``read``), and puts numbers into its bits (``write``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_dataclass import dataclass
from treadle.formats.format import Blocks, Codes, F32Array, Format, Search
from treadle.formats.packing import join_bits, split_bits
from treadle.formats.rounding import to_f16

Numbers = npt.NDArray[Any]
Dequantize = Callable[[Blocks], F32Array]
Write = Callable[[Blocks, Any], None]


def scale(blocks: Blocks) -> F32Array:
    """``d``, float32 [..., 1]."""
    d: F32Array = blocks["d"].astype(np.float32)[..., None]
    return d


def in_bits(bits: int, run: int) -> tuple[Callable[[Blocks], Numbers], Write]:
    """``read`` and ``write`` of codes ``q`` that lie in ``qs`` as packing.py has them."""

    def read(blocks: Blocks) -> Numbers:
        return split_bits(blocks["qs"], bits, run)

    def write(out: Blocks, found: Any) -> None:
        out["qs"] = join_bits(found.q, bits, run)

    return read, write


def with_scale(read: Callable[[Blocks], Numbers], offset: int = 0) -> Dequantize:
    """``dequantize`` where a block has one scale: ``w = d * (q - offset)``, plus ``m`` if there is
    one. ``read`` gives q [..., block].
    """

    def dequantize(blocks: Blocks) -> F32Array:
        q = read(blocks).astype(np.float32) - np.float32(offset)
        with np.errstate(invalid="ignore"):  # a scale of infinity times a quant of zero
            w: F32Array = q * scale(blocks)
            assert blocks.dtype.names is not None
            return w + blocks["m"].astype(np.float32)[..., None] if "m" in blocks.dtype.names else w

    return dequantize


def with_steps(
    read: Callable[[Blocks], tuple[Numbers, ...]], scale: Callable[[Blocks], F32Array] = scale
) -> Dequantize:
    """``dequantize`` where each of n sub-blocks has a step: ``w = d * step * y``, less ``dmin * m``
    if there are minimums. ``read`` gives steps [..., n], y [..., block], and m [..., n] if any.
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
    """A search for formats that without importances only round.

    ``how`` is a search over super-blocks, each here of one sub-block; ``numbers`` makes blocks as
    numbers of what it finds.
    """

    how: Any
    numbers: Callable[[Any], Any]


def searched(
    layout: np.dtype[Any], plain: Search, write: Write, weighted: Weighted | None = None
) -> Callable[..., Blocks]:
    """``quantize`` by a search: float32 [..., block], and weights that broadcast to it, -> blocks
    [...] of least squared error, times the weights if given.

    What ``plain``, and with weights ``weighted``, finds for [n, block] has ``d`` [n], and ``dmin``
    or ``m`` if the layout has one; ``write`` puts the rest into n blocks. A caller may bring a
    search of its own that finds these.
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
        found, flat = find(x.reshape(-1, x.shape[-1]), weights, search), out.reshape(-1)
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
    """A format whose blocks have one scale: see ``with_scale`` and ``searched``."""
    dequantize, quantize = with_scale(read, offset), searched(layout, search, write, weighted)
    made = Format(name, ggml_id, block, layout, dequantize, quantize, "q8", codes)
    if weighted is None:
        return made
    return replace(made, search=weighted.how, rounds=True, aware=True)


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
    """A format of 256 weights in sub-blocks with a step each: see ``with_steps``, ``searched``.
    ``search.run`` is the search.
    """
    dequantize, quantize = with_steps(read, scale), searched(layout, search.run, write)
    made = Format(name, ggml_id, 256, layout, dequantize, quantize, "q8", codes)
    return replace(made, search=search, aware=True)
