"""Checks that every weight is a finite number, on the raw bytes of any format."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.formats import Format

Flags = npt.NDArray[np.bool_]
CHECKED_WEIGHTS = 1 << 20  # weights checked at a time


def is_finite(fmt: Format, data: npt.NDArray[np.uint8], k: int) -> bool:
    """Return whether all weights of ``data`` (uint8, whole blocks) are finite, no infinities or
    NaNs.

    ``k``: weights per row. In a format whose rows have scales of their own, ``data`` are whole
    rows.
    """
    return find_nonfinite(fmt, data, k) < 0


def find_nonfinite(fmt: Format, data: npt.NDArray[np.uint8], k: int) -> int:
    """Return the index of the first block with a weight that is not finite; -1 if there is none.
    Arguments as ``is_finite``'s.
    """
    rows = data.reshape(-1, fmt.row_bytes(k)) if fmt.head else data.reshape(-1)
    blocks = fmt.blocks_of(rows).reshape(-1)
    step = max(1, CHECKED_WEIGHTS // fmt.block)
    for begin in range(0, len(blocks), step):
        good = _finite(fmt, blocks[begin : begin + step])
        if not good.all():
            return begin + int(good.argmin())
    return -1


def nonfinite_message(fmt: Format, block: int, k: int) -> str:
    """Return a message about the non-finite weight in block number ``block`` of a tensor with rows
    of ``k`` weights.
    """
    row, column = divmod(block * fmt.block, k)
    what = "holds a weight that is" if fmt.block == 1 else "has a block whose scale is"
    return f"{what} not finite, in row {row}, column {column}"


def _finite(fmt: Format, blocks: npt.NDArray[Any]) -> Flags:
    """Return a flag per block, bool [n]: all its weights are finite. Codes are always finite, so a
    block is if its scales are.
    """
    fields = fmt.whole.fields
    if fields is None:
        floats = blocks if fmt.dtype.kind == "f" else fmt.dequantize(blocks)
        return _every(np.isfinite(floats), len(blocks))
    good = np.ones(len(blocks), np.bool_)
    for name, (dtype, *_) in fields.items():
        if dtype.base.kind == "f":
            good &= _every(np.isfinite(blocks[name]), len(blocks))
    return good


def _every(flags: Flags, n: int) -> Flags:
    return np.asarray(flags.reshape(n, -1).all(axis=1)) if n else np.ones(0, np.bool_)
