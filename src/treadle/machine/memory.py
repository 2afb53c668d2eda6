"""Memory available to this process, and the limit that determines it.

A container shares its host's ``/proc``, so the host's free memory says nothing about the limit at
which a process in it is killed. All limits are read: the host's memory, each control group around
the process, and the process's own limits (``ulimit``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from treadle.machine import topology
from treadle.machine.topology import CGROUP, PROC
from treadle.system import SYSTEM

NO_LIMIT = 1 << 60  # bytes: cgroup v1 writes "no limit" as nearly 2**63
# A process's own limits: the line of /proc/self/limits, and the usage in /proc/self/status.
OWN_LIMITS = (
    ("Max address space", "VmSize", "address space", "ulimit -v"),
    ("Max data size", "VmData", "data", "ulimit -d"),
)


class MemoryBound(NamedTuple):
    """One limit of memory: bytes left, bytes allowed in all, its name (``what``) and the user's
    remedy (``cure``); and bytes of active file pages, which count as used although the kernel could
    reclaim them.
    """

    free_bytes: int
    limit_bytes: int
    what: str
    cure: str
    file_bytes: int = 0


def usable_memory(cgroup: Path = CGROUP, proc: Path = PROC) -> MemoryBound | None:
    """Return the tightest bound on what this process may still allocate without swapping or being
    killed; None if the system reports nothing.
    """
    bounds = memory_bounds(cgroup, proc)
    return min(bounds, key=lambda bound: bound.free_bytes, default=None)


def memory_bounds(cgroup: Path = CGROUP, proc: Path = PROC) -> list[MemoryBound]:
    """Return all limits of memory: the host's, the control groups', then the process's own."""
    return [*page_bounds(cgroup, proc), *_process_limits(proc)]


def page_bounds(cgroup: Path = CGROUP, proc: Path = PROC) -> list[MemoryBound]:
    """Return the bounds that count file pages: all except the process's own limits."""
    total, available = host_memory(proc)
    host = MemoryBound(available, total, "the machine's free memory", "stop other programs")
    return [*([host] if available else ()), *_cgroup_limits(cgroup, proc)]


def host_memory(proc: Path = PROC) -> tuple[int, int]:
    """Return the total bytes of memory, and those available without swapping; 0 for unknown."""
    sizes = _fields(proc / "meminfo")  # kB
    if not sizes:
        return SYSTEM.memory()
    return sizes.get("MemTotal", 0) << 10, sizes.get("MemAvailable", 0) << 10


def memory_limit(cgroup: Path = CGROUP, proc: Path = PROC) -> int | None:
    """Return this process's memory limit in bytes, besides the host's memory; None without one."""
    limits = [*_cgroup_limits(cgroup, proc), *_process_limits(proc)]
    return min((bound.limit_bytes for bound in limits), default=None)


def _cgroup_limits(root: Path, proc: Path) -> Iterator[MemoryBound]:
    """Yield the limits of this process's control group and of each around it, of version 2
    (``memory.max`` and ``memory.high``), then of version 1.

    Above ``memory.high`` no process is killed, but the kernel throttles it to reclaim memory.
    """
    places = [("", "memory.max", "memory.current", "")]
    places += [("", "memory.high", "memory.current", "")]
    places += [("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")]
    for controller, limit_name, used_name, prefix in places:
        for folder in topology.control_groups(controller, root, proc):
            limit = topology.read_text(folder / limit_name)
            if not limit.isdigit() or int(limit) >= NO_LIMIT:
                continue
            used = topology.read_text(folder / used_name)
            # Inactive file pages are reclaimed when memory is needed.
            stat = _fields(folder / "memory.stat")
            idle = stat.get(f"{prefix}inactive_file", 0)
            in_use = max(0, int(used) - idle) if used.isdigit() else 0
            yield MemoryBound(
                max(0, int(limit) - in_use),
                int(limit),
                f"the control group's limit of {_mib(int(limit))}",
                "raise it (docker --memory, Kubernetes limits.memory)",
                stat.get(f"{prefix}active_file", 0),
            )


def _process_limits(proc: Path) -> Iterator[MemoryBound]:
    status = _fields(proc / "self/status")  # kB
    for line in topology.read_text(proc / "self/limits").splitlines():
        for name, used_name, what, command in OWN_LIMITS:
            soft = line.removeprefix(name).split()[:1]
            if line.startswith(name) and soft and soft[0].isdigit():
                limit = int(soft[0])
                free = max(0, limit - (status.get(used_name, 0) << 10))
                text = f"the process's limit of {_mib(limit)} of {what}"
                yield MemoryBound(free, limit, text, f"raise it ({command})")


def _fields(path: Path) -> dict[str, int]:
    """Parse the lines ``name number`` and ``name: number kB`` of a file; return the numbers by
    name, {} if it cannot be read.
    """
    found = {}
    for line in topology.read_text(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[1].isdigit():
            found[words[0].removesuffix(":")] = int(words[1])
    return found


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 1 << 30 else f"{n_bytes / 2**20:.0f} MiB"
