"""Facts of a machine for ``treadle doctor``, each followed by its warnings with their cures.

A section of ``describe``'s report is a function that yields them. Everything is read from a
``Subject`` and its folders, so that tests can supply another machine's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import field
from pathlib import Path
from typing import Any, TypeAlias

from treadle.base.fast_classes import cached_property, dataclass
from treadle.isa import ROWS, choose, portable, runnable
from treadle.isa import best as best_row
from treadle.jit.host import FEATURES_TO_REQUEST, host_features
from treadle.jit.language import Isa
from treadle.machine import memory, topology
from treadle.machine.memory import MemoryBound
from treadle.profiling.peaks import Peaks
from treadle.system import SYSTEM
from treadle.system import machine as architecture

# By LLVM's name of a feature: its benefit, and the features that make it unnecessary.
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


# A fact's name and value, or a warning about the previous fact.
Finding: TypeAlias = tuple[str, Any] | str


@dataclass(frozen=True)
class ModelFile:
    """The properties of a model that a report needs: its files, and its weight formats."""

    files: Sequence[Path]
    formats: Sequence[str] = ()  # of its weights, by size, largest first
    without_kernel: Sequence[str] = ()  # formats that treadle has no kernels for
    acts: Set[str] = frozenset()  # "q8", "bf16", "f32": the activations for its weights
    instead: Sequence[str] = ()  # the formats that treadle has kernels for
    problem: str | None = None  # why treadle cannot run it at all
    # The features detected in its chat template's output, and missing ones; None: no template.
    chat: Mapping[str, str | None] | None = None


@dataclass(frozen=True)
class Subject:
    """The machine that a report describes (this one, or a test's), with a model on it and its
    measured peaks; None if none was given or measured.
    """

    model: ModelFile | None = None
    peaks: Peaks | None = None
    features: Set[str] = field(default_factory=host_features)
    allowed: list[int] = field(default_factory=topology.affinity)  # usable processors
    sys_root: Path = topology.SYS
    proc: Path = topology.PROC

    @cached_property
    def isa(self) -> Isa:
        """The instruction set whose kernels run here. Raises UnsupportedError for a ``TREADLE_ISA``
        that is unknown or cannot run here.
        """
        return choose(self.features)

    @property
    def acts(self) -> Set[str]:
        """The kinds of activations ("q8", "bf16", "f32") that the model's weights are multiplied
        with; "q8" and "bf16" without a model.
        """
        return {"q8", "bf16"} if self.model is None else self.model.acts

    @property
    def cpus(self) -> Path:
        """The folder in which the system describes processors: /sys/devices/system/cpu."""
        return self.sys_root / "devices/system/cpu"

    @property
    def cgroup(self) -> Path:
        """The root folder of the control groups."""
        return self.sys_root / "fs/cgroup"

    @cached_property
    def known(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """CPU features that matter on this architecture, by name: the benefit in words, and the
        features that make it unnecessary.
        """
        return FEATURES.get(architecture(), {})

    @cached_property
    def cores(self) -> dict[int, list[int]]:
        """The numbers of the processors that this process may use, by physical core."""
        return topology.physical_cores(self.allowed, self.cpus)

    @cached_property
    def fast(self) -> list[int]:
        """The numbers of the usable cores that are not slow by design (efficiency cores)."""
        return topology.fast_cores(sorted(self.cores), self.cpus)

    @cached_property
    def usable(self) -> MemoryBound | None:
        """The limit of memory that this process may still use, with its bytes; None if unknown."""
        return memory.usable_memory(self.cgroup, self.proc)

    def useful(self, processors: list[int]) -> int:
        """Return how many threads treadle would start if it may run on ``processors``, without a
        CPU quota: one for each fast core.
        """
        cores = topology.physical_cores(processors, self.cpus)
        return len(topology.fast_cores(sorted(cores), self.cpus)) if cores else len(processors)


# -- instructions ---------------------------------------------------------------------------------


def cpu_facts(here: Subject) -> Iterator[Finding]:
    """Yield the relevant CPU features: used, unused (treadle has no row for them yet), and missing
    (each with its benefit).
    """
    features = here.features
    known = here.known
    used = frozenset().union(*(row.needs for row in runnable(features)))
    present = [name for name in known if name in features]
    yield "name", topology.cpu_name(here.proc)
    yield "architecture", architecture()
    yield "used", [name for name in present if name in used]
    yield "unused", [name for name in present if name not in used]
    missing = {
        name: gives + enabled_by(name)
        for name, (gives, better) in known.items()
        if name not in features and not features & set(better)
    }
    yield "missing", missing


def enabled_by(feature: str) -> str:
    """Return the text `` (for the kernels of ROW)``, where ROW is the first row of ``isa.ROWS``
    that needs ``feature``; "" if none does.
    """
    row = next((row for row in ROWS.values() if feature in row.needs), None)
    return f" (for the kernels of {row.name})" if row else ""


def isa_facts(here: Subject) -> Iterator[Finding]:
    """Yield the chosen instruction set (row of ``isa.ROWS``), the reason for it, and all sets that
    can run here.
    """
    isa = here.isa
    best = best_row(here.features)
    able = runnable(here.features)
    forced = os.environ.get("TREADLE_ISA")
    yield "chosen", isa.name
    if isa is not best:
        yield f"TREADLE_ISA forces {isa.name}, and {best.name} would be faster: unset it"
    elsewhere = (
        "this is a virtual machine, which may hide it: give it the host's CPU (qemu -cpu host)"
        if topology.is_virtual(here.proc)
        else "only another CPU has it"
    )
    if not isa.needs:
        unknown = here.features & set(here.known)
        cure = "docs/add-an-isa.md tells how to add one" if unknown else elsewhere
        yield (
            "kernels use only the baseline instructions of this architecture, several times "
            f"slower than kernels for its extensions: {cure}"
        )
    yield "why", "TREADLE_ISA asks for it" if forced else "the best that this CPU can run"
    yield "can_run", [row.name for row in able]
    yield from _lacking(here, best, elsewhere)
    rows = list(ROWS.values())
    for row in able:
        slow = sorted(row.slow_with & here.features)
        if slow and rows.index(row) > rows.index(isa):
            yield (
                f"the kernels of {row.name} are not used, as CPUs with {', '.join(slow)} run them "
                f"slowly; to check this CPU, run TREADLE_ISA={row.name} treadle bench"
            )
    if isa.dot4 is portable.dot4 and "q8" in here.acts:
        yield (
            "a dot product of bytes takes several instructions, so quantised prompts are slow; if "
            "memory allows, F16 or F32 weights may be faster (treadle bench)"
        )
    widened = (
        isa.dot_bf16 is None and isa.matrix is None and not (isa.shorts and isa.tiles.words[0])
    )
    if widened and "bf16" in here.acts:
        yield (
            "BF16 weights are converted to f32, so their prompts are as slow as with F32; Q8_0 "
            "weights are faster and half the size"
        )


def _lacking(here: Subject, best: Isa, elsewhere: str) -> Iterator[str]:
    """Yield a warning for each instruction set above ``best``: the features that it needs in
    addition to those already named, and the cure; ``elsewhere`` is the cure if the CPU lacks them.
    """
    rows = list(ROWS.values())
    known = here.known
    named: set[str] = set()
    for row in rows[rows.index(best) + 1 :]:
        lacking = sorted(row.needs - here.features - named)
        if not lacking or not row.needs & set(known) or row.slow_with & here.features:
            continue
        named.update(lacking)
        if FEATURES_TO_REQUEST.issuperset(lacking):  # the CPU has them all
            yield (
                f"the system denies this process {', '.join(lacking)}, which the kernels of "
                f"{row.name} need: Linux 5.16 or newer grants it, unless a container's seccomp "
                "filter forbids arch_prctl"
            )
            continue
        gives = "; ".join(known[name][0] for name in lacking if name in known)
        yield (
            f"this CPU lacks {', '.join(lacking)}, which the kernels of {row.name} need"
            f"{f' ({gives})' if gives else ''}: {elsewhere}"
        )


# -- processors -----------------------------------------------------------------------------------


def thread_facts(here: Subject) -> Iterator[Finding]:
    """Yield the number of threads, the bound that set it, and all bounds with their counts."""
    bounds = topology.thread_bounds(here.allowed, here.cpus, here.cgroup, here.proc)
    chosen, why = min(bounds, key=lambda bound: bound[0])
    yield "chosen", chosen
    cores = here.cores
    fast = here.fast
    siblings = max(map(len, cores.values()), default=1)
    if siblings > 1:
        yield (
            f"{len(here.allowed)} processors are {len(cores)} cores of up to {siblings} threads "
            "(SMT), and a core's second thread adds no speed: treadle starts one thread per core; "
            "keep -t at that, and other programs off the siblings"
        )
    if len(fast) < len(cores):
        yield (
            f"{len(cores) - len(fast)} of {len(cores)} cores are slow by design, and the others "
            f"would wait for them: treadle starts {len(fast)} threads; keep them on the fast "
            f"cores with taskset -c {','.join(map(str, fast))}"
        )
    everywhere = topology.physical_cores(topology.online(here.cpus), here.cpus)
    best = topology.fast_cores(sorted(everywhere), here.cpus)
    usable = {cpu for core in best for cpu in everywhere[core]}
    if cores and best and not usable & set(here.allowed):
        yield (
            "this process may not run on any fast core: change taskset -c "
            f"{','.join(map(str, best))}, or the container's cpuset"
        )
    if SYSTEM.SLEEP_POLLS:
        yield (
            "idle threads wake once a millisecond, because this system has no wait on an address; "
            "Linux, Windows, and macOS 14.4 or newer have one"
        )
    yield "bound", why
    yield "bounds", {text: count for count, text in bounds}


def processor_facts(here: Subject) -> Iterator[Finding]:
    """Yield processor counts, the quota in processors, the governor, and the load (threads that
    wanted to run in the last minute).
    """
    online = topology.online(here.cpus)
    useful = here.useful(here.allowed)
    yield "online", len(online)
    yield "allowed", len(here.allowed)
    if useful < here.useful(online):
        yield (
            f"this process may run on {len(here.allowed)} of {len(online)} processors: "
            "see taskset, or the container's cpuset"
        )
    yield "cores", len(here.cores) or None
    yield "threads_a_core", max(map(len, here.cores.values()), default=None)
    yield "fast_cores", len(here.fast) or None
    quota = topology.cgroup_quota(here.cgroup, here.proc)
    yield "quota", quota
    if quota is not None and quota < useful:
        yield (
            f"the control group limits CPU time to {quota:g} processors, but treadle can use "
            f"{useful}: raise the limit (docker --cpus, Kubernetes limits.cpu)"
        )
    yield "governor", topology.governor_of(here.allowed[0], here.cpus)
    limits = [limit for cpu in here.allowed for limit in topology.clock_limits(cpu, here.cpus)]
    yield from dict.fromkeys([*limits, *topology.power_limits(here.sys_root)])
    stolen = topology.stolen_share(here.proc)
    load = topology.load_average(here.proc)
    yield "load", load
    if stolen > 1 - topology.ENOUGH:
        yield (
            f"the host gave {stolen:.0%} of this virtual machine's time to others: ask for "
            "processors of its own, or another host"
        )
    if here.peaks is None and load is not None and load > 0.5:
        yield (
            f"other programs run (load average {load}): they take processors and memory "
            "bandwidth; stop them"
        )


# -- memory ---------------------------------------------------------------------------------------


def memory_facts(here: Subject) -> Iterator[Finding]:
    """Yield sizes in bytes, huge pages, and NUMA nodes.

    ``usable_bytes`` is the memory that this process may still use; ``bound`` the limit that sets
    it.
    """
    total, available = memory.host_memory(here.proc)
    yield "total_bytes", total
    yield "available_bytes", available
    yield "limit_bytes", memory.memory_limit(here.cgroup, here.proc)
    yield "usable_bytes", here.usable and here.usable.free_bytes
    yield "bound", here.usable and here.usable.what
    huge_pages = topology.huge_pages(here.sys_root)
    yield "huge_pages", huge_pages
    if huge_pages == "never":
        yield (
            "transparent huge pages are off, which costs long contexts some speed: "
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
    nodes = topology.memory_nodes(here.sys_root)
    yield "nodes", nodes
    if nodes > 1:
        yield (
            f"memory has {nodes} NUMA nodes, and a processor reads other nodes more slowly: use "
            "numactl --interleave=all treadle ..., or run on one node only "
            "(numactl --cpunodebind=0 --membind=0)"
        )
    yield "largest_cache_bytes", topology.cache_bytes(here.cpus)
