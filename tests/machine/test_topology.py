"""Cores behind processors. What bounds the threads is in ``tests/profiling/test_report.py``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from treadle.machine import topology


def write(root: Path, files: Mapping[str, object]) -> Path:
    for name, value in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{value}\n")
    return root


def test_cores_are_counted_by_package_and_only_where_allowed(tmp_path: Path) -> None:
    """Two packages of two cores of two threads each; core numbers start anew in each package."""
    files: dict[str, object] = {}
    for cpu in range(8):
        files[f"cpu{cpu}/topology/physical_package_id"] = cpu // 4
        files[f"cpu{cpu}/topology/core_id"] = cpu % 4 // 2
    cpus = write(tmp_path, files)
    every = topology.physical_cores(list(range(8)), cpus)
    assert every == {0: [0, 1], 2: [2, 3], 4: [4, 5], 6: [6, 7]}
    assert topology.physical_cores([1, 2, 3, 7], cpus) == {1: [1], 2: [2, 3], 7: [7]}
    assert topology.physical_cores([0, 9], cpus) == {}  # one of which nothing is known


@pytest.mark.parametrize(
    ("name", "values", "fast"),
    [
        ("cpu_capacity", [1024, 1024, 446, 446], [0, 1]),
        ("cpufreq/cpuinfo_max_freq", [5100, 5000, 4700, 3800], [0, 1, 2]),  # favoured, and slow
        ("cpufreq/cpuinfo_max_freq", [3000, 3000, 3000, 3000], [0, 1, 2, 3]),
        ("nothing", [0, 0, 0, 0], [0, 1, 2, 3]),
        ("cpufreq/cpuinfo_max_freq", [5000, 5000, 0, 0], [0, 1, 2, 3]),  # of two nothing is known
    ],
)
def test_fast_cores(tmp_path: Path, name: str, values: list[int], fast: list[int]) -> None:
    files: dict[str, object] = {f"cpu{cpu}/{name}": value for cpu, value in enumerate(values)}
    assert topology.fast_cores([0, 1, 2, 3], write(tmp_path, files)) == fast


def test_affinity_bounds_the_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 3, 4}, raising=False)
    assert topology.affinity() == [3, 4, 5]
    n, why = topology.usable_threads(tmp_path, tmp_path)
    assert (n, why) == (3, "the processors this process may run on")


def test_the_least_of_all_groups_and_the_old_kind(tmp_path: Path) -> None:
    v1 = {"cpu/cpu.cfs_quota_us": 150000, "cpu/cpu.cfs_period_us": 100000}
    assert topology.cgroup_quota(write(tmp_path / "v1", v1), tmp_path) == 1.5
    no_limit = {**v1, "cpu/cpu.cfs_quota_us": -1}
    assert topology.cgroup_quota(write(tmp_path / "none", no_limit), tmp_path) is None
