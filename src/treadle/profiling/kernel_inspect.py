"""IR and assembly of a cached kernel, traced again from the spec that the cache recorded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from treadle.errors import CacheError
from treadle.jit import cache
from treadle.jit.kernel import trace
from treadle.jit.language import Isa
from treadle.kernels.spec import Spec


def ir(name: str, isa: str | None = None) -> str:
    """Return the LLVM IR, before optimisation, of the kernel called ``name``, one that ``treadle
    kernels`` lists.

    ``isa``: the name of the instruction set; None for the one in use here if the cache has the
    kernel for it, else any. Raises CacheError for a name that is not in the cache.
    """
    return trace(*find(name, isa))


def asm(name: str, isa: str | None = None) -> str:
    """Return the optimised machine code of a cached kernel, as assembly text. Arguments and errors
    are those of ``ir``.
    """
    from treadle.jit.compile import emit_assembly

    spec, row = find(name, isa)
    return emit_assembly(trace(spec, row), row)


def find(name: str, isa: str | None = None) -> tuple[Spec, Isa]:
    """Return the spec and the instruction set of a cached kernel; arguments as for ``ir``. Raises
    CacheError.
    """
    from treadle.isa import ROWS, choose
    from treadle.jit.host import host_features

    notes = {
        str(r.about.get("isa")): r.about
        for r in cache.records()
        if r.current and r.about["name"] == name
    }
    wanted = isa or choose(host_features()).name
    note = notes.get(wanted) or (None if isa else next(iter(notes.values()), None))
    if note is None:
        where = f" for {isa}" if isa and notes else ""
        raise CacheError(f"no kernel {name}{where} in {cache.folder()}")
    row = ROWS.get(str(note.get("isa")))
    if row is None:
        raise CacheError(
            f"kernel {name} is for {note.get('isa')}, which this version of treadle does not have"
        )
    return spec_of(note), row


def spec_of(about: Mapping[str, Any]) -> Spec:
    """Return the spec from its record ``about`` in the cache, which ``jit.kernel.describe_spec``
    made. Raises CacheError if it is not a treadle kernel.
    """
    module = str(about.get("module"))
    kind = str(about.get("spec"))
    found: Any = None
    if module.startswith("treadle."):
        with suppress(ImportError):  # reported below
            found = getattr(import_module(module), kind, None)
    if not (isinstance(found, type) and issubclass(found, Spec)):
        raise CacheError(
            f"kernel {about.get('name')} was made by {module}.{kind}, which this version of "
            "treadle does not have"
        )
    try:
        spec = found(**about["fields"])
    except (KeyError, TypeError) as error:
        raise CacheError(
            f"kernel {about.get('name')}: {module}.{kind} has other fields in this version: {error}"
        ) from error
    assert spec.name == about["name"], (spec.name, about["name"])
    return spec
