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

import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.cached_property import cached_property
from treadle.base.digest import blake2b
from treadle.devices.cpu.step_table import COLUMNS, StepTable
from treadle.devices.cpu.thread_team import HostMemory
from treadle.errors import CacheError
from treadle.files.gguf import GGUF
from treadle.jit.cache import checked_folder, hash_of_sources, write_whole
from treadle.plan.plan import Buffer, Input, Plan

if TYPE_CHECKING:
    from treadle.devices.protocol import PlanRequest
    from treadle.kvcache.cache import KVCache
    from treadle.kvcache.page_pool import Pool, StatePool

# Sources that can change a plan, besides those that can change a kernel's code.
SOURCES = ("plan", "models", "files", "kvcache", "engine", "devices.protocol")
SUFFIX = ".plan"
MAGIC = b"plan0001"
HEAD = struct.Struct("<8s16sQQQQ")  # MAGIC, digest of the rest, bytes of each part
MOST_COMPUTED = 8 << 20  # bytes of computed constants in one file
MOST_FILES = 256  # the oldest are removed
LINE = 64


class StoredPlan(Plan):
    """A plan read from disk, with all that runs need; reading ``steps`` lowers the plan.

    ``table``: the steps as the device binds them. ``lower`` returns the lowered plan.
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
    None if such plans are not stored: with adapters, control vectors or hooks; of models that are
    not unchanged GGUF files; with configurations of unknown types; and all of them under
    ``TREADLE_PLANS=0``.
    """
    if request.lowering is not None or os.environ.get("TREADLE_PLANS") == "0":
        return None
    if request.weights.n_scales or not (files := _identity(request.weights.gguf)):
        return None
    cache = request.cache
    given = (
        variant,
        _source_hash(),
        files,
        request.config,
        (cache.kv, cache.n_ctx),
        [_about(cells) for cells in _pools(cache)],
        (request.n_tokens, request.n_outputs, request.deterministic, request.output),
        (request.int16, n_threads),
    )
    try:
        text = "\n".join(_described(given))
    except TypeError:
        return None
    return blake2b(text.encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=1)
def _source_hash() -> str:
    return hash_of_sources(*SOURCES)


def _pools(cache: KVCache) -> list[Pool | StatePool]:
    """Return all pools of a cache: pages, an encoder's keys, and layer states, where it has
    them.
    """
    return [*cache.pools, *getattr(cache, "cross", ()), *getattr(cache, "states", ())]


def _about(cells: Pool | StatePool) -> tuple[object, ...]:
    """Return the properties of a pool that plans depend on."""
    places = [cells.layer_off(layer) for layer in cells.layers]
    return type(cells).__name__, cells.spec, cells.n_bytes, cells.cell_bytes, places


def _identity(gguf: GGUF) -> list[tuple[int, ...]] | None:
    """Return device, inode, size and times of a GGUF model's files. None if a file changed or a
    tensor was replaced in memory, and for other kinds of models, whose tensors also depend on other
    files.
    """
    if type(gguf) is not GGUF or not gguf.is_in_place:
        return None
    found: list[tuple[int, ...]] = []
    for file in gguf.mapped_files:
        try:
            about = os.stat(file.path)
        except OSError:
            return None
        if file.state != (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns):
            return None
        found.append((*file.state, about.st_ctime_ns))
    return found or None


def _described(value: Any) -> Iterator[str]:
    """Yield strings that are equal in every process for equal values. Raises TypeError for a value
    of an unknown type.
    """
    if is_dataclass(value):
        yield type(value).__name__
        for each in fields(value):
            yield from _described(getattr(value, each.name))
    elif isinstance(value, (list, tuple)):
        yield f"[{len(value)}"
        for item in value:
            yield from _described(item)
    elif isinstance(value, (set, frozenset)):
        yield f"{{{len(value)}"
        yield from sorted("\n".join(_described(item)) for item in value)
    elif isinstance(value, Mapping):
        yield f"<{len(value)}"
        for item in value.items():
            yield from _described(item)
    elif isinstance(value, np.ndarray):
        digest = blake2b(np.ascontiguousarray(value).data, digest_size=16)
        yield f"{value.dtype.str}{value.shape}{digest.hexdigest()}"
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        yield repr(value)
    else:
        raise TypeError(type(value).__name__)


def read_plan(key: str, gguf: GGUF, cache: KVCache, lower: Callable[[], Plan]) -> StoredPlan | None:
    """Return the plan stored under ``key``; None if there is none, or it is damaged."""
    try:
        data = (_folder() / f"{key}{SUFFIX}").read_bytes()
    except (OSError, CacheError):
        return None
    if len(data) < HEAD.size:
        return None
    magic, digest, *sizes = HEAD.unpack_from(data)
    body = memoryview(data)[HEAD.size :]
    if magic != MAGIC or sum(sizes) != len(body) or _digest([body]) != digest:
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
        [_found(place, gguf, cache, memory) for place in head["constants"]],
    )
    return StoredPlan(head, table, lower)


def write_plan(plan: Plan, table: StepTable, gguf: GGUF, cache: KVCache) -> None:
    """Store a plan, if all of its constants can be found again or stored; a folder that cannot be
    written to is ignored.
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
    with contextlib.suppress(OSError, CacheError):  # a read-only or full disk
        folder = _folder()
        start = HEAD.pack(MAGIC, _digest(parts), *map(len, parts))
        write_whole(folder / f"{plan.key}{SUFFIX}", start, *parts)
        _remove_oldest(folder)


def _digest(parts: Iterable[Any]) -> bytes:
    state = blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    return state.digest()


def _dtype(given: Any) -> np.dtype[Any]:
    return np.dtype(given if isinstance(given, str) else [tuple(each) for each in given])


def _folder() -> Path:
    """Return the folder of stored plans, inside that of kernels. Raises CacheError."""
    return checked_folder(checked_folder() / "plans")


def _remove_oldest(folder: Path) -> None:
    found = [(entry.stat().st_mtime_ns, entry.path) for entry in os.scandir(folder)]
    for _, path in sorted(found)[:-MOST_FILES]:
        os.unlink(path)


def _place_of(memory: Any, gguf: GGUF, cache: KVCache) -> list[Any] | None:
    """Return the place of a constant as a later process can find it: a model's file and offset, or
    a pool. None for a constant that the lowering computed.
    """
    for i, file in enumerate(gguf.mapped_files):
        if file.begin <= memory.address and memory.address + memory.n_bytes <= file.end:
            return ["file", i, memory.address - file.begin, memory.n_bytes]
    for i, pool in enumerate(_pools(cache)):
        if memory is pool.const.memory:
            return ["pool", i]
    return None


def _found(place: list[Any], gguf: GGUF, cache: KVCache, computed: HostMemory) -> Any:
    """Return the memory of a constant at ``place``, as described by ``_place_of``; ``computed``:
    the stored constants.
    """
    kind, first, *rest = place
    if kind == "pool":
        return _pools(cache)[first].const.memory
    if kind == "computed":
        return HostMemory.of(computed.bytes[first : first + rest[0]])
    at, n_bytes = rest
    return HostMemory.of(np.frombuffer(gguf.mapped_files[first], np.uint8, n_bytes, at))
