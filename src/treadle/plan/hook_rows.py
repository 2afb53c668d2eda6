"""The values that the steps of a plan write, as float32 rows, for hooks.

A step writes f32 columns of a buffer, or rows in the layout that the next product reads
(``kernels/activation_layout.py``). Rows are read as float32 and written back in the step's own
type.

A *hook point* is a place between two steps where the values of a label are complete and not used
yet. Steps that complete another step's buffer (the second path of attention, merges, adapters)
belong to that step's label. Rows sorted by expert have no hook points; the router, the routing and
the combined result of a layer have.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.kernels.matmul.gated import Gated
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.spec import Spec
from treadle.plan.plan import Buffer

if TYPE_CHECKING:
    from treadle.kernels.activation_layout import ActivationLayout
    from treadle.plan.plan import DeviceMemory, Plan, Step

Floats = npt.NDArray[np.float32]
AXES = {"n_tokens": "token", "n_outputs": "output", "n_parts": "sequence"}
COMPLETES = (".few", ".merge", ".rotate", ".lora_b")  # suffixes: a step adds to another's buffer
HIDDEN = (*COMPLETES, ".lora_a", ".lora_rows")
COPY = re.compile(r"\.rows$|\.\w+_group\d+_sub\d+$")  # suffix: another layout of the same rows
# Steps that write ``k`` columns of f32, or ``k`` for each of their ``heads`` or streams.
OF_K = frozenset(
    {
        *("embed", "norm", "add", "add_rows", "combine", "column_norm", "temper", "times", "weigh"),
        *("clamp", "softcap", "pooling", "xielu", "media_rows", "altup_take", "altup_join"),
        *("laurel", "selective", "unit_heads", "clamp_between", "add_directions"),
    }
)


@dataclass(frozen=True, eq=False)
class StepRows(ABC):
    """The rows that a step writes into ``buffer``, as an array ``[n, *shape]``.

    count: the field of RUN_STATE with their number, such as "n_tokens".
    axes: the name of each dimension of the array.
    shape: of one row.
    parts: slices of the last axis by name, where several products lie side by side.
    """

    buffer: Buffer
    count: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    parts: Mapping[str, slice] = field(default_factory=dict, kw_only=True)

    @abstractmethod
    def read(self, memory: DeviceMemory, offsets: Mapping[Buffer, int], n: int) -> Floats:
        """Return the first ``n`` rows as a copy, float32 ``[n, *shape]``. ``memory``: the plan's
        arena; ``offsets``: byte offset of each buffer in it.
        """

    @abstractmethod
    def write(self, memory: DeviceMemory, offsets: Mapping[Buffer, int], values: Floats) -> None:
        """Replace the first ``n`` rows by ``values``, float32 ``[n, *shape]``; the other arguments
        as in ``read``.
        """


@dataclass(frozen=True, eq=False)
class FloatRows(StepRows):
    """f32 rows in some columns of a buffer. ``columns``: (first, number) of each run of columns."""

    columns: tuple[tuple[int, int], ...]

    def _rows(self, memory: DeviceMemory, at: int, n: int) -> Floats:
        raw = memory.read(at, n * self.buffer.row_bytes)
        return raw.view(np.float32).reshape(n, self.buffer.row_bytes // 4)

    def read(self, memory: DeviceMemory, offsets: Mapping[Buffer, int], n: int) -> Floats:
        rows = self._rows(memory, offsets[self.buffer], n)
        parts = [rows[:, first : first + width] for first, width in self.columns]
        values = parts[0].copy() if len(parts) == 1 else np.concatenate(parts, axis=1)
        return values.reshape(n, *self.shape)

    def write(self, memory: DeviceMemory, offsets: Mapping[Buffer, int], values: Floats) -> None:
        n = len(values)
        at = offsets[self.buffer]
        rows = self._rows(memory, at, n).copy()
        flat = values.reshape(n, -1)
        start = 0
        for first, width in self.columns:
            rows[:, first : first + width] = flat[:, start : start + width]
            start += width
        memory.write(at, rows.reshape(-1).view(np.uint8))


@dataclass(frozen=True, eq=False)
class PackedRows(StepRows):
    """Rows in the activation layout that a product reads."""

    layout: ActivationLayout

    def read(self, memory: DeviceMemory, offsets: Mapping[Buffer, int], n: int) -> Floats:
        raw = memory.read(offsets[self.buffer], self.layout.n_bytes(n))
        return self.layout.read_ref(raw, n).astype(np.float32).reshape(n, *self.shape)

    def write(self, memory: DeviceMemory, offsets: Mapping[Buffer, int], values: Floats) -> None:
        n = len(values)
        raw = np.zeros(self.layout.n_bytes(n), np.uint8)
        self.layout.write_ref(raw, values.reshape(n, -1))
        memory.write(offsets[self.buffer], raw)


@dataclass(frozen=True, eq=False)
class RoutingRows(StepRows):
    """Routing weights as rows ``[n_expert]``, 0 for experts that were not chosen. ``buffer`` has
    the weights of a token's ``n_used`` chosen experts, ``chosen`` their numbers, i32.
    """

    chosen: Buffer
    n_used: int

    def _read(self, memory: DeviceMemory, at: int, n: int, dtype: str) -> np.ndarray:
        return memory.read(at, 4 * n * self.n_used).view(dtype).reshape(n, self.n_used)

    def read(self, memory: DeviceMemory, offsets: Mapping[Buffer, int], n: int) -> Floats:
        values = np.zeros((n, *self.shape), np.float32)
        chosen = self._read(memory, offsets[self.chosen], n, "i4")
        weights = self._read(memory, offsets[self.buffer], n, "f4")
        np.put_along_axis(values, chosen.astype(np.intp), weights, 1)
        return values

    def write(self, memory: DeviceMemory, offsets: Mapping[Buffer, int], values: Floats) -> None:
        """Store in each row of ``values [n, n_expert]`` the ``n_used`` weights with the largest
        magnitudes, and their experts' numbers; the other weights are dropped.
        """
        chosen = np.argsort(-np.abs(values), axis=1, kind="stable")[:, : self.n_used]
        weights = np.take_along_axis(values, chosen, 1)
        for buffer, array in ((self.chosen, chosen.astype(np.int32)), (self.buffer, weights)):
            memory.write(offsets[buffer], np.ascontiguousarray(array).reshape(-1).view(np.uint8))


@dataclass(frozen=True, eq=False)
class HookPoint:
    """A hook point: the place after the plan's first ``end`` steps, where the rows of ``label`` are
    complete. ``is_copy``: these rows had a point of this label before, in another layout.
    """

    label: str
    end: int
    rows: StepRows
    is_copy: bool = False


def hook_points(plan: Plan, n_embd: int) -> list[HookPoint]:
    """Return the hook points of a plan made by ``lowering/observed.py``, in the order of its steps.
    The states after layer 5 have the label "L5". ``n_embd``: width of these states.
    """
    points = []
    labels: set[str] = set()
    for i, step in enumerate(plan.steps):
        rows = None if step.label.endswith(HIDDEN) else rows_of(step, n_embd)
        if rows is None:
            continue
        label = label_of(step)
        points.append(HookPoint(label, _end(plan, i, rows.buffer), rows, label in labels))
        labels.add(label)
    for i, (end, buffer) in enumerate(plan.states[1:]):
        points.append(HookPoint(f"L{i}", end, state_rows(buffer, n_embd)))
    return sorted(points, key=lambda point: point.end)


def state_rows(buffer: Buffer, n_embd: int) -> StepRows:
    """Return the rows of the states between layers, f32 ``[N, n_embd]``, which ``buffer`` holds."""
    return FloatRows(buffer, "n_tokens", ("token", "embd"), (n_embd,), ((0, n_embd),))


def label_of(step: Step) -> str:
    """Return the label of a step's hook point. For a kernel that fuses an activation with its
    products, it is the activation's; for a second layout of the same rows, the first step's.
    """
    if isinstance(step.spec, Gated):
        name: str = step.args["y"].name
        return name
    return COPY.sub("", step.label)


def _end(plan: Plan, at: int, buffer: Buffer) -> int:
    """Return the number of steps after which the rows that step number ``at`` writes into
    ``buffer`` are complete: later steps of the same label may add to them.
    """
    label = plan.steps[at].label
    end = at + 1
    for i, step in enumerate(plan.steps[end:], end):
        touches = buffer in step.reads or buffer in step.writes
        if touches and step.label.startswith(f"{label}.") and step.label.endswith(COMPLETES):
            end = i + 1
        elif touches:
            break
    return end


def rows_of(step: Step, n_embd: int) -> StepRows | None:
    """Return the rows that a step writes; ``n_embd`` tells the name of the last axis (``_axis``).
    None if they are not one row per token, output or sequence, or if their layout is not supported
    for hooks.
    """
    spec: Any = step.spec
    args = step.args
    count = "n_outputs" if getattr(spec, "outputs", False) else "n_tokens"
    if step.grid.count in AXES:
        count = step.grid.count
    first = AXES[count]
    ops = _ops_of(type(step.spec))
    if isinstance(spec, Matmul):
        return _products(step, spec, count, n_embd)
    if "attention" in ops:
        return _heads(args["out"], spec.n_head, spec.dims_v)
    if "rope" in ops:
        return _heads(args["qkv"], spec.n_head, spec.head_dim)
    if "latent" in ops:
        return _heads(args["out"], spec.n_head, spec.head_dim)
    if "route" in ops:
        axes = (first, "expert")
        return RoutingRows(args["weights"], count, axes, (spec.n,), args["chosen"], spec.n_used)
    is_norm_sum = "norm" in ops and (spec.add or spec.rows)
    if hasattr(spec, "layout") and not is_norm_sum:
        if getattr(spec, "per", 1) > 1 or getattr(spec, "counted", False):
            return None  # rows of experts
        if getattr(spec, "heads", 1) > 1 or "gather" in ops:
            return None
        axes = (first, _axis(step.label, spec.k, n_embd))
        return PackedRows(args["out"], count, axes, (spec.k,), spec.layout())
    if ops.isdisjoint(OF_K):
        return None
    name = next(name for name in ("out", "y", "x") if name in spec.args.writes)
    width = spec.k * getattr(spec, "heads", getattr(spec, "n_streams", 1))
    # Of a step that does not write in place, ``column`` is where it reads.
    column = args.get("out_column", 0) if name == "out" else args.get("column", 0)
    axes = (first, _axis(step.label, width, n_embd))
    return FloatRows(args[name], count, axes, (width,), ((column, width),))


def _ops_of(kind: type[Spec]) -> frozenset[str]:
    """Return the op names of the kernel class ``kind`` and of the classes it derives from: GPU
    kernels derive from the CPU's.
    """
    bases = (base for base in kind.__mro__ if issubclass(base, Spec))
    return frozenset(base.op for base in bases if "op" in vars(base))


def _heads(buffer: Buffer, n_head: int, dims: int) -> StepRows:
    columns = ((0, n_head * dims),)
    return FloatRows(buffer, "n_tokens", ("token", "head", "dim"), (n_head, dims), columns)


def _products(step: Step, spec: Matmul, count: str, n_embd: int) -> StepRows | None:
    """Return the rows of the matrix products of ``step``, whose kernel is ``spec``, side by side in
    the order of their matrices; None for experts, and for several rows of a token. ``count``: as in
    ``StepRows``.
    """
    if spec.experts or spec.per > 1:
        return None
    args = step.args
    first = AXES[count]
    if isinstance(spec, Gated):
        layout = spec.result()
        axes = (first, _axis(step.label, layout.k, n_embd))
        return PackedRows(args["y"], count, axes, (layout.k,), layout)
    heights = args["rows"]
    if spec.heads:
        columns = tuple((i * args["y_pitch"], heights[0]) for i in range(spec.heads))
        shape = (spec.heads, heights[0])
        return FloatRows(args["y"], count, (first, "head", "dim"), shape, columns)
    columns = tuple(zip(args["column"], heights, strict=True))
    names = [weight[0].name for weight in args["w"]]
    parts = {}
    start = 0
    for name, height in zip(names, heights, strict=True):
        parts[_matrix_label(name)] = slice(start, start + height)
        start += height
    axis = _axis(step.label, start, n_embd)
    if len(names) == 1:
        stem = names[0].removesuffix(".weight")
        axis = "vocab" if stem in ("output", "token_embd") else axis
        axis = "expert" if stem.endswith("ffn_gate_inp") else axis
    shared = parts if len(names) > 1 and len(parts) == len(names) else {}
    return FloatRows(args["y"], count, (first, axis), (start,), columns, parts=shared)


def _matrix_label(name: str) -> str:
    """Return the short name of a matrix: that of ``blk.5.attn_q.weight`` is "q"."""
    stem = name.removesuffix(".weight").rpartition(".")[2]
    return stem.removeprefix("attn_").removeprefix("ffn_")


def _axis(label: str, width: int, n_embd: int) -> str:
    """Return the name of the last axis of rows of ``width`` values: "embd" if these are ``n_embd``,
    else "ff" or "column", by the step's ``label``.
    """
    if width == n_embd:
        return "embd"
    return "ff" if ".ffn." in label else "column"
