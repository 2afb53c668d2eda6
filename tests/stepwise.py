"""Walk a plan one step at a time, compiled code beside numpy twins, each from the same memory.

So a step is judged by itself: what an earlier one rounded is in both inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.engine.batch import BatchItem, RunInputs
from treadle.engine.engine import Engine
from treadle.kernels.activation_layout import BYTE_TOP, BYTES_TOP, WORD_TOP
from treadle.kernels.attention.latent_steps import LatentStore, PackHeads
from treadle.kernels.attention.merge_splits import Merge
from treadle.kernels.attention.paged import Attention
from treadle.kernels.attention.rope import RopeStore
from treadle.kernels.elementwise import altup
from treadle.kernels.elementwise.add import Add
from treadle.kernels.elementwise.column_norm import ColumnNorm
from treadle.kernels.elementwise.elementwise import Embed, Norm, Pack
from treadle.kernels.elementwise.scale import ScaleColumns
from treadle.kernels.elementwise.softcap import Softcap
from treadle.kernels.elementwise.sparse_gate import SparseGate
from treadle.kernels.elementwise.top_logits import JoinTop, TopLogitsKernel
from treadle.kernels.matmul.gated import Gated
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.moe.dispatch import Combine, Gather
from treadle.kernels.moe.route import Route, Sort
from treadle.kernels.run_state import PAGE
from treadle.plan.plan import Buffer, Plan, Step


@dataclass(frozen=True)
class Compared:
    """What one step wrote: by compiled code, and by its twin."""

    label: str
    # f32, pairs (of numbers held as two bf16), words, bf16, q8(x2), q16(n); or whole numbers
    kind: str
    actual: np.ndarray
    expected: np.ndarray
    n_terms: int  # that a sum has, or about as many

    @property
    def error(self) -> float:
        """The largest difference, as a share of what the kind's rounding allows.

        Both sums are right to some f32 roundings of terms no larger than the largest values in
        sight; a pair of bf16 is within 2**-18 of its number, and so is what products of pairs leave
        out, in scores and in results. Words have 16 bits: a score is off by half a unit of each
        number, a result by that of a span's weights. A value half-way between two codes of q8 or
        q16, or two bf16, may go either way: one code, or 2**-7 of the value.
        """
        if not self.actual.size:
            return 0.0
        if self.kind == "whole":
            return 0.0 if np.array_equal(self.actual, self.expected) else np.inf
        units = {"f32": 2**-21, "pairs": 2**-19, "words": 2**-11, "bf16": 2**-7, "q8": 1 / 127}
        units["q8x2"] = 1 / BYTE_TOP["q8x2"]
        units |= {"q16": 1 / WORD_TOP, "q16n": 1 / WORD_TOP, "q16x2": 1 / BYTES_TOP}
        unit = units[self.kind]
        top = np.abs(self.expected).max()
        if self.kind in ("f32", "pairs"):
            allowed = unit * np.sqrt(self.n_terms) * top
        else:
            allowed = 1.01 * unit * top
        worst = np.abs(self.actual.astype(np.float64) - self.expected).max()
        return float(worst / allowed) if np.isfinite(worst) else np.inf


def walk(engine: Engine, parts: Sequence[BatchItem]) -> Iterator[Compared]:
    """Run a batch; every step's output. The arena starts as NaN: nothing may be read unwritten."""
    ready = engine._plan_of(parts)
    engine._prepare(ready, parts)
    run = ready.run
    arena = ready.arena.bytes
    assert arena is not None
    arena[:] = 0xFF
    # For all steps: the system takes longer to give new memory than the copy takes.
    twin = np.empty_like(arena)
    every_pool = [pool.const.array for pool in engine.cache.pools]
    before, after = ([np.empty_like(pool) for pool in every_pool] for _ in range(2))
    for i, step in enumerate(ready.plan):
        pools = every_pool if isinstance(step.spec, (RopeStore, LatentStore)) else []
        np.copyto(twin, arena)
        for pool, data in zip(pools, before, strict=False):
            np.copyto(data, pool)
        engine.device.run(ready.program, range(i, i + 1))
        actual = outputs(ready.plan, step, arena, run)
        for pool, data, made in zip(pools, before, after, strict=False):
            np.copyto(made, pool)
            np.copyto(pool, data)
        with np.errstate(invalid="ignore"):  # what it makes of padding is not looked at
            step.spec.run_ref(ready.plan.arrays(step, twin), run)
        expected = outputs(ready.plan, step, twin, run)
        for pool, made in zip(pools, after, strict=False):
            np.copyto(pool, made)
        for (kind, a), (_, e) in zip(actual, expected, strict=True):
            kind = {"bf16x2": "pairs", "bf16x3": "f32"}.get(kind, kind)
            spec = step.spec
            terms = spec.head_dim if isinstance(spec, Attention) else 0
            terms = spec.k if isinstance(spec, Matmul) else terms
            yield Compared(step.label, kind, a, e, max(terms, e.shape[-1]))
    for part in parts:
        engine.cache.commit(part.seq)


def multiplied(plan: Plan, step: Step, arena: np.ndarray) -> np.ndarray:
    """Which rows by expert products meet: the others fill up an expert's last block, and a product
    whose tiles are shorter than blocks writes none of them.
    """
    rows = step.args["rows"]
    sort = next(s for s in plan if isinstance(s.spec, Sort) and s.args["rows"] is rows)
    tiles = plan.arrays(sort, arena).tiles
    each = tiles[1 : 1 + 3 * int(tiles[0])].reshape(-1, 3)
    return np.concatenate([np.arange(0), *(np.arange(first, first + n) for _, first, n in each)])


def rows_met(spec: Matmul | Gated, args: Any, run: RunInputs) -> np.ndarray:
    """Which rows of y a product writes."""
    return np.concatenate([np.arange(0), *(to for _, _, to in spec.met_ref(args, run))])


def _width(spec: Any, buffer: Buffer, step: Step) -> int:
    """Columns that are written of a row: of all streams, or of one."""
    whole = isinstance(spec, (altup.SpreadStreams, altup.Predict)) or buffer is step.args["x"]
    return int(spec.k * spec.n if whole else spec.k)


def outputs(
    plan: Plan, step: Step, arena: np.ndarray, run: RunInputs
) -> list[tuple[str, np.ndarray]]:
    """What a step has written, as values: (kind, array); padding is left out."""
    spec = step.spec
    args = plan.arrays(step, arena)
    n = run["n_tokens"]

    def rows(buffer: Buffer, columns: slice) -> np.ndarray:
        at = plan.offsets[buffer]
        data = arena[at : at + buffer.rows * buffer.row_bytes].view(np.float32)
        return data.reshape(buffer.rows, -1)[:, columns].copy()

    if isinstance(spec, Embed):
        return [("f32", rows(step.writes[0], slice(spec.k))[:n])]
    if isinstance(spec, Route):
        chosen, weights = (np.array(a[: n * spec.n_used]) for a in (args.chosen, args.weights))
        return [("whole", chosen), ("f32", weights.reshape(n, -1))]
    if isinstance(spec, Sort):
        n_tiles = int(args.tiles[0])
        n_rows = int(args.rows[:2].view(np.int64)[0]) * spec.block
        sorted_ = args.tiles[: 1 + 3 * n_tiles], args.rows[: 2 + n_rows]
        return [("whole", np.array(a)) for a in (*sorted_, args.places[: n * spec.n_used])]
    if isinstance(spec, ColumnNorm):
        return [("f32", rows(step.writes[0], slice(args.column, None))[:n, : spec.heads * spec.k])]
    if isinstance(spec, ScaleColumns):
        return [("f32", rows(step.writes[0], slice(args.column, args.column + spec.k))[:n])]
    if isinstance(spec, (Add, Combine)):
        return [("f32", rows(step.writes[0], slice(spec.k))[:n])]
    if isinstance(spec, Gather) or (isinstance(spec, Pack) and spec.counted):
        per = spec.block if isinstance(spec, Gather) else spec.per
        data, n_rows = args.out, int(args.rows[:2].view(np.int64)[0]) * per
        values = spec.layout().read_ref(data, n_rows)
        return [(spec.act, values[multiplied(plan, step, arena)])]
    if isinstance(spec, (Norm, Pack, Gated)):
        if isinstance(spec, Norm) and (spec.add or spec.rows):
            return [("f32", rows(step.writes[0], slice(spec.k))[:n])]
        if isinstance(spec, Gated) and spec.experts:
            met = rows_met(spec, args, run)
            with np.errstate(invalid="ignore"):  # rows between these may be anything
                values = spec.result().read_ref(args.y, max(met, default=-1) + 1)
            return [(spec.to, values[met])]
        n = n * spec.per if isinstance(spec, Pack) else n
        count = run["n_outputs"] if isinstance(spec, Norm) and spec.outputs else n
        at = plan.offsets[step.writes[0]]
        data = arena[at : at + step.writes[0].n_bytes]
        act = spec.result() if isinstance(spec, Gated) else spec.layout()
        return [(act.kind, act.read_ref(data, count).copy())]
    if isinstance(spec, PackHeads):
        heads = (args.out[head * args.head_bytes :] for head in range(spec.heads))
        each = [spec.layout().read_ref(data, n).copy() for data in heads]
        return [(spec.act, np.concatenate(each))]
    if isinstance(spec, Matmul) and spec.heads:
        (height,), width = args.rows, args.y_pitch
        y = rows(step.writes[0], slice(spec.heads * width))[:n]
        return [("f32", y.reshape(n, spec.heads, width)[..., :height].reshape(n, -1))]
    if isinstance(spec, Matmul):
        found = []
        for height, column in zip(args.rows, args.column, strict=True):
            y = rows(step.writes[0], slice(column, column + height))
            there = rows_met(spec, args, run)
            # One value alone may be near 0 where its terms are not.
            kind = spec.act if spec.act == "bf16x2" else "f32"
            found.append((kind, y[there] + (height == 1)))
        return found
    if isinstance(spec, (RopeStore, LatentStore)):
        q = rows(step.writes[0], slice(spec.n_head * spec.head_dim))[:n]
        if isinstance(spec, RopeStore) and spec.queries_only:
            return [("f32", q)]
        kept: list[list[np.ndarray]] = [[], []]
        for slot in run.kv_indices(spec.pool):
            for head in range(spec.n_head_kv):
                place = int(slot) // PAGE, args.page_bytes, args.layer_off, head
                home = spec.page.head_ref(args.pool, *place)
                for which, x in zip(kept, spec.page.read_ref(home), strict=True):
                    which.append(x[int(slot) % PAGE])
        kind = {"f32": "f32", "q8_0": "q8"}.get(spec.kv, "bf16")
        return [("f32", q), *((kind, np.array(which)) for which in kept)]
    out = slice(spec.n_head * spec.dims_v if isinstance(spec, Attention) else None)
    if isinstance(spec, Attention):
        y = rows(step.writes[0], out)
        items = run.attn_items(spec.pool, few=bool(args.few))
        whole = [
            int(i["token"]) + t
            for i, _ in items
            for t in range(int(i["n_tokens"]))
            if i["partial"] < 0
        ]
        n_partials = sum(int(item["partial"] >= 0) for item, _ in items)
        kind = "pairs" if spec.matrix else "words" if spec.words else "f32"
        if not args.few:
            assert not n_partials
            return [(kind, y[whole])]
        at = plan.offsets[step.writes[1]]
        size = spec.partial_values
        parts = arena[at : at + 4 * size * n_partials].view(np.float32)
        return [(kind, y[whole]), (kind, parts.reshape(-1, spec.dims_v + 2).copy())]
    if isinstance(spec, Softcap):
        return [("f32", rows(step.writes[0], slice(spec.k))[: int(run[spec.count])])]
    if isinstance(spec, (TopLogitsKernel, JoinTop)):  # an order, which is no matter of rounding
        return []
    if isinstance(spec, SparseGate):
        at = plan.offsets[step.writes[0]]
        data = arena[at : at + step.writes[0].n_bytes]
        return [(spec.act, spec.layout().read_ref(data, n).copy())]
    if type(spec).__module__ == altup.__name__:
        widths = [_width(spec, buffer, step) for buffer in step.writes]
        both = zip(step.writes, widths, strict=True)
        return [("f32", rows(buffer, slice(width))[:n]) for buffer, width in both]
    assert isinstance(spec, Merge)
    merges = run.attn_merges(spec.pool)
    y = rows(step.writes[0], slice(spec.n_groups * spec.heads * spec.head_dim))
    return [("f32", y[[int(m["token"]) + t for m in merges for t in range(int(m["n_tokens"]))]])]
