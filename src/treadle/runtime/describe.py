"""What ``treadle doctor`` tells: this machine, and every reason for lost speed with its cure."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.isa import best as best_row
from treadle.isa import choose, portable, runnable
from treadle.jit import cache
from treadle.jit.compile import compiler_versions, host_features
from treadle.runtime import machine
from treadle.runtime.threads import FUTEX_CALL

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.runtime.peaks import Peaks

Report = dict[str, Any]

# LLVM's name of a feature: what it gives, and the features that make it needless.
FEATURES: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "x86_64": {
        "avx2": ("256-bit vectors: several times the speed of the portable kernels", ()),
        "fma": ("a multiplication and an addition in one: twice the rate of f32", ()),
        "f16c": ("f16 to f32 in one instruction: F16 weights, keys and values", ()),
        "avxvnni": ("dots of bytes in 256 bits: faster quantised prompts", ("avx512vnni",)),
        "avx512f": ("512-bit vectors, and 32 of them: larger tiles", ()),
        "avx512vnni": ("dots of bytes in 512 bits: faster quantised prompts", ()),
        "avx512bf16": ("dots of bf16: faster prompts for BF16 weights", ()),
        "amx-int8": ("matrix tiles of bytes", ()),
        "amx-bf16": ("matrix tiles of bf16", ()),
    },
    "aarch64": {
        "neon": ("128-bit vectors", ()),
        "dotprod": ("dots of bytes: faster quantised prompts", ()),
        "i8mm": ("matrix products of bytes", ()),
        "bf16": ("dots of bf16: faster prompts for BF16 weights", ()),
        "fullfp16": ("arithmetic in f16", ()),
        "sve": ("vectors longer than 128 bits, on cores that have them", ()),
    },
    "riscv64": {
        "v": ("vectors", ()),
        "zvfh": ("vectors of f16", ()),
    },
}
ENOUGH = 0.9  # a share above this is not worth a warning


def row_in_use() -> Isa:
    """The instruction set that kernels are compiled for here."""
    return choose(host_features())


def describe(
    model_files: Sequence[Path] = (),
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
    minute). memory: sizes in bytes, huge pages. kernel_cache: folder, kernels in use and their
    size, files of other versions or damaged, problem (why kernels are not kept), compiling (may
    new ones be made). model: size of ``model_files`` and how much of it is in memory. peaks: as
    measured, if they were; processor_time_share is what the threads got of what they asked for.
    versions. warnings: each reason for lost speed and every fallback in force, with what to do.

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
        "model": _model(model_files),
        "peaks": _peaks(peaks),
        "versions": _versions(),
    }
    report = {name: part for name, part in report.items() if part}
    report["warnings"] = [
        *_of_instructions(isa, features, peaks),
        *_of_processors(report, allowed, sys_root, proc),
        *_of_memory(report),
        *_of_cache(report["kernel_cache"]),
    ]
    return report


def _cpu(features: Set[str], proc: Path) -> Report:
    known = FEATURES.get(platform.machine(), {})
    used = frozenset().union(*(row.needs for row in runnable(features)))
    present = [name for name in known if name in features]
    missing = {
        name: gives
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
    total, available = machine.memory(proc)
    return {
        "total_bytes": total,
        "available_bytes": available,
        "limit_bytes": machine.memory_limit(sys_root / "fs/cgroup", proc),
        "huge_pages": machine.huge_pages(sys_root),
        "largest_cache_bytes": machine.cache_bytes(sys_root / "devices/system/cpu"),
    }


def _model(files: Sequence[Path]) -> Report:
    if not files:
        return {}
    resident = [machine.resident_bytes(path) for path in files]
    known = [n for n in resident if n is not None]
    return {
        "files": [str(path) for path in files],
        "size_bytes": sum(path.stat().st_size for path in files),
        "in_memory_bytes": sum(known) if len(known) == len(files) else None,
    }


def _peaks(peaks: Peaks | None) -> Report:
    if peaks is None:
        return {}
    rates = {"q8_ops_s": peaks.q8, "bf16_ops_s": peaks.bf16, "f32_ops_s": peaks.f32}
    return {**rates, "read_bytes_s": peaks.bytes_s, "processor_time_share": peaks.cpu_share}


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


# -- reasons for lost speed -----------------------------------------------------------------------


def _of_instructions(isa: Isa, features: Set[str], peaks: Peaks | None) -> Iterator[str]:
    best = best_row(features)
    if isa is not best:
        yield f"TREADLE_ISA forces {isa.name}, and {best.name} would be faster: unset it"
    if not isa.needs:
        yield (
            "kernels use no instruction beyond the oldest of this architecture, several times "
            "slower than a row of its own"
        )
    if isa.dot4 is portable.dot4:
        yield "dots of bytes are made of several instructions: quantised prompts read slowly"
    if isa.dot_bf16 is None:
        yield "BF16 weights are widened to f32: their prompts read at the rate of F32's"
    if peaks is not None and peaks.bf16 is not None and peaks.bf16 < ENOUGH * peaks.f32:
        without = next(row for row in reversed(runnable(features)) if row.dot_bf16 is None)
        yield (
            f"this CPU's dots of bf16 run at {peaks.bf16 / peaks.f32:.0%} of its rate of f32: for "
            f"BF16 weights TREADLE_ISA={without.name} reads prompts faster"
        )


def _of_processors(report: Report, allowed: list[int], sys_root: Path, proc: Path) -> Iterator[str]:
    here, peaks = report["processors"], report.get("peaks", {})
    cpus, quota = sys_root / "devices/system/cpu", here["quota"]
    useful = _useful(allowed, cpus)
    if useful < _useful(machine.online(cpus), cpus):
        yield (
            f"this process may run on {here['allowed']} of {here['online']} processors: "
            "see taskset, or the container's cpuset"
        )
    if quota is not None and quota < useful:
        yield (
            f"the control group allows the time of {quota:g} processors, {useful} would be of use: "
            "raise it (docker --cpus, Kubernetes limits.cpu)"
        )
    yield from machine.clock_limits(allowed[0], cpus)
    stolen = machine.stolen_share(proc)
    if stolen > 1 - ENOUGH:
        yield f"the host gave {stolen:.0%} of this virtual machine's time to others"
    share, load = peaks.get("processor_time_share"), here["load"]
    if share is not None and share < ENOUGH:
        yield (
            f"the threads got {share:.0%} of the processor time they asked for: other programs "
            f"run (load average {load}), so the peaks are too low; stop them and ask again"
        )
    elif share is None and load is not None and load > 0.5:
        yield f"other programs run (load average {load}): they take processors and memory bandwidth"
    if FUTEX_CALL is None:
        yield "idle threads wake once a millisecond: this system offers treadle no futex"


def _useful(processors: list[int], cpus: Path) -> int:
    """How many threads ``processors`` would be worth without a quota."""
    cores = machine.physical_cores(processors, cpus)
    return len(machine.fast_cores(sorted(cores), cpus)) if cores else len(processors)


def _of_memory(report: Report) -> Iterator[str]:
    memory, model = report["memory"], report.get("model")
    if memory["huge_pages"] == "never":
        yield (
            "transparent huge pages are off, which costs long contexts some speed: "
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
    if not model:
        return
    size, resident = model["size_bytes"], model["in_memory_bytes"] or 0
    room = min(memory["available_bytes"], memory["limit_bytes"] or memory["available_bytes"])
    if room and size > room + resident:
        yield (
            f"the model ({size / 2**30:.1f} GiB) is larger than the memory there is for it "
            f"({(room + resident) / 2**30:.1f} GiB): each token reads from disk; a smaller format "
            "would not"
        )
    elif model["in_memory_bytes"] is not None and resident < ENOUGH * size:
        yield (
            f"{resident / size:.0%} of the model is in memory: its first run reads the rest from "
            "disk (cat it to /dev/null to have that behind you)"
        )


def _of_cache(state: Mapping[str, Any]) -> Iterator[str]:
    if state["problem"]:
        then = "every process compiles its kernels" if state["compiling"] else "nothing can run"
        yield f"{state['problem']}: {then}; set TREADLE_CACHE to a folder of your own"
    if not state["compiling"]:
        yield "TREADLE_NO_COMPILE=1: a kernel that is not in the cache is an error"
