"""Pages of rows: one row is key and value of all heads (DeepSeek V4, 2026). Steps that store rows,
and that rotate the heads of queries and results.

``unit`` tokens share a row, which is written with the last of them (``PoolSpec.unit``).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, i64, ptr
from treadle.kernels.attention.page_layout import PageLayout
from treadle.kernels.attention.rope import rotate_pairs, turned
from treadle.kernels.elementwise.elementwise import map_row, mean_square
from treadle.kernels.page_sizes import rows_of
from treadle.kernels.run_state import PAGE, PART, PART_PAGES, numbered
from treadle.kernels.spec import Args, Frame, Spec, f32_values, load_record


class RowKernel(Spec):
    """Base of kernels that read or write the pages of rows of one pool; ``unit`` tokens share a
    row.
    """

    kv: str  # formats of keys and values, as in ``kv_formats``
    head_dim: int
    unit: int

    def page_of(self, unit: int) -> PageLayout:
        """Return the layout of pages whose rows stand for ``unit`` tokens each."""
        return PageLayout(self.kv, 1, self.head_dim, self.head_dim, True, rows_of(unit))

    @property
    def page(self) -> PageLayout:
        return self.page_of(self.unit)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a page."""
        return self.page.layer_bytes // self.page.rows


def place_of(row: Any, unit: int) -> tuple[Any, Any]:
    """Return the page (an index in the sequence's list) of a sequence's ``row``-th row, and the
    row's index in that page. Rows stand for ``unit`` tokens each.
    """
    last = row * unit + (unit - 1)  # position of its last token
    return last // PAGE, last % PAGE // min(unit, PAGE)


@dataclass(frozen=True)
class RowStore(RowKernel):
    """Norm (if ``eps`` is given) and rotate one key a token, and store it if the token is the last
    of its unit. Items: tokens.

    ``key`` is f32, from ``k_column`` on, and is not changed. Its last ``rope_dims`` are rotated, in
    pairs of ``style``, by the position of the unit's first token. ``back`` (if ``unit`` > 1):
    cosines and sines that rotate from the last token's position to the first one's.
    """

    op: ClassVar[str] = "row_store"
    args = Args("key:in norm:const? pool:const back:const? k_stride k_column page_bytes layer_off")
    style: str  # pairs of dims that rotate together: "norm" or "neox" (``RopeStore``)
    kv: str  # formats of keys and values, as in ``kv_formats``
    head_dim: int
    rope_dims: int  # 0: no rotation
    eps: float | None = None  # of the norm; None: none
    unit: int = 1
    pool: int = 0  # number of the page pool
    table: int = 0  # number of the rope table

    @property
    def needs(self) -> set[str]:
        asked = {"back"} if self.rotates_back else set()
        return self.args.required | asked | ({"norm"} if self.eps is not None else set())

    @property
    def rotates_back(self) -> bool:
        return self.unit > 1 and self.rope_dims > 0

    def scratch(self, lanes: int) -> int:
        return 4 * (self.head_dim + 64)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        tables = frame.run(numbered("rope", self.table), ptr) if self.rope_dims else None
        kv_indices = frame.run(numbered("kv_indices", self.pool), ptr)
        dims = self.head_dim
        each = min(self.unit, PAGE)
        tmp = frame.scratch
        with k.loop(frame.end, start=frame.begin) as n:
            kv_index = k.load(kv_indices, i64, offset=n * 8)
            place = kv_index % PAGE
            with k.if_((place % each).eq(each - 1)):
                row = frame.key + (n * frame.k_stride + frame.k_column) * 4
                if self.eps is None:
                    map_row(k, dims, tmp, lambda v: v, row)
                else:
                    gain = 1.0 / k.sqrt(mean_square(k, row, dims, isa.lanes) + self.eps)
                    scale = k.splat(gain, f32 * isa.lanes)
                    map_row(k, dims, tmp, lambda v, w, s=scale: v * s * w, row, frame.norm)
                behind = tmp + (dims - self.rope_dims) * 4
                turns = [frame.back] if self.rotates_back else []
                if tables is not None:
                    turns.append(tables + n * (self.rope_dims * 4))
                for table in turns:
                    rotate_pairs(
                        k, self.style, self.rope_dims // 2, behind, behind, table, lambda v, i: v
                    )
                if self.page.keys.fmt.rotated:
                    from treadle.kernels.attention.hadamard import rotate  # rarely needed

                    rotate(k, tmp, tmp, dims)
                home = frame.pool + (kv_index // PAGE * frame.page_bytes + frame.layer_off)
                self.page.keys.store(k, tmp, home, place // each)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        dims = self.head_dim
        each = min(self.unit, PAGE)
        rows = f32_values(args.key).reshape(-1, args.k_stride)[:n]
        x = rows[:, args.k_column :][:, :dims].astype(np.float64)
        if self.eps is not None:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps) * args.norm[:dims]
        tables = [run.rope(self.table, self.rope_dims)] if self.rope_dims else []
        if self.rotates_back:
            back = args.back[: self.rope_dims].reshape(1, 2, -1)
            tables = [np.broadcast_to(back, (n, *back.shape[1:])), *tables]
        x = turned_last(x[:, None], tables, self.rope_dims, self.style)[:, 0]
        if self.page.keys.fmt.rotated:
            from treadle.kernels.attention.hadamard import rotate_ref

            x = rotate_ref(x)
        for i, kv_index in enumerate(run.kv_indices(self.pool)[:n].tolist()):
            if kv_index % each == each - 1:
                home = args.pool, kv_index // PAGE, args.page_bytes, args.layer_off, 0
                self.page.write_ref(self.page.head_ref(*home), kv_index % PAGE // each, x[i], x[i])


def turned_last(x: np.ndarray, tables: list[np.ndarray], dims: int, style: str) -> np.ndarray:
    """Return heads ``x [N, heads, head_dim]``, float64, whose last ``dims`` are rotated by each of
    the ``tables`` in turn (cosines and sines, as in ``turned``), in pairs of ``style``.
    """
    y = x.astype(np.float64)
    for table in tables:
        y[..., -dims:] = turned(y[..., -dims:], table, style)
    return y


@dataclass(frozen=True)
class TurnHeads(Spec):
    """Norm (without weights, if ``eps`` is given), scale and rotate heads in place, f32, from
    ``column`` on. Items: tokens x heads.

    The last ``rope_dims`` are rotated, in pairs of ``style``, by the token's position, or with
    ``inverse`` by minus the position. With ``hadamard`` heads are also rotated by the Hadamard
    matrix: after all else, or with ``inverse`` before.
    """

    op: ClassVar[str] = "turn_heads"
    args = Args("x:inout stride column")
    style: str  # pairs of dims that rotate together: "norm" or "neox" (``RopeStore``)
    heads: int
    head_dim: int
    rope_dims: int
    scale: float = 1.0
    eps: float | None = None  # of the norm; None: none
    table: int = 0  # number of the rope table
    inverse: bool = False
    hadamard: bool = False

    def scratch(self, lanes: int) -> int:
        return 4 * (self.rope_dims + 64)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        tables = frame.run(numbered("rope", self.table), ptr)
        dims = self.head_dim
        half = self.rope_dims // 2
        if self.hadamard:
            from treadle.kernels.attention.hadamard import rotate  # rarely needed
        with k.loop(frame.end, start=frame.begin) as item:
            token = item // self.heads
            head = item % self.heads
            x = frame.x + (token * frame.stride + frame.column + head * dims) * 4
            if self.hadamard and self.inverse:
                rotate(k, x, x, dims)
            if self.eps is not None:
                gain = 1.0 / k.sqrt(mean_square(k, x, dims, isa.lanes) + self.eps) * self.scale
                map_row(k, dims, x, lambda v, g=gain: v * k.splat(g, v.ty), x)
            elif self.scale != 1.0:
                map_row(k, dims, x, lambda v: v * self.scale, x)
            table = tables + token * (self.rope_dims * 4)
            if self.inverse:
                map_row(k, half, frame.scratch, lambda v: v, table)
                sines = frame.scratch + half * 4
                map_row(k, half, sines, lambda v: -v, table + half * 4)
                table = frame.scratch
            behind = x + (dims - self.rope_dims) * 4
            rotate_pairs(k, self.style, half, behind, behind, table, lambda v, i: v)
            if self.hadamard and not self.inverse:
                rotate(k, x, x, dims)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        width = self.heads * self.head_dim
        rows = args.x.reshape(-1, args.stride)[:n, args.column : args.column + width]
        x = rows.reshape(n, self.heads, self.head_dim).astype(np.float64)
        rotated: Any = np.asarray
        if self.hadamard:
            from treadle.kernels.attention.hadamard import rotate_ref as rotated
        if self.inverse:
            x = rotated(x)
        if self.eps is not None:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps)
        table = run.rope(self.table, self.rope_dims).astype(np.float64)
        if self.inverse:
            table = table * np.array([1.0, -1.0])[:, None]
        x = turned_last(x * self.scale, [table], self.rope_dims, self.style)
        rows[:] = (x if self.inverse else rotated(x)).reshape(n, width)


# -- the sequence of a token, for kernels that read pages ------------------------------------------


class TokenPlace:
    """Place of a batch's token in its sequence: its ``position``; ``first`` and ``stop``, the
    positions of the sequence's tokens in the batch (``stop`` excluded); and the sequence's page
    lists.
    """

    def __init__(self, k: Builder, frame: Frame, token: Val) -> None:
        self.k = k
        self.frame = frame
        parts = frame.run("parts", ptr)
        lists = frame.run("part_pages", ptr)
        position = k.var(k.i64(0))
        at = k.var(k.i64(0))
        n_pages = k.var(k.i64(0))
        first = k.var(k.i64(0))
        stop = k.var(k.i64(0))
        with k.loop(frame.run("n_parts")) as i:
            part = load_record(k, parts + i * PART.itemsize, PART)
            place = token - part["token"]
            with k.if_((place >= 0) & (place < part["n_tokens"])):
                pages = load_record(k, lists + i * PART_PAGES.itemsize, PART_PAGES)
                position.v = part["position"] + place
                at.v = pages["list"]
                n_pages.v = pages["n"]
                first.v = part["position"]
                stop.v = part["position"] + part["n_tokens"]
        self.position = position.v
        self.first = first.v
        self.stop = stop.v
        self._list = frame.block + at.v
        self._n = n_pages.v

    def page_address(self, page: Val, pool: int, base: Val, page_bytes: Val, layer_off: Val) -> Val:
        """Return the address of the layer's part of the sequence's ``page``-th page in pool number
        ``pool``. ``base``: address of the pool; ``layer_off``: byte offset of the layer in a page.
        """
        number = self.k.load(self._list, i64, offset=(self._n * pool + page) * 8, align=8)
        return base + (number * page_bytes + layer_off)


def token_places(run: Any, pool: int) -> list[tuple[int, int, np.ndarray]]:
    """Return for each token of the batch its row, its position, and its sequence's page numbers in
    pool number ``pool``.
    """
    made = []
    for part, pages in zip(run.parts, run.pages_of(pool), strict=True):
        for t in range(int(part["n_tokens"])):
            made.append((int(part["token"]) + t, int(part["position"]) + t, pages))
    return made


def rows_ref(page: PageLayout, args: Any, pages: np.ndarray, numbers: np.ndarray, unit: int) -> Any:
    """Return the rows with the numbers ``numbers`` of a sequence whose pages in the pool are
    ``pages``, float64 ``[n, head_dim]``. ``args``: has the pool's bytes, page_bytes and layer_off;
    ``unit``: tokens that share a row.
    """
    pool, page_bytes, layer_off = args
    found = np.zeros((len(numbers), page.head_dim))
    which, places = place_of(np.asarray(numbers), unit)
    for p in np.unique(which):
        rows = page.read_ref(page.head_ref(pool, int(pages[p]), page_bytes, layer_off, 0))[0]
        found[which == p] = rows[places[which == p]]
    return found
