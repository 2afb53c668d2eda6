"""Tile of the indexer's scores: each query token of a work item against the keys of its pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.jit.types import f32, i32
from treadle.kernels.attention.vector_tile import VectorTile
from treadle.kernels.run_state import PAGE
from treadle.kernels.spec import widest

if TYPE_CHECKING:
    from treadle.jit.language import Builder, Isa, Val, Var
    from treadle.kernels.attention.indexer import IndexScores
    from treadle.kernels.spec import Frame


class IndexTile(VectorTile):
    """Computes ``IndexScores`` for one token and one group of heads at a time, with
    ``VectorTile``'s products of queries and keys. Sums over groups of heads are accumulated in the
    ``scores`` buffer.
    """

    spec: IndexScores

    def __init__(
        self, k: Builder, isa: Isa, spec: IndexScores, frame: Frame, item: Val, group: Val
    ) -> None:
        super().__init__(k, isa, spec, frame, item, group)
        self.now = group  # the token of the item

    def run(self) -> None:
        k = self.k
        spec = self.spec
        start = self.item["key_begin"] // PAGE
        last = (self.item["key_end"] + (PAGE - 1)) // PAGE
        with k.loop(self.item["n_tokens"]) as self.now:
            own = self.item["position"] + self.now
            with (
                k.if_(spec.selection.units(own + 1) > spec.top),
                k.loop(spec.n_groups) as self.group,
            ):
                self._load_queries()
                with k.loop(last, start=start) as p:
                    self._scores(self.page(p), p * PAGE, p, [])

    def token(self, t: object) -> Val:
        """Return the item's token that is being scored; ``t`` is ignored, because a tile has one
        token at a time.
        """
        return self.now

    def _load_queries(self) -> None:
        k = self.k
        dims = self.spec.head_dim
        width = widest(self.isa.lanes, dims)
        for r, t, g in self._rows():
            row = self.query(t, g)
            with k.loop(dims, step=width) as d:
                q = k.load(row, f32 * width, offset=d * 4) * self.spec.scale
                k.store(self.q, q, offset=d * 4 + r * dims * 4)

    def _mask_and_store(
        self, key: Val, at: Val, column: int, rows: list[Val], tops: list[Var]
    ) -> None:
        k = self.k
        spec = self.spec
        frame = self.frame
        lanes = self.isa.lanes
        iota = k.const(range(column, column + lanes), i32 * lanes)
        position = k.splat(key.to(i32), iota.ty) + iota
        own = self.item["position"] + self.now
        seen = position <= k.splat(own.to(i32), iota.ty)
        if spec.whole:
            seen = seen & (position % spec.unit).eq(spec.unit - 1)
        token = self.item["token"] + self.now
        row = frame.scores + (token * spec.planes) * (frame.scores_stride * 4) + (key + column) * 4
        lowest = k.const(float("-inf"), f32 * lanes)
        if spec.apart:
            for r, score in enumerate(rows):
                head = self.group * spec.heads + r
                place = row + head * (frame.scores_stride * 4)
                k.store(place, k.select(seen, score + 0.0, lowest))
            return
        total = k.select((self.group > 0), k.load(row, lowest.ty), k.zero(lowest.ty))
        for r, score in enumerate(rows):
            positive = k.max(score, 0.0)
            if spec.weighted:
                head = frame.weights_column + self.group * spec.heads + r
                place = frame.weights + (token * frame.weights_stride + head) * 4
                total = k.fma(positive, k.splat(k.load(place, f32), positive.ty), total)
            else:
                total = total + positive
        k.store(row, k.select(seen, total + 0.0, lowest))
