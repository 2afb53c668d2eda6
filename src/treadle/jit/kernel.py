"""Kernel spec to function address: trace, compile, cache, link; each at most once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING

from treadle.base.fast_dataclass import dataclass
from treadle.base.fork_safety import UseLock
from treadle.errors import CacheError
from treadle.jit import cache, elf

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.jit.compile import Linker
    from treadle.jit.types import Ty
    from treadle.jit.values import Val
    from treadle.kernels.spec import Spec

Progress = Callable[[str, int, int], None]


@dataclass
class CompileStats:
    """Cost of preparing kernels: how many were compiled, how many came from the cache."""

    n_compiled: int = 0
    n_cached: int = 0
    seconds: float = 0.0  # includes making the plans that name them


def trace(spec: Spec, isa: Isa) -> str:
    """Return the kernel's LLVM IR, as the Python function emits it."""
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
    """Start a function named for the kernel, in a module of its own. Return its builder and its
    arguments.
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
    """Return the name of the kernel's function in its object."""
    return symbol_of(spec.name)


def symbol_of(name: str) -> str:
    """Return the name of the function of the kernel ``name``."""
    return f"treadle_{name}".replace(".", "p").replace("-", "m")


@lru_cache(maxsize=1)
def _linker() -> Linker:
    from treadle.jit.compile import Linker

    return Linker()


def _link(symbol: str, code: bytes) -> int:
    """Load an object and return the address of ``symbol`` in it."""
    address = elf.load(symbol, code)
    return _linker().link(symbol, code) if address is None else address


_linked: dict[tuple[str, str], int] = {}
# llvmlite fills tables at first use, and links, without locking. A forked child cannot free the
# lock: LLVM has locks of its own, and may be half done.
_making = UseLock("compiled", "start child processes with spawn, not fork")


def isa_key(isa: Isa) -> str:
    """Return everything in an instruction set's row that can change the code."""
    return "\0".join((isa.name, isa.triple, isa.cpu, isa.features))


def object_code(spec: Spec, isa: Isa, tally: CompileStats | None = None) -> bytes:
    """Return a kernel's object: from the cache, else compiled and stored if possible.

    If the cache is refused or read-only, kernels stay in memory only, and one warning says so.
    Raises CacheError for a miss under ``TREADLE_NO_COMPILE=1``, CompileError if LLVM refuses the
    kernel.
    """
    key = isa_key(isa)
    tally = tally or CompileStats()
    forbidden = os.environ.get("TREADLE_NO_COMPILE") == "1"
    try:
        code = cache.read(spec.name, key)
        refusal = None
    except CacheError as error:
        if forbidden:
            raise
        code = None
        refusal = error
    if code is not None:
        tally.n_cached += 1
        return code
    if forbidden:
        raise CacheError(
            f"kernel {spec.name} is not in the cache {cache.folder()}, "
            "and TREADLE_NO_COMPILE=1 forbids compiling it"
        )
    from treadle.jit.compile import emit_object

    code = emit_object(trace(spec, isa), isa)
    tally.n_compiled += 1
    if refusal is not None:
        _warn(str(refusal))
        return code
    try:
        cache.write(spec.name, key, code, about(spec, isa))
    except OSError as error:  # a read-only or full disk
        _warn(f"cannot write to the kernel cache {cache.folder()}: {error.strerror}")
    return code


def about(spec: Spec, isa: Isa) -> dict[str, object]:
    """Return the cache's JSON for a kernel, enough to build its spec again; see ``inspect.py``."""
    kind = type(spec)
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return {"isa": isa.name, "module": kind.__module__, "spec": kind.__qualname__, "fields": values}


@lru_cache
def _warn(why: str) -> None:
    """Warn once a process that kernels are not stored."""
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
    """Return the addresses of the kernels by name. ``progress("compile", done, total)`` is called
    for each kernel before it is loaded; ``tally`` counts them.
    """
    unique = {spec.name: spec for spec in specs}
    key = isa_key(isa)
    for done, (name, spec) in enumerate(unique.items()):
        if (key, name) in _linked:
            continue
        if progress:
            progress("compile", done, len(unique))
        with _making:
            if (key, name) not in _linked:
                code = object_code(spec, isa, tally)
                _linked[key, name] = _link(symbol(spec), code)
    if progress:
        progress("compile", len(unique), len(unique))
    return {name: _linked[key, name] for name in unique}


def load_cached(
    names: Sequence[str], isa: Isa, tally: CompileStats | None = None
) -> dict[str, int] | None:
    """Return the addresses of kernels by name, from the cache alone; None if one is not there."""
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
