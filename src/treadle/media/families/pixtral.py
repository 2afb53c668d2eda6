"""Pixtral, Mistral Small 3.x, Ministral 3 (``pixtral``): a picture in its own shape; a mark of the
text ends each row of it.
"""

from __future__ import annotations

import math

from treadle.media.tiles import Size, check_rows


def scaled_size(size: Size, longest: int, step: int, max_rows: int | None) -> Size:
    """Return the size that the tower sees: at most ``longest`` pixels a side, in multiples of
    ``step`` (rounded up), which is a media row's side, and at most ``max_rows`` of these.

    Raises TreadleError if ``max_rows`` is less than one row or one column of the picture.
    """
    while True:
        height, width = size
        ratio = max(height, width) / longest
        if ratio > 1:
            height = max(1, math.floor(height / ratio))
            width = max(1, math.floor(width / ratio))
        rows = (height - 1) // step + 1
        columns = (width - 1) // step + 1
        if max_rows is None or rows * columns <= max_rows:
            return rows * step, columns * step
        if longest <= step:
            check_rows(rows * columns, max_rows)
        longest = max(step, min(longest, max(height, width)) - step)


def layout(grid: Size) -> tuple[str | range, ...]:
    """Return what stands in the prompt for ``grid`` rows and columns of media rows."""
    rows, columns = grid
    parts: list[str | range] = []
    for row in range(rows):
        parts += [range(row * columns, (row + 1) * columns), "[IMG_BREAK]"]
    parts[-1] = "[IMG_END]"
    return tuple(parts)
