"""Latent attention's two matrices of each head, made of the one that a file has.

Rows of ``kv_b`` are a head's, one head after another: the first make its key, the last its value.
Queries are multiplied by the first, turned (``k_b``); what attention gives, by the last (``v_b``).
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
    """``k_b`` and ``v_b``, in memory; ``n_nope``: rows of a head that make its key.

    Values keep their format. Keys keep it where a weight is a number by itself. Blocks lie along
    rows, so what is turned leaves them: it becomes F16, whose 11 bits are more than codes have.
    """
    rows = fmt.join(whole.arrays).reshape(n_head, whole.shape[0] // n_head, -1)
    made = []
    for name, part, turned in (
        ("k_b", rows[:, :n_nope], True),
        ("v_b", rows[:, n_nope:], False),
    ):
        to, part = fmt, np.ascontiguousarray(part)
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
    """In F16, or in F32 where that ends too soon."""
    floats = fmt.dequantize_rows(rows)
    to = by_name("F16" if np.abs(floats).max() <= F16_MOST else "F32")
    return to, to.quantize_rows(floats)
