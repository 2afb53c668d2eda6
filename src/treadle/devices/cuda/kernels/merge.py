"""GPU merge of the partial results of split attention, a block for each merge and group of
heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from treadle.base.fast_classes import dataclass
from treadle.devices.cuda.kernels.block import ThreadBlock, convert_spec
from treadle.devices.cuda.launch_args import PerBlock
from treadle.jit import math
from treadle.jit.language import Builder, Isa
from treadle.jit.types import f32, ptr
from treadle.kernels.attention.merge_splits import Merge
from treadle.kernels.attention.work_item import LOWEST
from treadle.kernels.run_state import MERGE, numbered
from treadle.kernels.spec import Frame, load_record

if TYPE_CHECKING:
    from treadle.plan.plan import Plan, Step


@dataclass(frozen=True)
class SimtMerge(PerBlock, Merge):
    """GPU kernel of ``Merge``, summing in the order of the CPU's kernel: a thread for each value.
    Items: merges x head groups.
    """

    op: ClassVar[str] = "simt_merge"

    @property
    def threads(self) -> int:
        return 128

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        block = ThreadBlock(k, isa, self.threads)
        index = frame.begin
        merges = frame.run(numbered("attn_merges", self.pool), ptr)
        dims = self.head_dim
        n_groups = self.n_groups
        record = n_groups * self.tokens * self.heads * (dims + 2) * 4
        group = index % n_groups
        merge = merges + index // n_groups * MERGE.itemsize
        token, n_tokens, first, n = load_record(k, merge, MERGE).values()
        source = frame.partials + first * record
        source = source + group * (self.tokens * self.heads * (dims + 2) * 4)
        n_values = n_tokens * (self.heads * dims)
        with k.loop(n_values, start=block.tid, step=block.n_threads) as i:
            r = i // dims
            d = i % dims
            row = source + r * ((dims + 2) * 4)
            head = group * self.heads + r % self.heads
            sink = k.const(LOWEST, f32)
            if self.sinks:
                sink = k.load(frame.sinks + head * 4, f32, align=4) * math.LOG2_E
            m = k.var(sink)
            with k.loop(n) as part:
                m.v = k.max(m.v, k.load(row + part * record, f32, offset=dims * 4, align=4))
            start = math.exp2(k, sink - m.v) if self.sinks else k.const(0.0, f32)
            o = k.var(k.const(0.0, f32))
            total = k.var(start)
            with k.loop(n) as part:
                at = row + part * record
                gain = math.exp2(k, k.load(at, f32, offset=dims * 4, align=4) - m.v)
                o.v = k.fma(k.load(at + d * 4, f32, align=4), gain, o.v)
                total.v = k.fma(k.load(at, f32, offset=dims * 4 + 4, align=4), gain, total.v)
            to = frame.out + (token + r // self.heads) * frame.out_stride * 4
            k.store(to + (head * dims + d) * 4, o.v / total.v, align=4)


def swap(step: Step, plan: Plan, isa: Isa) -> Step | None:
    """Return a merge step with SimtMerge."""
    return replace(step, spec=convert_spec(SimtMerge, step.spec))
