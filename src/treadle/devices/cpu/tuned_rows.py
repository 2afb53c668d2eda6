"""A machine's own row: what ``treadle tune`` measured, kept beside the compiled kernels.

One small JSON file for each instruction set and CPU (a home directory may be shared by machines of
several kinds). It chooses the code that runs, so it is held to the rules of the cache: the user's
own, closed to others; and to more, for it is only numbers: each must be one that a sweep may give.
What was measured with other kernels says nothing of these, so versions and sources must agree.
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

from treadle.base.fast_dataclass import dataclass
from treadle.errors import CacheError
from treadle.jit import cache
from treadle.jit.language import Isa
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.gemv import Gemv
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.matmul.matrix import EDGE, MatrixGemm
from treadle.kernels.matmul.select import SHIPPED, SWEPT, TunedTable, fits
from treadle.machine import topology
from treadle.system import SYSTEM
from treadle.version import __version__

MAX_BYTES = 1 << 18  # of a file: a row of fifty formats has a tenth of this
MAX_TOKENS = 64
PROBE_K = 64  # of a spec that is only asked whether it fits, which does not depend on K
KINDS: dict[str, type[Matmul]] = {"gemm": Gemm, "matrix": MatrixGemm, "gemv": Gemv}


@dataclass(frozen=True)
class TunedRow:
    """The row of one instruction set on this machine; ``table`` is what plans are to use."""

    isa: str
    path: str  # where it is, or would be
    table: TunedTable = SHIPPED
    made: str | None = None  # when it was measured; None where no row is in force
    problem: str | None = None  # why a row that is there is not

    @property
    def formats(self) -> list[str]:
        """The weight formats it says anything of."""
        return list(_written(self.table))


class _RefusedError(Exception):
    """Why a file is no row for this machine."""


def tuned_row(isa: Isa | None = None, *, proc: Path = topology.PROC) -> TunedRow:
    """The row in force for ``isa`` (None: the instruction set in use here). Never raises for what
    a file holds; costs one look for a folder where nothing was ever tuned.
    """
    if isa is None:
        from treadle.isa import choose
        from treadle.jit.compile import host_features

        isa = choose(host_features())
    try:
        if not _folder().is_dir():
            return TunedRow(isa.name, str(_folder()))
        path = path_of(isa, proc)
    except (CacheError, OSError):  # no home directory, no right to look: nothing is kept
        return TunedRow(isa.name, "none")
    try:
        table, made = _read(path, isa, proc)
    except FileNotFoundError:
        return TunedRow(isa.name, str(path))
    except (_RefusedError, CacheError) as error:
        return TunedRow(isa.name, str(path), problem=str(error))
    except OSError as error:
        return TunedRow(isa.name, str(path), problem=f"{path}: cannot be read: {error.strerror}")
    if os.environ.get("TREADLE_TUNE") == "0":
        return TunedRow(isa.name, str(path), problem=f"{path}: ignored, TREADLE_TUNE=0")
    return TunedRow(isa.name, str(path), table, made)


def check_place(isa: Isa, *, proc: Path = topology.PROC) -> Path:
    """The file that ``save`` writes. Raises CacheError where its folder cannot be used."""
    cache.checked_folder()
    path = path_of(isa, proc)
    if not os.access(cache.checked_folder(path.parent), os.W_OK | os.X_OK):
        raise CacheError(f"{path}: cannot be written to: its folder takes no new files")
    return path


def save(isa: Isa, *tables: TunedTable, proc: Path = topology.PROC) -> Path:
    """Keep ``tables``, each put over those before and what a sound row already has; gives the file.

    Raises CacheError for a folder that is refused or cannot be written to.
    """
    path = check_place(isa, proc=proc)
    table = SHIPPED
    with suppress(_RefusedError, OSError):  # a row that is not in force is replaced
        table = _read(path, isa, proc)[0]
    for newer in tables:
        table = table.updated(newer)
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    text = json.dumps({**_machine(isa, proc), "made": made, "formats": _written(table)}, indent=1)
    try:
        cache.write_whole(path, f"{text}\n".encode())
    except OSError as error:
        raise CacheError(f"{path}: cannot be written to: {error.strerror}") from error
    return path


def reset(isa: Isa, *, proc: Path = topology.PROC) -> Path | None:
    """Remove the row, whatever it holds; gives its file, or None where there was none.

    Raises CacheError where it cannot be removed.
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
    """The file of one instruction set on this CPU. Raises CacheError without a home directory."""
    cpu = hashlib.sha256(topology.cpu_name(proc).encode()).hexdigest()[:8]
    return _folder() / f"{isa.name}-{cpu}.json"


def _folder() -> Path:
    return cache.folder() / "tuned"


def _machine(isa: Isa, proc: Path) -> dict[str, str]:
    """All that a measurement depends on, as far as it can be told."""
    from treadle.jit.compile import compiler_versions

    return {
        "isa": isa.name,
        "cpu": topology.cpu_name(proc),
        "treadle": __version__,
        "llvmlite": compiler_versions()["llvmlite"],
        "kernels": cache.source_hash()[:16],
    }


# -- what a file says -----------------------------------------------------------------------------


def _read(path: Path, isa: Isa, proc: Path) -> tuple[TunedTable, str]:
    """The table of a file, and when it was made. Raises _RefusedError, CacheError, OSError."""
    text = _owned(path)
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _RefusedError(f"{path}: damaged: no JSON") from error
    if not isinstance(said, dict) or not isinstance(said.get("formats"), dict):
        raise _RefusedError(f"{path}: damaged: no tile table")
    for name, here in _machine(isa, proc).items():
        there = said.get(name)
        if there != here:
            which = "other kernels" if name == "kernels" else f"{name} {str(there)[:40]!r}"
            raise _RefusedError(f"{path}: measured with {which}: run `treadle tune` again")
    try:
        return _table(said["formats"], isa), str(said.get("made", "at an unknown time"))[:40]
    except (ValueError, TypeError, AttributeError) as error:
        raise _RefusedError(f"{path}: damaged: {error}") from error


def _owned(path: Path) -> bytes:
    """The bytes of a file that nobody but its user can have written."""
    handle = os.open(path, os.O_RDONLY | SYSTEM.BINARY | getattr(os, "O_NOFOLLOW", 0))
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_BYTES:
            raise _RefusedError(f"{path}: damaged: no file of up to {MAX_BYTES >> 10} KiB")
        who = SYSTEM.intruder(info)
        if who == "another user":
            raise _RefusedError(f"{path}: belongs to another user, and it picks code: refused")
        if who is not None:
            raise _RefusedError(f"{path}: others may write to it, and it picks code: refused")
        cache.checked_folder()
        cache.checked_folder(path.parent)
        with open(handle, "rb", closefd=False) as file:
            return file.read(MAX_BYTES)
    finally:
        os.close(handle)


def _table(formats: Mapping[str, Mapping[str, Any]], isa: Isa) -> TunedTable:
    """The table that ``_written`` wrote. Raises ValueError, TypeError and AttributeError for what
    it cannot have written.
    """
    found: dict[str, dict[Any, Any]] = {name: {} for name in SHIPPED.items()}
    for w, row in formats.items():
        for key, value in row.items():
            if key not in found:
                raise ValueError(f"{w}: {str(key)[:40]!r}")
            if key == "gemv":
                for n, fields_ in value.items():
                    found[key][w, _tokens(n)] = _fields(key, fields_, isa, int(n))
            elif key in SWEPT:
                found[key][w] = _fields(key, value, isa, EDGE if key == "matrix" else 1)
            else:
                found[key][w] = _tokens(value, least=0 if key == "vector_tokens" else 1)
    return TunedTable(**found)


def _tokens(value: str | int, least: int = 1) -> int:
    if isinstance(value, bool) or not least <= (n := int(value)) <= MAX_TOKENS:
        raise ValueError(f"{value} tokens")
    return n


def _fields(op: str, said: Mapping[str, Any], isa: Isa, tokens: int) -> dict[str, int]:
    """A row's fields, each known to its kernel and of a value that a sweep may give."""
    kind, swept = KINDS[op], {name: vs for stage in SWEPT[op] for name, vs in stage.items()}
    defaults = {f.name: f.default for f in fields(kind)}
    given: dict[str, Any] = {}
    for name, value in said.items():
        if name not in swept or type(value) is not int:
            raise ValueError(f"{op}: {str(name)[:40]} {str(value)[:40]}")
        tile = name in ("mr", "nr")  # a shipped one may be none of the sweep's: it has to fit
        if not tile and value not in swept[name] and value != defaults[name]:
            raise ValueError(f"{op}: {name} {value}")
        given[name] = value
    shape: dict[str, Any] = {"mr": 1, "nr": tokens}
    probe = kind("", "", PROBE_K, **dict(shape, **given))
    if not fits(probe, isa):
        raise ValueError(f"{op}: {given} does not fit {isa.name}")
    return given


def _written(table: TunedTable) -> dict[str, dict[str, Any]]:
    """A table as JSON has it: by format."""
    out: dict[str, dict[str, Any]] = {}
    for key, rows in table.items().items():
        for at, said in rows.items():
            if key == "gemv":
                out.setdefault(at[0], {}).setdefault(key, {})[str(at[1])] = said
            else:
                out.setdefault(at, {})[key] = said
    return out
