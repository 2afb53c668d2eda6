"""GPU gemm: tiles of weight rows by tokens; see ``tile.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING, ClassVar

from treadle.base.fast_classes import dataclass
from treadle.devices.cuda.kernels.block import convert_spec
from treadle.devices.cuda.kernels.gemv import with_items
from treadle.devices.cuda.kernels.tile import THREADS, BlockTile, CudaTileShape
from treadle.devices.cuda.launch_args import PerBlock
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32
from treadle.kernels.activation_layout import ActivationLayout
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.matmul import Matmul, StripShare, finish, n_strips, pick_segment, shares
from treadle.kernels.spec import Frame

if TYPE_CHECKING:
    from treadle.plan.plan import Plan, Step

# Rows, in units of 16, and tokens of a tile: for many tokens, and for so few that tiles of many
# rows would leave most of a GPU idle. LARGE matches the rows of ``isa/nvptx.py``.
LARGE = (8, 64)
SMALL = (2, 16)
ABREAST = 8  # strips with consecutive items, so that both operands stay in the cache


def shape_of(spec: Matmul) -> CudaTileShape:
    """Return the tile shape of a product: ``16 mr`` rows by ``nr`` tokens; activations in f32 are
    split into two bf16 planes, others have one.
    """
    return CudaTileShape(16 * spec.mr, spec.nr, 2 if spec.act == "f32" else 1)


def item_order(
    k: Builder, frame: Frame, spec: Matmul, strips: Callable[[], Val]
) -> Callable[[Val], StripShare]:
    """Return the function that maps an item to its share (strip of rows, and tokens): ABREAST
    strips with one chunk of ``frame.tokens`` tokens, then the same strips with the next chunk.
    ``strips`` emits the number of strips. Products of experts or heads keep the CPU's order.
    """
    if spec.experts or spec.heads:
        return shares(k, frame, spec, strips)
    n = strips()
    chunk = frame.tokens
    n_tokens = spec.n_rows(frame)
    of_group = (n_tokens + (chunk - 1)) // chunk * ABREAST

    def of_item(item: Val) -> StripShare:
        first = item // of_group * ABREAST
        place = item % of_group
        width = k.min(n - first, ABREAST)
        start = place // width * chunk
        return StripShare(
            first + place % width, None, start, k.min(start + chunk, n_tokens), n_tokens
        )

    return of_item


@dataclass(frozen=True)
class SimtGemm(PerBlock, Gemm):
    """GPU kernel of ``Gemm`` for any number of tokens, with bf16 or f32 activations.

    Items: strips of ``16 mr`` rows x chunks of tokens.
    """

    op: ClassVar[str] = "simt_gemm"

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def shared_bytes(self) -> int:
        return shape_of(self).shared_bytes

    def layout(self) -> ActivationLayout:
        return ActivationLayout(self.act, self.k)

    def rows_per_item(self, lanes: int) -> int:
        return 16 * self.mr

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        rows, row_bytes = self.rows_per_item(isa.lanes), self.layout().row_bytes
        share_of = item_order(k, frame, self, lambda: n_strips(k, frame, self, rows))
        with k.loop(frame.end, start=frame.begin) as item:
            share = share_of(item)
            seg = pick_segment(k, frame, self, share.strip, rows, share.expert)
            x = frame.x
            here = seg.rows
            if self.heads and share.expert is not None:
                x = x + share.expert * frame.x_pitch
            with k.loop(share.stop, start=share.start, step=self.nr) as first:
                tile = BlockTile(
                    k,
                    shape_of(self),
                    self.fmt,
                    self.k,
                    lambda r: here.row(k, r),
                    lambda t: x + k.min(first + t, share.stop - 1) * row_bytes,
                )
                for r, t, y in tile.results():
                    row = here.first + r
                    token = first + t
                    with k.if_((row < here.m) & (token < share.stop)):
                        at = token * (frame.stride * 4) + (seg.column + row) * 4
                        y = finish(k, seg, y, row)
                        if self.residual:
                            y = y + k.load(frame.residual, f32, offset=at)
                        k.store(frame.y, y, offset=at)


def swap(step: Step, plan: Plan, isa: Isa) -> Step | None:
    """Return a gemm step with SimtGemm; None, to keep the CPU's kernel, for int8 activations, or
    layouts that are not plain rows.
    """
    spec = step.spec
    assert isinstance(spec, Gemm)
    if spec.layout() != ActivationLayout(spec.act, spec.k) or spec.act == "q8":
        return None
    mr, nr = tile_of(spec)
    return tiled_step(step, spec, replace(convert_spec(SimtGemm, spec), mr=mr, nr=nr), isa)


def tile_of(spec: Matmul) -> tuple[int, int]:
    """Return the tile as (rows / 16, tokens): LARGE or SMALL.

    It depends on ``spec.mr``, which the plan sets, alone: products that must be bit-identical have
    the same ``mr``, so they use the same tile.
    """
    return LARGE if spec.mr == LARGE[0] else SMALL


def tiled_step(step: Step, spec: Matmul, other: Matmul, isa: Isa) -> Step:
    """Return ``step`` with the tiled kernel ``other`` of the same product in place of ``spec``. An
    item then has the tokens of one tile; with experts, those of an expert as before.
    """
    result = with_items(step, spec, other, isa)
    if spec.experts:
        return result
    tokens = lcm(other.nr, spec.per)  # rows of x, of whole tokens
    grid = replace(result.grid, per=tokens // spec.per)
    return replace(result, grid=grid, args={**result.args, "tokens": tokens})
