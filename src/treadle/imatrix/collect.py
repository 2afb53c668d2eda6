"""Measuring what passes into every weight matrix while a model reads a text.

The plan that serves a prefill is copied with a *tap* behind each step that makes activations: the
same kernel once more, writing plain floats instead of the layout (int8, say) that the matrix
product wants. It runs from tap to tap, and between two of them the squares are summed. The engine's
own plans stay as they are, so a normal run costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.batch import Part
from treadle.engine import OUTPUTS
from treadle.errors import TreadleError
from treadle.imatrix.matrix import Entry, ImportanceMatrix
from treadle.jit.kernel import load_kernels
from treadle.kernels.act import Act
from treadle.kernels.elementwise import Pack
from treadle.kernels.gated import Gated
from treadle.kernels.matmul import Matmul, W, X
from treadle.kernels.spec import Grid
from treadle.plan import Buffer, Const, Plan, Step
from treadle.runtime.runner import STEP
from treadle.runtime.threads import Memory, interrupts_held

if TYPE_CHECKING:
    from treadle.engine import Engine

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Tap:
    """Where to look: after ``step`` (its place in the plan) ``buffer`` holds ``act``'s rows."""

    step: int
    act: Act
    buffer: Buffer
    count: str  # of RUN_STATE: how many rows
    tensors: tuple[str, ...]  # the weight matrices that these rows are multiplied by


@dataclass(eq=False)
class Sums:
    """Of one tap: squares, float64 ``[K]``, of so many rows."""

    squares: npt.NDArray[np.float64]
    n_rows: int = 0


@dataclass(eq=False)
class Collector:
    """Sums over all that is run through it."""

    engine: Engine
    with_output: bool = False
    sums: dict[str, Sums] = field(default_factory=dict)  # by tensor
    _plans: dict[int, _Tapped] = field(default_factory=dict)  # by the engine's plan

    def run(self, window: list[int], pool: ThreadPoolExecutor) -> None:
        """Let the model read tokens from the beginning of a text on.

        Raises ContextFullError where they do not fit, TreadleError for activations that are not
        finite.
        """
        engine, step = self.engine, self.engine.max_tokens
        if self.with_output:  # a run gives few logits, and what makes them must be seen at work
            step = min(step, OUTPUTS)
        seq = engine.cache.sequence()
        try:
            for at in range(0, len(window), step):
                ids = window[at : at + step]
                part = Part(seq, ids, len(ids) if self.with_output else 0)
                with engine.lock, interrupts_held():
                    self._run([part], pool)
                    engine.cache.commit(seq)
        finally:
            with interrupts_held():
                seq.close()

    def _run(self, parts: list[Part], pool: ThreadPoolExecutor) -> None:
        whole, run, team = self.engine.steps(parts)
        tapped = self._plans.setdefault(id(whole), _Tapped(whole, self.engine))
        at = 0
        for tap in tapped.taps:
            team.run(tapped.address(at), tap.step + 1 - at, int(run.state.ctypes.data))
            at = tap.step + 1
            if n_rows := run[tap.count]:
                self._add(tap, tapped.rows(tap, n_rows), pool)
        if at < len(tapped.plan):
            team.run(tapped.address(at), len(tapped.plan) - at, int(run.state.ctypes.data))
        self.engine.check_files()

    def _add(self, tap: Tap, rows: npt.NDArray[np.float32], pool: ThreadPoolExecutor) -> None:
        cuts = np.linspace(0, rows.shape[1], self.engine.n_threads + 1, dtype=int)
        parts = pool.map(lambda a, b: _squares(rows[:, a:b]), cuts[:-1], cuts[1:])
        squares = np.concatenate(list(parts))
        if not np.isfinite(squares).all():
            raise TreadleError(
                f"what enters {tap.tensors[0]} is not finite: the model's file is damaged, or its "
                "activations overflow"
            )
        for name in tap.tensors:
            sums = self.sums.setdefault(name, Sums(np.zeros(len(squares))))
            sums.squares += squares
            sums.n_rows += len(rows)

    def entries(self) -> dict[str, Entry]:
        """What was collected, as an importance matrix holds it."""
        return {
            name: Entry(sums.squares[None], np.array([float(sums.n_rows)]))
            for name, sums in self.sums.items()
        }


def collect(
    engine: Engine,
    windows: npt.NDArray[np.int32],
    dataset: str,
    *,
    bos: int | None,
    with_output: bool = False,
    progress: Progress | None = None,
) -> ImportanceMatrix:
    """Run a text's windows, int32 ``[n_windows, n_ctx]``, and sum what enters every matrix.

    Each window is a text by itself, its first token replaced by ``bos`` where the model wants one.
    ``with_output``: the output matrix too, which llama.cpp leaves out by default. ``progress(done,
    total)`` counts tokens.
    """
    collector = Collector(engine, with_output)
    with ThreadPoolExecutor(engine.n_threads, "imatrix") as pool:
        for i, row in enumerate(windows):
            ids: list[int] = row.tolist()
            if bos is not None:
                ids[0] = bos
            collector.run(ids, pool)
            if progress is not None:
                progress((i + 1) * len(ids), windows.size)
    return ImportanceMatrix(collector.entries(), (dataset,), len(windows), windows.shape[1])


class _Tapped:
    """A copy of a plan with its taps, compiled, and with memory of its own."""

    def __init__(self, plan: Plan, engine: Engine) -> None:
        self.source = plan  # kept, so that its id stays its own
        steps, self.taps = _with_taps(plan)
        self.plan = replace(plan, steps=steps, offsets={}, arena_bytes=0)
        self.plan.place()
        self.arena = Memory(self.plan.arena_bytes)
        kernels = load_kernels(self.plan.specs(), engine.isa, engine.progress)
        self._records, self._args = self.plan.table(kernels, self.arena.address, STEP)

    def address(self, step: int) -> int:
        """Of a step's record."""
        return int(self._records.ctypes.data) + step * STEP.itemsize

    def rows(self, tap: Tap, n: int) -> npt.NDArray[np.float32]:
        """What the tap shows, float32 ``[n, K]``: a view, until the next step is run."""
        at = self.plan.offsets[tap.buffer]
        rows = self.arena.bytes[at : at + n * tap.act.row_bytes].view(np.float32)
        return rows.reshape(n, -1)[:, : tap.act.k]


def _with_taps(plan: Plan) -> tuple[list[Step], list[Tap]]:
    """The plan's steps with taps between them, and where these are."""
    tensors: dict[Buffer, list[str]] = {}  # by the activations that they are multiplied by
    counts: dict[Buffer, str] = {}
    for step in plan.steps:
        if isinstance(step.spec, Matmul):
            x = step.args[X]
            assert isinstance(x, Buffer)
            tensors.setdefault(x, []).extend(_weights(step))
            counts[x] = step.spec.count
    steps: list[Step] = []
    taps: list[Tap] = []
    for step in plan.steps:
        tapped = [made for made in step.writes if made in tensors]
        if not tapped:
            steps.append(step)
        for made in tapped:
            both, act, buffer = (
                _split(step, made) if isinstance(step.spec, Gated) else _tap(step, made)
            )
            at = next(i for i, part in enumerate(both) if buffer in part.writes)
            taps.append(Tap(len(steps) + at, act, buffer, counts[made], tuple(tensors[made])))
            steps += both
    return steps, taps


def _weights(step: Step) -> Iterator[str]:
    """Names of the matrices that a product multiplies by."""
    assert isinstance(step.spec, Matmul)
    for segment in range(step.spec.segments):
        weight = step.args[step.spec.slot(segment, W)]
        assert isinstance(weight, Const)
        yield weight.name


def _split(step: Step, made: Buffer) -> tuple[list[Step], Act, Buffer]:
    """A kernel that makes ``made`` of products, as one that makes plain floats and one that packs
    them: products are not for doing twice.
    """
    spec = step.spec
    assert isinstance(spec, Gated)
    result, act = spec.result(), Act("f32", spec.m)
    n_rows = made.n_bytes // result.row_bytes
    tap = Buffer(f"{made.name}.tap", 1, act.n_bytes(n_rows), "u1")
    pack = Pack("copy", result.kind, result.k, result.group, result.sub)
    plain = replace(
        step,
        spec=replace(spec, to=act.kind, to_group=act.group, to_sub=act.sub),
        args=tuple(tap if arg is made else arg for arg in step.args),
        writes=(tap,),
    )
    packed = Step(
        label=f"{step.label}.pack",
        spec=pack,
        args=(tap, made, act.row_bytes // 4, 0),
        reads=(tap,),
        writes=(made,),
        grid=result.grid(pack.slices, "n_tokens"),
    )
    return [plain, packed], act, tap


def _tap(step: Step, made: Buffer) -> tuple[list[Step], Act, Buffer]:
    """The step, and one that makes ``made`` once more as plain floats unless it already does."""
    spec: Any = step.spec
    assert {"act", "group", "k"} <= {f.name for f in fields(spec)}, spec.name
    act = Act("f32", spec.k)
    if (spec.act, spec.group) == (act.kind, act.group):
        return [step], act, made
    n_rows = made.n_bytes // spec.layout().row_bytes
    tap = Buffer(f"{made.name}.tap", 1, act.n_bytes(n_rows), "u1")
    again = Step(
        label=f"{step.label}.tap",
        spec=replace(spec, act=act.kind, group=act.group),
        args=tuple(tap if arg is made else arg for arg in step.args),
        reads=step.reads,
        writes=(tap,),
        grid=Grid(step.grid.base // spec.layout().grid(1, step.grid.count).base, step.grid.count),
        chunk=step.chunk,
    )
    return [step, again], act, tap


def _squares(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The sum over rows of their squares, float64 ``[K]``."""
    with np.errstate(over="ignore", invalid="ignore"):
        total: npt.NDArray[np.float64] = np.einsum("ij,ij->j", rows, rows, dtype=np.float64)
    return total
