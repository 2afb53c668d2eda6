"""Compares the values that one step wrote with those that its numpy twin computes from the same
memory.

A step's inputs are read from the plan's arena as earlier kernels have left them, so that a step is
judged by itself: earlier rounding errors are in both. The twin computes in float64, and outputs
start as NaN, so that only values that the twin has written are compared.

Where a product has many rows or experts, or attention many items, the twin computes a part of them
(``Cut``), chosen by a seed; the kernel always computes all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.kernels.activation_layout import BLOCK, SPAN, SPANNED, ActivationLayout
from treadle.kernels.activations import ACTIVATIONS, gated
from treadle.kernels.attention.indexer import Choose, IndexScores, IndexStore
from treadle.kernels.attention.int16_tile import LIMIT
from treadle.kernels.attention.latent_steps import LatentStore, PackHeads
from treadle.kernels.attention.merge_splits import Merge
from treadle.kernels.attention.paged import Attention
from treadle.kernels.attention.rope import RopeStore
from treadle.kernels.attention.row_attention import RowChoice
from treadle.kernels.attention.row_pages import RowStore
from treadle.kernels.attention.work_item import SPAN as SPAN_PAGES
from treadle.kernels.attention.work_item import alibi_slopes
from treadle.kernels.elementwise.add import Add, AddRows
from treadle.kernels.elementwise.column_norm import ColumnNorm
from treadle.kernels.elementwise.elementwise import Embed, Norm, Pack
from treadle.kernels.elementwise.media_rows import MediaRowsKernel
from treadle.kernels.elementwise.softcap import Softcap
from treadle.kernels.elementwise.sparse_gate import SparseGate
from treadle.kernels.elementwise.top_logits import PARTIAL, JoinTop, TopLogitsKernel, slices
from treadle.kernels.matmul.gated import Gated
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.moe.dispatch import Combine, Gather
from treadle.kernels.moe.route import Route, RouteByToken, Sort
from treadle.kernels.recurrent.block_convolution import BlockConvolution
from treadle.kernels.recurrent.chunk_keys import ChunkKeys
from treadle.kernels.recurrent.chunked import Chunked
from treadle.kernels.recurrent.gates import OutputGate
from treadle.kernels.run_state import PAGE, RESULT, TOTAL_ERROR
from treadle.kernels.spec import f32_values
from treadle.plan.plan import Buffer, Const
from treadle.selftest.rounding_bounds import (
    TINY,
    TWIN_ERROR,
    U16,
    U32,
    activation_error,
    centring_error,
    gated_error,
    norm_error,
    product_error,
    rotation_error,
    stored_error,
)

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.kernels.attention.page_layout import KVFormat
    from treadle.kernels.spec import Spec
    from treadle.plan.plan import Step

# Twins of these read the bits of their f32 arguments, so these stay f32.
READS_BITS = (
    "top",
    "pack",
    "pooling",
    "lora_down",
    "expert_lora_down",
    "clamp_between",
    "sparse_gate",
)
WRITTEN_CONSTANTS = ("pool", "units", "states")  # arguments that steps change for good
SENSIBLE = 1e30  # padding rows are undefined memory: larger numbers in them are not compared


@dataclass(frozen=True)
class Cut:
    """Limits of the part of a step that its twin computes.

    weights: rows of a product's matrix are computed up to so many weights, at least ``rows`` rows.
    experts: the most experts (or heads, or rows of a gemv with experts) of a product.
    items: the most work items of an attention.
    """

    weights: int = 1 << 20
    rows: int = 64
    experts: int = 6
    items: int = 12

    def rows_of(self, n_rows: int, width: int, unit: int = 1) -> np.ndarray:
        """Return the indices, ascending, of the rows that the twin computes, of a matrix of
        ``n_rows`` rows of ``width`` values, in groups of ``unit`` neighbours; the first and the
        last are among them.
        """
        n_groups = -(-n_rows // unit)
        groups = self.sample_indices(n_groups, max(self.weights // width, self.rows) // unit)
        rows = (groups[:, None] * unit + np.arange(unit)).ravel()
        return rows[rows < n_rows]

    def sample_indices(self, n: int, most: int) -> np.ndarray:
        """Return at most ``most`` (4, if that is less) of the indices below ``n``, ascending: a
        quarter of them from the front, a quarter from the end, the others at random from a seed.
        """
        most = max(most, 4)
        if n <= most:
            return np.arange(n)
        edge = most // 4
        inner = np.random.default_rng(n).choice(n - 2 * edge, most - 2 * edge, replace=False)
        return np.concatenate([np.arange(edge), np.sort(inner) + edge, np.arange(n - edge, n)])


@dataclass
class Compared:
    """Values that a step wrote (``actual``), its twin's (``expected``), and the tolerance of each:
    float64 arrays of one shape. ``what``: the name of the array.

    ``rows`` and ``columns``: indices of the arrays' rows and columns in the step's result; None
    where they count from 0. ``n_cut``: values that the twin did not compute.
    """

    what: str
    actual: np.ndarray
    expected: np.ndarray
    tolerance: np.ndarray
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    n_cut: int = 0

    @property
    def compared(self) -> np.ndarray:
        """A mask of the values to compare: all but those where the twin's value or the tolerance is
        NaN. There an input was NaN already, which is an earlier step's fault.
        """
        made: np.ndarray = ~(np.isnan(self.expected) | np.isnan(self.tolerance))
        return made

    def excess(self) -> np.ndarray:
        """Return each error divided by its tolerance; infinite where only the kernel's value is
        NaN, 0 where nothing is compared.
        """
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            same = (self.actual == self.expected) | ~self.compared
            share = np.where(same, 0.0, np.abs(self.actual - self.expected) / self.tolerance)
        made: np.ndarray = np.where(np.isnan(share), np.inf, share)
        return made

    def place(self, at: tuple[int, ...]) -> str:
        """Return the place of the value at the indices ``at`` in words: array, row, column."""
        if len(at) != 2:
            return f"{self.what} {list(at)}"
        row = at[0] if self.rows is None else int(self.rows[at[0]])
        column = at[1] if self.columns is None else int(self.columns[at[1]])
        return f"{self.what}: row {row}, column {column}"


class Evidence:
    """One step's arguments before it ran, as its twin takes them, and the kernel's results.

    ``before``: the bytes of each buffer that the step reads; ``changing``: by argument name, the
    constants that it changes (KV pages, states). ``run``: the run's inputs.
    """

    def __init__(
        self,
        step: Step,
        run: Any,
        isa: Isa,
        before: dict[Buffer, np.ndarray],
        changing: dict[str, np.ndarray],
    ) -> None:
        self.step = step
        self.spec: Any = step.spec
        self.run = run
        self.isa = isa
        self.before = before
        self.changing = changing
        self._after: dict[Buffer, np.ndarray] = {}
        self.changed: dict[str, np.ndarray] = {}  # the constants afterwards

    def finish(self, after: dict[Buffer, np.ndarray], changed: dict[str, np.ndarray]) -> None:
        """Add the kernel's results: the bytes of the buffers that it wrote, and those of the
        constants that it changed.
        """
        self._after = after
        self.changed = changed

    def args(self, without: str = "") -> SimpleNamespace:
        """Return new arguments for the twin, by name: f32 buffers as float64, so that it rounds
        nothing; outputs as NaN (0xFF in other types). ``without``: an output that is left out
        (None).
        """
        spec = self.spec
        wide = spec.op not in READS_BITS
        outputs = {*self.step.writes} - {*self.step.reads}
        made: dict[Buffer, np.ndarray] = {}

        def view(name: str, arg: Any) -> Any:
            if isinstance(arg, (tuple, list)):
                return [view(name, one) for one in arg]
            if isinstance(arg, Const):
                known = self.changing.get(name)
                if known is not None:
                    return known.copy()
                # Of pages the device may have the only array.
                cells = name in WRITTEN_CONSTANTS
                return arg.memory.read(0, arg.memory.n_bytes) if cells else arg.array
            if not isinstance(arg, Buffer):
                return arg
            if name == without:
                return None
            if arg not in made:
                if arg in outputs:
                    float_ = np.dtype("f8" if wide and arg.dtype == "f4" else arg.dtype)
                    n = arg.n_bytes // np.dtype(arg.dtype).itemsize
                    array = np.full(n * float_.itemsize, 0xFF, np.uint8).view(float_)
                else:
                    array = self.before[arg].copy().view(arg.dtype)
                    with np.errstate(invalid="ignore"):  # NaN of earlier steps' memory
                        array = array.astype("f8") if wide and arg.dtype == "f4" else array
                made[arg] = array
            return made[arg]

        given = self.step.args.items()
        found: SimpleNamespace = spec.args(**{name: view(name, arg) for name, arg in given})
        return found

    def written(self, name: str) -> np.ndarray:
        """Return the array that the kernel wrote to the argument ``name``, in the buffer's type."""
        buffer = self.step.args[name]
        return self._after[buffer].view(buffer.dtype)

    def twin(self, spec: Spec | None = None, run: Any = None, **more: Any) -> SimpleNamespace:
        """Run the twin of ``spec`` (by default the step's) on new arguments; return them as the
        twin left them. ``more``: values that replace arguments; ``run``: inputs in place of the
        run's.
        """
        args = self.args()
        for name, value in more.items():
            setattr(args, name, value)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            (spec or self.spec).run_ref(args, self.run if run is None else run)
        return args


def compare(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    """Yield the comparison of each array that a step wrote with its twin's result, by the function
    of COMPARISONS for the step's kind of kernel.
    """
    spec = evidence.spec
    for kind, compared in COMPARISONS.items():
        if isinstance(spec, kind):
            yield from compared(evidence, cut)
            return
    yield from _compare_default(evidence, cut)


# -- sums and elementwise kernels ------------------------------------------------------------------


def _floats(
    evidence: Evidence, args: SimpleNamespace, name: str, tolerance: Any, n_cut: int = 0
) -> Compared:
    """Compare the f32 buffer of the argument ``name``, where the twin has written. ``args``: the
    twin's arguments afterwards; ``tolerance``: an array in the buffer's shape, or a function of the
    expected values that returns it.
    """
    expected = np.asarray(getattr(args, name), np.float64).reshape(-1)
    actual = evidence.written(name).view(np.float32).astype(np.float64)
    allowed = tolerance(expected) if callable(tolerance) else tolerance
    there = ~np.isnan(expected)
    stride = next((s for s in ("out_stride", "stride") if getattr(args, s, None)), "")
    if name in ("x", "y", "qkv"):
        stride = "stride"
    width = int(getattr(args, stride, 0) or 0) or len(expected)
    if len(expected) % width == 0 and (len(expected) // width) > 0:
        rows, columns = (np.flatnonzero(there.reshape(-1, width).any(axis)) for axis in (1, 0))
        block = np.ix_(rows, columns)
        shape = -1, width
        a, e, t = (
            np.broadcast_to(each, expected.shape).reshape(shape)[block]
            for each in (actual, expected, allowed)
        )
        e = np.where(there.reshape(shape)[block], e, a)  # between written rows: not compared
        return Compared(name, a, e, t, rows, columns, n_cut)
    allowed = np.broadcast_to(allowed, expected.shape)
    return Compared(name, actual[there], expected[there], allowed[there], n_cut=n_cut)


def _estimate(spec: Any, expected: np.ndarray, unit: float = 2.0**-21) -> np.ndarray:
    """Return the allowed error of each value, in the shape of ``expected``; it is the same for all:
    ``unit * sqrt(n)`` times the largest magnitude in ``expected``. This is how far off a sum of n
    terms of that magnitude may be if each term is off by some f32 roundings. n: the largest of
    the fields ``k``, ``n_state``, ``head_dim`` and ``taps`` that ``spec`` has, at least 64.
    """
    n_terms = max(getattr(spec, name, 0) for name in ("k", "n_state", "head_dim", "taps"))
    top = np.nanmax(np.abs(expected), initial=0.0)
    return np.full(expected.shape, unit * np.sqrt(max(n_terms, 64)) * top + TINY)


def _compare_default(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    """Compare the outputs of kernels that have no function in COMPARISONS: f32 within
    ``_estimate``, whole numbers exactly, and states.
    """
    spec = evidence.spec
    args = evidence.twin()
    for name in dict.fromkeys(spec.args.writes):
        if not isinstance(evidence.step.args.get(name), Buffer):
            continue
        if (
            isinstance(spec, (BlockConvolution, OutputGate)) and name == "x"
        ):  # rows of a norm, whose buffer is bytes
            setattr(args, name, f32_values(getattr(args, name)))
            yield _floats(evidence, args, name, lambda expected: _estimate(spec, expected))
        elif evidence.step.args[name].dtype == "f4":
            yield _floats(evidence, args, name, lambda expected: _estimate(spec, expected))
        else:
            yield _whole(evidence, args, name)
    yield from _states(evidence, args, 2.0**-21)


def _whole(evidence: Evidence, args: SimpleNamespace, name: str) -> Compared:
    """Compare the whole numbers of the argument ``name`` exactly, where the twin has written any
    (bits other than 0xFF). ``args``: the twin's arguments afterwards.
    """
    expected = np.asarray(getattr(args, name)).reshape(-1)
    actual = evidence.written(name).reshape(-1)
    there = expected.view(np.uint8).reshape(len(expected), -1).min(1, initial=255) < 255
    return _compare_integers(name, actual[there], expected[there])


def _compare_integers(name: str, actual: np.ndarray, expected: np.ndarray) -> Compared:
    """Return the comparison of whole numbers, which must be equal: the tolerance is 0.5."""
    tolerance = np.full(expected.shape, 0.5)
    return Compared(name, actual.astype(np.float64), expected.astype(np.float64), tolerance)


def _states(evidence: Evidence, args: SimpleNamespace, unit: float) -> Iterator[Compared]:
    """Compare the states that a kernel or its twin has changed, within ``_estimate`` of ``unit``.
    Where the twin's result equals the state before, the kernel's may still be some roundings off. A
    changed state of another sequence is wrong, for the twin keeps it.
    """
    if "states" not in evidence.changed:
        return
    before, actual, expected = (
        a.view(np.uint32)
        for a in (evidence.changing["states"], evidence.changed["states"], args.states)
    )
    changed = (actual != before) | (expected != before)
    found, exact = (a[changed].view(np.float32).astype(np.float64) for a in (actual, expected))
    yield Compared("states", found, exact, _estimate(evidence.spec, exact, unit))


def _chunked(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    """Compare the outputs and states of a recurrence by chunks. Tolerance: 24 roundings to bf16 of
    the largest value: a term is a product of at most four numbers that are rounded to bf16, and six
    such roundings of each are allowed for.
    """
    args = evidence.twin()

    def bound(expected: np.ndarray) -> np.ndarray:
        top = np.nanmax(np.abs(expected), initial=0.0)
        return np.full(expected.shape, 6 * 4 * U16 * top + TINY)

    for name in evidence.spec.args.writes:
        yield _floats(evidence, args, name, bound)
    for compared in _states(evidence, args, 1.0):
        compared.tolerance = bound(compared.expected)
        yield compared


def _chunk_keys(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    """Compare the output of ``ChunkKeys``. Operands must have the same bits as the twin's; sums may
    be off by 8 f32 roundings for each of ``n_state`` terms.
    """
    spec = evidence.spec
    args = evidence.twin()
    matrix = evidence.isa.matrix
    turns = matrix is not None and matrix.turn is not None
    n_chunks = -(-int(evidence.run["n_tokens"]) // 32) * spec.n_group
    both = (a.reshape(-1, spec.n_bytes)[:n_chunks] for a in (evidence.written("out"), args.out))
    for mine, theirs in zip(*both, strict=True):
        found = spec.read_ref(mine, turns=turns)
        for name, values in spec.read_ref(theirs).items():
            expected = np.asarray(values, np.float64)
            size = np.abs(expected).max(initial=1.0)
            dots = spec.n_state * U32 * 8 * size if name in ("seen", "known") else 0.0
            allowed = np.full(expected.shape, dots + TINY)
            yield Compared(name, np.asarray(found[name], np.float64), expected, allowed)


def _embed(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    """Compare embeddings: a code times d, plus m, times scale. Tolerance: three roundings of the
    value, and three of the largest value.
    """

    def bound(expected: np.ndarray) -> np.ndarray:
        size = np.abs(expected)
        made: np.ndarray = 3 * U32 * (size + np.nanmax(size, initial=0.0)) + TINY
        return made

    yield _floats(evidence, evidence.twin(), "x", bound)


def _added(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    """Compare sums of two values. Tolerance: one rounding."""
    name = evidence.spec.args.writes[0]
    yield _floats(evidence, evidence.twin(), name, lambda exact: U32 * np.abs(exact) + TINY)


def _softcap(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    """Compare capped logits. Tolerance: five roundings of the cap: two of tanh, two of its
    argument, one of the last product.
    """
    yield _floats(evidence, evidence.twin(), "y", evidence.spec.cap * 5 * U32)


def _combine(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    """Compare the combined rows of experts. Tolerance: a rounding for each product or sum of a
    chosen expert, of the shared expert and of the residual, and some for the sigmoid, all relative
    to the sum of magnitudes, which the twin computes from the magnitudes of its inputs.
    """
    spec = evidence.spec
    magnitudes = evidence.args()
    for name in ("y", "weights", "shared", "residual"):
        if getattr(magnitudes, name) is not None:
            setattr(magnitudes, name, np.abs(f32_values(getattr(magnitudes, name))))
    with np.errstate(invalid="ignore"):
        spec.run_ref(magnitudes, evidence.run)
    sums = np.nan_to_num(np.asarray(magnitudes.out, np.float64))
    tolerance = (spec.n_used + 6) * U32 * sums + TINY
    yield _floats(evidence, evidence.twin(), "out", tolerance)


# -- norms and activations -------------------------------------------------------------------------


def _column_norm(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    spec: ColumnNorm = evidence.spec
    args = evidence.args()
    width = spec.heads * spec.k
    rows = args.x.reshape(-1, args.stride)[: int(evidence.run["n_tokens"])]
    part = rows[:, args.column : args.column + width].copy().reshape(len(rows), spec.heads, spec.k)
    w = args.w[: spec.k * (spec.heads if spec.own else 1)].reshape(-1, spec.k)
    off = centring_error(spec, evidence.isa, part, w).reshape(len(rows), width)
    done = evidence.twin()
    columns = slice(args.column, args.column + width)
    exact = done.x.reshape(-1, args.stride)[: len(rows), columns]
    bias = np.tile(np.abs(args.bias[: spec.k]), spec.heads) if spec.bias else 0.0
    relative = norm_error(spec.k, evidence.isa) + U32
    allowed = off + (np.abs(exact) + bias) * relative + TINY
    found = evidence.written("x").reshape(-1, args.stride)[: len(rows), columns]
    yield Compared("x", found.astype(np.float64), exact, allowed, columns=_numbers(columns))


def _numbers(columns: slice) -> np.ndarray:
    return np.arange(columns.start, columns.stop)


def _exact_spec(spec: Any) -> Any:
    """Return ``spec`` with plain f32 activations as its output, so that its twin rounds to f32
    only.
    """
    return replace(spec, act="f32", group=1, sub=BLOCK, unit=4)


def _stored(
    evidence: Evidence,
    name: str,
    act: ActivationLayout,
    exact: np.ndarray,
    tolerance: np.ndarray,
    raw: np.ndarray | None = None,
) -> Iterator[Compared]:
    """Compare the first rows of the activations ``name``, in the layout ``act`` of the kernel, with
    ``exact [n, k]``: values, and the sums stored beside them. ``raw``: their bytes, None for those
    of the argument.
    """
    raw = evidence.written(name) if raw is None else raw
    n = len(exact)
    with np.errstate(invalid="ignore", over="ignore"):
        actual = act.read_ref(raw, n)
    yield Compared(name, actual, exact, tolerance)
    if act.ks and n:
        yield _compensations(raw, act, n, name)


def _compensations(raw: np.ndarray, act: ActivationLayout, n: int, name: str) -> Compared:
    """Compare the sums of quants that are stored beside activations of ``n`` rows, from which
    products start: exactly. ``raw``: the activations' bytes; ``name``: of the argument.
    """
    from treadle.kernels.activation_layout import LOW_BITS, MAGIC_BITS, OFFSET

    groups = raw[: act.n_bytes(n)].reshape(-1, act.group_bytes)
    sums = groups[:, act.comp_off : act.comp_off + 4 * act.ks * act.group].copy().view(np.int32)
    sums = sums.reshape(-1, act.ks, act.group).transpose(0, 2, 1).reshape(-1, act.ks)[:n]
    quants = act.dwords_ref(raw, n).view(np.int8).astype(np.int32)
    if act.kind == "q8x2":
        high, low = np.split(quants, 2, axis=1)
        quants = (high << LOW_BITS) + low
    expected = MAGIC_BITS - OFFSET * quants.reshape(n, act.ks, act.sub).sum(-1, dtype=np.int32)
    return _compare_integers(f"{name}: sums", sums, expected)


def _norm(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    spec: Norm = evidence.spec
    run = evidence.run
    args = evidence.args()
    n = int(run["n_outputs" if spec.outputs else "n_tokens"])
    which = run.output_rows if spec.outputs else slice(n)
    x = f32_values(args.x).reshape(-1, args.stride)[which, : spec.k].astype(np.float64)
    w = args.w[: spec.k] if spec.weight else np.ones(spec.k)
    relative = norm_error(spec.k, evidence.isa) + U32
    off = centring_error(spec, evidence.isa, x, w)
    # A bias and the product it is added to may cancel: the product has the larger error.
    off = off + (relative * np.abs(args.bias[: spec.k]) if spec.bias else 0.0)
    if spec.add or spec.rows:
        done = evidence.twin()
        exact = np.asarray(done.out).reshape(-1, args.stride)[: len(x), : spec.k]
        before: Any = 0.0
        if spec.add:
            gain = float(args.gain[0]) if spec.gain else 1.0
            residual = f32_values(args.residual).reshape(-1, args.stride)
            before = residual[: len(x), : spec.k] * gain
        tolerance = off + np.abs(exact - before) * relative + 2 * U32 * np.abs(exact) + TINY
        found = evidence.written("out").reshape(-1, args.stride)[: len(x), : spec.k]
        yield Compared("out", found.astype(np.float64), exact, tolerance)
        return
    plain = _exact_spec(spec)
    out = np.full(plain.layout().n_bytes(n), 0xFF, np.uint8)
    evidence.twin(plain, out=out)
    exact = plain.layout().read_ref(out, n)
    act = spec.layout()
    absolute = off * (1 + 2.0**-8) + TINY
    yield from _stored(evidence, "out", act, exact, stored_error(act, exact, relative, absolute))


def _pack(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    spec: Pack = evidence.spec
    args = evidence.args()
    counted = spec.counted
    first = int(args.rows[:2].view(np.int64)[0]) if counted else int(evidence.run["n_tokens"])
    n = first * spec.per
    plain = _exact_spec(spec)
    out = np.full(max(plain.layout().n_bytes(n), 1), 0xFF, np.uint8)
    evidence.twin(plain, out=out)
    exact = plain.layout().read_ref(out, n)
    act = spec.layout()
    absolute = np.full(exact.shape, TINY)
    if spec.fn != "copy":
        with np.errstate(invalid="ignore"):
            rows = args.x.view(np.float32).reshape(-1, args.stride).astype(np.float64)
        x = rows[:n, : spec.k]
        gate: Any = 1.0
        if spec.gated:
            apart = args.apart.view(np.float32) if spec.apart else None
            source = rows if apart is None else apart.reshape(-1, args.apart_stride)
            gate = source[:n, args.up : args.up + spec.k]
        with np.errstate(invalid="ignore", over="ignore"):
            absolute = absolute + np.abs(x * gate) * TWIN_ERROR
    relative = activation_error(spec.fn)
    if spec.fn == "tanh":  # twice a sigmoid, of at most 1, less 1: near 0 its error stays
        absolute = absolute + 2 * relative * np.abs(gate)
    yield from _sensible(evidence, act, exact, relative, absolute)


def _sensible(
    evidence: Evidence,
    act: ActivationLayout,
    exact: np.ndarray,
    relative: float,
    absolute: np.ndarray,
    raw: np.ndarray | None = None,
    name: str = "out",
) -> Iterator[Compared]:
    """Compare stored activations like ``_stored``, with ``stored_error`` as the tolerance, except
    rows of undefined memory: the padding of an expert's last block of rows.
    """
    kept = (np.abs(np.nan_to_num(exact, nan=np.inf)) < SENSIBLE).all(-1)
    if kept.all():
        tolerance = stored_error(act, exact, relative, absolute)
        yield from _stored(evidence, name, act, exact, tolerance, raw)
        return
    raw = evidence.written(name) if raw is None else raw
    with np.errstate(invalid="ignore", over="ignore"):
        actual = act.read_ref(raw, len(exact))[kept]
    exact = exact[kept]
    tolerance = stored_error(act, exact, relative, absolute[kept])
    yield Compared(name, actual, exact, tolerance, rows=np.flatnonzero(kept))


def _sparse_gate(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    """Compare the results of a sparse gate. The tolerance includes the rounding of the gate's
    threshold, which decides whether a value near it becomes 0.
    """
    spec: SparseGate = evidence.spec
    n = int(evidence.run["n_tokens"])
    plain = _exact_spec(spec)
    out = np.full(plain.layout().n_bytes(n), 0xFF, np.uint8)
    evidence.twin(plain, out=out)
    exact = plain.layout().read_ref(out, n)
    args = evidence.args()
    rows = args.x.view(np.float32).reshape(-1, args.stride)[:n].astype(np.float64)
    x = rows[:, : spec.k]
    up = np.abs(rows[:, args.up : args.up + spec.k])
    scale = np.abs(x).mean(-1, keepdims=True) + abs(spec.cut) * x.std(-1, keepdims=True)
    off = (norm_error(spec.k, evidence.isa) * 2 + 3 * U32) * (scale + np.abs(x))
    act = spec.layout()
    relative = activation_error(spec.fn)
    tolerance = stored_error(act, exact, relative, 1.13 * off * up + TINY)
    yield from _stored(evidence, "out", act, exact, tolerance)


def _pack_heads(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    spec: PackHeads = evidence.spec
    n = int(evidence.run["n_tokens"])
    args = evidence.args()
    rows = args.x.reshape(-1, args.stride)[:n].astype(np.float64)
    act = spec.layout()
    for head in range(spec.heads):
        column = args.column + head * args.pitch
        exact = rows[:, column : column + spec.k] * spec.scale
        raw = evidence.written("out")[head * args.head_bytes :]
        tolerance = stored_error(act, exact, 2 * U32)
        yield from _stored(evidence, f"head {head}", act, exact, tolerance, raw)


# -- products --------------------------------------------------------------------------------------


@dataclass
class PartialProduct:
    """A part of a matrix product, float64 ``[n, m]``: ``values`` and the bounds of their ``error``.
    ``head``: the number of the expert or head. ``to``: the n rows of y; ``chosen``: the m rows of
    the matrix of segment ``segment``, which has ``height`` rows.
    """

    head: int
    segment: int
    to: np.ndarray
    chosen: np.ndarray
    height: int
    values: np.ndarray
    error: np.ndarray


def products(
    spec: Matmul,
    args: Any,
    run: Any,
    choose: Callable[[int], np.ndarray],
    residual: np.ndarray | None = None,
    met: Sequence[Any] | None = None,
    *,
    bounded: bool = True,
) -> Iterator[PartialProduct]:
    """Yield the parts of a matrix product, as ``Matmul.run_ref`` computes it from the arguments
    ``args`` and the run's inputs, for the matrix rows ``choose(height)``. ``residual``: rows that
    are added, or None. ``met``: the experts or heads to compute, as numbered entries of
    ``spec.met_ref``; None for all. ``bounded``: compute error bounds; else they are next to zero.
    """
    layout = spec.layout()
    if met is None:
        met = list(enumerate(spec.met_ref(args, run)))
    for number, (expert, rows, to) in met:
        if not len(rows):
            continue
        source = args.x[expert * args.x_pitch :] if spec.heads else args.x
        x = layout.read_ref(source, int(rows.max()) + 1)[rows]
        for i, m in enumerate(args.rows):
            first = expert * args.pitch[i] if expert else 0
            chosen = choose(m)
            if not len(chosen):
                continue
            parts = []
            for array, n in zip(args.w[i], spec.fmt.row_strides(spec.k), strict=True):
                parts.append(array.reshape(-1)[n * first :][: n * m].reshape(m, n)[chosen])
            raw = np.ascontiguousarray(spec.fmt.join(parts)).reshape(len(chosen), -1)
            weights = spec.weights_ref(parts, len(chosen))
            values = x @ weights.T - spec.left_out_ref(source, rows, parts, len(chosen))
            plain = weights  # a kernel that rounds weights further has a twin of its own for them
            if type(spec).weights_ref is not Matmul.weights_ref:
                plain = spec.fmt.dequantize_rows(raw).astype(np.float64)
            error = np.zeros(values.shape)
            if bounded:
                error = product_error(spec, x, plain, raw.view(np.uint8))
            if spec.factor:
                factor = float(args.factor[i][expert])
                values = values * factor
                error = error * abs(factor) + U32 * np.abs(values)
            if spec.bias:
                bias = args.bias[i][first : first + m][chosen]
                values = values + bias
                error = error + 2 * U32 * np.abs(bias)
            if residual is not None:
                column = args.column[i] + (number * args.y_pitch if spec.heads else 0)
                more = residual[np.ix_(to, column + chosen)]
                values = values + more
                error = error + 2 * U32 * np.abs(more)
            yield PartialProduct(number, i, to, chosen, m, values, error + TINY)


def _matmul(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    spec: Matmul = evidence.spec
    args = evidence.args(without="y")
    y = evidence.written("y").reshape(-1, args.stride)
    residual = None
    if spec.residual:
        residual = f32_values(args.residual).reshape(-1, args.stride).astype(np.float64)
    met = list(enumerate(spec.met_ref(args, evidence.run)))
    some = [met[i] for i in cut.sample_indices(len(met), cut.experts)]
    made = products(spec, args, evidence.run, lambda m: cut.rows_of(m, spec.k), residual, met=some)
    for part in made:
        column = args.column[part.segment] + (part.head * args.y_pitch if spec.heads else 0)
        columns = column + part.chosen
        actual = y[np.ix_(part.to, columns)].astype(np.float64)
        n_cut = (part.height - len(part.chosen)) * len(part.to)
        yield Compared("y", actual, part.values, part.error, part.to, columns, n_cut)


def _gated(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    spec: Gated = evidence.spec
    args = evidence.args(without="y")
    act = spec.result()
    unit = SPAN if act.kind in SPANNED else BLOCK
    product = replace(
        spec.product, bias=spec.bias, experts=spec.experts, factor=spec.factor, segments=2
    )
    met = list(enumerate(product.met_ref(args, evidence.run)))
    some = [met[i] for i in cut.sample_indices(len(met), cut.experts)]
    made = products(product, args, evidence.run, lambda m: cut.rows_of(m, spec.k, unit), met=some)
    raw = evidence.written("y")
    for gate in made:
        up = next(made)
        value = ACTIVATIONS[spec.fn].exact(gate.values)
        exact = gated(spec.fn, gate.values, up.values)
        off = gated_error(spec.fn, gate.values, up.values, value, exact, (gate.error, up.error))
        if act.kind in ("q8", "q8x2"):  # a block's scale is as far off as its largest value may be
            off = off + off.reshape(len(off), -1, BLOCK).max(-1).repeat(BLOCK, -1)
        part = replace(act, k=len(gate.chosen), group=1, sub=BLOCK, unit=4)
        tolerance = stored_error(part, exact, 8 * U32, off)
        with np.errstate(invalid="ignore", over="ignore"):
            actual = act.read_ref(raw, int(gate.to.max()) + 1)[np.ix_(gate.to, gate.chosen)]
        n_cut = (gate.height - len(gate.chosen)) * len(gate.to)
        yield Compared("y", actual, exact, tolerance, gate.to, gate.chosen, n_cut)


# -- attention -------------------------------------------------------------------------------------


def _pages(evidence: Evidence, args: SimpleNamespace, relative: float) -> Iterator[Compared]:
    """Compare the keys and values that a step stored in its pages with those in ``args.pool``, the
    twin's. Each may be off by a unit of the page's format, as rounding may fall either way, plus
    the error before they were stored: ``relative``, a share of the row's largest value. Then
    compare the other pages, which the step may not change.
    """
    spec = evidence.spec
    actual = evidence.changed["pool"]
    for name, which in (("keys", 0), ("values", 1)):
        found = []
        for pool in (actual, args.pool):
            rows = []
            for slot in evidence.run.kv_indices(spec.pool):
                for head in range(spec.n_head_kv):
                    place = int(slot) // PAGE, args.page_bytes, args.layer_off, head
                    home = spec.page.head_ref(pool, *place)
                    rows.append(spec.page.read_ref(home)[which][int(slot) % PAGE])
            found.append(np.array(rows))
        a, b = found
        top = np.abs(b).max(-1, keepdims=True)
        fmt = (spec.page.keys, spec.page.values)[which].fmt
        yield Compared(name, a, b, _page_error(fmt, b, relative, top))
    yield _other_pages(evidence, args.page_bytes, evidence.run.kv_indices(spec.pool).tolist())


def _other_pages(evidence: Evidence, page_bytes: int, kv_indices: list[int]) -> Compared:
    """Compare the pages that hold none of the tokens ``kv_indices`` with those before the step: no
    byte may differ.
    """
    before, actual = evidence.changing["pool"], evidence.changed["pool"]
    changed = (before != actual).reshape(-1, page_bytes).any(-1)
    changed[[n // PAGE for n in kv_indices]] = False
    wrong = changed.astype(np.float64)
    return _compare_integers("other pages", wrong, np.zeros_like(wrong))


def _page_error(fmt: KVFormat, b: np.ndarray, relative: float, top: np.ndarray) -> np.ndarray:
    """Return the bound of the error of rows ``b`` [n, dims] stored in the format ``fmt``, which
    were off by ``relative`` times their largest values, ``top`` [n, 1], before they were stored.
    """
    unit: Any = {
        "f16": np.abs(b) * 2.0**-10 + 2.0**-24,
        "bf16": np.abs(b) * 2.0**-7,
        "f32": np.abs(b) * 2.0**-23,
    }.get(fmt.name)
    if unit is None:
        block = np.abs(b).reshape(len(b), -1, BLOCK).max(-1).repeat(BLOCK, -1)
        # The widest gap of IQ4_NL's steps is 24 of 127; of q5_1 both ends count.
        gap = {"iq4_nl": 127 / 24, "q5_1": fmt.most / 2}.get(fmt.name, abs(fmt.most))
        unit = block / gap * (1 + 4 * relative)
    return np.asarray(unit + 2 * relative * top + TINY)


def _rope(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    spec: RopeStore = evidence.spec
    args = evidence.twin()
    n = int(evidence.run["n_tokens"])
    hadamard = spec.page.keys.fmt.rotated or spec.page.values.fmt.rotated
    relative = rotation_error(spec.head_dim, hadamard=hadamard)
    width = spec.n_head * spec.head_dim
    q = evidence.written("qkv").reshape(-1, args.stride)[:n, :width].astype(np.float64)
    exact = args.qkv.reshape(-1, args.stride)[:n, :width]
    heads = np.abs(exact).reshape(n, -1, spec.head_dim).max(-1).repeat(spec.head_dim, -1)
    yield Compared("queries", q, exact, 2 * heads * relative + TINY)
    if not spec.queries_only:
        yield from _pages(evidence, args, relative)


def _latent(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    spec: LatentStore = evidence.spec
    args = evidence.twin()
    relative = rotation_error(spec.head_dim, hadamard=spec.page.keys.fmt.rotated)

    def bound(expected: np.ndarray) -> np.ndarray:
        top = np.nanmax(np.abs(expected), initial=0.0)
        return np.full(expected.shape, 2 * top * relative + TINY)

    yield _floats(evidence, args, "out", bound)
    yield from _pages(evidence, args, relative)


def _index_store(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    """Compare the rotated queries and the stored keys of an indexer. Tolerance: the rounding of
    RoPE, and of the Hadamard transform for formats whose pages are rotated.
    """
    spec: IndexStore = evidence.spec
    args = evidence.twin()
    relative = rotation_error(spec.head_dim, hadamard=spec.page.keys.fmt.rotated)
    if spec.n_head:
        top = np.nanmax(np.abs(args.q), initial=0.0)
        yield _floats(evidence, args, "q", 2 * top * relative + TINY)
    yield from _pages(evidence, args, relative)


def _row_store(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    """Compare the keys that the step stored: one for each unit of tokens that ends in the batch.
    Then compare all other pages, which must not have changed.
    """
    spec: RowStore = evidence.spec
    args = evidence.twin()
    relative = rotation_error(spec.head_dim, hadamard=spec.page.keys.fmt.rotated)
    each = min(spec.unit, PAGE)
    ends = [n for n in evidence.run.kv_indices(spec.pool).tolist() if n % each == each - 1]
    if not ends:
        return
    actual = evidence.changed["pool"]
    rows = []
    for pool in (actual, args.pool):
        found = []
        for n in ends:
            home = spec.page.head_ref(pool, n // PAGE, args.page_bytes, args.layer_off, 0)
            found.append(spec.page.read_ref(home)[0][n % PAGE // each])
        rows.append(np.array(found))
    a, b = rows
    top = np.abs(b).max(-1, keepdims=True)
    yield Compared("rows", a, b, _page_error(spec.page.keys.fmt, b, relative, top))
    yield _other_pages(evidence, args.page_bytes, ends)


def _row_choice(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    """Compare the numbers of the chosen rows: exactly, since the kernel compares numbers and
    computes none.
    """
    yield _whole(evidence, evidence.twin(), "chosen")


def _index_scores(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    """Compare an indexer's scores. Keys with the score -inf must be the same. Tolerance of the
    others: the roundings of a sum of ``head_dim`` products for each head, and of the sum over the
    heads.
    """
    spec: IndexScores = evidence.spec
    args = evidence.args()
    every = evidence.run.attn_items(spec.pool, few=bool(args.few))
    items = [every[i] for i in cut.sample_indices(len(every), cut.items)]
    if not items:
        return
    done = evidence.twin(run=SomeItems(evidence.run, items))
    exact = np.asarray(done.scores, np.float64)
    found = evidence.written("scores")[: len(exact)].astype(np.float64)
    there = ~np.isnan(exact)
    exact, found = exact[there], found[there]
    lowest = np.isneginf(exact)
    yield _compare_integers("hidden keys", np.isneginf(found).astype(float), lowest.astype(float))
    rows = np.flatnonzero(there)[~lowest]
    exact, found = exact[~lowest], found[~lowest]
    n_terms = spec.head_dim + spec.n_head + 4
    allowed = n_terms * U32 * _largest_score(spec, args, items) + TINY
    yield Compared("scores", found, exact, np.full(exact.shape, allowed), rows=rows)


def _largest_score(spec: IndexScores, args: Any, items: Sequence[Any]) -> float:
    """Return a bound, for all scores of ``items``, of the sum of the magnitudes that a score is
    added up from.
    """
    key = most = 0.0
    queries = np.asarray(args.qkv, np.float64).reshape(-1, args.stride)
    for item, pages in items:
        rows = slice(int(item["token"]), int(item["token"]) + int(item["n_tokens"]))
        q = np.abs(queries[rows, : spec.n_head * spec.head_dim]).reshape(
            -1, spec.n_head, spec.head_dim
        )
        sums = q.sum(-1)
        if spec.weighted:
            weights = np.asarray(args.weights, np.float64).reshape(-1, args.weights_stride)
            sums = sums * np.abs(weights[rows, args.weights_column :][:, : spec.n_head])
        most = max(most, float(sums.sum(-1).max(initial=0.0)))
        n_keys = int(item["key_end"])
        for number, page in enumerate(pages[: -(-n_keys // PAGE)]):
            home = spec.page.head_ref(args.pool, int(page), args.page_bytes, args.layer_off, 0)
            keys = spec.page.read_ref(home)[0][: n_keys - number * PAGE]
            key = max(key, float(np.abs(keys).max(initial=0.0)))
    return most * key * spec.scale


def _choose(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    """Compare the bits of the chosen keys: exactly, since the kernel compares numbers and computes
    none.
    """
    spec: Choose = evidence.spec
    args = evidence.twin()
    rows = []
    for words in (evidence.written("chosen"), args.chosen):
        table = words[: len(words) // args.chosen_stride * args.chosen_stride]
        table = table.reshape(-1, args.chosen_stride).astype(np.uint32)
        bits = np.unpackbits(table.view(np.uint8), axis=-1, bitorder="little")
        seen = []
        for part in evidence.run.parts:
            for t in range(int(part["n_tokens"])):
                at = (int(part["token"]) + t) * spec.planes
                seen.append(bits[at : at + spec.planes, : int(part["position"]) + t + 1].ravel())
        rows.append(np.concatenate(seen).astype(np.float64))
    yield _compare_integers("chosen", *rows)


class SomeItems:
    """A run's inputs, ``run``, but with only some of the work items of attention: ``items``, each
    with its pages.
    """

    def __init__(self, run: Any, items: list[Any]) -> None:
        self._run = run
        self._items = items

    def __getitem__(self, field: str) -> int:
        found: int = self._run[field]
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def attn_items(self, pool: int, *, few: bool = False) -> list[Any]:
        """Return the chosen items, each with its pages, whatever the pool and ``few``."""
        return self._items


def attention_error(spec: Attention, args: Any, items: Sequence[Any]) -> tuple[float, float]:
    """Return bounds of the errors of a score and of an output, from the largest |k| and |v| in the
    pages of ``items``. D: dims of a head; n: the most keys of an item.

    - A score S is a chain of D products: off by at most (D + 4) u max_j sum |q||k_j| =: s.
    - A weight e**(S - m) is then off by a factor within 1 +- (s + 2 u |S - m| + 4 u).
    - An output, a weighted mean of n values, is then off by at most 2 (s + 2 u max|S - m| + 4 u + n
      u) max|v|.
    - On matrix registers, a number is split into two bf16, to 2**-18 of it. The product of two low
      parts, also below 2**-18, is left out; each sum has three times as many terms.
    - int16 tiles (``spec.words``): numbers are off by 1/2 where vectors have the length LIMIT, so a
      score is off by at most (sqrt(D) + D / 4 / LIMIT) |q||k| / LIMIT. In a span of n keys, weights
      are off by 1/2 where their sum is LIMIT, and values by 1/2 where the largest is LIMIT, so a
      mean is off by at most (n + 1) / 2 / LIMIT max|v|.
    """
    largest = [0.0, 0.0]
    longest_key = 0.0
    longest = 1
    most = 0.0
    norm = 0.0
    queries = np.asarray(args.qkv, np.float64).reshape(-1, args.stride)
    for item, pages in items:
        n_keys = int(item["key_end"])
        longest = max(longest, n_keys - int(item["key_begin"]))
        rows = queries[int(item["token"]) :][: int(item["n_tokens"])]
        q = rows[:, : spec.n_head * spec.head_dim].reshape(-1, spec.head_dim)
        most = max(most, float(np.abs(q).sum(-1).max()))
        norm = max(norm, float(np.linalg.norm(q, axis=1).max()))
        for number, page in enumerate(pages[: -(-n_keys // PAGE)]):
            if page < 0 or (number + 1) * PAGE <= int(item["key_begin"]):
                continue
            for head in range(spec.n_head_kv):
                place = int(page), args.page_bytes, args.layer_off, head
                both = spec.page.read_ref(spec.page.head_ref(args.pool, *place))
                for i, x in enumerate(both):
                    x = x[: n_keys - number * PAGE]
                    largest[i] = max(largest[i], float(np.abs(x).max(initial=0.0)))
                    if i == 0:
                        length = np.linalg.norm(x, axis=1).max(initial=0.0)
                        longest_key = max(longest_key, float(length))
    product = most * largest[0]
    terms, halves = (3, 3 * 2.0**-18) if spec.matrix else (1, 0.0)
    score = ((terms * spec.head_dim + 4) * U32 + halves) * product
    if spec.alibi:
        score += 4 * U32 * float(alibi_slopes(spec.n_head, spec.alibi).max()) * longest
    if spec.reach:  # the rounding of LOG2_E, and of the sum
        score += 2 * U32 * float(np.abs(args.distances).max())
    if spec.rel_extent:
        score += 2 * U32 * float(np.abs(args.rel_logits).max())
    if spec.words:
        score += (spec.head_dim**0.5 / LIMIT + spec.head_dim / 4 / LIMIT**2) * norm * longest_key
        halves = (SPAN_PAGES * PAGE + 1) / 4 / LIMIT
    n = terms * longest
    weight = score + 2 * U32 * 2 * product + 4 * U32 + n * U32 + halves
    return score, 2 * weight * largest[1]


def _attention(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    spec: Attention = evidence.spec
    args = evidence.args()
    every = evidence.run.attn_items(spec.pool, few=bool(args.few))
    items = [every[i] for i in cut.sample_indices(len(every), cut.items)]
    if not items:
        return
    score, error = attention_error(spec, args, items)
    done = evidence.twin(run=SomeItems(evidence.run, items))
    yield _floats(evidence, done, "out", error + TINY, len(every) - len(items))
    if evidence.step.args.get("partials") is None:
        return
    exact = np.asarray(done.partials, np.float64)
    size = spec.partial_values
    n = len(exact) // size
    exact = exact[: n * size].reshape(n * (size // (spec.dims_v + 2)), spec.dims_v + 2)
    found = evidence.written("partials")[: n * size].astype(np.float64).reshape(exact.shape)
    there = ~np.isnan(exact).any(-1)
    exact = exact[there]
    found = found[there]
    # Values and weights are not divided yet; the weights' sum is off as a value of 1 would be.
    totals = np.maximum(exact[:, -1:], 1.0)
    top = np.abs(exact[:, :-2]).max(initial=0.0)
    allowed = np.concatenate(
        [
            np.broadcast_to(error * totals + TINY, (len(exact), spec.dims_v)),
            2 * score + 4 * U32 * (1 + np.abs(exact[:, -2:-1])),
            totals * (4 * score + 64 * U32 + (error / max(top, TINY) if top else 0.0)),
        ],
        axis=1,
    )
    yield Compared("partials", found, exact, allowed, rows=np.flatnonzero(there))


def _merge(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    """Compare merged attention: a weighted mean of n partial results. Tolerance: a rounding for
    each product and sum, and the errors of the weights, which are powers of two whose arguments
    have one rounding.
    """
    spec: Merge = evidence.spec
    merges = evidence.run.attn_merges(spec.pool)
    most = max((int(m["n_partials"]) for m in merges), default=0)
    args = evidence.args()
    data = np.asarray(args.partials, np.float64)
    width = spec.head_dim + 2
    parts = data[: len(data) // width * width].reshape(-1, width)
    n_parts = max((int(m["partial"]) + int(m["n_partials"]) for m in merges), default=0)
    parts = parts[: n_parts * spec.n_groups * spec.tokens * spec.heads]
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.abs(parts[:, :-2]) / parts[:, -1:]
    top = np.nanmax(means, initial=0.0)
    spread = np.nanmax(np.abs(parts[:, -2]), initial=0.0)
    allowed = (2 * most + 16 + 2 * min(spread, 256.0)) * U32 * top + TINY
    yield _floats(evidence, evidence.twin(), "out", allowed)


# -- choices ---------------------------------------------------------------------------------------


def _top(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    """Compare the largest logits that a step has found for each query of the samplers
    (``LogitsQuery``): values and ids must be equal, in the same order. Then compare the sums of
    exponentials for the queries with ``total``; their relative error may be TOTAL_ERROR. ``cut`` is
    not used.
    """
    args = evidence.twin()
    joined = isinstance(evidence.spec, JoinTop)
    record = RESULT if joined else PARTIAL
    n = int(evidence.run["n_sampled"]) * (1 if joined else slices(args.n))
    n_bytes = n * record.itemsize
    expected = args.out.view(np.uint8)[:n_bytes].view(record)
    actual = evidence.written("out").view(np.uint8)[:n_bytes].view(record)
    names = ("values", "ids") if joined else ("keys", "ids")
    for name in names:
        a, e = (each[name].astype(np.float64) for each in (actual, expected))
        yield Compared(name, a, e, np.full(e.shape, TINY))
    queries = list(evidence.run.sampled(args.n))
    wanted = np.repeat([bool(total) for *_, total in queries], n // max(len(queries), 1))
    a, e = (each["total"][wanted].astype(np.float64) for each in (actual, expected))
    yield Compared("total", a, e, np.abs(e) * TOTAL_ERROR + TINY)


def _route(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    """Compare a router's choices: the weights to 16 roundings, and the experts, which must be the
    same, except in rows where two weights are within 32 roundings of each other.
    """
    spec: Route | RouteByToken = evidence.spec
    args = evidence.twin()
    n = int(evidence.run["n_tokens"]) * spec.n_used
    exact = args.weights[:n].reshape(-1, spec.n_used).astype(np.float64)
    found = evidence.written("weights")[:n].reshape(exact.shape).astype(np.float64)
    allowed = 16 * U32 * np.abs(exact) + TINY
    yield Compared("weights", found, exact, allowed)
    chosen = [
        a[:n].reshape(-1, spec.n_used).astype(np.float64)
        for a in (evidence.written("chosen"), args.chosen)
    ]
    tied = (np.abs(found - exact) <= allowed).all(-1) & (chosen[0] != chosen[1]).any(-1)
    gaps = np.abs(np.diff(exact, axis=-1)).min(-1, initial=np.inf)
    tied &= gaps <= 32 * U32 * np.abs(exact).max(-1, initial=0.0)
    yield _compare_integers("chosen", *(c[~tied] for c in chosen))
    if isinstance(spec, Route) and spec.n_shared:
        n = int(evidence.run["n_tokens"]) * spec.n_shared
        given = [
            (evidence.written(f"shared_{x}")[:n], getattr(args, f"shared_{x}")[:n])
            for x in ("weights", "chosen")
        ]
        (found, exact), numbers = ([a.astype(np.float64) for a in each] for each in given)
        yield Compared("shared_weights", found, exact, 16 * U32 * np.abs(exact) + TINY)
        yield _compare_integers("shared_chosen", *numbers)


def _bytes(evidence: Evidence, cut: Cut) -> Iterator[Compared]:
    """Compare the outputs of kernels that move bytes or count: exactly."""
    args = evidence.twin()
    for name in evidence.spec.args.writes:
        yield _whole(evidence, args, name)


COMPARISONS: dict[type, Callable[[Evidence, Cut], Iterator[Compared]]] = {
    Embed: _embed,
    Norm: _norm,
    ColumnNorm: _column_norm,
    Pack: _pack,
    SparseGate: _sparse_gate,
    PackHeads: _pack_heads,
    Gated: _gated,
    Matmul: _matmul,
    RopeStore: _rope,
    LatentStore: _latent,
    IndexStore: _index_store,
    IndexScores: _index_scores,
    RowStore: _row_store,
    RowChoice: _row_choice,
    Choose: _choose,
    Attention: _attention,
    Merge: _merge,
    Add: _added,
    AddRows: _added,
    MediaRowsKernel: _added,
    Softcap: _softcap,
    Combine: _combine,
    Route: _route,
    RouteByToken: _route,
    Sort: _bytes,
    Gather: _bytes,
    TopLogitsKernel: _top,
    JoinTop: _top,
    ChunkKeys: _chunk_keys,
    Chunked: _chunked,
}
