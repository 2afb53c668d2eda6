"""Prefetch hints for weights."""

from __future__ import annotations

from treadle.jit.language import Builder, Val
from treadle.kernels.format_blocks import BlockAddress
from treadle.kernels.run_state import LINE

# Prefetch distances in bytes: far into the second-level cache, which has more outstanding misses
# than the first; near into the first (``Neighbours``).
FAR = 32768
NEAR = 8192


class Neighbours:
    """Prefetches for adjacent rows that are processed together, line by line in file order.

    Hardware prefetchers stop at every 4 KB page and lose track of several rows, and the products'
    instructions leave the core little room to run ahead. Addresses past an item's rows are clamped
    to their end, so that lines of other threads' items are not prefetched.
    """

    def __init__(
        self, k: Builder, rows: list[BlockAddress], n: Val, n_blocks: int, *, far: bool = True
    ) -> None:
        """Emit prefetches for ``n`` adjacent rows of ``n_blocks`` blocks each, from ``rows[0]`` on;
        the products process ``rows`` together. ``far``: prefetch in two steps, FAR and NEAR bytes
        early; else only NEAR bytes early.
        """
        self.k = k
        self.rows = rows
        self.steps = ((FAR, 2),) * far + ((NEAR, 3),)
        fmt = rows[0].fmt
        self.n_bytes = [n * stride for stride in fmt.row_strides(n_blocks * fmt.block)]

    def fetch(self, i: Val, n: int) -> None:
        """Emit the prefetches that belong to the products of the ``i``-th run of ``n`` blocks of
        each row, in each array of the format.
        """
        first = self.rows[0]
        for p, stride, n_bytes in zip(first.parts, first.fmt.strides, self.n_bytes, strict=True):
            size = n * len(self.rows) * stride
            lines = -(-size // LINE)
            for distance, locality in self.steps:
                at = self.k.min(i * size + distance, n_bytes - LINE * lines)
                for line in range(lines):
                    self.k.prefetch(p + at + LINE * line, locality)


class PrefetchRuns:
    """Prefetches for rows that each advance through a run of rows of their own. Each run is a
    sequential memory stream, prefetched ``ahead`` bytes early, up to its end.

    Hardware prefetchers follow such streams too. Measured on Sapphire Rapids, two cores: one long
    stream a thread reads 37 GB/s or 28, depending on how its lines lie in their pages; four always
    read 35. ``Neighbours`` reads 28 in Q8_0, four runs 34 (docs/experiments.md).
    """

    def __init__(
        self, k: Builder, rows: list[BlockAddress], n: Val, n_blocks: int, ahead: int
    ) -> None:
        """Emit prefetches for several runs of ``n`` rows of ``n_blocks`` blocks each; a run begins
        at each of ``rows``. ``ahead``: distance in bytes.
        """
        self.k = k
        self.rows = rows
        self.ahead = ahead
        fmt = rows[0].fmt
        self.n_bytes = [n * stride for stride in fmt.row_strides(n_blocks * fmt.block)]

    def fetch(self, i: Val, n: int) -> None:
        """Emit the prefetches that belong to the products of the ``i``-th ``n`` blocks of each run,
        in each array of the format.
        """
        for part, (stride, n_bytes) in enumerate(
            zip(self.rows[0].fmt.strides, self.n_bytes, strict=True)
        ):
            size = n * stride
            lines = -(-size // LINE)
            at = self.k.min(i * size + self.ahead, n_bytes - LINE * lines)
            for row in self.rows:
                for line in range(lines):
                    self.k.prefetch(row.parts[part] + at + LINE * line)

    def start(self) -> None:
        """Prefetch the first ``ahead`` bytes of each run: ``fetch`` begins behind them."""
        k = self.k
        for part, n_bytes in enumerate(self.n_bytes):
            with k.loop(k.min(n_bytes, self.ahead) // LINE) as line:
                for row in self.rows:
                    k.prefetch(row.parts[part] + line * LINE)
