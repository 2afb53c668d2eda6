"""Importance matrix collection: sums the squared inputs of every weight matrix over a text.

The plan of a prefill is copied with a *tap* after each step that makes activations: the same kernel
once more, writing plain floats instead of the layout (int8, say) that the matrix product takes. The
plan runs from tap to tap, and the squares are summed in between. The engine's own plans do not
change, so a normal run costs nothing extra.

Inputs of experts are kept until routing is known, then summed per expert. Heads with matrices of
their own (latent attention) have separate sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.base.interrupts import interrupts_held
from treadle.engine.batch import BatchItem, RunInputs
from treadle.engine.engine import OUTPUTS
from treadle.errors import TreadleError
from treadle.kernels.activation_layout import ActivationLayout
from treadle.kernels.attention.latent_steps import PackHeads
from treadle.kernels.elementwise.elementwise import Pack
from treadle.kernels.matmul.gated import Gated
from treadle.kernels.matmul.matmul import Matmul, tiles_of
from treadle.kernels.moe.dispatch import Gather
from treadle.kernels.moe.route import Sort
from treadle.kernels.spec import Grid
from treadle.plan.plan import Buffer, Plan, Step
from treadle.quantize.imatrix.matrix import ImatrixEntry, ImportanceMatrix

if TYPE_CHECKING:
    from treadle.devices.protocol import Device
    from treadle.engine.engine import Engine

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class ActivationTap:
    """A point where activations are read: after step number ``step`` of the tapped plan, ``buffer``
    holds rows of f32 in layout ``act``.
    """

    step: int
    act: ActivationLayout
    buffer: Buffer
    count: str  # the RUN_STATE entry with the number of rows
    tensors: tuple[str, ...]  # the weight matrices that these rows are multiplied by
    keeps_rows: bool = False  # keep all rows of the buffer, for experts
    heads: int = 1  # heads that have rows of their own in the buffer


@dataclass(frozen=True, eq=False)
class ExpertShare:
    """The routing to experts of the rows of ``buffer``, which an ``ActivationTap`` has kept; known
    after step number ``step``. ``tensors``: the experts' weight matrices.

    ``tiles``: each expert's rows, sorted into tiles, as indices into ``rows`` (token ids), or of
    tokens if ``rows`` is None. If ``tokens`` is not 0, ``tiles`` has instead the chosen experts,
    where each run of ``tokens`` entries shares a row.
    """

    step: int
    buffer: Buffer
    tensors: tuple[str, ...]
    n_experts: int
    tiles: Buffer
    rows: Buffer | None
    tokens: int
    n_used: int  # experts of a token

    def rows_by_expert(
        self, read: Callable[[Buffer], npt.NDArray[np.uint8]], n_tokens: int
    ) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Yield each expert's number with the indices of the rows of ``buffer`` that it multiplies,
        int64 ``[n]``. ``read`` returns the bytes of a buffer; ``n_tokens``: tokens of the run.
        """
        tiles = read(self.tiles).view(self.tiles.dtype)
        if self.tokens:
            chosen = tiles[: n_tokens * self.n_used]
            for expert in np.unique(chosen):
                yield int(expert), np.flatnonzero(chosen == expert) // self.tokens
            return
        token_of = read(self.rows).view(self.rows.dtype)[2:] if self.rows else None
        for expert, here in tiles_of(tiles):
            yield expert, here if token_of is None else token_of[here].astype(np.int64)


@dataclass(eq=False)
class Collector:
    """Sums of squared inputs, ``entries`` by tensor, over all windows that this collector has run.

    ``with_output``: include the output matrix.
    """

    engine: Engine
    with_output: bool = False
    entries: dict[str, ImatrixEntry] = field(default_factory=dict)
    _plans: dict[int, _TappedPlan] = field(default_factory=dict)  # by the engine's plan

    def run(self, window: list[int], pool: ThreadPoolExecutor) -> None:
        """Run a window of token ids through the model, as a sequence of its own, and add the
        squares of the inputs to ``entries``. ``pool``: threads that sum them.

        Raises ContextFullError if the window does not fit, TreadleError for activations that are
        not finite.
        """
        engine = self.engine
        step = self.engine.max_tokens
        if self.with_output:  # a run computes at most OUTPUTS logits, and every token needs one
            step = min(step, OUTPUTS)
        seq = engine.cache.sequence()
        try:
            for at in range(0, len(window), step):
                ids = window[at : at + step]
                part = BatchItem(seq, ids, len(ids) if self.with_output else 0)
                with engine.lock, interrupts_held():
                    self._run([part], pool)
                    engine.cache.commit(seq)
        finally:
            with interrupts_held():
                seq.close()

    def _run(self, parts: list[BatchItem], pool: ThreadPoolExecutor) -> None:
        whole, run = self.engine.steps(parts)
        at = 0
        device = self.engine.device
        tapped = self._plans.get(id(whole))
        if tapped is None:
            tapped = self._plans[id(whole)] = _TappedPlan(whole, run, device)
        kept: dict[Buffer, npt.NDArray[np.float32]] = {}
        for tap in tapped.taps:
            device.run(tapped.program, range(at, tap.step + 1))
            at = tap.step + 1
            if isinstance(tap, ExpertShare):
                rows = kept[tap.buffer]
                self._add_experts(tap, rows, tapped.read, run["n_tokens"])
            elif tap.keeps_rows:
                kept[tap.buffer] = tapped.rows(tap, tap.buffer.n_bytes // tap.act.row_bytes).copy()
            elif n_rows := run[tap.count]:
                heads = [tapped.rows(tap, n_rows, head) for head in range(tap.heads)]
                self._add(tap, heads, pool)
        if at < len(tapped.plan):
            device.run(tapped.program, range(at, len(tapped.plan)))
        self.engine.check_files()

    def _add(
        self, tap: ActivationTap, heads: list[npt.NDArray[np.float32]], pool: ThreadPoolExecutor
    ) -> None:
        cuts = np.linspace(0, tap.act.k, self.engine.device.n_threads + 1, dtype=int)

        def of_columns(a: int, b: int) -> npt.NDArray[np.float64]:
            return np.stack([_squares(rows[:, a:b]) for rows in heads])

        parts = pool.map(of_columns, cuts[:-1], cuts[1:])
        counts = np.array([float(len(rows)) for rows in heads])
        self._add_entry(tap.tensors, ImatrixEntry(np.concatenate(list(parts), axis=1), counts))

    def _add_experts(
        self,
        share: ExpertShare,
        rows: npt.NDArray[np.float32],
        read: Callable[[Buffer], npt.NDArray[np.uint8]],
        n_tokens: int,
    ) -> None:
        sums = np.zeros((share.n_experts, rows.shape[1]))
        counts = np.zeros(share.n_experts)
        for expert, here in share.rows_by_expert(read, n_tokens):
            sums[expert] += _squares(rows[here])
            counts[expert] += len(here)
        self._add_entry(share.tensors, ImatrixEntry(sums, counts))

    def _add_entry(self, tensors: tuple[str, ...], found: ImatrixEntry) -> None:
        if not np.isfinite(found.sums).all():
            raise TreadleError(
                f"the input of {tensors[0]} is not finite: the model's file is damaged, or its "
                "activations overflow"
            )
        for name in tensors:
            own = self.entries.get(name)
            self.entries[name] = found if own is None else own + found


def collect(
    engine: Engine,
    windows: npt.NDArray[np.int32],
    dataset: str,
    *,
    bos: int | None,
    with_output: bool = False,
    progress: Progress | None = None,
) -> ImportanceMatrix:
    """Run a text's windows, int32 ``[n_windows, n_ctx]``, and return the importance matrix: sums of
    the squared inputs of every matrix.

    Each window is a sequence of its own; unless ``bos`` is None, it replaces the first token.
    ``with_output``: include the output matrix, which llama.cpp leaves out by default. ``dataset``:
    the text's name. ``progress(done, total)`` counts tokens. Raises as ``Collector.run`` does.
    """
    collector = Collector(engine, with_output)
    with ThreadPoolExecutor(engine.device.n_threads, "imatrix") as pool:
        for i, row in enumerate(windows):
            ids: list[int] = row.tolist()
            if bos is not None:
                ids[0] = bos
            collector.run(ids, pool)
            if progress is not None:
                progress((i + 1) * len(ids), windows.size)
    tensors = engine.gguf.tensors  # keyed by the graph's names; `quantize` uses the file's
    entries = {
        tensors[name].name if name in tensors else name: entry
        for name, entry in collector.entries.items()
    }
    return ImportanceMatrix(entries, (dataset,), len(windows), windows.shape[1])


class _TappedPlan:
    """A copy of a plan with tap steps, prepared for the device, with an arena of its own."""

    def __init__(self, plan: Plan, run: RunInputs, device: Device) -> None:
        self.source = plan  # kept alive, so that its id() is not reused
        steps, self.taps = _with_taps(plan)
        self.plan = plan.with_steps(steps)
        self._arena = device.memory(self.plan.arena_bytes)
        self.program = device.ready(self.plan, self._arena, run.memory)

    def rows(self, tap: ActivationTap, n: int, head: int = 0) -> npt.NDArray[np.float32]:
        """Return the first ``n`` rows at the tap, float32 ``[n, K]``, those of its ``head``-th head
        if it has several: a view, valid until the next step runs.
        """
        at = self.plan.offsets[tap.buffer] + head * tap.buffer.row_bytes
        rows = self._arena.read(at, n * tap.act.row_bytes)
        return rows.view(np.float32).reshape(n, -1)[:, : tap.act.k]

    def read(self, buffer: Buffer) -> npt.NDArray[np.uint8]:
        """Return a buffer's bytes: a view, valid until the next step runs."""
        return self._arena.read(self.plan.offsets[buffer], buffer.n_bytes)


def _with_taps(plan: Plan) -> tuple[list[Step], list[ActivationTap | ExpertShare]]:
    """Return the plan's steps with tap steps inserted, and the taps in the order of their steps."""
    tensors: dict[Buffer, list[str]] = {}  # weight names, by the activations they multiply
    counts: dict[Buffer, str] = {}
    maker = {made: step for step in plan.steps for made in step.writes}
    experts: dict[Buffer, list[Step]] = {}  # expert products, by the rows to keep
    for step in plan.steps:
        if isinstance(step.spec, Matmul):
            x = step.args["x"]
            if step.spec.experts:
                source = maker[x]
                x = source.args["x"] if isinstance(source.spec, Gather) else x
                experts.setdefault(x, []).append(step)
                continue
            tensors.setdefault(x, []).extend(w[0].name for w in step.args["w"])
            counts[x] = step.spec.count
    steps: list[Step] = []
    taps: list[ActivationTap | ExpertShare] = []
    shares: dict[str, tuple[Buffer, list[Step]]] = {}  # by the step after which routing is known
    for step in plan.steps:
        tapped = [made for made in step.writes if made in tensors or made in experts]
        if not tapped:
            steps.append(step)
        for made in tapped:
            if isinstance(step.spec, Gated):
                tiles = step.args.get("tiles")
                both, act, buffer = _split(step, made, maker[tiles] if tiles else None)
            else:
                both, act, buffer = _tap(step, made)
            at = len(steps) + next(i for i, part in enumerate(both) if buffer in part.writes)
            if made in tensors:
                # Each name once, even if several products use rows of one matrix.
                names = tuple(dict.fromkeys(tensors[made]))
                heads = buffer.rows if isinstance(step.spec, PackHeads) else 1
                taps.append(ActivationTap(at, act, buffer, counts[made], names, heads=heads))
            if made in experts:
                taps.append(ActivationTap(at, act, buffer, "", (), keeps_rows=True))
                for product in experts[made]:
                    source = maker[product.args["x"]]
                    known = source if isinstance(source.spec, Gather) else product
                    shares.setdefault(known.label, (buffer, []))[1].append(product)
            steps += both
        if step.label in shares:
            buffer, products = shares[step.label]
            for product in products:
                chooser: Any = maker[product.args["tiles"]].spec
                taps.append(_share(len(steps) - 1, buffer, product, step, chooser.n))
    return steps, taps


def _share(at: int, buffer: Buffer, product: Step, known: Step, n_experts: int) -> ExpertShare:
    """Return the routing of the rows in ``buffer`` that ``product``, a product of ``n_experts``
    experts, multiplies; it is known after the step ``known``, whose index is ``at``.
    """
    spec = product.spec
    assert isinstance(spec, Matmul)
    names = dict.fromkeys(w[0].name for w in product.args["w"])
    return ExpertShare(
        at,
        buffer,
        tuple(names),
        n_experts,
        product.args["tiles"],
        known.args["rows"] if isinstance(known.spec, Gather) else product.args.get("sources"),
        product.args["tokens"],
        spec.experts,
    )


def _split(
    step: Step, made: Buffer, sort: Step | None
) -> tuple[list[Step], ActivationLayout, Buffer]:
    """Split a gate-and-up step, which writes ``made``, into a step that writes f32 and one that
    packs these rows into ``made``, because products must not run twice. Return both steps, and
    layout and buffer of the f32 rows.

    ``sort``: the step that sorted the rows by expert, None without experts.
    """
    spec = step.spec
    assert isinstance(spec, Gated)
    result = spec.result()
    act = ActivationLayout("f32", spec.m)
    n_rows = made.n_bytes // result.row_bytes
    tap = Buffer(f"{made.name}.tap", 1, act.n_bytes(n_rows), "u1")
    pack = Pack("copy", result.kind, result.k, result.group, result.sub, unit=result.unit)
    grid = result.grid(pack.slices, "n_tokens")
    rows = None
    if sort is not None:
        assert isinstance(sort.spec, Sort)
        pack = replace(pack, per=sort.spec.block, counted=True)
        grid = Grid(pack.slices * pack.per // result.together, "rows")
        rows = sort.args["rows"]
    plain = replace(
        step,
        spec=replace(spec, to=act.kind, to_group=act.group, to_sub=act.sub, to_unit=act.unit),
        args={**step.args, "y": tap},
    )
    args = {"x": tap, "out": made, "stride": act.row_bytes // 4, "up": 0, "rows": rows}
    return [plain, Step(f"{step.label}.pack", pack, args, grid)], act, tap


def _tap(step: Step, made: Buffer) -> tuple[list[Step], ActivationLayout, Buffer]:
    """Return ``step``, followed by a step that writes the activations ``made`` again in f32, unless
    they are f32 already; and layout and buffer of the f32 rows.
    """
    spec: Any = step.spec
    assert {"act", "group", "k"} <= {f.name for f in fields(spec)}, spec.name
    act = ActivationLayout("f32", spec.k)
    if isinstance(spec, PackHeads):
        return _tap_heads(step, spec, act)
    if (spec.act, spec.group) == (act.kind, act.group):
        return [step], act, made
    n_rows = made.n_bytes // spec.layout().row_bytes
    tap = Buffer(f"{made.name}.tap", 1, act.n_bytes(n_rows), "u1")
    items = spec.slices * spec.per if isinstance(spec, Pack) else 1
    again = Step(
        f"{step.label}.tap",
        replace(spec, act=act.kind, group=act.group),
        {**step.args, "out": tap},
        Grid(items, step.grid.count),
    )
    return [step, again], act, tap


def _tap_heads(
    step: Step, spec: PackHeads, act: ActivationLayout
) -> tuple[list[Step], ActivationLayout, Buffer]:
    """Return ``step``, which packs heads, followed by a step that packs them in f32, without the
    attention score scale; and layout and buffer of the f32 rows.
    """
    n_rows = step.args["head_bytes"] // spec.layout().row_bytes
    tap = Buffer(f"{step.label}.tap", spec.heads, act.n_bytes(n_rows), "u1")
    again = Step(
        f"{step.label}.tap",
        replace(spec, act=act.kind, group=act.group, sub=act.sub, unit=act.unit, scale=1.0),
        {**step.args, "out": tap, "head_bytes": tap.row_bytes},
        act.grid(spec.heads, step.grid.count),
    )
    return [step, again], act, tap


def _squares(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return for each column of float32 ``rows [n, K]`` the sum of its squares: float64 ``[K]``."""
    with np.errstate(over="ignore", invalid="ignore"):
        total: npt.NDArray[np.float64] = np.einsum("ij,ij->j", rows, rows, dtype=np.float64)
    return total
