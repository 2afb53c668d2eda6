"""GPU kernel of the gate and up products with their activation.

The first half of a tile's rows are rows of the gate matrix, the second half the same rows of the up
matrix. So a thread has both sums, and no more memory is needed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from treadle.base.fast_classes import dataclass
from treadle.devices.cuda.kernels.block import convert_spec
from treadle.devices.cuda.kernels.gemm import SimtGemm, item_order, shape_of, tile_of, tiled_step
from treadle.devices.cuda.kernels.tile import THREADS, BlockTile
from treadle.devices.cuda.launch_args import PerBlock
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32
from treadle.kernels.activation_layout import ActivationLayout
from treadle.kernels.activations import ACTIVATIONS
from treadle.kernels.format_blocks import BlockAddress, WeightRows
from treadle.kernels.matmul.gated import Gated
from treadle.kernels.spec import Frame

if TYPE_CHECKING:
    from treadle.plan.plan import Plan, Step


@dataclass(frozen=True)
class SimtGated(PerBlock, Gated):
    """GPU kernel of ``Gated``, with bf16 or f32 activations and results.

    Items: strips of ``8 mr`` rows of both matrices x chunks of tokens.
    """

    op: ClassVar[str] = "simt_gated"

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def shared_bytes(self) -> int:
        return shape_of(self).shared_bytes

    @property
    def product(self) -> SimtGemm:
        return SimtGemm(self.w, self.act, self.k, self.mr, self.nr)

    def item_rows(self, lanes: int) -> int:
        return 8 * self.mr

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        n, row_bytes = self.item_rows(isa.lanes), self.layout().row_bytes
        share_of = item_order(k, frame, self, lambda: k.i64(self.strips([], isa.lanes)))
        with k.loop(frame.end, start=frame.begin) as item:
            share = share_of(item)
            first = share.strip * n
            expert = share.expert
            m = k.i64(self.m)

            def row_of(r: Val) -> BlockAddress:
                weights = self._matrix(k, frame, r >= n, expert)
                return WeightRows(weights, first, m, self.k).row(k, r % n)

            with k.loop(share.stop, start=share.start, step=self.nr) as begin:

                def x_of(t: Val) -> Val:
                    return frame.x + k.min(begin + t, share.stop - 1) * row_bytes

                tile = BlockTile(k, shape_of(self), self.fmt, self.k, row_of, x_of)
                for r, t, gate, up in tile.pairs():
                    row = first + r
                    token = begin + t
                    with k.if_((row < m) & (token < share.stop)):
                        if self.bias:
                            gate, up = (
                                v + k.load(self._bias(k, frame, s, expert), f32, offset=row * 4)
                                for s, v in enumerate((gate, up))
                            )
                        self._write(k, frame, token, row, ACTIVATIONS[self.fn].gate(k, gate, up))

    def _bias(self, k: Builder, frame: Frame, s: int, expert: Val | None) -> Val:
        """Emit the address of a matrix's biases: ``s`` is 0 for gate, 1 for up; ``expert``: the
        number of the expert, None without experts.
        """
        all_of: Val = frame.each("bias", s)
        return all_of if expert is None else all_of + expert * frame.each("pitch", s) * 4

    def _write(self, k: Builder, frame: Frame, token: Val, row: Val, v: Val) -> None:
        act = self.result()
        if act.kind == "bf16":
            v = k.isa.narrow_bf16(k, v)
        k.store(frame.y + token * act.row_bytes, v, offset=row * v.ty.n_bytes)


def swap(step: Step, plan: Plan, isa: Isa) -> Step | None:
    """Return a gate-and-up step with SimtGated; None, to keep the CPU's kernel, for int8
    activations, or layouts that are not plain rows.
    """
    spec = step.spec
    assert isinstance(spec, Gated)
    plain = all(act == ActivationLayout(act.kind, act.k) for act in (spec.layout(), spec.result()))
    if not plain or "q8" in (spec.act, spec.to):
        return None
    mr, nr = tile_of(spec)
    return tiled_step(step, spec, replace(convert_spec(SimtGated, spec), mr=mr, nr=nr), isa)
