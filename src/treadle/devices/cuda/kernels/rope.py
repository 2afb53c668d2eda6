"""GPU rope and KV store: one block per token and key/value head.

In a block, each query head, the key and the value is processed by one warp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from treadle.base.fast_classes import dataclass
from treadle.devices.cuda.kernels.block import ThreadBlock, convert_spec, plus
from treadle.devices.cuda.launch_args import PerBlock
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, i64, ptr
from treadle.kernels.activation_layout import BLOCK
from treadle.kernels.attention.rope import RopeStore
from treadle.kernels.run_state import PAGE, numbered, round_up
from treadle.kernels.spec import Frame

if TYPE_CHECKING:
    from treadle.plan.plan import Plan, Step

WARPS = 4


class Dim(NamedTuple):
    """One value of a head, held by a lane; ``at``: its index in the head; ``inside``: whether the
    index is within the head, None if it is in all lanes.
    """

    at: Val
    value: Val
    inside: Val | None


@dataclass(frozen=True)
class SimtRopeStore(PerBlock, RopeStore):
    """GPU kernel of ``RopeStore``. Items: tokens x n_head_kv."""

    op: ClassVar[str] = "simt_rope"

    @property
    def threads(self) -> int:
        return 32 * WARPS

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory for the rotated key."""
        return round_up(4 * self.head_dim, 16)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        block = ThreadBlock(k, isa, self.threads)
        item = frame.begin
        n = item // self.n_head_kv
        head = item % self.n_head_kv
        row = frame.qkv + n * frame.stride * 4
        queries = self.n_head // self.n_head_kv

        def table(index: int) -> Val:
            return frame.run(numbered("rope", index), ptr) + n * (self.rope_dims * 4)

        with k.loop(queries, start=block.warp, step=WARPS) as g:
            q = row + (head * queries + g) * (self.head_dim * 4)
            weight = frame.q_norm if self.eps is not None else q
            turned = self._turned(block, q, table(self.queries_table), weight, self.scale)
            _store(k, q, turned)
        if self.queries_only:
            return
        kv_index = k.load(
            frame.run(numbered("kv_indices", self.pool), ptr), i64, offset=n * 8, align=8
        )
        home = frame.pool + (kv_index // PAGE * frame.page_bytes + frame.layer_off)
        home = home + head * self.page.head_bytes
        place = kv_index % PAGE
        # The last warps have the fewest queries.
        with k.if_(block.warp.eq(WARPS - 1)):
            at = row + (frame.k_column + head * self.head_dim) * 4
            weight = frame.k_norm if self.eps is not None else at
            _store(k, block.shared, self._turned(block, at, table(self.table), weight, 1.0))
            block.simt.warp_barrier(k)
            self._store_head(block, block.shared, home, place, self.head_dim, transposed=True)
        with k.if_(block.warp.eq(WARPS - 2)):
            value = row + (frame.v_column + head * self.dims_v) * 4
            home = home + self.page.v_off
            self._store_head(block, value, home, place, self.dims_v, transposed=False)

    def _turned(
        self, block: ThreadBlock, x: Val, table: Val, weight: Val, scale: float
    ) -> list[Dim]:
        """Emit one head's values, normed, rotated and multiplied by ``scale``. ``x``, ``table``,
        ``weight``: addresses of the values, of the cosines and sines, and of the norm's weights.
        """
        k = block.k
        half = self.rope_dims // 2
        dims = self.head_dim
        neox = self.style == "neox"
        pairs: list[tuple[Val, Dim, Dim]] = []
        for at, inside in _lanes(block, 0, half):
            places = (at, at + half) if neox else (at * 2, at * 2 + 1)
            first, second = (Dim(i, k.load(x + i * 4, f32, align=4), inside) for i in places)
            pairs.append((at, first, second))
        rest = [
            Dim(at, k.load(x + at * 4, f32, align=4), inside)
            for at, inside in _lanes(block, 2 * half, dims)
        ]
        gain = None
        if self.eps is not None and not self.norm_last:
            known = [dim for _, *both in pairs for dim in both]
            gain = _gain(block, [*known, *rest], dims, self.eps) * scale

        def scaled(dim: Dim) -> Val:
            if gain is not None:
                return dim.value * gain * k.load(weight + dim.at * 4, f32, align=4)
            return dim.value * scale if scale != 1.0 and not self.norm_last else dim.value

        result = []
        for at, first, second in pairs:
            a = scaled(first)
            b = scaled(second)
            cos, sin = (k.load(table + i * 4, f32, align=4) for i in (at, at + half))
            result.append(first._replace(value=a * cos - b * sin))
            result.append(second._replace(value=a * sin + b * cos))
        result += [dim._replace(value=scaled(dim)) for dim in rest]
        if self.norm_last:
            assert self.eps is not None
            last = _gain(block, result, dims, self.eps) * scale
            weights = [k.load(weight + dim.at * 4, f32, align=4) for dim in result]
            result = [
                dim._replace(value=dim.value * last * w)
                for dim, w in zip(result, weights, strict=True)
            ]
        return result

    def _store_head(
        self, block: ThreadBlock, x: Val, home: Val, place: Val, dims: int, *, transposed: bool
    ) -> None:
        """Emit: store a key (``transposed``) or a value, the f32 ``[dims]`` at ``x``, in its page's
        format, one block of dims at a time. ``home``: address of the head's keys or values in the
        page; ``place``: the token's index in the page.
        """
        k = block.k
        side = self.page.keys if transposed else self.page.values
        fmt = side.fmt
        values = [
            Dim(at, k.load(x + at * 4, f32, align=4), inside)
            for at, inside in _lanes(block, 0, dims)
        ]
        if self.v_eps is not None and not transposed:
            gain = _gain(block, values, dims, self.v_eps)
            values = [Dim(at, v * gain, inside) for at, v, inside in values]
        for b, (at, v, inside) in enumerate(values):
            if fmt.scaled:
                d = block.reduce_warp(k.abs(v), k.max) * (1 / 127)
                v = v * k.select(d > 0.0, 1.0 / k.max(d, 1e-38), k.const(0.0, f32))
                where = place + b * PAGE if transposed else place * (dims // BLOCK) + b
                with k.if_(block.lane.eq(0)):
                    k.store(home + side.codes_bytes + where * 4, d, align=4)
            narrow = fmt.narrow(k, k.isa, k.splat(v, f32 * 1))
            where = at * PAGE + place if transposed else place * dims + at
            _store(k, home, [Dim(where, k.extract(narrow, 0), inside)])


def _lanes(block: ThreadBlock, begin: int, end: int) -> list[tuple[Val, Val | None]]:
    """Emit this lane's indices from ``begin`` to ``end``, 32 lanes at a time, each with a validity
    flag.

    Past the end, the index ``end - 1`` is repeated, with a false flag. The flag is None if all
    lanes are valid.
    """
    result: list[tuple[Val, Val | None]] = []
    for first in range(begin, end, 32):
        at = block.lane + first
        whole = first + 32 <= end
        result.append((at, None) if whole else (block.k.min(at, end - 1), at < end))
    return result


def _gain(block: ThreadBlock, values: list[Dim], n: int, eps: float) -> Val:
    """Emit the factor by which an RMS norm multiplies a head of ``n`` values, which the warp's
    lanes hold in ``values``.
    """
    k = block.k
    total = block.k.const(0.0, f32)
    for _, v, inside in values:
        v = v if inside is None else k.select(inside, v, k.const(0.0, f32))
        total = k.fma(v, v, total)
    mean = block.reduce_warp(total, plus) * (1 / n)
    return 1.0 / k.sqrt(mean + eps)


def _store(k: Builder, to: Val, values: list[Dim]) -> None:
    """Emit: store each lane's ``values`` in an array at the address ``to``, at their indices."""
    for at, v, inside in values:
        n_bytes = v.ty.n_bytes
        if inside is None:
            k.store(to + at * n_bytes, v, align=n_bytes)
        else:
            with k.if_(inside):
                k.store(to + at * n_bytes, v, align=n_bytes)


def swap(step: Step, plan: Plan, isa: Isa) -> Step | None:
    """Return a rope step with SimtRopeStore; None for page formats with a Hadamard rotation."""
    spec = step.spec
    assert isinstance(spec, RopeStore)
    # Formats with a Hadamard rotation have no GPU kernel.
    rotated = spec.page.keys.fmt.rotated or spec.page.values.fmt.rotated
    return None if rotated else replace(step, spec=convert_spec(SimtRopeStore, spec))
