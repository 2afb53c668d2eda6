"""Per-head matrices ``k_b`` and ``v_b`` of latent attention, cut from a file's ``kv_b``.

The rows of ``kv_b`` are grouped by head: the first of each make its key, the last its value.
Queries are multiplied by the first, transposed (``k_b``), and attention's result by the last
(``v_b``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.formats import by_name

if TYPE_CHECKING:
    from treadle.files.tensor import Bytes, Tensor
    from treadle.formats import Format

F16_MOST = 65504.0


def cut_heads(whole: Tensor, fmt: Format, n_head: int, n_nope: int) -> tuple[Tensor, Tensor]:
    """Return ``k_b`` and ``v_b``, in memory; ``n_nope``: rows of a head that make its key.

    Values keep their format, and so do keys whose format stores each weight by itself. Blocks lie
    along rows, so transposed blocks are converted to F16, whose 11 bits exceed those of the codes.
    """
    rows = fmt.join(whole.arrays).reshape(n_head, whole.shape[0] // n_head, -1)
    made = []
    for name, part, turned in (
        ("k_b", rows[:, :n_nope], True),
        ("v_b", rows[:, n_nope:], False),
    ):
        to = fmt
        part = np.ascontiguousarray(part)
        if len(whole.arrays) > 1 or (turned and fmt.block > 1):
            to, part = _numbers(fmt, part)
        if turned:
            part = np.ascontiguousarray(part.view(to.dtype).swapaxes(1, 2)).view(np.uint8)
        shape = (*part.shape[:2], part.shape[2] // to.dtype.itemsize * to.block)
        part.flags.writeable = False
        made.append(whole.made(whole.name.replace("kv_b", name), shape, to, part.reshape(-1)))
    keys, values = made
    return keys, values


def _numbers(fmt: Format, rows: Bytes) -> tuple[Format, Bytes]:
    """Convert to F16, or to F32 if the values exceed F16's range."""
    floats = fmt.dequantize_rows(rows)
    to = by_name("F16" if np.abs(floats).max() <= F16_MOST else "F32")
    return to, to.quantize_rows(floats)
