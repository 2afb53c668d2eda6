"""What doctor tells of machines that are not here: trees of files in place of /sys and /proc."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from treadle.cli.doctor import render
from treadle.errors import UnsupportedError
from treadle.isa import ROWS
from treadle.jit import cache
from treadle.runtime import describe as describe_module
from treadle.runtime import machine
from treadle.runtime.describe import describe
from treadle.runtime.peaks import Peaks

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
VNNI = ROWS["avx512_vnni"].needs
BEST = ROWS["avx512_bf16"].needs
CPU = "sys/devices/system/cpu"
GROUP = "sys/fs/cgroup"
PEAKS = Peaks(q8=2.05e12, bf16=None, f32=5.1e11, bytes_s=45e9, cpu_share=0.99)

DESKTOP = {
    "proc/cpuinfo": "processor : 0\nmodel name : A Processor 9000\nflags : fpu\n",
    "proc/meminfo": "MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable: 25165824 kB\n",
    "proc/loadavg": "0.10 0.20 0.30 1/99 4242\n",
    "proc/stat": "cpu  900 0 100 9000 0 0 0 5 0 0\ncpu0 1 0 0 0 0 0 0 0 0 0\n",
    "proc/self/cgroup": "0::/\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    f"{CPU}/online": "0-3\n",
    f"{CPU}/cpu0/cache/index0/size": "48K\n",
    f"{CPU}/cpu0/cache/index3/size": "32M\n",
    f"{CPU}/cpu0/cpufreq/scaling_governor": "performance\n",
    **{f"{CPU}/cpu{i}/topology/physical_package_id": "0\n" for i in range(4)},
    **{f"{CPU}/cpu{i}/topology/core_id": f"{i}\n" for i in range(4)},
}

Describe = Callable[..., dict[str, Any]]


def lay(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Describe:
    """``describe`` of a machine made of DESKTOP and what is laid over it."""
    monkeypatch.delenv("TREADLE_ISA", raising=False)
    monkeypatch.delenv("TREADLE_NO_COMPILE", raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    state = cache.State("/home/user/.cache/treadle", 31, 402_000, 2, 20_000)
    monkeypatch.setattr(cache, "state", lambda: state)

    def build(
        files: Mapping[str, str] | None = None,
        *model_files: Path,
        peaks: Peaks | None = None,
        features: frozenset[str] = BEST,
        allowed: tuple[int, ...] = (0, 1, 2, 3),
    ) -> dict[str, Any]:
        root = lay(tmp_path / "machine", {**DESKTOP, **(files or {})})
        return describe(
            model_files,
            peaks,
            sys_root=root / "sys",
            proc=root / "proc",
            features=features,
            allowed=list(allowed),
        )

    return build


def test_the_golden_report(there: Describe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a laptop: two threads a core, slow cores, a quota, no bf16, a saving governor.

    ``TREADLE_UPDATE_GOLDEN=1`` writes the file anew.
    """
    versions = {"treadle": "0.1.0", "python": "CPython 3.11.2", "llvm": "22.1.0"}
    monkeypatch.setattr(describe_module, "_versions", lambda: versions)
    files = {
        f"{CPU}/online": "0-7",
        **{f"{CPU}/cpu{i}/topology/physical_package_id": "0" for i in range(8)},
        **{f"{CPU}/cpu{i}/topology/core_id": str(max(i // 2, i - 2)) for i in range(8)},
        **{
            f"{CPU}/cpu{i}/cpufreq/cpuinfo_max_freq": "4800000" if i < 4 else "3500000"
            for i in range(8)
        },
        f"{CPU}/cpu0/cpufreq/scaling_max_freq": "3000000",
        f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave",
        "proc/self/cgroup": "0::/box",
        f"{GROUP}/box/cpu.max": "150000 100000",
        f"{GROUP}/box/memory.max": str(8 << 30),
    }
    peaks = Peaks(q8=2.05e12, bf16=None, f32=5.1e11, bytes_s=45e9, cpu_share=0.61)
    report = there(files, peaks=peaks, features=VNNI, allowed=tuple(range(8)))
    text = "".join(f"{line}\n" for line in render(report))
    path = GOLDEN / "doctor.txt"
    if os.environ.get("TREADLE_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8")


def test_nothing_is_held_back_on_a_good_machine(there: Describe) -> None:
    report = there(peaks=PEAKS)
    assert report["warnings"] == []
    assert report["threads"] == {
        "chosen": 4,
        "bound": "the processors this process may run on",
        "bounds": {
            "the processors this process may run on": 4,
            "physical cores (a core's second thread adds nothing here)": 4,
            "performance cores": 4,
        },
    }
    assert report["peaks"]["bf16_ops_s"] is None
    assert json.loads(json.dumps(report)) == report


def test_this_very_machine() -> None:
    report = describe()
    assert json.loads(json.dumps(report)) == report
    assert report["threads"]["chosen"] == machine.usable_threads()[0]
    assert "model" not in report
    assert "peaks" not in report


REASONS: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({}, {"allowed": (1, 2)}, "this process may run on 2 of 4 processors: see taskset"),
    (
        {f"{GROUP}/cpu.max": "150000 100000"},
        {},
        "allows the time of 1.5 processors, 4 would be of use: raise",
    ),
    ({f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave"}, {}, "governor is powersave"),
    (
        {
            f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave",
            f"{CPU}/cpu0/cpufreq/scaling_driver": "intel_pstate",
            f"{CPU}/cpu0/cpufreq/energy_performance_preference": "balance_power",
        },
        {},
        "the energy preference is balance_power: cpupower",
    ),
    (
        {
            f"{CPU}/cpu0/cpufreq/cpuinfo_max_freq": "5000000",
            f"{CPU}/cpu0/cpufreq/scaling_max_freq": "3000000",
        },
        {},
        "capped at 3.0 of 5.0 GHz: cpupower frequency-set -u 5000MHz",
    ),
    ({f"{CPU}/intel_pstate/no_turbo": "1"}, {}, "turbo clocks are off"),
    ({f"{CPU}/cpufreq/boost": "0"}, {}, "turbo clocks are off"),
    ({"proc/stat": "cpu  80 0 0 900 0 0 0 20 0 0"}, {}, "the host gave 20% of this"),
    ({"proc/loadavg": "3.5 0 0 1/9 4"}, {}, "other programs run (load average 3.5)"),
    ({"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}, {}, "echo madvise"),
    ({}, {"features": VNNI}, "BF16 weights are widened to f32"),
    ({}, {"features": frozenset()}, "several times slower than a row of its own"),
    ({}, {"features": frozenset()}, "dots of bytes are made of several instructions"),
]


@pytest.mark.parametrize(
    ("files", "changes", "warning"), REASONS, ids=lambda value: str(value)[:40]
)
def test_a_reason_for_lost_speed(
    there: Describe, files: dict[str, str], changes: dict[str, Any], warning: str
) -> None:
    warnings = there(files, **changes)["warnings"]
    assert [text for text in warnings if warning in text]
    assert len(warnings) <= 3


def test_the_usual_governor_of_a_driver_that_goes_by_preference(there: Describe) -> None:
    files = {
        f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave",
        f"{CPU}/cpu0/cpufreq/scaling_driver": "amd-pstate-epp",
        f"{CPU}/cpu0/cpufreq/energy_performance_preference": "balance_performance",
    }
    assert there(files)["warnings"] == []


def test_what_takes_nothing_useful_is_no_reason(there: Describe) -> None:
    """Four cores of two threads each: a thread on every core is all there is to gain."""
    files = {
        f"{CPU}/online": "0-7",
        **{f"{CPU}/cpu{i}/topology/physical_package_id": "0" for i in range(8)},
        **{f"{CPU}/cpu{i}/topology/core_id": str(i // 2) for i in range(8)},
        f"{GROUP}/cpu.max": "400000 100000",
    }
    assert there(files, allowed=(0, 2, 4, 6))["warnings"] == []
    (warning,) = there(files, allowed=(0, 1, 2, 3))["warnings"]
    assert "may run on 4 of 8 processors" in warning


def test_a_share_of_processor_time_says_more_than_the_load(there: Describe) -> None:
    busy = Peaks(1e12, None, 1e11, 1e10, cpu_share=0.5)
    (warning,) = there({"proc/loadavg": "3.5 0 0 1/9 4"}, peaks=busy)["warnings"]
    assert "the threads got 50% of the processor time" in warning
    assert there({"proc/loadavg": "3.5 0 0 1/9 4"}, peaks=PEAKS)["warnings"] == []


def test_instruction_sets(there: Describe, monkeypatch: pytest.MonkeyPatch) -> None:
    report = there(features=AVX2 | {"avxvnni", "amx-int8"})
    assert report["instruction_set"] == {
        "chosen": "avx2_vnni",
        "why": "the best that this CPU can run",
        "can_run": ["portable", "avx2", "avx2_vnni"],
    }
    assert report["cpu"]["unused"] == ["amx-int8"]
    missing = report["cpu"]["missing"]
    assert list(missing) == ["avx512f", "avx512vnni", "avx512bf16", "amx-bf16"]
    assert missing["avx512bf16"] == "dots of bf16: faster prompts for BF16 weights"
    assert "avxvnni" not in there(features=BEST)["cpu"]["missing"]  # avx512vnni is better
    monkeypatch.setenv("TREADLE_ISA", "avx2")
    report = there(features=BEST)
    assert report["instruction_set"]["chosen"] == "avx2"
    assert report["instruction_set"]["why"] == "TREADLE_ISA asks for it"
    assert "forces avx2, and avx512_bf16 would be faster: unset it" in report["warnings"][0]
    with pytest.raises(UnsupportedError, match="this CPU lacks"):
        there(features=frozenset())


def test_dots_of_bf16_that_are_slower_than_none(there: Describe) -> None:
    slow = Peaks(q8=1e12, bf16=1.1e11, f32=2e11, bytes_s=1e10, cpu_share=1.0)
    (warning,) = there(peaks=slow)["warnings"]
    assert "run at 55% of its rate of f32" in warning
    assert "TREADLE_ISA=avx512_vnni reads prompts faster" in warning
    assert there(peaks=Peaks(1e12, 4e11, 2e11, 1e10, 1.0))["warnings"] == []


def test_an_architecture_that_has_no_table(
    there: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "sparc64")
    assert there(features=frozenset())["cpu"]["missing"] == {}


# -- the cache ------------------------------------------------------------------------------------


def test_a_cache_that_cannot_serve(there: Describe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "state", lambda: cache.State("/c", problem="/c: refused"))
    (warning,) = there()["warnings"]
    assert warning.startswith("/c: refused: every process compiles its kernels; set TREADLE_CACHE")
    monkeypatch.setenv("TREADLE_NO_COMPILE", "1")
    report = there()
    assert report["kernel_cache"]["compiling"] is False
    assert report["warnings"][0].startswith("/c: refused: nothing can run;")
    assert report["warnings"][1].startswith("TREADLE_NO_COMPILE=1: a kernel that is not in")


# -- the model ------------------------------------------------------------------------------------


def test_a_model(there: Describe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for path in parts:
        path.write_bytes(bytes(5000))
    monkeypatch.setattr(machine, "resident_bytes", lambda path: 5000)
    report = there({}, *parts)
    assert report["model"] == {
        "files": [str(path) for path in parts],
        "size_bytes": 10_000,
        "in_memory_bytes": 10_000,
    }
    assert report["warnings"] == []
    monkeypatch.setattr(machine, "resident_bytes", lambda path: 600)
    (warning,) = there({}, *parts)["warnings"]
    assert warning.startswith("12% of the model is in memory: its first run reads the rest")
    (warning,) = there({f"{GROUP}/memory.max": "8000"}, *parts)["warnings"]
    assert "larger than the memory there is for it" in warning
    monkeypatch.setattr(machine, "resident_bytes", lambda path: None)
    assert there({f"{GROUP}/memory.max": "max"}, *parts)["warnings"] == []


def test_what_was_just_written_is_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100_001))
    assert machine.resident_bytes(path) == 100_001
    path.write_bytes(b"")
    assert machine.resident_bytes(path) == 0


# -- the facts beneath ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/", "g/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/", "g/cpu.max": "150000 100000"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b", "g/a/cpu.max": "100000 50000"}, 2.0),
        ({"proc/self/cgroup": "0::/a/b", "g/a/cpu.max": "8 1", "g/a/b/cpu.max": "3 1"}, 3.0),
        ({"proc/self/cgroup": "0::/../..", "g/cpu.max": "3 1"}, 3.0),
        ({"proc/self/cgroup": "0::/", "g/cpu.max": "nonsense"}, None),
        ({"g/cpu/cpu.cfs_quota_us": "50000", "g/cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ({"g/cpu/cpu.cfs_quota_us": "-1", "g/cpu/cpu.cfs_period_us": "100000"}, None),
    ],
    ids=str,
)
def test_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    root = lay(tmp_path, files)
    assert machine.cgroup_quota(root / "g", root / "proc") == quota


def test_memory_limits(tmp_path: Path) -> None:
    root = lay(tmp_path / "2", {"proc/self/cgroup": "0::/a", "g/a/memory.max": "4096"})
    assert machine.memory_limit(root / "g", root / "proc") == 4096
    root = lay(tmp_path / "1", {"g/memory/memory.limit_in_bytes": str(2**63 - 4096)})
    assert machine.memory_limit(root / "g", root / "proc") is None


def topology(core_ids: list[int], **extra: list[int]) -> dict[str, str]:
    files = {}
    for cpu, core in enumerate(core_ids):
        files[f"cpu{cpu}/topology/core_id"] = str(core)
        files[f"cpu{cpu}/topology/physical_package_id"] = "0"
        for name, values in extra.items():
            files[f"cpu{cpu}/{name.replace('__', '/')}"] = str(values[cpu])
    return files


@pytest.mark.parametrize(
    ("files", "quota", "chosen", "why"),
    [
        (topology([0, 1, 2, 3]), "max", 4, "may run on"),
        (topology([0, 0, 1, 1]), "max", 2, "physical cores"),
        (topology([0, 1, 2, 3], cpu_capacity=[1024, 1024, 400, 400]), "max", 2, "performance"),
        (
            topology([0, 1, 2, 3], cpufreq__cpuinfo_max_freq=[5000, 4800, 3500, 3500]),
            "max",
            2,
            "performance",
        ),
        (topology([0, 1, 2, 3]), "250000", 2, "quota of 2.5 processors"),
        (topology([0, 1, 2, 3]), "50000", 1, "quota of 0.5 processors"),
        ({}, "max", 4, "may run on"),
    ],
    ids=["plain", "smt", "arm", "x86 hybrid", "quota", "small quota", "silent"],
)
def test_the_least_bound_wins(
    tmp_path: Path, files: dict[str, str], quota: str, chosen: int, why: str
) -> None:
    files = {f"c/{name}": text for name, text in files.items()}
    files |= {"proc/self/cgroup": "0::/", "g/cpu.max": f"{quota} 100000"}
    root = lay(tmp_path, files)
    bounds = machine.thread_bounds([0, 1, 2, 3], root / "c", root / "g", root / "proc")
    n, text = min(bounds, key=lambda bound: bound[0])
    assert n == chosen
    assert why in text


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    report = describe(
        sys_root=tmp_path / "sys", proc=tmp_path / "proc", features=frozenset(), allowed=[0]
    )
    assert report["cpu"]["name"]
    assert report["threads"]["chosen"] == 1
    assert report["memory"]["total_bytes"] == 0
    assert report["processors"]["cores"] is None
    assert json.loads(json.dumps(report)) == report
