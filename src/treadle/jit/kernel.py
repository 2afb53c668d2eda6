"""Kernel spec to function address: trace, compile, cache, link; each at most once."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Protocol

from treadle.base.fast_classes import dataclass
from treadle.base.fork_safety import UseLock
from treadle.errors import CacheError
from treadle.jit import cache, elf

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.jit.compile import Linker
    from treadle.jit.compile_pool import CompilePool
    from treadle.jit.types import Ty
    from treadle.jit.values import Val
    from treadle.kernels.spec import Spec

Progress = Callable[[str, int, int], None]
WAIT_S = 0.05  # between two looks at what other processes have compiled
END_S = 1.0


@dataclass
class CompileStats:
    """Cost of preparing kernels: how many were compiled, how many came from the cache, and the
    time.
    """

    n_compiled: int = 0
    n_cached: int = 0
    seconds: float = 0.0  # includes making the plans that name them


def trace(spec: Spec, isa: Isa) -> str:
    """Return the LLVM IR that the kernel's ``build`` emits, before any optimisation."""
    from treadle.jit.types import i64, ptr

    k, given = begin(spec, isa, (ptr, ptr, i64, i64, ptr))
    for i in (0, 1, 4):
        k.function.arg_attributes[i] = "noalias"
    spec.emit(k, isa, *given)
    k.ret()
    return str(k.module)


def begin(
    spec: Spec, isa: Isa, types: Sequence[Ty], convention: str = ""
) -> tuple[Builder, list[Val]]:
    """Start a function named for the kernel, with arguments of ``types``, in a module of its own.
    ``convention``: LLVM's calling convention, "" for C's. Return its builder and its arguments.
    """
    from treadle.jit import ir
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

    given = [ty.ir for ty in types]
    function = ir.Module().function(symbol(spec), ir.VOID, given, convention=convention)
    function.attributes.append("nounwind")
    k = Builder(function, isa)
    return k, [Val(k, arg, ty) for arg, ty in zip(function.args, types, strict=True)]


def symbol(spec: Spec) -> str:
    """Return the name of the kernel's function in its object file."""
    return symbol_of(spec.name)


def symbol_of(name: str) -> str:
    """Return the name that the function of kernel ``name`` has in its object file."""
    return f"treadle_{name}".replace(".", "p").replace("-", "m")


@lru_cache(maxsize=1)
def _linker() -> Linker:
    from treadle.jit.compile import Linker

    return Linker()


def _link(symbol: str, code: bytes) -> int:
    """Load the object ``code`` and return the address of ``symbol`` in it, by ``elf`` or else by
    LLVM's linker.
    """
    address = elf.load(symbol, code)
    return _linker().link(symbol, code) if address is None else address


_linked: dict[tuple[str, str], int] = {}
_pools: list[CompilePool] = []  # the one pool; empty until kernels are missing
_compiled_elsewhere: dict[tuple[str, str], bytes] = {}  # objects, until they are linked
_holds: list[None] = []  # one for each block of ``compile_processes_held``
STORED = b"\1"  # before an object that its process has written to the cache
NOT_STORED = b"\0"
# llvmlite fills tables at first use, and links, without locking. A forked child cannot free the
# lock: LLVM has locks of its own, and may be half done.
_making = UseLock("compiled", "start child processes with spawn, not fork")


class KernelTarget(Protocol):
    """The target of a compilation: the fields of ``Isa`` that name an instruction set."""

    @property
    def name(self) -> str: ...
    @property
    def triple(self) -> str: ...
    @property
    def cpu(self) -> str: ...
    @property
    def features(self) -> str: ...


def isa_key(isa: KernelTarget) -> str:
    """Return a key of ``isa``: its name, and the target, CPU and features that LLVM
    compiles for.
    """
    return "\0".join((isa.name, isa.triple, isa.cpu, isa.features))


def object_code(spec: Spec, isa: Isa, tally: CompileStats | None = None) -> bytes:
    """Return a kernel's object: from the cache, else compiled, and stored if possible. ``tally``
    counts it.

    If the cache is refused or read-only, kernels stay in memory only, and one warning says so.
    Raises CacheError for a miss under ``TREADLE_NO_COMPILE=1``, CompileError if LLVM rejects the
    kernel.
    """
    tally = tally or CompileStats()
    code = _cached(spec, isa, tally)
    return _compiled(spec, isa, tally) if code is None else code


def _cached(spec: Spec, isa: Isa, tally: CompileStats) -> bytes | None:
    """Return a kernel's object from the cache; None if it must be compiled. Raises CacheError if
    ``TREADLE_NO_COMPILE=1`` forbids that.
    """
    forbidden = os.environ.get("TREADLE_NO_COMPILE") == "1"
    try:
        code = cache.read(spec.name, isa_key(isa))
    except CacheError:
        if forbidden:
            raise
        return None  # ``_store`` logs why
    if code is not None:
        tally.n_cached += 1
    elif forbidden:
        raise CacheError(
            f"kernel {spec.name} is not in the cache {cache.folder()}, "
            "and TREADLE_NO_COMPILE=1 forbids compiling it"
        )
    return code


def _compiled(spec: Spec, isa: Isa, tally: CompileStats) -> bytes:
    from treadle.jit.compile import emit_object

    code = emit_object(trace(spec, isa), isa)
    tally.n_compiled += 1
    _store(spec, isa, code)
    return code


def _store(spec: Spec, isa: Isa, code: bytes) -> None:
    """Write a kernel's object to the cache; log a warning if that fails."""
    try:
        cache.write(spec.name, isa_key(isa), code, describe_spec(spec, isa))
    except CacheError as error:
        _warn(str(error))
    except OSError as error:  # a read-only or full disk
        _warn(f"cannot write to the kernel cache {cache.folder()}: {error.strerror}")


def describe_spec(spec: Spec, isa: Isa) -> dict[str, object]:
    """Return the JSON that the cache keeps with a kernel, from which ``treadle kernels`` builds its
    spec again: the names of instruction set, module and spec class, and the spec's fields.
    """
    kind = type(spec)
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return {"isa": isa.name, "module": kind.__module__, "spec": kind.__qualname__, "fields": values}


@lru_cache
def _warn(why: str) -> None:
    """Log a warning, once a process for each reason, that kernels are not stored."""
    from logging import getLogger

    getLogger("treadle").warning(
        "%s; kernels are not cached and every process compiles them again (see treadle doctor)", why
    )


def load_kernels(
    specs: Sequence[Spec],
    isa: Isa,
    progress: Progress | None = None,
    tally: CompileStats | None = None,
) -> dict[str, int]:
    """Return the addresses of the kernels by name. Missing kernels are compiled, by several
    processes if possible. ``progress("compile", done, total)`` is called while they are loaded;
    ``tally`` counts the compiled and the cached ones.
    """
    unique = {spec.name: spec for spec in specs}
    tally = tally or CompileStats()
    key = isa_key(isa)
    missing: dict[str, Spec] = {}
    for done, (name, spec) in enumerate(unique.items()):
        if (key, name) in _linked:
            continue
        if progress:
            _report_progress(progress, done - len(missing), len(unique))
        with _making:
            _receive()
            if (key, name) not in _linked and not _link_compiled(spec, key, tally):
                is_pending = any(pool.is_pending(name, isa) for pool in _pools)
                code = None if is_pending else _cached(spec, isa, tally)
                if code is None:
                    missing[name] = spec
                else:
                    _linked[key, name] = _link(symbol(spec), code)
    if len(missing) > 1 or _pools:
        _compile_elsewhere(missing, isa, progress, tally)
    for done, (name, spec) in enumerate(missing.items(), len(unique) - len(missing)):
        if progress:
            _report_progress(progress, done, len(unique))
        with _making:
            if (key, name) not in _linked:
                _linked[key, name] = _link(symbol(spec), _compiled(spec, isa, tally))
    if progress:
        _report_progress(progress, len(unique), len(unique))
    return {name: _linked[key, name] for name in unique}


def load_cached(
    names: Sequence[str], isa: KernelTarget, tally: CompileStats | None = None
) -> dict[str, int] | None:
    """Return the addresses of the kernels ``names``, taken from the cache and never compiled; None
    if one is missing or the cache is refused.
    """
    key = isa_key(isa)
    found: dict[str, int] = {}
    for name in names:
        with _making:
            if (key, name) not in _linked:
                try:
                    code = cache.read(name, key)
                except CacheError:
                    return None
                if code is None:
                    return None
                _linked[key, name] = _link(symbol_of(name), code)
                if tally is not None:
                    tally.n_cached += 1
        found[name] = _linked[key, name]
    return found


def _report_progress(progress: Progress, done: int, total: int) -> None:
    """Report progress: ``done`` of ``total``, or while child processes compile, that of all kernels
    that are waited for.
    """
    for pool in _pools:
        counts = pool.counts
        if counts[0] < counts[1]:
            done, total = counts
    progress("compile", done, total)


# -- kernels that other processes compile ---------------------------------------------------------


def compile_ahead(specs: Sequence[Spec], isa: Isa, *, later: bool = False) -> bool:
    """Begin to compile ``specs`` in child processes, before ``load_kernels`` asks for them;
    ``later``: after all kernels that are waited for. Return whether child processes compile them.
    To save time only the slowest kernel is looked up first: if it is linked or cached, nothing is
    done.
    """
    key = isa_key(isa)
    slowest = max(specs, key=lambda spec: spec.compile_ms).name
    if (key, slowest) in _linked or cache.has(slowest, key):
        return False
    if os.environ.get("TREADLE_NO_COMPILE") == "1":
        return False
    with _making:
        _receive()
        missing = [
            spec
            for spec in dict.fromkeys(specs)
            if (key, spec.name) not in _linked and not cache.has(spec.name, key)
        ]
        return _begin(missing, isa, later=later)


def _begin(specs: Sequence[Spec], isa: Isa, *, later: bool = False) -> bool:
    """Let child processes compile ``specs``, with ``later`` after all kernels that are waited for;
    return False if this process must compile them.
    """
    from treadle.jit.compile_pool import FIRST, LATER, CompilePool

    if not _pools:
        _pools.append(CompilePool())
        atexit.register(end_compile_processes)
    # Once for all processes.
    from treadle.jit import values  # noqa: F401
    from treadle.jit.compile import prepare

    prepare(isa)
    key = isa_key(isa)
    specs = [spec for spec in specs if (key, spec.name) not in _compiled_elsewhere]
    return _pools[0].begin(specs, isa, partial(_emit_and_store, isa), LATER if later else FIRST)


def _emit_and_store(isa: Isa, spec: Spec) -> bytes:
    """Compile a kernel in a child process and store it. Return its object after one byte: STORED or
    NOT_STORED.
    """
    from treadle.jit.compile import emit_object

    code = emit_object(trace(spec, isa), isa)
    try:
        cache.write(spec.name, isa_key(isa), code, describe_spec(spec, isa))
    except (CacheError, OSError):  # the parent tries again, and warns
        return NOT_STORED + code
    return STORED + code


def _compile_elsewhere(
    missing: dict[str, Spec], isa: Isa, progress: Progress | None, tally: CompileStats
) -> None:
    """Let child processes compile the kernels ``missing``, and link them. Kernels that stay in
    ``missing`` must be compiled in this process.
    """
    key = isa_key(isa)
    with _making:
        if missing:
            _begin([*missing.values()], isa)
    while True:
        with _making:
            _receive()
            for name, spec in [*missing.items()]:
                if (key, name) in _linked or _link_compiled(spec, key, tally):
                    del missing[name]
            if not any(_pools[0].is_pending(name, isa) for name in missing):
                _leave()
                return
        if progress:
            _report_progress(progress, 0, 0)
        _pools[0].wait(WAIT_S)  # without the lock: others have a turn


def _receive() -> None:
    """Take the objects that child processes have compiled; write to the cache those that the
    children could not write.
    """
    for pool in _pools:
        for isa, spec, code in pool.receive():
            _compiled_elsewhere[isa_key(isa), spec.name] = code[1:]
            if code[:1] == NOT_STORED:
                _store(spec, isa, code[1:])


def _link_compiled(spec: Spec, key: str, tally: CompileStats) -> bool:
    """Link a kernel that a child process has compiled for the instruction set with the key ``key``;
    return False if none has.
    """
    code = _compiled_elsewhere.pop((key, spec.name), None)
    if code is None:
        return False
    _linked[key, spec.name] = _link(symbol(spec), code)
    tally.n_compiled += 1
    return True


def _leave() -> None:
    """End the child processes if no kernel is pending, unless a ``compile_processes_held`` block is
    open.
    """
    for pool in _pools:
        if pool.is_idle and not _holds:
            pool.close()


@contextmanager
def compile_processes_held() -> Iterator[None]:
    """Context in which child processes that compile stay alive between two plans. Outside of it
    they end when nothing is left to compile.
    """
    _holds.append(None)
    try:
        yield
    finally:
        _holds.pop()
        with _making:
            _receive()
            _leave()


def end_compile_processes() -> None:
    """End the child processes that compile, even if kernels are pending. If another thread holds
    the lock for END_S seconds, because it compiles, they are left to end by themselves.
    """
    if _pools and _making.acquire(timeout=END_S):
        try:
            _receive()
            for pool in _pools:
                pool.close()
        finally:
            _making.release()
