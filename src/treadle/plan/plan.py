"""The forward pass as a flat list of labelled steps, and the memory they share.

A plan is built once for a size of batch: the most tokens and outputs. A device runs it
(``devices/protocol.py``); ``run_reference`` runs the kernels' numpy twins step by step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from fnmatch import fnmatchcase
from math import comb, prod
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.kernels.run_state import round_up

if TYPE_CHECKING:
    from treadle.kernels.spec import Grid, Spec

ALIGN = 64
ANY = range(1, 1 << 62)  # any number of tokens of a sequence, or of rows of an expert


def input_of_count(count: str) -> str:
    """Return the name of the input whose items the RUN_STATE field ``count`` counts: "tokens" for
    "n_tokens".
    """
    return "output_rows" if count == "n_outputs" else count.removeprefix("n_")


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory for results within a run: ``rows`` rows of ``row_bytes`` bytes, placed in the arena by
    ``Plan.place``.

    ``dtype``: the type in which numpy twins view it; "u1" for activations in a product's layout.
    """

    name: str
    rows: int
    row_bytes: int
    dtype: str = "f4"

    @property
    def n_bytes(self) -> int:
        return round_up(self.rows * self.row_bytes, ALIGN)


class DeviceMemory(ABC):
    """A block of a device's memory (``devices/protocol.py``), of ``n_bytes`` bytes.

    ``bytes``: the memory as uint8, if the host can read and write it in place; else None.
    """

    n_bytes: int
    bytes: np.ndarray | None

    def read(self, at: int, n_bytes: int) -> np.ndarray:
        """Return the ``n_bytes`` bytes from byte ``at`` on as uint8: a copy, or a view that is
        valid until the next run.
        """
        self.check(at, n_bytes)
        return self._read(at, n_bytes)

    def write(self, at: int, data: np.ndarray) -> None:
        """Write uint8 ``data`` at byte ``at``; only between runs."""
        self.check(at, data.nbytes)
        self._write(at, data)

    def check(self, at: int, n_bytes: int) -> None:
        """Assert that ``n_bytes`` bytes from ``at`` on are within the memory."""
        assert 0 <= at <= at + n_bytes <= self.n_bytes, (at, n_bytes, self.n_bytes)

    @abstractmethod
    def _read(self, at: int, n_bytes: int) -> np.ndarray: ...

    @abstractmethod
    def _write(self, at: int, data: np.ndarray) -> None: ...


@dataclass(frozen=True, eq=False)
class Const:
    """Memory that outlives a run: weights, page pools, and states that steps change.

    ``memory``: the device's block. ``array``: the view that numpy twins use; None if the host
    cannot read the memory.
    """

    name: str
    memory: DeviceMemory
    array: Any = field(repr=False)


class Storage(Protocol):
    """The part of a device (``devices/protocol.py``) that needs no plan: it allocates memory for
    weights, pages and inputs.
    """

    @abstractmethod
    def memory(self, n_bytes: int, *, host: bool = False) -> DeviceMemory:
        """Return ``n_bytes`` of zeroed memory.

        ``host``: for the inputs of runs, which the host writes in place (``DeviceMemory.bytes``); a
        run reads what was written before it began.

        Raises MemoryError or ValueError if the device has too little memory.
        """

    @abstractmethod
    def weights(self, name: str, array: np.ndarray) -> Const:
        """Return ``array``, a mapped file's or one built by the host, as a constant that plans
        read; copied to the device if that is necessary.
        """

    @abstractmethod
    def copy(self, memory: DeviceMemory, to: int, start: int, n_bytes: int) -> None:
        """Copy ``n_bytes`` from byte ``start`` to byte ``to`` of one memory of this device."""


@dataclass(frozen=True)
class Input:
    """An array that the host writes for each run. ``shape``: its largest shape."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


ArrayOf = Callable[[Const], Any]


@dataclass(frozen=True)
class Step:
    """One entry of the plan: a kernel (``spec``), its arguments by the names in its ``Args``, and
    the grid that counts its work items.

    An argument is a Buffer, a Const, a tuple of Consts (the arrays of a tensor), an integer or
    None, or a list with one of these per tensor.
    """

    label: str
    spec: Spec
    args: Mapping[str, Any]
    grid: Grid
    shape: tuple[int, ...] = ()  # of the matrix that it multiplies by, or of the row that it reads
    n_bytes: int = 0  # read from the model's file
    n_flops: int = 0  # of one token (or output)
    query_counts: range = ANY  # it attends for sequences with so many tokens in the batch
    # The share of n_bytes that one token reads: some experts, one embedding.
    read_share: float = 1.0
    rows_per_expert: range = ANY  # an expert is read by this step only if so many tokens chose it

    @property
    def kernel(self) -> str:
        return self.spec.name

    @property
    def reads(self) -> tuple[Buffer, ...]:
        given = [self.args.get(name) for name in self.spec.args.reads]
        return tuple(arg for arg in given if isinstance(arg, Buffer))

    @property
    def writes(self) -> tuple[Buffer, ...]:
        given = [self.args.get(name) for name in self.spec.args.writes]
        return tuple(arg for arg in given if isinstance(arg, Buffer))

    def cost(self, parts: Iterable[tuple[int, int]], n_outputs: int = 1) -> tuple[int, int]:
        """Return the bytes that the step reads in one run (weights and history), and its number of
        operations.

        ``parts``: for each sequence, (tokens in its cache, tokens in the batch); ``n_outputs``:
        rows of logits. A count that is known only during the run, such as an expert's rows, is
        estimated.
        """
        parts = list(parts)
        of_outputs = self.grid.count in ("n_outputs", "n_sampled")
        rows = n_outputs if of_outputs else sum(n for _, n in parts)
        # Expected value, as tokens choose independently; experts that no token chose are not read.
        n_bytes = round(
            self.n_bytes * binomial_probability(rows, self.read_share, self.rows_per_expert)
        )
        n_ops = rows * self.n_flops
        if (
            self.rows_per_expert != ANY and rows
        ):  # a token's expert counts if enough other tokens chose it too
            others = range(self.rows_per_expert.start - 1, self.rows_per_expert.stop - 1)
            n_ops = round(n_ops * binomial_probability(rows - 1, self.read_share, others))
        for part in parts:
            more_bytes, more_ops = (
                self.spec.history(*part) if part[1] in self.query_counts else (0, 0)
            )
            n_bytes = n_bytes + more_bytes
            n_ops = n_ops + more_ops
        return n_bytes, n_ops


def binomial_probability(n: int, p: float, counts: range) -> float:
    """Return the probability that ``n`` independent trials of probability ``p`` have a number of
    successes in ``counts``.
    """
    if counts.stop > n:
        return 1.0 - binomial_probability(n, p, range(counts.start))
    return sum(comb(n, i) * p**i * (1.0 - p) ** (n - i) for i in counts)


@dataclass
class Plan:
    """The steps for batches of up to ``n_tokens`` tokens and ``n_outputs`` rows of logits."""

    n_tokens: int
    n_outputs: int
    steps: list[Step] = field(default_factory=list)
    offsets: dict[Buffer, int] = field(default_factory=dict)  # bytes from the arena's start
    inputs: dict[str, Input] = field(default_factory=dict)  # of a run, by field of RUN_STATE
    takes: dict[str, Buffer] = field(default_factory=dict)  # written by the host before each run
    outputs: dict[str, Buffer] = field(default_factory=dict)  # live until the last step
    arena_bytes: int = 0  # size of the memory of all buffers
    tensors: frozenset[str] = frozenset()  # all tensors of the file
    tensors_used: set[str] = field(default_factory=set)  # tensors that steps read
    query_tile: int = 1  # query tokens of an attention item, for more than few_tokens
    few_tokens: int = 0  # sequences with at most so many: one token an item, long histories split
    tensors_ignored: frozenset[str] = frozenset()  # tensors that no step needs to read
    # In plans for hooks: the number of steps after which the states before each layer are complete,
    # and after the last layer, and their buffer (``lowering/observed.py``).
    states: list[tuple[int, Buffer]] = field(default_factory=list)
    key: str = ""  # digest of all that the plan was made of, if a device may store it; else ""

    @property
    def first_masked(self) -> int:
        """The index of the first step that reads the masks of samplers; the number of steps if none
        does.
        """
        masked = (i for i, step in enumerate(self.steps) if step.spec.reads_masks)
        return next(masked, len(self.steps))

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def emit(self, step: Step) -> None:
        self.steps.append(step)

    def with_steps(self, steps: Sequence[Step]) -> Plan:
        """Return a copy of this plan with other steps, but the same inputs and outputs, placed in
        memory. It has no ``key``, so no device stores it.
        """
        given = {of.name: getattr(self, of.name) for of in fields(Plan)}
        given |= {"steps": [*steps], "offsets": {}, "arena_bytes": 0, "key": ""}
        plan = Plan(**given)
        plan.place()
        return plan

    def match(self, pattern: str) -> list[Step]:
        """Return the steps whose label matches a shell pattern such as ``L5.*``."""
        return [step for step in self.steps if fnmatchcase(step.label, pattern)]

    def specs(self) -> list[Spec]:
        """Return each distinct kernel once: a plan of hundreds of steps has about a dozen."""
        return list(dict.fromkeys(step.spec for step in self.steps))

    def scratch(self, lanes: int) -> int:
        """Return the bytes of scratch memory that each thread needs, the most of any kernel, if
        vectors have ``lanes`` f32 values (``Spec.scratch``).
        """
        return max(step.spec.scratch(lanes) for step in self.steps)

    def lifetimes(self) -> dict[Buffer, tuple[int, int]]:
        """Return for each buffer the indices of the first and last step that read or write it.
        Buffers that the host writes live from the first step on, outputs until the last.
        """
        spans: dict[Buffer, tuple[int, int]] = {}
        for i, step in enumerate(self.steps):
            for name in step.spec.args.buffers:
                if name in step.args and type(arg := step.args[name]) is Buffer:
                    spans[arg] = (spans[arg][0] if arg in spans else i, i)
        for buffer in self.takes.values():
            spans[buffer] = (0, spans[buffer][1])
        for buffer in self.outputs.values():
            spans[buffer] = (spans[buffer][0], len(self.steps) - 1)
        return spans

    def place(self) -> None:
        """Assign every buffer a byte offset in the arena; buffers with overlapping lifetimes share
        no byte.
        """
        spans = self.lifetimes()
        taken: list[set[tuple[int, int]]] = [set() for _ in self.steps]  # bytes in use at each step
        for buffer in sorted(spans, key=lambda b: -b.n_bytes):
            first, last = spans[buffer]
            at = 0
            n_bytes = buffer.n_bytes
            for start, end in sorted(set().union(*taken[first : last + 1])):
                if at < end and start < at + n_bytes:
                    at = end
            for step in taken[first : last + 1]:
                step.add((at, at + n_bytes))
            self.offsets[buffer] = at
            self.arena_bytes = max(self.arena_bytes, at + n_bytes)

    def check(self) -> None:
        """Assert the invariants of every plan; a failure is a bug in treadle.

        Labels are unique, steps supply the arguments that their kernels need and count known
        inputs, buffers are written before they are read, buffers that live at the same time share
        no byte, and every tensor of the file is used or listed as ignored.
        """
        labels = [step.label for step in self.steps]
        assert len(set(labels)) == len(labels), f"a label twice: {sorted(labels)}"
        written: set[Buffer] = set(self.takes.values())
        for step in self.steps:
            for buffer in step.reads:
                assert buffer in written, f"{step.label} reads {buffer.name} before it is written"
            written.update(step.writes)
            args = step.spec.args
            there = {name for name, arg in step.args.items() if arg is not None}
            unlike = (step.spec.needs - there) | (step.args.keys() - args.kinds.keys())
            assert not unlike, f"{step.label}: not given, or no argument: {sorted(unlike)}"
            count = step.grid.count
            assert count not in step.args or count in args.reads, f"{step.label}: {count} not read"
            known = count in step.args or count == "one" or input_of_count(count) in self.inputs
            assert known or not self.inputs, f"{step.label}: no input {input_of_count(count)}"
        lost = self.tensors ^ (self.tensors_used | self.tensors_ignored)
        assert not lost, f"tensors that are neither used nor ignored, or not there: {sorted(lost)}"
        twice = self.tensors_used & self.tensors_ignored
        assert not twice, f"tensors both used and ignored: {sorted(twice)}"
        spans = self.lifetimes()
        for a in spans:
            for b in spans:
                if a is b or spans[a][1] < spans[b][0] or spans[b][1] < spans[a][0]:
                    continue
                at = self.offsets[a]
                to = self.offsets[b]
                apart = at + a.n_bytes <= to or to + b.n_bytes <= at
                assert apart, f"{a.name} and {b.name} share memory while both live"

    def arrays(
        self, step: Step, arena: np.ndarray, array_of: ArrayOf = attrgetter("array")
    ) -> SimpleNamespace:
        """Return a step's arguments as its numpy twin expects them: views of ``arena`` and of
        constants, integers, None. ``array_of``: returns a constant's array, by default the host's.
        """

        def view(arg: Any) -> Any:
            if isinstance(arg, (tuple, list)):
                return [view(one) for one in arg]
            if isinstance(arg, Buffer):
                at = self.offsets[arg]
                return arena[at : at + arg.n_bytes].view(arg.dtype)
            return array_of(arg) if isinstance(arg, Const) else arg

        return step.spec.args(**{name: view(arg) for name, arg in step.args.items()})

    def run_reference(
        self,
        arena: np.ndarray,
        run: Any,
        until: str | None = None,
        array_of: ArrayOf = attrgetter("array"),
    ) -> None:
        """Run the numpy twins on ``arena`` (bytes), up to and including the step labelled
        ``until``.

        ``run``: the run's inputs (``engine.batch.Inputs``). ``array_of`` returns a constant's
        array, by default the host's.
        """
        for step in self.steps:
            step.spec.run_ref(self.arrays(step, arena, array_of), run)
            if step.label == until:
                return
