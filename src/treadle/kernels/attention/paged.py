"""Attention over pages of keys and values, with an online softmax (Milakov and Gimelshein, 2018).

A tile of queries (tokens x the heads that share one key/value head) processes its keys SPAN pages
at a time::

    S = log2(e) Q K^T, masked;  m' = max(m, rowmax S);  P = 2**(S - m');  c = 2**(m - m')
    l = l c + rowsum P;  O = O c + P V;  m = m'          at the end: out = O / l

With a sink, a score s of each head without a value, m starts as log2(e) s and l as 1. ALiBi
subtracts the key's distance times the head's slope from each score. A relative bias adds a number
by head and distance (``relative_bias.py``), a relative logit by query, head and distance
(``relative_logits.py``). With ``chosen`` a query sees the keys that an indexer has chosen for it
(``indexer.py``), and spans without any are skipped.

A sequence with few tokens in the batch (decoding) has items of one token each, whatever else is in
the batch. A long history is split into runs of SPLIT keys, each an item of its own, so that every
core has work; ``Merge`` joins their (O, m, l). The splits depend on the batch's positions alone, so
the thread count never changes a sum. In vector tiles spans depend on the query's own position, and
a masked key adds exactly 0, so a query's result does not depend on the others in its tile.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import i64
from treadle.kernels.attention.relative_bias import row_values
from treadle.kernels.attention.relative_logits import farthest, relative_values
from treadle.kernels.attention.work_item import LOWEST, SPAN, Queries, alibi_slopes
from treadle.kernels.run_state import ITEM, PAGE, numbered, run_offset
from treadle.kernels.spec import Args, Frame


@dataclass(frozen=True)
class Attention(Queries):
    """Paged attention of the run's work items. Items: work items x head groups.

    ``partials`` is f32 ``[n_partials, n_groups, rows, dims_v + 2]``: O, then m and l. m has units
    of log2(e); of a part without a key that the query sees, O and l are 0 and m is LOWEST. Without
    ``causal`` queries also see later keys, up to the end of their item's keys. With ``spans`` a
    causal query also sees later keys up to its item's ``sees``, whatever the window. ``few``: 1 for
    the items of sequences with few tokens, 0 for the others.
    """

    op: ClassVar[str] = "attention"
    args = Args(
        "qkv:in pool:const out:out partials:out? stride out_stride page_bytes layer_off few "
        "sinks:const? distances:const? chosen:in? chosen_stride:? rel_logits:in?"
    )

    @property
    def needs(self) -> set[str]:
        asked = {"sinks": self.sinks, "distances": self.reach, "rel_logits": self.rel_extent}
        asked |= dict.fromkeys(("chosen", "chosen_stride"), self.chosen)
        return self.args.required | {name for name, there in asked.items() if there}

    @property
    def compile_ms(self) -> float:
        return 140.0 if self.tokens == 1 else 300.0

    def scratch(self, lanes: int) -> int:
        if self.matrix:
            from treadle.kernels.attention.matrix_tile import matrix_scratch

            return matrix_scratch(self)
        if self.words:
            from treadle.kernels.attention.int16_tile import words_scratch

            return words_scratch(self)
        o_rows = self.row_lanes if self.latent else self.rows
        return 4 * (self.rows * (self.head_dim + SPAN * PAGE) + o_rows * self.dims_v) + 256

    def history(self, n_before: int, n_tokens: int) -> tuple[int, int]:
        """Return the bytes of every visible key and value, read once (a batch's tiles share them in
        cache), and the operations: a multiply and an add for each of their values that a query
        sees.
        """
        end = n_before + n_tokens
        reach = self.window or end
        n_keys = min(end, n_tokens - 1 + reach)
        ahead = 1 if self.causal else reach  # distance to the first key that is not seen
        n_seen = sum(min(end, p + ahead) - max(0, p + 1 - reach) for p in range(n_before, end))
        n_bytes = n_keys * self.page.layer_bytes // PAGE
        return n_bytes, 2 * n_seen * self.n_head * (self.head_dim + self.dims_v)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        items = frame.block + self._load_run_field(frame, "attn_items", "attn_few")
        n_items = self._load_run_field(frame, "n_attn_items", "n_attn_few")
        tile = self._tile()
        if self.matrix:
            assert isa.matrix is not None, isa.name
            isa.matrix.begin(k, frame.scratch)
        with k.loop(frame.end, start=frame.begin) as index:
            # One group after the other, so that its keys and values stay in cache from tile to
            # tile.
            item = items + index % n_items * ITEM.itemsize
            tile(k, isa, self, frame, item, index // n_items).run()
        if isa.matrix and self.matrix:
            isa.matrix.end(k)

    def _tile(self) -> Any:
        """Return the tile class that emits a work item. Imported here, because most runs find their
        kernels cached.
        """
        if self.matrix:
            from treadle.kernels.attention.matrix_tile import MatrixTile

            return MatrixTile
        if self.words:
            from treadle.kernels.attention.int16_tile import WordTile

            return WordTile
        if self.latent:
            from treadle.kernels.attention.latent_tile import LatentTile

            return LatentTile
        from treadle.kernels.attention.vector_tile import VectorTile

        return VectorTile

    def _load_run_field(self, frame: Frame, field: str, few: str) -> Val:
        """Return the value of ``field``, an EACH field of the run's state, for this kernel's pool;
        if the argument ``few`` is 1, the value of the field named ``few`` instead.
        """
        many_off, few_off = (run_offset(numbered(name, self.pool)) for name in (field, few))
        at = frame.block + frame.few * (few_off - many_off)
        return frame.k.load(at, i64, align=8, offset=many_off)

    def run_ref(self, args: Any, run: Any) -> None:
        dims = self.head_dim
        dims_v = self.dims_v
        per = self.n_head // self.n_head_kv
        q_all = args.qkv.reshape(-1, args.stride)
        out_all = args.out.reshape(-1, args.out_stride)
        layout = self.page

        @cache
        def read(page: int, head: int) -> tuple[np.ndarray, np.ndarray]:
            """Return a page's keys and values of one head, which items and query heads share."""
            place = page, args.page_bytes, args.layer_off, head
            return layout.read_ref(layout.head_ref(args.pool, *place))

        for item, pages in run.attn_items(self.pool, few=bool(args.few)):
            first = int(item["key_begin"])
            last = int(item["key_end"])
            keys = np.arange(first // PAGE * PAGE, -(-last // PAGE) * PAGE)
            read_pages = pages[first // PAGE : -(-last // PAGE)]
            for head in range(self.n_head):
                cached = [read(int(page), head // per) for page in read_pages]
                keep = (keys >= first) & (keys < last)
                kk = np.concatenate([c[0] for c in cached])[keep]
                vv = np.concatenate([c[1] for c in cached])[keep]
                for t in range(int(item["n_tokens"])):
                    token = int(item["token"]) + t
                    pos = int(item["position"]) + t
                    q = q_all[token, head * dims : (head + 1) * dims].astype(np.float64)
                    score = kk @ q
                    if self.softcap:
                        score = self.softcap * np.tanh(score / self.softcap)
                    kept = keys[keep]
                    score = score + self._biases_ref(args, token, head, kept - pos)
                    bound = max(pos, int(item["sees"])) if self.spans else pos
                    hidden = (kept > bound) & self.causal
                    if self.window and self.spans:
                        hidden |= kept <= pos - self.window
                    elif self.window:
                        hidden |= abs(kept - pos) >= self.window
                    if self.chosen:
                        which = head // (self.n_head // self.chosen)
                        hidden |= ~self._chosen_ref(args, token * self.chosen + which)[kept]
                    score = np.where(hidden, -np.inf, score)
                    m = max(score.max(), LOWEST / math.LOG2_E)  # LOWEST is a bound of log2(e) m
                    p = np.exp(score - m)
                    if item["partial"] < 0:
                        total = p.sum()
                        if self.sinks:
                            with np.errstate(over="ignore"):  # infinite: the sink takes all weight
                                total += np.exp(args.sinks[head] - m)
                        out_all[token, head * dims_v : (head + 1) * dims_v] = p @ vv / total
                    else:
                        group, member = divmod(head, self.heads)
                        row = args.partials[int(item["partial"]) * self.partial_values :]
                        row = row[: self.partial_values].reshape(self.n_groups, self.rows, -1)
                        row = row[group, t * self.heads + member]
                        row[:dims_v], row[dims_v:] = p @ vv, (m * math.LOG2_E, p.sum())

    def _biases_ref(self, args: Any, token: int, head: int, distance: np.ndarray) -> np.ndarray:
        """Return the biases that are added to the scores of the query of row ``token`` and of
        ``head``, for keys at ``distance`` (key - query) from it.
        """
        found = np.zeros(distance.shape)
        if self.alibi:
            found -= alibi_slopes(self.n_head, self.alibi)[head] * abs(distance)
        if self.reach:
            end = self.reach + PAGE
            row = args.distances.reshape(self.n_head, row_values(self.reach))[head]
            found += row[np.clip(distance, -end, end - 1) + end]
        if self.rel_extent:
            begin = farthest(self.rel_extent)
            n = relative_values(self.rel_extent)
            row = np.ravel(args.rel_logits)[(token * self.n_head + head) * n :][:n]
            found += row[np.clip(distance - begin, 0, n - 1)]
        return found

    def _chosen_ref(self, args: Any, row: int) -> np.ndarray:
        """Return the bits of the indexer's choice in row ``row``, a bool for each key."""
        words = np.ascontiguousarray(args.chosen[row * args.chosen_stride :][: args.chosen_stride])
        return np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
