"""Steps of latent attention: pack the heads for their products, and store the latent row in its
page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, ptr
from treadle.kernels.activation_layout import BLOCK, DWORD, ActivationLayout, emit_store
from treadle.kernels.attention.page_layout import PagedKernel
from treadle.kernels.attention.rope import rotate_pairs
from treadle.kernels.attention.rope import turned as turned_pairs
from treadle.kernels.elementwise.elementwise import map_row, mean_square
from treadle.kernels.run_state import PAGE, numbered
from treadle.kernels.spec import Args, Frame, Spec


@dataclass(frozen=True)
class PackHeads(Spec):
    """Pack ``k`` columns of each of ``heads`` heads, times ``scale``, as the activations of a
    product that multiplies each head by its own matrix, in the layout ``ActivationLayout(act, k,
    group, sub, unit)``.

    Head ``h`` has the ``k`` columns of f32 ``x`` from ``column + h * pitch`` on; its activations
    start ``head_bytes`` after the previous head's. Items: rows times heads.
    """

    op: ClassVar[str] = "pack_heads"
    args = Args("x:in out:out stride column pitch head_bytes")
    act: str
    k: int
    group: int
    heads: int
    sub: int = BLOCK
    scale: float = 1.0
    unit: int = DWORD  # unit of the activations

    def layout(self) -> ActivationLayout:
        return ActivationLayout(self.act, self.k, self.group, self.sub, self.unit)

    def scratch(self, lanes: int) -> int:
        return self.layout().store_scratch

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        act = self.layout()
        lanes = isa.lanes
        stride = frame.stride * 4
        last = frame.run("n_tokens") - 1
        each = self.group // act.together
        with k.loop(frame.end, start=frame.begin) as item:
            # All heads of a group's tokens, then the next group's.
            first = item // (self.heads * each) * self.group + item % each * act.together
            head = item // each % self.heads
            x = frame.x + (frame.column + head * frame.pitch) * 4
            out = frame.out + head * frame.head_bytes

            def block(b: Val, count: int, first: Val = first, x: Val = x, out: Val = out) -> None:
                def values_of(n: Val) -> list[Val]:
                    row = x + k.min(n, last) * stride + b * (BLOCK * 4)  # see ActivationLayout.grid
                    return [
                        k.load_first(row + i * 4, f32 * lanes, min(max(count - i, 0), lanes))
                        * self.scale
                        for i in range(0, BLOCK, lanes)
                    ]

                emit_store(k, act, out, first, b, values_of, frame.scratch)

            k.runs(self.k, BLOCK, block)

    def run_ref(self, args: Any, run: Any) -> None:
        rows = args.x.reshape(-1, args.stride)[: int(run["n_tokens"])]
        for head in range(self.heads):
            column = args.column + head * args.pitch
            y = rows[:, column : column + self.k].astype(np.float64) * self.scale
            self.layout().write_ref(args.out[head * args.head_bytes :], y)


@dataclass(frozen=True)
class LatentStore(PagedKernel):
    """Rotate the positional dims of queries and keys, and store each token's latent row: the RMS
    norm of its first dims (times ``norm``), then the key's rotated dims. Style ``none``: no
    rotation. Unless ``norms`` the first dims are stored as they are, without a norm.

    ``q`` has heads of ``head_dim_q``; the last ``rope_dims`` of each are rotated, scaled, and
    written as the last dims of the head in ``out``, of ``head_dim``. ``kv`` is ``[N, head_dim]``,
    its last ``rope_dims`` the key's. Formats with Hadamard rotation rotate both parts of a row
    separately, because attention sums values from the first part alone. Items: tokens.
    """

    op: ClassVar[str] = "latent"
    args = Args(
        "q:in kv:in out:inout norm:const? pool:const stride kv_stride out_stride q_column kv_column"
        " page_bytes layer_off"
    )
    latent = True
    style: str  # pairs that rotate together: "norm", "neox" (``RopeStore``), or "none"
    kv: str  # formats of keys and values, as in ``kv_formats``
    n_head: int
    head_dim: int
    head_dim_v: int  # latent dims of ``head_dim``
    head_dim_q: int
    rope_dims: int
    scale: float
    eps: float
    pool: int = 0  # number of the page pool
    table: int = 0  # number of the rope table
    n_head_kv: int = 1
    norms: bool = True

    @property
    def needs(self) -> set[str]:
        return self.args.required | ({"norm"} if self.norms else set())

    def scratch(self, lanes: int) -> int:
        return 4 * (self.head_dim + 64)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        tables = frame.run(numbered("rope", self.table), ptr) if self.has_rope else None
        kv_indices = frame.run(numbered("kv_indices", self.pool), ptr)
        half = self.rope_dims // 2
        rank = self.dims_v
        tmp = frame.scratch
        stride, kv_stride, out_stride = (
            n * 4 for n in (frame.stride, frame.kv_stride, frame.out_stride)
        )
        with k.loop(frame.end, start=frame.begin) as n:
            table = None if tables is None else tables + n * (self.rope_dims * 4)
            q = frame.q + n * stride + (frame.q_column + (self.head_dim_q - self.rope_dims)) * 4
            out = frame.out + n * out_stride + rank * 4
            with k.loop(self.n_head) as head:
                x = q + head * (self.head_dim_q * 4)
                to = out + head * (self.head_dim * 4)
                self._rotate_pairs(k, half, x, to, table, lambda v, i=0: v * self.scale)
                self._rotate(k, to)
            row = frame.kv + n * kv_stride + frame.kv_column * 4
            if self.norms:
                gain = 1.0 / k.sqrt(mean_square(k, row, rank, isa.lanes) + self.eps)

                def normed(v: Val, w: Val, gain: Val = gain) -> Val:
                    return v * k.splat(gain, v.ty) * w

                map_row(k, rank, tmp, normed, row, frame.norm)
            else:
                map_row(k, rank, tmp, lambda v: v, row)
            behind = tmp + rank * 4
            self._rotate_pairs(k, half, row + rank * 4, behind, table, lambda v, i=0: v)
            self._rotate(k, behind)
            kv_index = k.load(kv_indices, n.ty, offset=n * 8)
            home = frame.pool + (kv_index // PAGE * frame.page_bytes + frame.layer_off)
            self.page.keys.store(k, tmp, home, kv_index % PAGE)

    @property
    def has_rope(self) -> bool:
        return self.style != "none"

    def _rotate_pairs(
        self, k: Builder, half: int, x: Val, to: Val, table: Val | None, scaled: Callable[..., Val]
    ) -> None:
        """Rotate ``half`` pairs from ``x`` to ``to`` by ``rotate_pairs``; without a ``table`` only
        apply ``scaled``.
        """
        if table is None:
            map_row(k, 2 * half, to, scaled, x)
        else:
            rotate_pairs(k, self.style, half, x, to, table, scaled)

    def _rotate(self, k: Builder, behind: Val) -> None:
        """Apply the Hadamard rotation to a query or key in place, if the page format needs it.
        ``behind``: address of its last ``rope_dims``; ``dims_v`` latent dims come before them.
        """
        if self.page.keys.fmt.rotated:
            from treadle.kernels.attention.hadamard import rotate  # rarely needed

            x = behind + self.dims_v * -4
            rotate(k, x, x, self.dims_v)
            if self.rope_dims:
                rotate(k, behind, behind, self.rope_dims)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        dims = self.head_dim
        rank = self.dims_v
        turn = self.rope_dims
        rotated: Callable[[np.ndarray], np.ndarray] = np.asarray
        if self.page.keys.fmt.rotated:
            from treadle.kernels.attention.hadamard import rotate_ref as rotated

        def turned(x: np.ndarray) -> np.ndarray:
            if not self.has_rope:
                return x
            return turned_pairs(x, run.rope(self.table, turn), self.style)

        def columns(x: np.ndarray, stride: int, column: int, width: int) -> np.ndarray:
            rows: np.ndarray = x.reshape(-1, stride)[:n, column : column + width]
            return rows

        q = columns(args.q, args.stride, args.q_column, self.n_head * self.head_dim_q)
        q = q.reshape(n, self.n_head, -1)[..., self.head_dim_q - turn :].astype(np.float64)
        out = columns(args.out, args.out_stride, 0, self.n_head * dims)
        for head in range(self.n_head):
            plain, to = np.split(out[:, head * dims : (head + 1) * dims], [rank], axis=1)
            plain[:] = rotated(plain)
            if turn:
                to[:] = rotated(turned(q)[:, head] * self.scale)
        kv = columns(args.kv, args.kv_stride, args.kv_column, dims).astype(np.float64)
        keys = kv.copy()
        if self.norms:
            square = (kv[:, :rank] ** 2).mean(-1, keepdims=True)
            keys[:, :rank] = kv[:, :rank] / np.sqrt(square + self.eps) * args.norm[:rank]
        keys[:, :rank] = rotated(keys[:, :rank])
        if turn:
            keys[:, rank:] = rotated(turned(kv[:, None, rank:])[:, 0])
        for i, kv_index in enumerate(run.kv_indices(self.pool)[:n]):
            home = args.pool, int(kv_index) // PAGE, args.page_bytes, args.layer_off, 0
            self.page.write_ref(self.page.head_ref(*home), int(kv_index) % PAGE, keys[i], keys[i])
