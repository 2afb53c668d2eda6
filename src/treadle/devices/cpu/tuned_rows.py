"""This machine's tuned kernel parameters: measured by ``treadle tune``, kept beside the compiled
kernels.

There is one small JSON file for each instruction set and CPU, as machines of several kinds may
share a home directory. It selects the code that runs, so the rules of the kernel cache apply: owned
by the user and writable by nobody else. Besides, each number must be one that a sweep may produce.
Measurements of other kernels are not comparable, so versions and sources must match.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from treadle import __version__
from treadle.base.fast_classes import dataclass
from treadle.errors import CacheError
from treadle.jit import cache
from treadle.jit.language import Isa
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.gemv import Gemv
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.matmul.matrix import EDGE, MatrixGemm
from treadle.kernels.matmul.select import SHIPPED, TUNING_CANDIDATES, TunedTable, fits
from treadle.machine import topology
from treadle.system import SYSTEM

MAX_BYTES = 1 << 18  # of a file: fifty formats take a tenth of this
MAX_TOKENS = 64
PROBE_K = 64  # of the specs of ``fits``, which does not depend on K
KINDS: dict[str, type[Matmul]] = {"gemm": Gemm, "matrix": MatrixGemm, "gemv": Gemv}


@dataclass(frozen=True)
class TunedRow:
    """The kernel parameters of one instruction set on this machine: ``table`` is the one that plans
    use, tuned or shipped.
    """

    isa: str
    path: str  # of the file, whether it exists or not
    table: TunedTable = SHIPPED
    measured: str | None = None  # when it was measured; None if none is in use
    problem: str | None = None  # why an existing file is not used

    @property
    def formats(self) -> list[str]:
        """The names of the weight formats that the table has parameters for."""
        return list(_to_json(self.table))


class _RefusedError(Exception):
    """Raised, with the reason, for a file that is not valid for this machine."""


def tuned_row(isa: Isa | None = None, *, proc: Path = topology.PROC) -> TunedRow:
    """Return the parameters in use for ``isa`` (None: the instruction set in use here).

    A file that is not valid raises nothing: ``problem`` has the reason. Where nothing was ever
    tuned, the call costs one check for a folder. ``proc``: the system's /proc, or a test's.
    """
    if isa is None:
        from treadle.isa import choose
        from treadle.jit.host import host_features

        isa = choose(host_features())
    try:
        if not cache.tuned_folder().is_dir():
            return TunedRow(isa.name, str(cache.tuned_folder()))
        path = path_of(isa, proc)
    except (CacheError, OSError):  # no home directory, or no access: nothing is stored
        return TunedRow(isa.name, "none")
    try:
        table, measured = _read(path, isa, proc)
    except FileNotFoundError:
        return TunedRow(isa.name, str(path))
    except (_RefusedError, CacheError) as error:
        return TunedRow(isa.name, str(path), problem=str(error))
    except OSError as error:
        return TunedRow(isa.name, str(path), problem=f"{path}: cannot be read: {error.strerror}")
    if os.environ.get("TREADLE_TUNE") == "0":
        return TunedRow(isa.name, str(path), problem=f"{path}: ignored, TREADLE_TUNE=0")
    return TunedRow(isa.name, str(path), table, measured)


def check_place(isa: Isa, *, proc: Path = topology.PROC) -> Path:
    """Return the path of the tuning file that ``save`` writes for ``isa``. Raises CacheError if its
    folder cannot be used.
    """
    cache.checked_folder()
    path = path_of(isa, proc)
    if not os.access(cache.checked_folder(path.parent), os.W_OK | os.X_OK):
        raise CacheError(f"{path}: cannot be written: its folder is not writable")
    return path


def save(isa: Isa, *tables: TunedTable, proc: Path = topology.PROC) -> Path:
    """Store ``tables`` in the tuning file of ``isa``: the parameters of a valid existing file,
    overridden by each of ``tables`` in turn; return the path.

    Raises CacheError for a folder that is refused or cannot be written to.
    """
    path = check_place(isa, proc=proc)
    table = SHIPPED
    with suppress(_RefusedError, OSError):  # an invalid file is replaced
        table = _read(path, isa, proc)[0]
    for newer in tables:
        table = table.updated(newer)
    measured = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    text = json.dumps(
        {**_machine(isa, proc), "made": measured, "formats": _to_json(table)}, indent=1
    )
    try:
        cache.write_whole(path, f"{text}\n".encode())
    except OSError as error:
        raise CacheError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def reset(isa: Isa, *, proc: Path = topology.PROC) -> Path | None:
    """Remove the tuning file of ``isa``, whatever it holds; return its path, or None if there was
    none. Raises CacheError if it cannot be removed.
    """
    path = path_of(isa, proc)
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CacheError(f"{path}: cannot be removed: {error.strerror}") from error
    return path


def path_of(isa: Isa, proc: Path = topology.PROC) -> Path:
    """Return the path of the tuning file for one instruction set on this CPU. Raises CacheError if
    there is no home directory.
    """
    cpu = hashlib.sha256(topology.cpu_name(proc).encode()).hexdigest()[:8]
    return cache.tuned_folder() / f"{isa.name}-{cpu}.json"


def _machine(isa: Isa, proc: Path) -> dict[str, str]:
    """Return the properties that measurements depend on, as they are in the file: instruction set,
    CPU, versions and a hash of the kernels' sources, by name.
    """
    from treadle.jit.compile import compiler_versions

    return {
        "isa": isa.name,
        "cpu": topology.cpu_name(proc),
        "treadle": __version__,
        "llvmlite": compiler_versions()["llvmlite"],
        "kernels": cache.source_hash()[:16],
    }


# -- file contents --------------------------------------------------------------------------------


def _read(path: Path, isa: Isa, proc: Path) -> tuple[TunedTable, str]:
    """Return a file's table, and the date of its measurement as text. Raises _RefusedError,
    CacheError and OSError.
    """
    text = _read_owned(path)
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _RefusedError(f"{path}: damaged: not JSON") from error
    if not isinstance(said, dict) or not isinstance(said.get("formats"), dict):
        raise _RefusedError(f"{path}: damaged: it has no tile table")
    for name, here in _machine(isa, proc).items():
        there = said.get(name)
        if there != here:
            which = f"{name} {str(there)[:40]!r}"
            if name == "kernels":
                which = "another version of the kernels"
            raise _RefusedError(f"{path}: measured with {which}: run `treadle tune` again")
    try:
        return _table(said["formats"], isa), str(said.get("made", "at an unknown time"))[:40]
    except (ValueError, TypeError, AttributeError) as error:
        raise _RefusedError(f"{path}: damaged: {error}") from error


def _read_owned(path: Path) -> bytes:
    """Return the bytes of a file, if only its owner, this user, can have written it; else raise
    _RefusedError.
    """
    handle = os.open(path, os.O_RDONLY | SYSTEM.BINARY | getattr(os, "O_NOFOLLOW", 0))
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_BYTES:
            size = f"{MAX_BYTES >> 10} KiB"
            raise _RefusedError(f"{path}: damaged: expected a regular file of at most {size}")
        if (who := SYSTEM.other_writer(info)) is not None:
            other = who == "another user"
            what = "belongs to another user" if other else "is writable by others"
            raise _RefusedError(
                f"{path}: refused: the file {what}, and tuning files select the code that runs"
            )
        cache.checked_folder()
        cache.checked_folder(path.parent)
        with open(handle, "rb", closefd=False) as file:
            return file.read(MAX_BYTES)
    finally:
        os.close(handle)


def _table(formats: Mapping[str, Mapping[str, Any]], isa: Isa) -> TunedTable:
    """Parse the JSON form that ``_to_json`` makes: parameters by weight format, then by kernel.
    Raises ValueError, TypeError and AttributeError for anything else.
    """
    found: dict[str, dict[Any, Any]] = {name: {} for name in SHIPPED.items()}
    for w, row in formats.items():
        for key, value in row.items():
            if key not in found:
                raise ValueError(f"{w}: {str(key)[:40]!r}")
            if key == "gemv":
                for n, fields_ in value.items():
                    found[key][w, _tokens(n)] = _fields(key, fields_, isa, int(n))
            elif key in TUNING_CANDIDATES:
                found[key][w] = _fields(key, value, isa, EDGE if key == "matrix" else 1)
            else:
                found[key][w] = _tokens(value, least=0 if key == "vector_tokens" else 1)
    return TunedTable(**found)


def _tokens(value: str | int, least: int = 1) -> int:
    if isinstance(value, bool) or not least <= (n := int(value)) <= MAX_TOKENS:
        raise ValueError(f"{value} tokens")
    return n


def _fields(op: str, said: Mapping[str, Any], isa: Isa, tokens: int) -> dict[str, int]:
    """Check and return ``said``, the parameters of the kernel ``op``, from a file: each must be
    known to the kernel, with a value that a sweep may produce, and all must fit the registers of
    ``isa``. ``tokens``: the tile's tokens if ``said`` has none (``nr``). Raises ValueError.
    """
    kind = KINDS[op]
    swept = {name: vs for stage in TUNING_CANDIDATES[op] for name, vs in stage.items()}
    defaults = {f.name: f.default for f in fields(kind)}
    given: dict[str, Any] = {}
    for name, value in said.items():
        if name not in swept or type(value) is not int:
            raise ValueError(f"{op}: {str(name)[:40]} {str(value)[:40]}")
        tile = name in ("mr", "nr")  # a shipped tile may be outside the sweep: it only has to fit
        if not tile and value not in swept[name] and value != defaults[name]:
            raise ValueError(f"{op}: {name} {value}")
        given[name] = value
    shape: dict[str, Any] = {"mr": 1, "nr": tokens}
    probe = kind("", "", PROBE_K, **dict(shape, **given))
    if not fits(probe, isa):
        raise ValueError(f"{op}: {given} does not fit {isa.name}")
    return given


def _to_json(table: TunedTable) -> dict[str, dict[str, Any]]:
    """Return a table in its JSON form: by weight format, then by kernel, the parameters or
    (``gemv``) those by the number of tokens.
    """
    out: dict[str, dict[str, Any]] = {}
    for key, rows in table.items().items():
        for at, said in rows.items():
            if key == "gemv":
                out.setdefault(at[0], {}).setdefault(key, {})[str(at[1])] = said
            else:
                out.setdefault(at, {})[key] = said
    return out
