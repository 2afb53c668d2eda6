"""Every reason for lost speed that ``treadle doctor`` knows, each with what to do about it.

All is read from the report and from the folders that it was made from, so that tests can hand over
another machine's.
"""

from __future__ import annotations

import platform
import shlex
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.isa import ROWS, portable, runnable
from treadle.isa import best as best_row
from treadle.jit.permission import ASKED_FOR
from treadle.runtime import machine
from treadle.runtime.memory import usable_memory
from treadle.runtime.peaks import wanted_bytes
from treadle.runtime.threads import FUTEX_CALL

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.runtime.describe import ModelFile
    from treadle.runtime.peaks import Peaks

Report = Mapping[str, Any]

# LLVM's name of a feature: what it gives, and the features that make it needless.
FEATURES: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "x86_64": {
        "avx2": ("256-bit vectors: several times the speed of the portable kernels", ()),
        "fma": ("a multiplication and an addition in one: twice the rate of f32", ()),
        "f16c": ("f16 to f32 in one instruction: F16 weights, keys and values", ()),
        "avxvnni": ("dots of bytes in 256 bits: faster quantised prompts", ("avx512vnni",)),
        "avx512f": ("512-bit vectors, and 32 of them: larger tiles", ()),
        "avx512vnni": ("dots of bytes in 512 bits: faster quantised prompts", ()),
        "avx512vbmi": ("bytes and bits in any order: faster writing from formats of few bits", ()),
        "avx512bf16": ("dots of bf16: faster prompts for BF16 weights", ()),
        "amx-bf16": ("matrix registers of bf16: quantised and BF16 prompts twice as fast", ()),
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
WALKED = 64 << 20  # bytes of a model that the size of its pages matters for


def reasons(
    report: Report,
    isa: Isa,
    features: Set[str],
    peaks: Peaks | None,
    model: ModelFile | None,
    *,
    allowed: list[int],
    sys_root: Path,
    proc: Path,
) -> Iterator[str]:
    """One line for each, the most fundamental first."""
    if model is not None:
        yield from _of_model(model)
    yield from _of_instructions(isa, features, proc)
    yield from _of_dots(isa, features, peaks, model)
    yield from _of_threads(allowed, sys_root)
    yield from _of_processors(report, allowed, sys_root, proc)
    yield from _of_memory(report, sys_root, proc)
    yield from _of_buffer(report, peaks, sys_root, proc)
    yield from _of_cache(report["kernel_cache"])
    if report.get("tuning", {}).get("problem"):
        yield f"the shipped tiles are used, not this machine's own: {report['tuning']['problem']}"


def _of_model(model: ModelFile) -> Iterator[str]:
    if model.problem:
        yield f"treadle cannot run this model: {model.problem}"
    if model.without_kernel:
        yield (
            f"there is no kernel for {', '.join(model.without_kernel)} weights, so treadle cannot "
            f"run this file: get the model as {', '.join(model.instead)}"
        )


def enabled_by(feature: str) -> str:
    """`` (for the kernels of ROW)``, the first row that needs ``feature``; empty if none does."""
    row = next((row for row in ROWS.values() if feature in row.needs), None)
    return f" (for the kernels of {row.name})" if row else ""


# -- instructions ---------------------------------------------------------------------------------


def _of_instructions(isa: Isa, features: Set[str], proc: Path) -> Iterator[str]:
    best, rows = best_row(features), list(ROWS.values())
    if isa is not best:
        yield f"TREADLE_ISA forces {isa.name}, and {best.name} would be faster: unset it"
    elsewhere = (
        "this is a virtual machine, which may hide it: give it the host's CPU (qemu -cpu host)"
        if machine.is_virtual(proc)
        else "only another CPU has it"
    )
    known = FEATURES.get(platform.machine(), {})
    if not isa.needs:
        cure = "docs/add-an-isa.md tells how to add one" if features & set(known) else elsewhere
        yield (
            "kernels use no instruction beyond the oldest of this architecture, several times "
            f"slower than a row of its own: {cure}"
        )
    named: set[str] = set()
    for row in rows[rows.index(best) + 1 :]:
        lacking = sorted(row.needs - features - named)
        if not lacking or not row.needs & set(known) or row.slow_with & features:
            continue
        named.update(lacking)
        if ASKED_FOR.issuperset(lacking):  # the CPU has all of it
            yield (
                f"the system refuses this process {', '.join(lacking)}, which the kernels of "
                f"{row.name} need: Linux grants it from 5.16 on, where no container's filter of "
                "system calls forbids arch_prctl"
            )
            continue
        gives = "; ".join(known[name][0] for name in lacking if name in known)
        yield (
            f"this CPU lacks {', '.join(lacking)}, which the kernels of {row.name} need"
            f"{f' ({gives})' if gives else ''}: {elsewhere}"
        )
    for row in runnable(features):
        slow = sorted(row.slow_with & features)
        if slow and rows.index(row) > rows.index(isa):
            yield (
                f"the kernels of {row.name} are passed over, for CPUs with {', '.join(slow)} run "
                f"their own instructions slowly: see with TREADLE_ISA={row.name} treadle bench "
                "whether this one does"
            )


def _of_dots(
    isa: Isa, features: Set[str], peaks: Peaks | None, model: ModelFile | None
) -> Iterator[str]:
    """What the row in use has to make of several instructions, where the model, if one is asked
    about, has weights that want it.
    """
    acts = {"q8", "bf16"} if model is None else model.acts
    if isa.dot4 is portable.dot4 and "q8" in acts:
        yield (
            "dots of bytes are made of several instructions: quantised prompts read slowly; "
            "where memory allows, F16 or F32 weights may read faster (treadle bench)"
        )
    if "bf16" not in acts:
        return
    if isa.dot_bf16 is None and isa.matrix is None:
        yield (
            "BF16 weights are widened to f32: their prompts read at the rate of F32's; Q8_0 "
            "weights read faster, and are half the size"
        )
    if peaks is not None and peaks.bf16 is not None and peaks.bf16 < ENOUGH * peaks.f32:
        plain = (row for row in reversed(runnable(features)) if not (row.dot_bf16 or row.matrix))
        yield (
            f"this CPU's dots of bf16 run at {peaks.bf16 / peaks.f32:.0%} of its rate of f32: for "
            f"BF16 weights TREADLE_ISA={next(plain).name} reads prompts faster"
        )


# -- processors -----------------------------------------------------------------------------------


def _of_threads(allowed: list[int], sys_root: Path) -> Iterator[str]:
    """Processors that are no use: a core's second thread, and cores that are slow by design."""
    cpus = sys_root / "devices/system/cpu"
    cores = machine.physical_cores(allowed, cpus)
    if not cores:
        return
    siblings = max(map(len, cores.values()))
    if siblings > 1:
        yield (
            f"{len(allowed)} processors are {len(cores)} cores of up to {siblings} threads (SMT), "
            "and a core's second thread adds nothing here: treadle starts one a core; keep -t "
            "at that, and other programs off the siblings"
        )
    fast = machine.fast_cores(sorted(cores), cpus)
    if len(fast) < len(cores):
        yield (
            f"{len(cores) - len(fast)} of {len(cores)} cores are slow by design, and the others "
            f"would wait for them: treadle starts {len(fast)} threads; keep them on the fast "
            f"cores with taskset -c {','.join(map(str, fast))}"
        )
    everywhere = machine.physical_cores(machine.online(cpus), cpus)
    best = machine.fast_cores(sorted(everywhere), cpus) if everywhere else []
    usable = {cpu for core in best for cpu in everywhere[core]}
    if best and not usable & set(allowed):
        yield (
            "this process may run on none of the fast cores: taskset -c "
            f"{','.join(map(str, best))}, or the container's cpuset"
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
    limits = [limit for cpu in allowed for limit in machine.clock_limits(cpu, cpus)]
    yield from dict.fromkeys([*limits, *machine.power_limits(sys_root)])
    stolen = machine.stolen_share(proc)
    if stolen > 1 - ENOUGH:
        yield (
            f"the host gave {stolen:.0%} of this virtual machine's time to others: ask for "
            "processors of its own, or another host"
        )
    share, load = peaks.get("processor_time_share"), here["load"]
    if share is not None and share < ENOUGH:
        yield (
            f"the threads got {share:.0%} of the processor time they asked for: other programs "
            f"run (load average {load}), so the peaks are too low; stop them and ask again"
        )
    elif share is None and load is not None and load > 0.5:
        yield (
            f"other programs run (load average {load}): they take processors and memory "
            "bandwidth; stop them"
        )
    if FUTEX_CALL is None:
        yield (
            "idle threads wake once a millisecond, for this system offers treadle no futex: "
            "Linux does"
        )


def _useful(processors: list[int], cpus: Path) -> int:
    """How many threads ``processors`` would be worth without a quota."""
    cores = machine.physical_cores(processors, cpus)
    return len(machine.fast_cores(sorted(cores), cpus)) if cores else len(processors)


# -- memory, disk ---------------------------------------------------------------------------------


def _of_memory(report: Report, sys_root: Path, proc: Path) -> Iterator[str]:
    memory, model = report["memory"], report.get("model")
    if memory["huge_pages"] == "never":
        yield (
            "transparent huge pages are off, which costs long contexts some speed: "
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
    if memory["nodes"] > 1:
        yield (
            f"memory is in {memory['nodes']} parts (NUMA), and a processor reads the others' more "
            "slowly: numactl --interleave=all treadle ..., or keep to one part, threads and all "
            "(numactl --cpunodebind=0 --membind=0)"
        )
    if not model:
        return
    size, resident, huge = (
        model["size_bytes"],
        model["in_memory_bytes"] or 0,
        model["in_huge_pages_bytes"],
    )
    files = " ".join(map(shlex.quote, model["files"]))
    usable = usable_memory(sys_root / "fs/cgroup", proc)
    if usable and size > usable.free_bytes + resident:
        yield (
            f"the model ({size / 2**30:.1f} GiB) is larger than the memory there is for it "
            f"({(usable.free_bytes + resident) / 2**30:.1f} GiB, for {usable.what}), so each token "
            f"reads from disk: {usable.cure}, or take a smaller format"
        )
    elif model["in_memory_bytes"] is not None and resident < ENOUGH * size:
        yield (
            f"{resident / size:.0%} of the model is in memory: its first run reads the other "
            f"{(size - resident) / 2**30:.1f} GiB from disk; treadle doctor --reload {files} "
            "does so before"
        )
    elif huge is not None and size > WALKED and huge < ENOUGH * size:
        yield (
            f"{huge / size:.0%} of the model is in huge pages, the rest in small ones, as copying "
            "or downloading leaves it, and a token takes up to a tenth longer to find its weights: "
            f"treadle doctor --reload {files} reads the model anew"
        )


def _of_buffer(report: Report, peaks: Peaks | None, sys_root: Path, proc: Path) -> Iterator[str]:
    """A bandwidth that was measured on less than is wanted, and which limit is the reason."""
    wanted = wanted_bytes(sys_root / "devices/system/cpu")
    usable = usable_memory(sys_root / "fs/cgroup", proc)
    if peaks is None or usable is None or peaks.buffer_bytes >= wanted:
        return
    cache = report["memory"]["largest_cache_bytes"]
    follows = (
        "so it may be a little too high"
        if peaks.from_memory
        else f"and a cache of {cache / 2**20:.0f} MiB holds most of that: it is the speed of the "
        "caches, not of memory"
    )
    yield (
        f"the reading speed was measured on {peaks.buffer_bytes / 2**20:.1f} MiB, not on "
        f"{wanted / 2**20:.0f}, {follows}. The reason is {usable.what}: {usable.cure}"
    )


def _of_cache(state: Report) -> Iterator[str]:
    if state["problem"]:
        then = "every process compiles its kernels" if state["compiling"] else "nothing can run"
        yield f"{state['problem']}: {then}; set TREADLE_CACHE to a folder of your own"
    if not state["compiling"]:
        yield "TREADLE_NO_COMPILE=1: a kernel that is not in the cache is an error; unset it"
