"""GPU norms and packs, one block per row or slice; output rows are f32 or bf16, one token after
another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from treadle.base.fast_classes import dataclass
from treadle.devices.cuda.kernels.block import ThreadBlock, convert_spec, plus
from treadle.devices.cuda.launch_args import PerBlock
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, i32, i64, ptr
from treadle.kernels.activation_layout import BLOCK, ActivationLayout
from treadle.kernels.activations import ACTIVATIONS
from treadle.kernels.elementwise.elementwise import SLICE, Norm, Pack
from treadle.kernels.run_state import round_up
from treadle.kernels.spec import Frame

if TYPE_CHECKING:
    from treadle.plan.plan import Plan, Step

WIDTH = 4  # f32 values that a thread loads at once: 16 bytes
PLAIN = ("f32", "bf16")  # kinds of activations whose rows are plain arrays


@dataclass(frozen=True)
class SimtNorm(PerBlock, Norm):
    """GPU kernel of ``Norm``. The row is read twice, the second time from the L1 cache. Items:
    rows.
    """

    op: ClassVar[str] = "simt_norm"

    @property
    def threads(self) -> int:
        """Threads of a block: one for about four vectors of values, 64 to 512."""
        return min(512, max(64, round_up(self.k // (4 * WIDTH), 64)))

    @property
    def shared_bytes(self) -> int:
        return 2 * 4 * self.threads // 32  # sums of the values, and of the squares

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        block = ThreadBlock(k, isa, self.threads)
        n = frame.begin
        act = self.layout()
        width = WIDTH if self.k % WIDTH == 0 else 1
        n_rows = frame.run("n_outputs" if self.outputs else "n_tokens")
        source = k.min(n, n_rows - 1)
        if self.outputs:
            source = k.load(frame.run("output_rows", ptr), i32, offset=source * 4).to(n.ty)
        row = frame.x + source * frame.stride * 4
        mean = None
        if self.centred:
            total = self._sum(block, row, width, lambda v: v)
            mean = block.reduce_block([total], plus, block.shared)[0] * (1 / self.k)

        def centred(v: Val) -> Val:
            return v if mean is None else v - k.splat(mean, v.ty)

        def square(v: Val) -> Val:
            return centred(v) * centred(v)

        room = block.shared + block.reduce_bytes()
        squares = block.reduce_block([self._sum(block, row, width, square)], plus, room)[0]
        scale = 1.0 / k.sqrt(squares * (1 / self.k) + self.eps)
        plain = self.add or self.rows
        to = frame.out + (n * frame.stride * 4 if plain else n * act.row_bytes)

        def values(at: Val, have: Val | None = None) -> Val:
            v = centred(_floats(k, row, at, width))
            v = v * k.splat(scale, v.ty)
            if self.weight:
                v = v * _floats(k, frame.w, at, width)
            if self.bias:
                v = v + _floats(k, frame.bias, at, width)
            if self.add:
                v = _floats(k, frame.residual + n * frame.stride * 4, at, width) + v
            if self.gain:
                v = v * k.splat(k.load(frame.gain, f32), v.ty)
            return v

        start = block.tid * width
        step = block.n_threads * width
        with k.loop(self.k, start=start, step=step) as at:
            if plain:
                k.store(to + at * 4, values(at), align=4 * width)
            else:
                store_act(k, act, to, at, values(at))
        if not plain:
            fill(block, act, to)

    def _sum(self, block: ThreadBlock, row: Val, width: int, of: Callable[[Val], Val]) -> Val:
        """Emit this thread's part of the sum of ``of(value)`` over the values of the row, loaded
        ``width`` at a time.
        """
        k = block.k
        total = k.var(k.zero(f32 * width))
        with k.loop(self.k, start=block.tid * width, step=block.n_threads * width) as at:
            total.v = total.v + of(_floats(k, row, at, width))
        return k.sum(total.v)


@dataclass(frozen=True)
class SimtPack(PerBlock, Pack):
    """GPU kernel of ``Pack``. Items: rows x slices."""

    op: ClassVar[str] = "simt_pack"

    @property
    def threads(self) -> int:
        return 128

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        block = ThreadBlock(k, isa, self.threads)
        item = frame.begin
        act = self.layout()
        width = WIDTH if self.k % WIDTH == 0 else 1
        n_rows = k.load(frame.rows, i64, align=8) if self.counted else frame.run("n_tokens")
        n = item // self.slices
        first = item % self.slices * SLICE
        source = k.min(n, n_rows * self.per - 1)
        row = frame.x + source * frame.stride * 4
        to = frame.out + n * act.row_bytes
        gated = self.gated and self.fn != "copy"
        ups = frame.apart + source * frame.apart_stride * 4 if self.apart else row
        start = first + block.tid * width
        step = block.n_threads * width
        with k.loop(k.min(first + SLICE, self.k), start=start, step=step) as at:
            v = _floats(k, row, at, width)
            if gated:
                v = ACTIVATIONS[self.fn].gate(k, v, _floats(k, ups + frame.up * 4, at, width))
            elif self.fn != "copy":
                v = ACTIVATIONS[self.fn].emit(k, v)
            store_act(k, act, to, at, v)
        with k.if_((item % self.slices).eq(self.slices - 1)):
            fill(block, act, to)


def _floats(k: Builder, row: Val, at: Val, width: int) -> Val:
    """Emit a load of ``width`` f32 values of a row, from index ``at`` on, which is a multiple of
    ``width``.
    """
    return k.load(row + at * 4, f32 * width, align=4 * width)


def store_act(k: Builder, act: ActivationLayout, row: Val, at: Val, v: Val) -> None:
    """Emit: store the f32 values ``v`` in a row of plain activations, from index ``at`` on, as f32
    or rounded to bf16 (``act.kind``).
    """
    width = v.ty.lanes
    if act.kind == "f32":
        k.store(row + at * 4, v, align=4 * width)
    else:
        k.store(row + at * 2, k.isa.narrow_bf16(k, v), align=2 * width)


def fill(block: ThreadBlock, act: ActivationLayout, row: Val) -> None:
    """Emit: store zeros past a row of plain activations, up to a multiple of BLOCK values."""
    k = block.k
    rest = round_up(act.k, BLOCK) - act.k
    if rest:
        with k.if_(block.tid < rest):
            store_act(k, act, row, block.tid + act.k, k.zero(f32 * 1))


def is_plain(act: ActivationLayout) -> bool:
    """Return whether ``store_act`` can write this layout: rows of f32 or bf16, one after
    another.
    """
    return act.kind in PLAIN and act.group == 1


def swap_norm(step: Step, plan: Plan, isa: Isa) -> Step | None:
    """Return a norm step with SimtNorm; None, to keep the CPU's kernel, for layouts that are not
    plain rows, and unaligned rows.
    """
    spec = step.spec
    assert isinstance(spec, Norm)
    fits = is_plain(spec.layout()) or spec.add or spec.rows
    return replace(step, spec=convert_spec(SimtNorm, spec)) if fits and aligned(step) else None


def swap_pack(step: Step, plan: Plan, isa: Isa) -> Step | None:
    """Return a pack step with SimtPack; None, to keep the CPU's kernel, for layouts that are not
    plain rows, and unaligned rows.
    """
    spec = step.spec
    assert isinstance(spec, Pack)
    fits = is_plain(spec.layout()) and aligned(step)
    return replace(step, spec=convert_spec(SimtPack, spec)) if fits else None


def aligned(step: Step) -> bool:
    """Return whether all rows and columns of the step begin at a multiple of WIDTH values."""
    places = ("stride", "up", "apart_stride", "out_stride", "k_column", "v_column")
    return not any((step.args.get(name) or 0) % WIDTH for name in places)
