"""Merging the partial results of a history that ``paged.Attention`` split into several items."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Isa
from treadle.jit.types import f32, ptr
from treadle.kernels.attention.work_item import LOWEST
from treadle.kernels.run_state import MERGE, numbered
from treadle.kernels.spec import Args, Frame, Spec, load_record, widest


@dataclass(frozen=True)
class Merge(Spec):
    """Join the partial results (O_i, m_i, l_i of ``paged.py``) of a query over runs of keys, in the
    order of the keys: ``out = sum O_i 2**(m_i - m) / sum l_i 2**(m_i - m)``, m the largest m_i. A
    sink counts as one more part with l_i = 1 and O_i = 0. ``heads``, ``tokens``: heads and tokens
    of an attention item. Items: merges x head groups.
    """

    op: ClassVar[str] = "merge"
    args = Args("partials:in out:out out_stride sinks:const?")
    n_groups: int
    heads: int
    tokens: int
    head_dim: int
    pool: int = 0  # number of the page pool
    sinks: bool = False

    @property
    def needs(self) -> set[str]:
        return self.args.required | ({"sinks"} if self.sinks else set())

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        partials = frame.partials
        out = frame.out
        out_stride = frame.out_stride
        merges = frame.run(numbered("attn_merges", self.pool), ptr)
        rows = self.tokens * self.heads
        dims = self.head_dim
        width = widest(isa.lanes, dims)
        floats = f32 * width
        record = self.n_groups * rows * (dims + 2) * 4
        with k.loop(frame.end, start=frame.begin) as index:
            merge = merges + index // self.n_groups * MERGE.itemsize
            group = index % self.n_groups
            token, n_tokens, first, n = load_record(k, merge, MERGE).values()
            with k.loop(n_tokens * self.heads) as r:
                source = partials + (first * record + (group * rows + r) * ((dims + 2) * 4))
                sink = k.const(LOWEST, f32)
                if self.sinks:
                    head = group * self.heads + r % self.heads
                    sink = k.load(frame.sinks + head * 4, f32) * math.LOG2_E
                m = k.var(sink)
                total = k.var(k.const(0.0, f32))
                with k.loop(n) as i:
                    m.v = k.max(m.v, k.load(source, f32, offset=i * record + dims * 4))
                row = out + (token + r // self.heads) * out_stride * 4
                row = row + (group * self.heads + r % self.heads) * (dims * 4)
                with k.loop(dims, step=width) as d:
                    o = k.var(k.zero(floats))
                    total.v = k.const(0.0, f32)
                    if self.sinks:
                        total.v = k.extract(math.exp2(k, k.splat(sink - m.v, floats)), 0)
                    with k.loop(n) as i:
                        at = source + i * record
                        gain = math.exp2(k, k.splat(k.load(at, f32, offset=dims * 4) - m.v, floats))
                        o.v = k.fma(k.load(at, floats, offset=d * 4), gain, o.v)
                        total.v = k.fma(
                            k.load(at, f32, offset=dims * 4 + 4), k.extract(gain, 0), total.v
                        )
                    k.store(row, o.v * k.splat(1.0 / total.v, floats), offset=d * 4)

    def run_ref(self, args: Any, run: Any) -> None:
        dims = self.head_dim
        rows = self.tokens * self.heads
        record = self.n_groups * rows * (dims + 2)
        n_groups = self.n_groups
        data = args.partials[: args.partials.size // record * record]
        data = data.reshape(-1, n_groups, rows, dims + 2)
        out = args.out.reshape(-1, args.out_stride)
        for merge in run.attn_merges(self.pool):
            part = data[int(merge["partial"]) :][: int(merge["n_partials"])].astype(np.float64)
            most = part[..., dims].max(0)
            gain = np.exp2(part[..., dims] - most)
            total = (part[..., dims + 1] * gain).sum(0)
            if self.sinks:
                sink = args.sinks[: n_groups * self.heads].astype(np.float64) * math.LOG2_E
                sink = np.tile(sink.reshape(n_groups, 1, -1), (1, self.tokens, 1))
                total = total + np.exp2(sink.reshape(n_groups, rows) - most)
            o = (part[..., :dims] * gain[..., None]).sum(0) / total[..., None]
            for t in range(int(merge["n_tokens"])):
                for group in range(n_groups):
                    column = group * self.heads * dims
                    block = o[group, t * self.heads : (t + 1) * self.heads]
                    out[int(merge["token"]) + t, column : column + block.size] = block.ravel()
