"""Asking for weights before they are needed."""

from __future__ import annotations

from treadle.jit.language import Builder, Val
from treadle.kernels.format_blocks import BlockAddress
from treadle.kernels.spec import LINE

# How many bytes ahead lines are asked for, into the second-level cache, which can wait for more of
# them at once than the first, and later into the first (``Neighbours``).
FAR, NEAR = 32768, 8192


class Neighbours:
    """Prefetches for rows beside each other that are walked together, line by line in the order of
    the file.

    Hardware prefetchers stop at every 4 KB page and lose their way between several rows, and the
    products' instructions leave the core no room to look far ahead by itself. What belongs to
    somebody else's items is not asked for.
    """

    def __init__(
        self, k: Builder, rows: list[BlockAddress], n: Val, n_blocks: int, *, far: bool = True
    ) -> None:
        """``n`` rows of ``n_blocks`` blocks, from the first of ``rows`` on; ``far``: in two steps,
        else in the nearer one alone.
        """
        self.k, self.rows = k, rows
        self.steps = ((FAR, 2),) * far + ((NEAR, 3),)
        self.n_bytes = [n * (n_blocks * stride) for stride in rows[0].fmt.strides]

    def fetch(self, i: Val, n: int) -> None:
        """The ``i``-th run of ``n`` blocks of each row, in each of their arrays."""
        first = self.rows[0]
        for p, stride, n_bytes in zip(first.parts, first.fmt.strides, self.n_bytes, strict=True):
            size = n * len(self.rows) * stride
            lines = -(-size // LINE)
            for distance, locality in self.steps:
                at = self.k.min(i * size + distance, n_bytes - LINE * lines)
                for line in range(lines):
                    self.k.prefetch(p + at + LINE * line, locality)


class PrefetchRuns:
    """Prefetches for rows that each lie in a run of their own, walked side by side: as many streams
    of memory, each in order, asked for ``ahead`` bytes early, up to its end.

    Hardware prefetchers follow them, too. Measured on Sapphire Rapids, two cores: one long stream
    a thread makes 37 GB/s or 28, by how its lines lie in their pages; four make 35 always. Rows
    beside each other, as above, made 28 in Q8_0, in four runs 34 (docs/experiments.md).
    """

    def __init__(
        self, k: Builder, rows: list[BlockAddress], n: Val, n_blocks: int, ahead: int
    ) -> None:
        """Each run has ``n`` rows of ``n_blocks`` blocks from its row of ``rows`` on."""
        self.k, self.rows, self.ahead = k, rows, ahead
        self.n_bytes = [n * (n_blocks * stride) for stride in rows[0].fmt.strides]

    def fetch(self, i: Val, n: int) -> None:
        """The ``i``-th run of ``n`` blocks of each row, in each of their arrays."""
        for part, (stride, n_bytes) in enumerate(
            zip(self.rows[0].fmt.strides, self.n_bytes, strict=True)
        ):
            size = n * stride
            lines = -(-size // LINE)
            at = self.k.min(i * size + self.ahead, n_bytes - LINE * lines)
            for row in self.rows:
                for line in range(lines):
                    self.k.prefetch(row.parts[part] + at + LINE * line)
