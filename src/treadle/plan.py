"""The forward pass as a flat list of labelled steps, and the memory they share.

A plan is built once for a kind of batch (how many tokens and outputs at most). ``Plan.table``
turns it into a table that the compiled loop walks; ``run_reference`` walks the same list with the
kernels' numpy twins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from treadle.kernels.spec import RUN_STATE, Grid, Spec, round_up

ALIGN = 64


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory of a plan: ``rows`` rows of ``row_bytes``; the arena decides where.

    ``dtype`` is how numpy's twins see it; activations in a kernel's own layout are bytes.
    """

    name: str
    rows: int
    row_bytes: int
    dtype: str = "f4"

    @property
    def n_bytes(self) -> int:
        return round_up(self.rows * self.row_bytes, ALIGN)


@dataclass(frozen=True, eq=False)
class Const:
    """Memory that outlives the plan and that no step changes, or changes for good: weights, pools
    of pages.
    """

    name: str
    array: np.ndarray

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)


Arg = Buffer | Const | int | None


@dataclass(frozen=True)
class Step:
    """One entry of the plan: a kernel and what it is given."""

    label: str
    spec: Spec
    args: tuple[Arg, ...]
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    grid: Grid
    chunk: int = 1  # items a thread claims at least
    shape: tuple[int, ...] = ()
    n_bytes: int = 0  # read from the model's file
    n_flops: int = 0  # of one token (or output)

    @property
    def kernel(self) -> str:
        return self.spec.name

    def work(self, parts: Iterable[tuple[int, int]], n_outputs: int = 1) -> tuple[int, int]:
        """Bytes that one run reads of the model's file and of its history, and its operations.

        ``parts``: tokens held before, and tokens of the batch, of each sequence.
        """
        parts = list(parts)
        rows = n_outputs if self.grid.count == "n_outputs" else sum(n for _, n in parts)
        n_bytes, n_ops = (self.n_bytes if rows else 0), rows * self.n_flops
        for part in parts:
            more_bytes, more_ops = self.spec.history(*part)
            n_bytes, n_ops = n_bytes + more_bytes, n_ops + more_ops
        return n_bytes, n_ops


@dataclass
class Plan:
    """The steps for batches of up to ``n_tokens`` tokens and ``n_outputs`` rows of logits."""

    n_tokens: int
    n_outputs: int
    steps: list[Step] = field(default_factory=list)
    offsets: dict[Buffer, int] = field(default_factory=dict)
    arena_bytes: int = 0
    tensors: frozenset[str] = frozenset()  # of the file
    tensors_used: set[str] = field(default_factory=set)
    query_tile: int = 1  # query tokens of an attention item
    split_keys: bool = False  # long histories are cut into several items
    tensors_ignored: frozenset[str] = frozenset()

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def emit(self, step: Step) -> None:
        self.steps.append(step)

    def match(self, pattern: str) -> list[Step]:
        """Steps whose label fits a shell pattern such as ``L5.*``."""
        return [step for step in self.steps if fnmatchcase(step.label, pattern)]

    def specs(self) -> list[Spec]:
        """The kernels, each once: hundreds of steps share a dozen."""
        return list(dict.fromkeys(step.spec for step in self.steps))

    @property
    def scratch(self) -> int:
        return max(step.spec.scratch for step in self.steps)

    def lifetimes(self) -> dict[Buffer, tuple[int, int]]:
        """First and last step that touches each buffer."""
        spans: dict[Buffer, tuple[int, int]] = {}
        for i, step in enumerate(self.steps):
            for buffer in (*step.reads, *step.writes):
                spans[buffer] = (spans.get(buffer, (i, i))[0], i)
        return spans

    def place(self) -> None:
        """Give every buffer an offset in the arena; buffers whose lives overlap never share a
        byte.
        """
        spans = self.lifetimes()
        taken: list[set[tuple[int, int]]] = [set() for _ in self.steps]  # by each step's buffers
        for buffer in sorted(spans, key=lambda b: -b.n_bytes):
            first, last = spans[buffer]
            at, n_bytes = 0, buffer.n_bytes
            for start, end in sorted(set().union(*taken[first : last + 1])):
                if at < end and start < at + n_bytes:
                    at = end
            for step in taken[first : last + 1]:
                step.add((at, at + n_bytes))
            self.offsets[buffer] = at
            self.arena_bytes = max(self.arena_bytes, at + n_bytes)

    def check(self) -> None:
        """Assert what every plan must hold; whatever fails is a bug of ours.

        Labels are unique, reads follow writes, buffers that live at once share no byte, and every
        tensor of the file is used or listed as ignored.
        """
        labels = [step.label for step in self.steps]
        assert len(set(labels)) == len(labels), f"a label twice: {sorted(labels)}"
        written: set[Buffer] = set()
        for step in self.steps:
            for buffer in step.reads:
                assert buffer in written, f"{step.label} reads {buffer.name} before it is written"
            written.update(step.writes)
            for buffer in (*step.reads, *step.writes):
                assert buffer in step.args, f"{step.label}: {buffer.name} is no argument"
        lost = self.tensors ^ (self.tensors_used | self.tensors_ignored)
        assert not lost, f"tensors that are neither used nor ignored, or not there: {sorted(lost)}"
        twice = self.tensors_used & self.tensors_ignored
        assert not twice, f"tensors both used and ignored: {sorted(twice)}"
        spans = self.lifetimes()
        for a in spans:
            for b in spans:
                if a is b or spans[a][1] < spans[b][0] or spans[b][1] < spans[a][0]:
                    continue
                at, to = self.offsets[a], self.offsets[b]
                apart = at + a.n_bytes <= to or to + b.n_bytes <= at
                assert apart, f"{a.name} and {b.name} share memory while both live"

    def arrays(self, step: Step, arena: np.ndarray) -> list[Any]:
        """A step's arguments as its numpy twin takes them: views, integers, None."""
        out: list[Any] = []
        for arg in step.args:
            if isinstance(arg, Buffer):
                at = self.offsets[arg]
                out.append(arena[at : at + arg.n_bytes].view(arg.dtype))
            else:
                out.append(arg.array if isinstance(arg, Const) else arg)
        return out

    def run_reference(self, arena: np.ndarray, run: Any, until: str | None = None) -> None:
        """Run the numpy twins on ``arena`` (bytes), up to and with the step labelled ``until``."""
        for step in self.steps:
            step.spec.run_ref(self.arrays(step, arena), run)
            if step.label == until:
                return

    def table(
        self, kernels: dict[str, int], arena: int, step_dtype: np.dtype[Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The STEP records for the compiled loop, and the memory that holds their arguments."""
        addresses = [self._addresses(step, arena) for step in self.steps]
        args = np.array([a for row in addresses for a in row] or [0], np.int64)
        records = np.zeros(len(self.steps), step_dtype)
        at = int(args.ctypes.data)
        fields = RUN_STATE.fields
        assert fields is not None
        address_of = {spec: kernels[spec.name] for spec in self.specs()}
        for i, (step, row) in enumerate(zip(self.steps, addresses, strict=True)):
            grid = step.grid
            offset = -1 if grid.count == "one" else int(fields[grid.count][1])
            records[i] = (address_of[step.spec], at, grid.base, offset, grid.per, step.chunk)
            at += 8 * len(row)
        return records, args

    def _addresses(self, step: Step, arena: int) -> list[int]:
        out = []
        for arg in step.args:
            if isinstance(arg, Buffer):
                out.append(arena + self.offsets[arg])
            elif isinstance(arg, Const):
                out.append(arg.address)
            else:
                out.append(arg or 0)
        return out
