"""Rotary positions, and storing keys and values in their pages: all steps between qkv and
attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, ptr
from treadle.kernels.attention.page_layout import PagedKernel, PageSide
from treadle.kernels.elementwise.elementwise import map_row, mean_square
from treadle.kernels.run_state import PAGE, numbered
from treadle.kernels.spec import Args, Frame, widest


@dataclass(frozen=True)
class RopeStore(PagedKernel):
    """Norm (if ``eps`` is given) and rotate each token's queries and keys; store keys and values in
    their pages. Items: tokens x n_head_kv.

    Su and others, "RoFormer", 2021: ``(a, b) -> (a cos - b sin, a sin + b cos)`` for each pair;
    pairs are neighbours ("norm", as Meta laid out Llama) or halves ("neox"). Queries are scaled by
    ``scale`` and updated in place, f32. With ``queries_only`` nothing is stored: the layer uses the
    pages of another layer. With ``norm_last`` the norm is applied after rotation. With ``v_eps``
    values have an RMS norm without weight, of that epsilon. ``v_column`` may be ``k_column``:
    values are then the unprocessed keys. ``table`` and ``q_table`` are numbers of the run's rope
    tables: that of keys, and that of queries where it is another (-1: it is the same).
    """

    op: ClassVar[str] = "rope"
    compile_ms: ClassVar[float] = 65.0
    args = Args(
        "qkv:inout q_norm:const? k_norm:const? pool:const? stride k_column:? v_column:?"
        " page_bytes:? layer_off:?"
    )
    style: str  # pairs of dims that rotate together: "norm" or "neox" (``RopeStore``)
    kv: str  # formats of keys and values, as in ``kv_formats``
    n_head: int
    n_head_kv: int
    head_dim: int
    rope_dims: int  # 0: no rotation
    scale: float
    eps: float | None = None  # epsilon of the q/k norm; None: no norm
    pool: int = 0  # number of the page pool
    table: int = 0  # rope table of keys
    head_dim_v: int = 0  # dims of a value; 0: head_dim
    queries_only: bool = False
    norm_last: bool = False
    q_table: int = -1  # rope table of queries; -1: that of keys
    v_eps: float | None = None

    @property
    def needs(self) -> set[str]:
        keys = {"pool", "k_column", "v_column", "page_bytes", "layer_off"}
        keys |= {"k_norm"} if self.eps is not None else set()
        asked = set() if self.queries_only else keys
        return self.args.required | asked | ({"q_norm"} if self.eps is not None else set())

    @property
    def queries_table(self) -> int:
        return self.table if self.q_table < 0 else self.q_table

    def scratch(self, lanes: int) -> int:
        return 2 * 4 * (max(self.head_dim, self.dims_v) + 64)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        qkv = frame.qkv
        q_norm = frame.q_norm
        k_norm = frame.k_norm
        pool = frame.pool
        stride = frame.stride
        k_column = frame.k_column
        v_column = frame.v_column
        page_bytes = frame.page_bytes
        layer_off = frame.layer_off
        tables = frame.run(numbered("rope", self.table), ptr)
        of_queries = frame.run(numbered("rope", self.queries_table), ptr)
        kv_indices = frame.run(numbered("kv_indices", self.pool), ptr)
        queries = self.n_head // self.n_head_kv
        tmp = frame.scratch
        turns_keys, turns_values = (s.fmt.rotated for s in (self.page.keys, self.page.values))
        if turns_keys or turns_values:
            from treadle.kernels.attention.hadamard import rotate  # rarely needed
        n_tokens = frame.run("n_tokens")
        with k.loop(frame.end, start=frame.begin) as item:
            # A page's worth of tokens of one head, before the next head: tokens share lines of
            # transposed keys, and these lines then belong to one thread.
            first = item // (PAGE * self.n_head_kv) * PAGE
            each = k.min(n_tokens - first, PAGE)
            place = item - first * self.n_head_kv
            n = first + place % each
            head = place // each
            row = qkv + n * stride * 4
            table, q_table = (at + n * (self.rope_dims * 4) for at in (tables, of_queries))
            with k.loop(queries) as g:
                q = row + (head * queries + g) * (self.head_dim * 4)
                self._rotate(k, isa, q, q, q_table, q_norm, self.scale)
                if turns_keys:
                    rotate(k, q, q, self.head_dim)
            if not self.queries_only:
                at = row + (k_column + head * self.head_dim) * 4
                self._rotate(k, isa, at, tmp, table, k_norm, 1.0)
                if turns_keys:
                    rotate(k, tmp, tmp, self.head_dim)
                kv_index = k.load(kv_indices, n.ty, offset=n * 8)
                home = pool + (
                    kv_index // PAGE * page_bytes + layer_off + head * self.page.head_bytes
                )
                self.page.keys.store(k, tmp, home, kv_index % PAGE)
                value = row + (v_column + head * self.dims_v) * 4
                home = home + self.page.v_off
                if self.v_eps is not None:
                    square = mean_square(k, value, self.dims_v, isa.lanes)
                    gain = 1.0 / k.sqrt(square + self.v_eps)
                    map_row(k, self.dims_v, tmp, lambda v, g=gain: v * k.splat(g, v.ty), value)
                    value = tmp  # the key is already stored
                if turns_values:
                    rotate(k, value, tmp, self.dims_v)
                    value = tmp
                self.page.values.store(k, value, home, kv_index % PAGE)

    def _rotate(
        self, k: Builder, isa: Isa, x: Val, out: Val, table: Val, weight: Val, scale: float
    ) -> None:
        """Norm, rotate and scale one head, from address ``x`` to ``out`` (which may be ``x``).
        ``table``: the token's cosines and sines; ``weight``: address of the norm's weights.
        """
        half = self.rope_dims // 2
        dims = self.head_dim
        gain = None
        if self.eps is not None and not self.norm_last:
            gain = 1.0 / k.sqrt(mean_square(k, x, dims, isa.lanes) + self.eps) * scale

        def scaled(v: Val, at: int) -> Val:
            if gain is not None:
                return v * k.splat(gain, v.ty) * k.load(weight, v.ty, offset=at * 4)
            return v * scale if scale != 1.0 and not self.norm_last else v

        rotate_pairs(k, self.style, half, x, out, table, scaled)
        width = widest(isa.lanes, dims - 2 * half) if dims > 2 * half else 1
        for i in range(2 * half, dims, width):
            k.store(out, scaled(k.load(x, f32 * width, offset=i * 4), i), offset=i * 4)
        if self.norm_last:
            assert self.eps is not None
            last = 1.0 / k.sqrt(mean_square(k, out, dims, isa.lanes) + self.eps) * scale
            width = widest(isa.lanes, dims)
            for i in range(0, dims, width):
                v = k.load(out, f32 * width, offset=i * 4)
                v = v * k.splat(last, v.ty) * k.load(weight, v.ty, offset=i * 4)
                k.store(out, v, offset=i * 4)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        dims = self.head_dim
        half = self.rope_dims // 2
        rows = args.qkv.reshape(-1, args.stride)[:n]

        def normed(x: np.ndarray, weight: Any) -> np.ndarray:
            y: np.ndarray = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps) * weight[:dims]
            return y

        def turn(x: np.ndarray, weight: Any, table: int) -> np.ndarray:
            x = x.astype(np.float64)
            if self.eps is not None and not self.norm_last:
                x = normed(x, weight)
            y = turned(x, run.rope(table, self.rope_dims), self.style) if half else x
            return normed(y, weight) if self.norm_last else y

        def heads(column: int, n_heads: int, dims: int) -> Any:
            return rows[:, column : column + n_heads * dims].reshape(n, n_heads, dims)

        q = turn(heads(0, self.n_head, dims), args.q_norm, self.queries_table) * self.scale
        of_keys, of_values = (_rotation(side) for side in (self.page.keys, self.page.values))
        q = of_keys(q)
        rows[:, : self.n_head * dims] = q.reshape(n, -1)
        if self.queries_only:
            return
        keys = of_keys(turn(heads(args.k_column, self.n_head_kv, dims), args.k_norm, self.table))
        value = heads(args.v_column, self.n_head_kv, self.dims_v)
        if self.v_eps is not None:
            value = value.astype(np.float64)
            value = value / np.sqrt((value**2).mean(-1, keepdims=True) + self.v_eps)
        value = of_values(value)
        for i, kv_index in enumerate(run.kv_indices(self.pool)[:n]):
            page = args.pool, int(kv_index) // PAGE, args.page_bytes, args.layer_off
            for head in range(self.n_head_kv):
                home = self.page.head_ref(*page, head)
                self.page.write_ref(home, int(kv_index) % PAGE, keys[i, head], value[i, head])


def rotate_pairs(
    k: Builder,
    style: str,
    half: int,
    x: Val,
    out: Val,
    table: Val,
    scaled: Callable[[Val, int], Val],
) -> None:
    """Rotate ``half`` pairs of one head, from ``x`` to ``out`` (which may be ``x``). ``style``:
    "norm" or "neox", as in ``RopeStore``. ``table``: ``half`` cosines, then ``half`` sines, f32.
    ``scaled(v, i)`` is applied to each loaded vector ``v``, whose first value is the i-th, before
    it is rotated.
    """
    width = widest(k.isa.lanes, half)
    pairs = f32 * width
    for i in range(0, half, width):
        cos = k.load(table, pairs, offset=i * 4)
        sin = k.load(table, pairs, offset=(half + i) * 4)
        if style == "neox":
            a = scaled(k.load(x, pairs, offset=i * 4), i)
            b = scaled(k.load(x, pairs, offset=(half + i) * 4), half + i)
        else:
            both = scaled(k.load(x, f32 * (2 * width), offset=i * 8), 2 * i)
            a = k.shuffle(both, both, range(0, 2 * width, 2))
            b = k.shuffle(both, both, range(1, 2 * width, 2))
        first = a * cos - b * sin
        second = a * sin + b * cos
        if style == "neox":
            k.store(out, first, offset=i * 4)
            k.store(out, second, offset=(half + i) * 4)
        else:
            order = [j + width * odd for j in range(width) for odd in range(2)]
            k.store(out, k.shuffle(first, second, order), offset=i * 8)


def turned(
    x: npt.NDArray[np.float64], table: npt.NDArray[np.float32], style: str
) -> npt.NDArray[np.float64]:
    """Return ``x [N, heads, dims]`` with its first ``pairs`` pairs, laid out as ``style`` says,
    rotated by ``table [N, 2, pairs]`` (cosines, sines); the numpy twin of ``rotate_pairs``.
    """
    y = x.copy()
    half = table.shape[-1]
    ia = np.arange(half) if style == "neox" else np.arange(0, 2 * half, 2)
    ib = ia + (half if style == "neox" else 1)
    cos = table[:, None, 0].astype(np.float64)
    sin = table[:, None, 1].astype(np.float64)
    y[..., ia] = x[..., ia] * cos - x[..., ib] * sin
    y[..., ib] = x[..., ia] * sin + x[..., ib] * cos
    return y


def _rotation(side: PageSide) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function that rotates heads by the Hadamard matrix, or the identity if the format
    of ``side`` needs none.
    """
    if not side.fmt.rotated:
        return np.asarray
    from treadle.kernels.attention.hadamard import rotate_ref

    return rotate_ref
