"""How much memory this process may still take, by trees of files in place of /sys and /proc."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from treadle.machine import memory
from treadle.machine.memory import usable_memory
from treadle.profiling import peaks

MIB = 1 << 20
HOST = {"proc/meminfo": "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB"}
LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max data size             {data}            unlimited            bytes     \n"
    "Max address space         {space}            unlimited            bytes     \n"
)


def lay(root: Path, files: Mapping[str, object]) -> tuple[Path, Path]:
    """The folders of control groups and of processes."""
    for name, value in {**HOST, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{value}\n")
    return root / "g", root / "proc"


def group(
    folder: str, limit: int | str, used: int, idle: int = 0, high: object = "max"
) -> dict[str, object]:
    """A group of v2."""
    return {
        f"g/{folder}/memory.max": limit,
        f"g/{folder}/memory.high": high,
        f"g/{folder}/memory.current": used,
        f"g/{folder}/memory.stat": f"anon 5\ninactive_file {idle}\nactive_file 7",
    }


def old_group(folder: str, limit: int, used: int, idle: int = 0) -> dict[str, object]:
    """A group of v1."""
    return {
        f"g/memory/{folder}/memory.limit_in_bytes": limit,
        f"g/memory/{folder}/memory.usage_in_bytes": used,
        f"g/memory/{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {idle}",
    }


@pytest.mark.parametrize(
    ("files", "free", "what"),
    [
        ({}, 8 << 30, "the machine's free memory"),
        (
            {"proc/self/cgroup": "0::/box", **group("box", 300 * MIB, 100 * MIB, 40 * MIB)},
            240 * MIB,
            "the control group's limit of 300 MiB",
        ),
        (  # in a container its own group is the root of the tree that it sees
            {"proc/self/cgroup": "0::/", **group(".", 300 * MIB, 100 * MIB)},
            200 * MIB,
            "the control group's limit of 300 MiB",
        ),
        (  # the group around it has less left, for others are in it too
            {
                "proc/self/cgroup": "0::/a/b",
                **group("a", 2048 * MIB, 2000 * MIB),
                **group("a/b", 1024 * MIB, 100 * MIB),
            },
            48 * MIB,
            "the control group's limit of 2.0 GiB",
        ),
        (
            {"proc/self/cgroup": "0::/a", **group("a", "max", 64 * MIB, high=256 * MIB)},
            192 * MIB,
            "the control group's limit of 256 MiB",
        ),
        (  # above its limit, as when that was lowered
            {"proc/self/cgroup": "0::/a", **group("a", 100 * MIB, 101 * MIB)},
            0,
            "the control group's limit of 100 MiB",
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/box/1\n1:cpu:/",
                **old_group("box", 600 * MIB, 200 * MIB, 100 * MIB),
                **old_group("box/1", 2**63 - 4096, 50 * MIB),
            },
            500 * MIB,
            "the control group's limit of 600 MiB",
        ),
        (  # v1 in a container: the path is the host's, the files are at the root
            {"proc/self/cgroup": "4:memory:/docker/f00", **old_group(".", 300 * MIB, 60 * MIB)},
            240 * MIB,
            "the control group's limit of 300 MiB",
        ),
        (
            {"proc/self/cgroup": "0::/a", "g/a/memory.max": 1 << 20},  # nobody says what is used
            1 << 20,
            "the control group's limit of 1 MiB",
        ),
        (
            {
                "proc/self/limits": LIMITS.format(data="unlimited", space=1 << 30),
                "proc/self/status": "Name: python\nVmSize:\t  524288 kB\nVmData: 4 kB",
            },
            512 * MIB,
            "the process's limit of 1.0 GiB of address space",
        ),
        (
            {
                "proc/self/limits": LIMITS.format(data=100 * MIB, space=1 << 30),
                "proc/self/status": "VmSize: 524288 kB\nVmData: 4096 kB",
            },
            96 * MIB,
            "the process's limit of 100 MiB of data",
        ),
    ],
    ids=str,
)
def test_what_may_still_be_taken(
    tmp_path: Path, files: Mapping[str, object], free: int, what: str
) -> None:
    usable = usable_memory(*lay(tmp_path, files))
    assert usable is not None
    assert (usable.free_bytes, usable.what) == (free, what)
    assert usable.cure


def test_where_nobody_tells(tmp_path: Path) -> None:
    assert usable_memory(tmp_path, tmp_path) is None
    assert memory.memory_limit(tmp_path, tmp_path) is None
    assert memory.host_memory(tmp_path) == (0, 0)


def test_limits_are_told_apart_from_what_they_leave(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a", **group("a", 300 * MIB, 299 * MIB)}
    files["proc/self/limits"] = LIMITS.format(data=200 * MIB, space="unlimited")
    cgroup, proc = lay(tmp_path, files)
    assert memory.memory_limit(cgroup, proc) == 200 * MIB
    usable = usable_memory(cgroup, proc)
    assert usable is not None
    assert usable.limit_bytes == 300 * MIB
    assert [bound.free_bytes >> 20 for bound in memory.memory_bounds(cgroup, proc)] == [
        8192,
        1,
        200,
    ]


SMALL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
from treadle.machine import topology
from treadle.profiling import peaks
from treadle.machine.memory import usable_memory
from treadle.profiling.report import row_in_use
usable = usable_memory()
assert usable.what.endswith("of address space"), usable
topology.cache_bytes = lambda cpus=topology.CPUS: 1 << 30  # of a large server
found = peaks.measure_peaks(row_in_use(), 1, 0.001)
assert peaks.PIECE <= found.buffer_bytes <= usable.free_bytes, found
assert not found.from_memory and "cache_bytes_s" in found.as_dict(), found
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process's limits")
def test_peaks_are_measured_within_a_real_limit() -> None:
    """A quarter of the host's memory was taken whatever the limit, and so a GiB here."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SMALL, str(900 * MIB)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("cache", "files", "expected"),
    [
        ("61440K", {}, 256 * MIB),
        ("128M", {}, 512 * MIB),
        ("512M", {}, 1 << 30),
        ("32M", {"proc/self/cgroup": "0::/a", **group("a", 300 * MIB, 60 * MIB)}, 80 * MIB),
        ("32M", {"proc/meminfo": "MemAvailable: 300 kB"}, peaks.PIECE),
        ("", {"proc/meminfo": ""}, 256 * MIB),
    ],
    ids=str,
)
def test_the_buffer_is_larger_than_caches_and_smaller_than_memory(
    tmp_path: Path, cache: str, files: Mapping[str, object], expected: int
) -> None:
    for index, size in (("index0", "48K"), ("index3", cache)):
        folder = tmp_path / "cpu0/cache" / index
        folder.mkdir(parents=True)
        (folder / "size").write_text(size + "\n")
    assert peaks.buffer_bytes(tmp_path, *lay(tmp_path, files)) == expected
