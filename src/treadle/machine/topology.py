"""The machine's topology: usable processors and their limits, clocks, caches.

Linux has these in files; other systems report a few numbers, and much stays unknown. Functions take
the folders they read, so that tests can pass another machine's.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

from treadle.system import SYSTEM
from treadle.system import machine as architecture

SYS, PROC = Path("/sys"), Path("/proc")
CGROUP = SYS / "fs/cgroup"
CPUS = SYS / "devices/system/cpu"

Bound = tuple[int, str]

ENOUGH = 0.9  # no warning above this share


def busy_warning(shares: Sequence[float], so: str) -> str | None:
    """Return a warning if a thread got less than the share ENOUGH of the processor time that it
    requested; else None. ``shares``: the part that each thread got, from 0 to 1. ``so``: the end of
    the warning's sentence.
    """
    if min(shares, default=1.0) >= ENOUGH:
        return None
    low = f"{min(shares):.0%}"
    high = f"{max(shares):.0%}"
    got = low if low == high else f"{low} to {high}"
    why = f"other programs are running{so}"
    return f"the threads got {got} of the processor time they asked for: {why}"


def usable_threads(cpus: Path = CPUS, cgroup: Path = CGROUP) -> Bound:
    """Return the number of threads worth starting and the reason for it: the smallest of
    ``thread_bounds``.
    """
    return min(thread_bounds(affinity(), cpus, cgroup), key=lambda bound: bound[0])


def thread_bounds(
    allowed: list[int], cpus: Path = CPUS, cgroup: Path = CGROUP, proc: Path = PROC
) -> list[Bound]:
    """Return the limits on threads worth starting, each as a number and its reason. ``allowed``: as
    ``affinity`` returns them.

    The limits are the processors this process may run on; the control group's quota; physical cores
    among those processors; performance cores, if some are slower by design. A second thread on a
    core, or one on an efficiency core, makes the others wait for it.
    """
    bounds = [(len(allowed), "the processors this process may run on")]
    quota = cgroup_quota(cgroup, proc)
    if quota:
        text = f"the control group's quota of {quota:g} processors"
        bounds.append((max(1, int(quota)), text))
    cores = physical_cores(allowed, cpus)
    if cores:
        bounds.append((len(cores), "physical cores (a core's second thread adds nothing here)"))
        fast = fast_cores(sorted(cores), cpus)
        bounds.append((len(fast), "performance cores"))
    elif counts := SYSTEM.cores():
        bounds.append((counts[0], "physical cores (a core's second thread adds nothing here)"))
        bounds.append((counts[1], "performance cores"))
    return bounds


def affinity() -> list[int]:
    """Return the numbers of the processors that this process may run on."""
    return SYSTEM.affinity()


def cgroup_quota(root: Path = CGROUP, proc: Path = PROC) -> float | None:
    """Return the smallest CPU quota of this process's control groups (v2 and v1), in processors;
    None for no limit.
    """
    pairs = [
        tuple(read_text(folder / "cpu.max").split()) for folder in control_groups("", root, proc)
    ]
    pairs += [
        (read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us"))
        for folder in control_groups("cpu", root, proc)
    ]
    shares = [
        int(pair[0]) / int(pair[1])
        for pair in pairs
        if len(pair) == 2 and pair[0].isdigit() and pair[1].isdigit() and int(pair[1])
    ]
    return min(shares, default=None)


def control_groups(controller: str, root: Path, proc: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of its ancestors, as each may have a
    limit.

    ``controller``: a controller of cgroup v1, which has a tree for each, such as "cpu"; "" for v2,
    which has one tree for all.
    """
    root = root / controller
    group = ""
    for line in read_text(proc / "self/cgroup").splitlines():  # 4:cpu,cpuacct:/box, or 0::/box
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(","):
            group = path.strip("/")
    folder = root / group
    while folder != root and root in folder.parents:
        yield folder
        folder = folder.parent
    yield root


def physical_cores(allowed: list[int], cpus: Path = CPUS) -> dict[int, list[int]]:
    """Return the processors of each physical core that has some of ``allowed``, keyed by the first
    one; {} if unknown.
    """
    cores: dict[tuple[str, str], list[int]] = {}
    for cpu in allowed:
        topology = cpus / f"cpu{cpu}" / "topology"
        key = (read_text(topology / "physical_package_id"), read_text(topology / "core_id"))
        if not key[1]:
            return {}
        cores.setdefault(key, []).append(cpu)
    return {members[0]: members for members in cores.values()}


def fast_cores(cores: list[int], cpus: Path = CPUS) -> list[int]:
    """Return the performance cores among ``cores`` (numbers of processors, one for each core) of a
    hybrid processor; all of them of any other.

    Performance cores have at least 80 % of the highest capacity (Arm) or maximum frequency (x86):
    favoured cores of the same kind differ by at most about 10 %, the kinds by far more.
    """
    power = {}
    for cpu in cores:
        capacity = read_text(cpus / f"cpu{cpu}" / "cpu_capacity")
        frequency = read_text(cpus / f"cpu{cpu}" / "cpufreq" / "cpuinfo_max_freq")
        power[cpu] = int(capacity or frequency or 0)
    if not all(power.values()):  # unknown for some core
        return cores
    top = max(power.values(), default=0)
    return [cpu for cpu in cores if power[cpu] >= 0.8 * top]


def read_text(path: Path) -> str:
    """Return the stripped text of a file in /sys or /proc; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def clock_limits(cpu: int = 0, cpus: Path = CPUS) -> list[str]:
    """Return the reasons that keep processor number ``cpu`` below its top clock, each with a fix;
    empty if there are none.
    """
    folder = cpus / f"cpu{cpu}" / "cpufreq"
    limits = []
    cure = "cpupower frequency-set -g performance"
    # Drivers that choose the clock by a preference; their usual governor is "powersave".
    by_preference = read_text(folder / "scaling_driver") in ("intel_pstate", "amd-pstate-epp")
    governor = governor_of(cpu, cpus)
    preference = read_text(folder / "energy_performance_preference")
    if governor in ("powersave", "conservative") and not by_preference:
        limits.append(f"the frequency governor is {governor}: {cure}")
    if by_preference and "power" in preference.split("_"):
        limits.append(f"the energy preference is {preference}: {cure}")
    top = read_text(folder / "cpuinfo_max_freq")
    cap = read_text(folder / "scaling_max_freq")
    if top.isdigit() and cap.isdigit() and int(cap) < 0.95 * int(top):
        limits.append(
            f"the clock is capped at {int(cap) / 1e6:.1f} of {int(top) / 1e6:.1f} GHz: "
            f"cpupower frequency-set -u {int(top) // 1000}MHz"
        )
    if read_text(cpus / "intel_pstate/no_turbo") == "1" or read_text(cpus / "cpufreq/boost") == "0":
        limits.append("turbo clocks are off: see intel_pstate/no_turbo, cpufreq/boost, firmware")
    return limits


def power_limits(sys_root: Path = SYS) -> list[str]:
    """Return machine-wide power-saving settings that are on, each with a fix; empty if none is
    known.
    """
    limits = []
    profile = read_text(sys_root / "firmware/acpi/platform_profile")
    if profile in ("low-power", "quiet", "cool"):
        cure = "echo performance > /sys/firmware/acpi/platform_profile"
        limits.append(f"the platform profile is {profile}: {cure}")
    supplies = list((sys_root / "class/power_supply").glob("*"))
    mains = [read_text(s / "online") for s in supplies if read_text(s / "type") == "Mains"]
    if mains and "1" not in mains:
        limits.append("this machine runs on battery, which lowers clocks: plug it in")
    return limits


def governor_of(cpu: int = 0, cpus: Path = CPUS) -> str | None:
    """Return the name of the frequency governor of processor number ``cpu``; None without one, as
    in most virtual machines.
    """
    return read_text(cpus / f"cpu{cpu}" / "cpufreq" / "scaling_governor") or None


def memory_nodes(sys_root: Path = SYS) -> int:
    """Return the number of NUMA nodes with memory; 1 if unknown."""
    return max(1, len(_numbers(read_text(sys_root / "devices/system/node/has_memory"))))


def huge_pages(sys_root: Path = SYS) -> str | None:
    """Return the kernel's setting of transparent huge pages, "always", "madvise" or "never"; None
    if it has none.
    """
    words = read_text(sys_root / "kernel/mm/transparent_hugepage/enabled").split()
    return next((word.strip("[]") for word in words if word.startswith("[")), None)


def load_average(proc: Path = PROC) -> float | None:
    """Return the mean number of running or runnable threads in the last minute; None if unknown."""
    words = read_text(proc / "loadavg").split()
    return float(words[0]) if words else None


def stolen_share(proc: Path = PROC) -> float:
    """Return the share (0 to 1) of this virtual machine's busy time, since boot, that the host gave
    to others.
    """
    words = read_text(proc / "stat").split("\n")[0].split()
    times = [int(word) for word in words[1:9]]  # user nice system idle iowait irq softirq steal
    if len(times) < 8:
        return 0.0
    wanted = sum(times) - times[3] - times[4]
    return times[7] / wanted if wanted else 0.0


def cache_bytes(cpus: Path = CPUS) -> int:
    """Return the size of the largest cache of processor 0; 0 if unknown."""
    units = {"K": 1 << 10, "M": 1 << 20}
    sizes = [read_text(path) for path in cpus.glob("cpu0/cache/index*/size")]
    found = [int(s[:-1]) * units[s[-1]] for s in sizes if s[-1:] in units]
    return max(found, default=0) or SYSTEM.cache_bytes()


def online(cpus: Path = CPUS) -> list[int]:
    """Return the numbers of the online processors."""
    return _numbers(read_text(cpus / "online")) or list(range(os.cpu_count() or 1))


def _numbers(text: str) -> list[int]:
    """Parse a list of numbers and ranges such as ``0-2,5``: [0, 1, 2, 5]."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found += range(int(first), int(last or first) + 1)
    return found


def is_virtual(proc: Path = PROC) -> bool:
    """Whether the processor's flags include "hypervisor": a virtual machine."""
    lines = read_text(proc / "cpuinfo").splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return "hypervisor" in flags.split()


def cpu_name(proc: Path = PROC) -> str:
    """Return the processor's model name."""
    for line in read_text(proc / "cpuinfo").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return SYSTEM.cpu_name() or platform.processor() or architecture()
