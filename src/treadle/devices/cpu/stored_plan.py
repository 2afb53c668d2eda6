"""Plans on disk, beside the kernels: the parts of a lowered plan that a later process needs to run
it.

A stored plan is used as it is: no graph is built, nothing is lowered, and no module of a kernel is
imported. Its steps are lowered only on demand, to be shown or profiled.

The name of a file is a hash of everything that the lowering reads: the model's file (its identity,
size and times), the configuration, the cache's pools, the sizes of the plan, the machine's
instruction set and the sources. Constants are found again by their place in the model's file or by
their pool; those that the lowering has computed (norms in f32) are stored with the plan.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.fast_classes import cached_property, dataclass
from treadle.devices.cpu.thread_team import HostMemory
from treadle.files.stored_entries import (
    all_sources,
    are_stored,
    key_of,
    read_entry,
    write_entry,
)
from treadle.models.stored_config import identities
from treadle.plan.plan import Buffer, Input, Plan

if TYPE_CHECKING:
    from treadle.devices.protocol import PlanRequest
    from treadle.files.gguf import GGUF
    from treadle.kvcache.cache import KVCache
    from treadle.kvcache.page_pool import Pool, StatePool


INTEGER, ARENA, INPUTS, CONSTANTS = range(4)  # bases; CONSTANTS + i: the i-th constant
# Of each step: the index of its kernel and of its first word, then the fields of ``Grid``, the
# count as a base and an offset.
COLUMNS = ("kernel", "word", "base", "count_base", "count_offset", "per", "whole")
SUFFIX = ".plan"
HEAD = struct.Struct("<QQQQ")  # bytes of each part
MOST_COMPUTED = 8 << 20  # bytes of computed constants in one file
LINE = 64


@dataclass(eq=False)
class StepTable:
    """The steps of a plan: ``steps`` i64 ``[n_steps, len(COLUMNS)]``, and their arguments, in
    words: ``offsets`` i64 ``[n_words]``, each relative to the base with the number in ``bases`` i32
    ``[n_words]``. ``kernels``: names of the kernels; ``constants``: the memory that outlives the
    plan, such as weights and KV pools; ``scratch``: bytes for each thread.
    """

    kernels: list[str]
    steps: np.ndarray
    offsets: np.ndarray
    bases: np.ndarray
    scratch: int
    constants: list[Any] = field(default_factory=list)


def step_table(plan: Plan, lanes: int) -> StepTable:
    """Return the step table of a plan for an instruction set with vectors of ``lanes`` f32
    values.
    """
    from treadle.kernels.run_state import run_offset
    from treadle.plan.plan import Const

    kernels = {spec: i for i, spec in enumerate(plan.specs())}
    constants: list[Any] = []
    index_of: dict[int, int] = {}  # of a constant's memory, by its address

    def place(arg: Any) -> tuple[int, int]:
        if type(arg) is Buffer:
            return ARENA, plan.offsets[arg]
        if type(arg) is not Const:
            return INTEGER, arg or 0
        memory: Any = arg.memory
        if memory.address not in index_of:
            index_of[memory.address] = len(constants)
            constants.append(memory)
        return CONSTANTS + index_of[memory.address], 0

    words: list[tuple[int, int]] = []
    steps = []
    for step in plan.steps:
        grid = step.grid
        count = INTEGER, 0
        if isinstance(counted := step.args.get(grid.count), Buffer):
            count = place(counted)
        elif grid.count != "one":
            count = INPUTS, run_offset(grid.count)
        steps.append((kernels[step.spec], len(words), grid.base, *count, grid.per, grid.whole))
        words += map(place, step.spec.args.in_order(step.args))
    table = np.array(words or [(INTEGER, 0)], np.int64)
    return StepTable(
        [spec.name for spec in kernels],
        np.array(steps, np.int64).reshape(-1, len(COLUMNS)),
        table[:, 1].copy(),
        table[:, 0].astype(np.int32),
        plan.scratch(lanes),
        constants,
    )


class StoredPlan(Plan):
    """A plan read from disk, with all that runs need; reading ``steps`` lowers the plan.

    ``head``: the other attributes of the plan, from the file's JSON. ``table``: the steps in the
    form that the CPU device binds to memory. ``lower``: a function that returns the lowered plan.
    """

    def __init__(
        self,
        head: Mapping[str, Any],
        table: StepTable,
        lower: Callable[[], Plan],
    ) -> None:
        self.n_tokens = head["n_tokens"]
        self.n_outputs = head["n_outputs"]
        self.arena_bytes = head["arena_bytes"]
        self.query_tile = head["query_tile"]
        self.few_tokens = head["few_tokens"]
        self.key = head["key"]
        self.inputs = {
            name: Input(_dtype(given), tuple(shape)) for name, given, shape in head["inputs"]
        }
        buffers = {name: Buffer(name, *sizes) for name, *sizes, _ in head["buffers"]}
        self.offsets = {buffers[name]: at for name, *_, at in head["buffers"]}
        self.takes = {name: buffers[of] for name, of in head["takes"].items()}
        self.outputs = {name: buffers[of] for name, of in head["outputs"].items()}
        self.table = table
        self._n_steps: int = head["n_steps"]
        self._first_masked: int = head["first_masked"]
        self._lower = lower

    @property
    def is_lowered(self) -> bool:
        """Whether ``steps`` have been lowered already."""
        return "steps" in self.__dict__

    @cached_property
    def steps(self) -> list[Any]:  # type: ignore[override]
        """The plan's steps, lowered on first use."""
        plan = self._lower()
        self.__dict__.update(plan.__dict__)
        return plan.steps

    @cached_property
    def tensors(self) -> frozenset[str]:  # type: ignore[override]
        found: frozenset[str] = self._lowered("tensors")
        return found

    @cached_property
    def tensors_used(self) -> set[str]:  # type: ignore[override]
        found: set[str] = self._lowered("tensors_used")
        return found

    @cached_property
    def tensors_ignored(self) -> frozenset[str]:  # type: ignore[override]
        found: frozenset[str] = self._lowered("tensors_ignored")
        return found

    def _lowered(self, name: str) -> Any:
        """Lower the plan; return its attribute ``name``, which is not stored."""
        self.steps  # noqa: B018
        return self.__dict__[name]

    @property
    def first_masked(self) -> int:
        return self._first_masked

    def __len__(self) -> int:
        return self._n_steps


def plan_key(request: PlanRequest, variant: str, n_threads: int) -> str | None:
    """Return the key of a plan: a hash of all that its lowering reads, and the name of its file.
    ``variant``: ``Device.variant``.

    Returns None for plans that are not stored: those with adapters, control vectors or hooks; those
    of models that are not unchanged GGUF files, or with configurations of unknown types; and all
    plans under ``TREADLE_PLANS=0``.
    """
    if request.lowering is not None or request.weights.n_scales or not are_stored():
        return None
    if not (files := identities(request.weights.gguf)):
        return None
    cache = request.cache
    try:
        config = request.config.digest
    except TypeError:
        return None
    return key_of(
        variant,
        all_sources(),
        files,
        config,
        (cache.kv, cache.n_ctx),
        [_about(cells) for cells in _pools(cache)],
        (request.n_tokens, request.n_outputs, request.deterministic, request.output),
        (request.int16, n_threads),
    )


def _pools(cache: KVCache) -> list[Pool | StatePool]:
    """Return all pools of a cache: pages, an encoder's keys, and layer states, where it has
    them.
    """
    return [*cache.pools, *getattr(cache, "cross", ()), *getattr(cache, "states", ())]


def _about(cells: Pool | StatePool) -> tuple[object, ...]:
    """Return the properties of a pool that plans depend on: its kind, sizes, and layers'
    offsets.
    """
    places = [cells.layer_off(layer) for layer in cells.layers]
    return type(cells).__name__, cells.spec, cells.n_bytes, cells.cell_bytes, places


def read_plan(key: str, gguf: GGUF, cache: KVCache, lower: Callable[[], Plan]) -> StoredPlan | None:
    """Return the plan stored under ``key``, with its constants found in ``gguf`` and ``cache``;
    None if there is none, or it is damaged. ``lower``: see ``StoredPlan``.
    """
    body = read_entry(key + SUFFIX)
    if body is None or len(body) < HEAD.size:
        return None
    sizes = HEAD.unpack_from(body)
    body = body[HEAD.size :]
    if sum(sizes) != len(body):
        return None
    parts = []
    at = 0
    for size in sizes:
        parts.append(body[at : at + size])
        at += size
    text, steps, words, computed = parts
    head = json.loads(bytes(text))
    if head["key"] != key:
        return None
    n_words = len(words) // 12
    memory = HostMemory(len(computed))
    memory.bytes[:] = computed
    table = StepTable(
        head["kernels"],
        np.frombuffer(steps, np.int64).reshape(-1, len(COLUMNS)),
        np.frombuffer(words, np.int64, n_words),
        np.frombuffer(words, np.int32, n_words, 8 * n_words),
        head["scratch"],
        [_constant_memory(place, gguf, cache, memory) for place in head["constants"]],
    )
    return StoredPlan(head, table, lower)


def write_plan(plan: Plan, table: StepTable, gguf: GGUF, cache: KVCache) -> None:
    """Store a plan and its step table under ``plan.key``, if each of the constants is in ``gguf``
    or ``cache``, or they are small enough to be stored too; a folder that cannot be written to is
    ignored.
    """
    computed: list[np.ndarray] = []
    constants = []
    for memory in table.constants:
        place = _place_of(memory, gguf, cache)
        if place is None:
            if memory.bytes.nbytes + sum(map(len, computed)) > MOST_COMPUTED:
                return
            place = ["computed", sum(map(len, computed)), memory.n_bytes]
            raw = np.ascontiguousarray(memory.bytes).reshape(-1).view(np.uint8)
            computed.append(np.pad(raw, (0, -len(raw) % LINE)))
        constants.append(place)
    kept = {id(of): of for of in (*plan.takes.values(), *plan.outputs.values())}
    names = {id(of): f"{i}" for i, of in enumerate(kept.values())}
    head = {
        "key": plan.key,
        "n_tokens": plan.n_tokens,
        "n_outputs": plan.n_outputs,
        "arena_bytes": plan.arena_bytes,
        "query_tile": plan.query_tile,
        "few_tokens": plan.few_tokens,
        "n_steps": len(plan),
        "first_masked": plan.first_masked,
        "scratch": table.scratch,
        "inputs": [
            (name, of.dtype.descr if of.dtype.names else of.dtype.str, of.shape)
            for name, of in plan.inputs.items()
        ],
        "buffers": [
            (names[id(of)], of.rows, of.row_bytes, of.dtype, plan.offsets[of])
            for of in kept.values()
        ],
        "takes": {name: names[id(of)] for name, of in plan.takes.items()},
        "outputs": {name: names[id(of)] for name, of in plan.outputs.items()},
        "kernels": table.kernels,
        "constants": constants,
    }
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)  # the arrays that follow are read in place
    steps = table.steps.tobytes()
    words = table.offsets.tobytes() + table.bases.tobytes()
    data = b"".join(each.tobytes() for each in computed)
    parts = [text, steps, words, data]
    write_entry(plan.key + SUFFIX, HEAD.pack(*map(len, parts)), *parts)


def _dtype(given: Any) -> np.dtype[Any]:
    return np.dtype(given if isinstance(given, str) else [tuple(each) for each in given])


def _place_of(memory: Any, gguf: GGUF, cache: KVCache) -> list[Any] | None:
    """Return the place of a constant's ``memory`` as a later process can find it: ["file", number,
    offset, bytes] in a model's file, or ["pool", number]. None for a constant that the lowering
    computed.
    """
    for i, file in enumerate(gguf.mapped_files):
        if file.begin <= memory.address and memory.address + memory.n_bytes <= file.end:
            return ["file", i, memory.address - file.begin, memory.n_bytes]
    for i, pool in enumerate(_pools(cache)):
        if memory is pool.const.memory:
            return ["pool", i]
    return None


def _constant_memory(place: list[Any], gguf: GGUF, cache: KVCache, computed: HostMemory) -> Any:
    """Return the memory of a constant at ``place``: one that ``_place_of`` returns, or ["computed",
    offset, bytes] for a part of ``computed``, the stored constants.
    """
    kind, first, *rest = place
    if kind == "pool":
        return _pools(cache)[first].const.memory
    if kind == "computed":
        return HostMemory.wrap(computed.bytes[first : first + rest[0]], computed.address + first)
    at, n_bytes = rest
    file = gguf.mapped_files[first]
    return HostMemory.wrap(np.frombuffer(file, np.uint8, n_bytes, at), file.begin + at)
