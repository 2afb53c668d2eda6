"""Rows of pictures and sound, in place of embeddings or added to hidden states.

The host writes a buffer with a row for each token of the batch::

    f32 [n_tokens, MEDIA_HEAD + width]      column 0: 1.0 if the token is one of media, else 0.0
"""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa
from treadle.jit.types import f32
from treadle.kernels.elementwise.elementwise import map_row
from treadle.kernels.run_state import MEDIA_HEAD
from treadle.kernels.spec import Args, Frame, Spec


@dataclass(frozen=True)
class MediaRowsKernel(Spec):
    """Write the rows of media into the hidden states: for tokens of media ``x[n] = media[n]``, or
    with ``add`` ``x[n] += media[n]``; ``k`` values, from column ``first`` of the buffer's values
    on. Items: tokens.
    """

    op: ClassVar[str] = "media_rows"
    args = Args("x:inout media:in stride media_stride")
    k: int
    first: int = 0
    add: bool = False

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as n:
            source = frame.media + n * (frame.media_stride * 4)
            with k.if_(k.load(source, f32) > 0.0):
                x = frame.x + n * (frame.stride * 4)
                row = source + 4 * (MEDIA_HEAD + self.first)
                if self.add:
                    map_row(k, self.k, x, operator.add, x, row)
                else:
                    map_row(k, self.k, x, lambda v: v, row)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        x = args.x.reshape(-1, args.stride)[:n, : self.k]
        media = args.media.reshape(-1, args.media_stride)[:n]
        start = MEDIA_HEAD + self.first
        rows = media[:, start : start + self.k].astype(np.float64)
        here = media[:, :1] > 0
        x[:] = np.where(here, x + rows if self.add else rows, x)
