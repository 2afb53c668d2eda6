"""The CPU's kernels run on the GPU with one block per item; and scans, with one thread per item.

The block's threads share the iterations of loops marked as parallel (``Builder.shared_loop``).
Scans (recurrences over tokens) get items of one column of a state, so that a thread has one column.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from treadle.base.fast_classes import dataclass
from treadle.devices.cuda.kernels.block import ThreadBlock, convert_spec, plus
from treadle.devices.cuda.launch_args import PerBlock
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.sharing import Sharing
from treadle.kernels.elementwise.add import Add, AddRows
from treadle.kernels.elementwise.clamp import Clamp
from treadle.kernels.elementwise.column_norm import ColumnNorm
from treadle.kernels.elementwise.control_vectors import AddDirections
from treadle.kernels.elementwise.elementwise import Embed
from treadle.kernels.elementwise.pooling import Pooling
from treadle.kernels.elementwise.softcap import Softcap
from treadle.kernels.matmul.lora import LoraDown, LoraUp
from treadle.kernels.matmul.lora_experts import ExpertDown, ExpertUp
from treadle.kernels.moe.dispatch import Combine, Gather
from treadle.kernels.recurrent.block_convolution import BlockConvolution
from treadle.kernels.recurrent.convolution import Convolution
from treadle.kernels.recurrent.gates import OutputGate, Rates, UnitHeads
from treadle.kernels.recurrent.kda import ChannelDelta, ChannelRates
from treadle.kernels.recurrent.mamba1 import Selective
from treadle.kernels.recurrent.rules import Delta, Mamba2
from treadle.kernels.recurrent.scan import Scan
from treadle.kernels.spec import Frame, Spec

if TYPE_CHECKING:
    from treadle.plan.plan import Plan, Step


class SpreadKernel(PerBlock):
    """Mixin: runs a CPU kernel, the next base class, with a block of threads per item. The items
    are those of the CPU kernel.
    """

    n_threads: ClassVar[int] = 128

    @property
    def threads(self) -> int:
        return self.n_threads

    @property
    def shared_bytes(self) -> int:
        return 4 * self.threads // 32  # one sum per warp

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        block = ThreadBlock(k, isa, self.threads)

        def total(v: Val) -> Val:
            block.simt.barrier(k)  # the previous total has been read
            return block.reduce_block([v], plus, block.shared)[0]

        k.sharing = Sharing(block.tid, self.threads, lambda: block.simt.barrier(k), total)
        super().build(k, isa, frame)
        k.sharing = None


def spread(kind: type[Spec], n_threads: int) -> type[Spec]:
    """Return a subclass of the CPU spec ``kind`` that runs with blocks of ``n_threads`` threads."""
    own = {"op": f"simt_{kind.op}", "n_threads": n_threads, "__doc__": kind.__doc__}
    return type(f"Simt{kind.__name__}", (SpreadKernel, kind), own)


# An item is a row of the model's width, a row of a head, or some channels.
ROWS = (Add, AddDirections, AddRows, Clamp, Combine, Embed, OutputGate, Gather, Pooling, Softcap)
LORAS = (LoraDown, LoraUp, ExpertDown, ExpertUp)
PARTS = (BlockConvolution, ChannelRates, ColumnNorm, Convolution, Rates, UnitHeads, *LORAS)
SPREAD = {kind.op: spread(kind, 128) for kind in ROWS} | {
    kind.op: spread(kind, 32) for kind in PARTS
}


@dataclass(frozen=True)
class SimtMamba2(Mamba2):
    """``Mamba2`` with one column of the state per item. Items: sequences x heads x columns."""

    op: ClassVar[str] = "simt_mamba2"

    @property
    def tile(self) -> int:
        return 1


@dataclass(frozen=True)
class SimtDelta(Delta):
    """``Delta`` with one column of the state per item. Items: sequences x heads x columns."""

    op: ClassVar[str] = "simt_delta"

    @property
    def tile(self) -> int:
        return 1


@dataclass(frozen=True)
class SimtChannelDelta(ChannelDelta):
    """``ChannelDelta`` with one column of the state per item. Items: sequences x heads x
    columns.
    """

    op: ClassVar[str] = "simt_channel_delta"

    @property
    def tile(self) -> int:
        return 1


@dataclass(frozen=True)
class SimtSelective(Selective):
    """``Selective`` with one channel of the state per item. Items: sequences x channels."""

    op: ClassVar[str] = "simt_selective"

    @property
    def tile(self) -> int:
        return 1


def swap(step: Step, plan: Plan, isa: Isa) -> Step | None:
    """Return ``step`` with the GPU kernel that SPREAD has for its CPU kernel, which must have an
    entry there (KeyError); never None. ``plan`` and ``isa`` are not used: all functions that
    replace steps have them.
    """
    return replace(step, spec=convert_spec(SPREAD[step.spec.op], step.spec))


SCANS = {
    "channel_delta": SimtChannelDelta,
    "delta": SimtDelta,
    "mamba2": SimtMamba2,
    "selective": SimtSelective,
}


def swap_scan(step: Step, plan: Plan, isa: Isa) -> Step | None:
    """Return a scan's step with one column or channel of the state per item (``SCANS``)."""
    spec = step.spec
    assert isinstance(spec, (Scan, Selective))
    made: Scan | Selective = convert_spec(SCANS[spec.op], spec)
    base = step.grid.base // spec.items * made.items
    return replace(step, spec=made, grid=replace(step.grid, base=base))
