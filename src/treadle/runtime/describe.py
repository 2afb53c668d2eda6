"""What ``treadle doctor`` tells: this machine, and every reason for lost speed with its cure."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.isa import choose, runnable
from treadle.jit import cache
from treadle.jit.compile import compiler_versions, host_features
from treadle.runtime import machine, memory, residence
from treadle.runtime.reasons import FEATURES, enabled_by, reasons
from treadle.runtime.tuned import tuned_row

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.runtime.peaks import Peaks

Report = dict[str, Any]


@dataclass(frozen=True)
class ModelFile:
    """What a report needs to know of a model: its files, and the formats of its weights."""

    files: Sequence[Path]
    formats: Sequence[str] = ()  # of its weights, the one with most bytes first
    without_kernel: Sequence[str] = ()  # those that treadle cannot compute with
    acts: Set[str] = frozenset()  # "q8", "bf16", "f32": what its weights are multiplied by
    instead: Sequence[str] = ()  # the formats that treadle has kernels for
    problem: str | None = None  # why treadle cannot run it at all


def row_in_use() -> Isa:
    """The instruction set that kernels are compiled for here."""
    return choose(host_features())


def describe(
    model: ModelFile | None = None,
    peaks: Peaks | None = None,
    *,
    sys_root: Path = machine.SYS,
    proc: Path = machine.PROC,
    features: Set[str] | None = None,
    allowed: list[int] | None = None,
) -> Report:
    """This machine as a dictionary that JSON can hold.

    cpu: name, architecture; features that matter here: used, unused (treadle has no row for them
    yet), missing (name: what it would give). instruction_set: the row chosen, why, all that can
    run. threads: how many, which bound it was, all bounds. processors: online, allowed, cores,
    threads a core, fast cores, quota, governor, load (threads that wanted to run in the last
    minute). memory: sizes in bytes (usable is what this process may still take, bound the limit
    that says so), huge pages, NUMA nodes. kernel_cache: folder, kernels in use and their size,
    files of other versions or damaged, problem (why kernels are not kept), compiling (may new ones
    be made). tuning: what `treadle tune` measured here, if it did: file,
    when, formats, problem (why it is not used). model: its files' size, how much of it is in
    memory and in huge pages, the formats of its weights and those without a kernel, problem (why
    it cannot be run at all). peaks: as measured, if they were; read_from is "caches"
    where no larger buffer may be had; processor_time_share is what the threads got of what they
    asked for. versions. warnings: each reason for lost speed and every
    fallback in force, with what to do.

    The other arguments stand for another machine, for tests. Raises UnsupportedError for a
    ``TREADLE_ISA`` that is unknown or cannot run here.
    """
    features = host_features() if features is None else features
    allowed = machine.affinity() if allowed is None else allowed
    isa = choose(features)
    report: Report = {
        "cpu": _cpu(features, proc),
        "instruction_set": _instruction_set(isa, features),
        "threads": _threads(allowed, sys_root, proc),
        "processors": _processors(allowed, sys_root, proc),
        "memory": _memory(sys_root, proc),
        "kernel_cache": _kernel_cache(),
        "tuning": _tuning(isa, proc),
        "model": _model(model),
        "peaks": _peaks(peaks),
        "versions": _versions(),
    }
    report = {name: part for name, part in report.items() if part}
    report["warnings"] = list(
        reasons(report, isa, features, peaks, model, allowed=allowed, sys_root=sys_root, proc=proc)
    )
    return report


def _cpu(features: Set[str], proc: Path) -> Report:
    known = FEATURES.get(platform.machine(), {})
    used = frozenset().union(*(row.needs for row in runnable(features)))
    present = [name for name in known if name in features]
    missing = {
        name: gives + enabled_by(name)
        for name, (gives, better) in known.items()
        if name not in features and not features & set(better)
    }
    return {
        "name": machine.cpu_name(proc),
        "architecture": platform.machine(),
        "used": [name for name in present if name in used],
        "unused": [name for name in present if name not in used],
        "missing": missing,
    }


def _instruction_set(isa: Isa, features: Set[str]) -> Report:
    forced = os.environ.get("TREADLE_ISA")
    return {
        "chosen": isa.name,
        "why": "TREADLE_ISA asks for it" if forced else "the best that this CPU can run",
        "can_run": [row.name for row in runnable(features)],
    }


def _threads(allowed: list[int], sys_root: Path, proc: Path) -> Report:
    cpus, cgroup = sys_root / "devices/system/cpu", sys_root / "fs/cgroup"
    bounds = machine.thread_bounds(allowed, cpus, cgroup, proc)
    n, why = min(bounds, key=lambda bound: bound[0])
    return {"chosen": n, "bound": why, "bounds": {text: count for count, text in bounds}}


def _processors(allowed: list[int], sys_root: Path, proc: Path) -> Report:
    cpus = sys_root / "devices/system/cpu"
    cores = machine.physical_cores(allowed, cpus)
    return {
        "online": len(machine.online(cpus)),
        "allowed": len(allowed),
        "cores": len(cores) or None,
        "threads_a_core": max(map(len, cores.values()), default=None),
        "fast_cores": len(machine.fast_cores(sorted(cores), cpus)) if cores else None,
        "quota": machine.cgroup_quota(sys_root / "fs/cgroup", proc),
        "governor": machine.governor_of(allowed[0], cpus),
        "load": machine.load_average(proc),
    }


def _memory(sys_root: Path, proc: Path) -> Report:
    cgroup = sys_root / "fs/cgroup"
    total, available = memory.host_memory(proc)
    usable = memory.usable_memory(cgroup, proc)
    nodes = machine.memory_nodes(sys_root)
    return {
        "total_bytes": total,
        "available_bytes": available,
        "limit_bytes": memory.memory_limit(cgroup, proc),
        "usable_bytes": usable and usable.free_bytes,
        "bound": usable and usable.what,
        "huge_pages": machine.huge_pages(sys_root),
        "nodes": nodes,
        "largest_cache_bytes": machine.cache_bytes(sys_root / "devices/system/cpu"),
    }


def _model(model: ModelFile | None) -> Report:
    if model is None:
        return {}
    return {
        "files": [str(path) for path in model.files],
        "size_bytes": sum(path.stat().st_size for path in model.files),
        "in_memory_bytes": _total(residence.resident_bytes(path) for path in model.files),
        "in_huge_pages_bytes": _total(residence.huge_bytes(path) for path in model.files),
        "formats": list(model.formats),
        "without_kernel": list(model.without_kernel),
        "problem": model.problem,
    }


def _total(sizes: Iterable[int | None]) -> int | None:
    """Their sum, if all are known."""
    listed = list(sizes)
    known = [size for size in listed if size is not None]
    return sum(known) if len(known) == len(listed) else None


def _peaks(peaks: Peaks | None) -> Report:
    if peaks is None:
        return {}
    return {
        "q8_ops_s": peaks.q8,
        "bf16_ops_s": peaks.bf16,
        "f32_ops_s": peaks.f32,
        "read_bytes_s": peaks.bytes_s,
        "read_from": "memory" if peaks.from_memory else "caches",
        "read_buffer_bytes": peaks.buffer_bytes,
        "processor_time_share": peaks.cpu_share,
    }


def _versions() -> Mapping[str, str]:
    import numpy as np

    import treadle

    return {
        "treadle": treadle.__version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        **compiler_versions(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()}",
    }


def _kernel_cache() -> Report:
    state = cache.state()
    return {
        "folder": state.folder,
        "kernels": state.n_kernels,
        "size_bytes": state.n_bytes,
        "old_files": state.n_stale,
        "old_size_bytes": state.stale_bytes,
        "problem": state.problem,
        "compiling": os.environ.get("TREADLE_NO_COMPILE") != "1",
    }


def _tuning(isa: Isa, proc: Path) -> Report:
    row = tuned_row(isa, proc=proc)
    if row.made is None and row.problem is None:
        return {}  # nothing was ever tuned here
    return {"file": row.path, "measured": row.made, "formats": row.formats, "problem": row.problem}
