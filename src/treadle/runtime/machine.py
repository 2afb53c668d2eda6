"""What this machine is: processors that may be used and why, features, memory; and what it can do at best."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
CPUS = Path("/sys/devices/system/cpu")


def usable_threads(cpus: Path = CPUS, cgroup: Path = CGROUP) -> tuple[int, str]:
    """Threads worth starting, and which bound it was.

    The smallest of: processors this process may run on; the control group's quota; physical cores among those processors;
    performance cores, where some are slower by design. A second thread on a core, or one on an efficiency core, makes the
    others wait for it.
    """
    allowed = _affinity()
    bounds = [(len(allowed), "the processors this process may run on")]
    quota = cgroup_quota(cgroup)
    if quota:
        bounds.append((max(1, int(quota)), f"the control group's quota of {quota:g} processors"))
    cores = physical_cores(allowed, cpus)
    if cores:
        bounds.append((len(cores), "physical cores (a core's second thread adds nothing here)"))
        fast = fast_cores(sorted(cores), cpus)
        bounds.append((len(fast), "performance cores"))
    return min(bounds, key=lambda bound: bound[0])


def _affinity() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cgroup_quota(root: Path = CGROUP) -> float | None:
    """Processors' worth of time that the control group (v2, else v1) allows, or None for no limit."""
    group = ""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                group = line[3:].strip("/")
    except OSError:
        return None
    best: float | None = None
    folder = root / group
    while folder == root or root in folder.parents:
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
            share = int(words[0]) / int(words[1])
            best = share if best is None else min(best, share)
        if folder == root:
            break
        folder = folder.parent
    quota, period = _read(root / "cpu/cpu.cfs_quota_us"), _read(root / "cpu/cpu.cfs_period_us")
    if best is None and quota.isdigit() and period.isdigit():
        best = int(quota) / int(period)
    return best


def physical_cores(allowed: list[int], cpus: Path = CPUS) -> dict[int, list[int]]:
    """Cores among the allowed processors, each by its first one; empty where the system does not say."""
    cores: dict[tuple[str, str], list[int]] = {}
    for cpu in allowed:
        topology = cpus / f"cpu{cpu}" / "topology"
        key = (_read(topology / "physical_package_id"), _read(topology / "core_id"))
        if not key[1]:
            return {}
        cores.setdefault(key, []).append(cpu)
    return {members[0]: members for members in cores.values()}


def fast_cores(cores: list[int], cpus: Path = CPUS) -> list[int]:
    """Of a hybrid processor's cores those of the fast kind; all of them elsewhere.

    Linux gives an Arm core's capacity; on x86 the top frequencies of the kinds differ by far more than those of one kind's
    favoured cores (a tenth).
    """
    power = {}
    for cpu in cores:
        capacity = _read(cpus / f"cpu{cpu}" / "cpu_capacity")
        frequency = _read(cpus / f"cpu{cpu}" / "cpufreq" / "cpuinfo_max_freq")
        power[cpu] = int(capacity or frequency or 0)
    top = max(power.values(), default=0)
    return [cpu for cpu in cores if power[cpu] >= 0.8 * top]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def cpu_name() -> str:
    """The processor's own name."""
    if sys.platform == "linux":
        for line in _read(Path("/proc/cpuinfo")).splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
