"""What doctor tells of machines that are not here: trees of files in place of /sys and /proc."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from treadle.cli.commands.doctor import render
from treadle.devices.cpu import residence
from treadle.errors import UnsupportedError
from treadle.isa import ROWS
from treadle.jit import cache
from treadle.machine import memory
from treadle.machine import topology as machine
from treadle.profiling import report as describe_module
from treadle.profiling.facts import ModelFile, Subject
from treadle.profiling.peaks import Peaks
from treadle.profiling.report import describe

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
VNNI = ROWS["avx512_vnni"].needs
VBMI = ROWS["avx512_vbmi"].needs
BF16 = ROWS["avx512_bf16"].needs
BEST = ROWS["amx_bf16"].needs
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
    state = cache.CacheState("/home/user/.cache/treadle", 31, 402_000, 2, 20_000)
    monkeypatch.setattr(cache, "state", lambda: state)

    def build(
        files: Mapping[str, str] | None = None,
        *model_files: Path,
        model: ModelFile | None = None,
        peaks: Peaks | None = None,
        features: frozenset[str] = BEST,
        allowed: tuple[int, ...] = (0, 1, 2, 3),
    ) -> dict[str, Any]:
        root = lay(tmp_path / "machine", {**DESKTOP, **(files or {})})
        asked = model or (ModelFile(model_files) if model_files else None)
        return describe(Subject(asked, peaks, features, list(allowed), root / "sys", root / "proc"))

    return build


def test_the_golden_report(there: Describe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a laptop: two threads a core, slow cores, a quota, no bf16, a saving governor.

    ``TREADLE_UPDATE_GOLDEN=1`` writes the file anew.
    """
    versions = {"treadle": "0.1.0", "python": "CPython 3.11.2", "llvm": "22.1.0"}
    monkeypatch.setitem(describe_module.SECTIONS, "versions", lambda here: versions.items())
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
    report = describe(Subject())
    assert json.loads(json.dumps(report)) == report
    assert report["threads"]["chosen"] == machine.usable_threads()[0]
    assert "model" not in report
    assert "peaks" not in report


def several(count: int, **values: list[int]) -> dict[str, str]:
    """The first ``count`` processors, with a value for each under each name."""
    files = {f"{CPU}/online": f"0-{count - 1}"}
    for cpu in range(count):
        files[f"{CPU}/cpu{cpu}/topology/physical_package_id"] = "0"
        for name, numbers in values.items():
            files[f"{CPU}/cpu{cpu}/{name.replace('__', '/')}"] = str(numbers[cpu])
    return files


HYBRID = several(
    6,
    topology__core_id=[0, 1, 2, 3, 4, 5],
    cpufreq__cpuinfo_max_freq=[5000, 5000, 3500, 3500, 3500, 3500],
)
VIRTUAL = {"proc/cpuinfo": "model name : A Processor\nflags : fpu avx2 hypervisor\n"}

# What is laid over the machine, how it is described, what each of its warnings must say: the
# reason, and what to do.
REASONS: list[tuple[dict[str, str], dict[str, Any], list[str]]] = [
    (
        {},
        {"allowed": (1, 2)},
        ["this process may run on 2 of 4 processors: see taskset, or the container's cpuset"],
    ),
    (
        {f"{GROUP}/cpu.max": "150000 100000"},
        {},
        ["limits CPU time to 1.5 processors, but treadle can use 4: raise the limit (docker"],
    ),
    (
        {f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave"},
        {},
        ["the frequency governor is powersave: cpupower frequency-set -g performance"],
    ),
    (
        {f"{CPU}/cpu2/cpufreq/scaling_governor": "conservative"},  # another than the first
        {},
        ["the frequency governor is conservative: cpupower frequency-set -g performance"],
    ),
    (
        {
            f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave",
            f"{CPU}/cpu0/cpufreq/scaling_driver": "intel_pstate",
            f"{CPU}/cpu0/cpufreq/energy_performance_preference": "balance_power",
        },
        {},
        ["the energy preference is balance_power: cpupower frequency-set -g performance"],
    ),
    (
        {
            f"{CPU}/cpu0/cpufreq/cpuinfo_max_freq": "5000000",
            f"{CPU}/cpu0/cpufreq/scaling_max_freq": "3000000",
        },
        {},
        ["capped at 3.0 of 5.0 GHz: cpupower frequency-set -u 5000MHz"],
    ),
    ({f"{CPU}/intel_pstate/no_turbo": "1"}, {}, ["turbo clocks are off: see intel_pstate/no_tu"]),
    ({f"{CPU}/cpufreq/boost": "0"}, {}, ["turbo clocks are off: see intel_pstate/no_turbo"]),
    (
        {"sys/firmware/acpi/platform_profile": "low-power"},
        {},
        ["the platform profile is low-power: echo performance > /sys/firmware/acpi/platform_prof"],
    ),
    (
        {
            "sys/class/power_supply/AC/type": "Mains",
            "sys/class/power_supply/AC/online": "0",
            "sys/class/power_supply/BAT0/type": "Battery",
        },
        {},
        ["runs on battery, which lowers clocks: plug it in"],
    ),
    (
        {"proc/stat": "cpu  80 0 0 900 0 0 0 20 0 0"},
        {},
        ["the host gave 20% of this virtual machine's time to others: ask for processors of its"],
    ),
    (
        {"proc/loadavg": "3.5 0 0 1/9 4"},
        {},
        ["other programs run (load average 3.5): they take processors and memory bandwidth; stop"],
    ),
    (
        {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"},
        {},
        ["transparent huge pages are off, which costs long contexts some speed: echo madvise >"],
    ),
    (
        {"sys/devices/system/node/has_memory": "0-1"},
        {},
        ["memory has 2 NUMA nodes, and a processor reads other nodes more slowly: use numactl"],
    ),
    (  # SMT: eight processors, four cores
        several(8, topology__core_id=[0, 0, 1, 1, 2, 2, 3, 3]),
        {"allowed": tuple(range(8))},
        [
            "8 processors are 4 cores of up to 2 threads (SMT), and a core's second thread adds "
            "no speed: treadle starts one thread per core; keep -t at that"
        ],
    ),
    (  # hybrid
        HYBRID,
        {"allowed": tuple(range(6))},
        [
            "4 of 6 cores are slow by design, and the others would wait for them: treadle starts 2 "
            "threads; keep them on the fast cores with taskset -c 0,1"
        ],
    ),
    (HYBRID, {"allowed": (2, 3, 4)}, ["not run on any fast core: change taskset -c 0,1, or the"]),
    (  # a feature that is missing, and the row it would enable
        {},
        {"features": VNNI},
        [
            "this CPU lacks avx512bitalg, avx512vbmi, gfni, which the kernels of avx512_vbmi need "
            "(bytes and bits in any order: faster writing from formats of few bits): only another "
            "CPU has it",
            "this CPU lacks avx512bf16, which the kernels of avx512_bf16 need (dots of bf16: "
            "faster prompts for BF16 weights): only another CPU has it",
            "this CPU lacks amx-bf16, amx-tile, which the kernels of amx_bf16 need (matrix "
            "registers of bf16: quantised and BF16 prompts twice as fast): only another CPU has it",
            "BF16 weights are converted to f32, so their prompts are as slow as with F32; Q8_0",
        ],
    ),
    (
        VIRTUAL,
        {"features": VBMI, "model": ModelFile((), acts={"q8"})},
        [
            "lacks avx512bf16, which the kernels of avx512_bf16 need (dots of bf16: faster prompts "
            "for BF16 weights): this is a virtual machine, which may hide it: "
            "give it the host's CPU",
            "lacks amx-bf16, amx-tile, which the kernels of amx_bf16 need",
        ],
    ),
    (  # each row above the best is named with what it needs beyond the row before
        {},
        {"features": AVX2 | {"avxvnni"}, "model": ModelFile((), acts={"f32"})},
        [
            "lacks avx512bw, avx512cd, avx512dq, avx512f, avx512vl, which the kernels of avx512 ne",
            "lacks avx512vnni, which the kernels of avx512_vnni need",
            "lacks avx512bitalg, avx512vbmi, gfni, which the kernels of avx512_vbmi need",
            "lacks avx512bf16, which the kernels of avx512_bf16 need",
            "lacks amx-bf16, amx-tile, which the kernels of amx_bf16 need",
        ],
    ),
    (  # the portable row
        {},
        {"features": frozenset(), "model": ModelFile((), acts={"f32"})},
        [
            "several times slower than kernels for its extensions: only another CPU has it",
            "lacks avx2, bmi2, f16c, fma, which the kernels of avx2 need (256-bit vectors",
            "lacks avxvnni, which the kernels of avx2_vnni need",
            "lacks avx512bw, avx512cd, avx512dq, avx512f, avx512vl, which the kernels of avx512 ne",
            "lacks avx512vnni, which the kernels of avx512_vnni need",
            "lacks avx512bitalg, avx512vbmi, gfni, which the kernels of avx512_vbmi need",
            "lacks avx512bf16, which the kernels of avx512_bf16 need",
            "lacks amx-bf16, amx-tile, which the kernels of amx_bf16 need",
        ],
    ),
    (  # Zen 4: dots of bf16, and nothing is passed over
        {},
        {"features": BF16},
        ["lacks amx-bf16, amx-tile, which the kernels of amx_bf16 need"],
    ),
    (  # the CPU has the registers, and Linux keeps them: the row before is passed over
        {},
        {"features": BEST - {"amx-tile"}, "model": ModelFile((), acts={"q8"})},
        [
            "the system denies this process amx-tile, which the kernels of amx_bf16 need: Linux "
            "5.16 or newer grants it, unless a container's seccomp filter forbids arch_prctl",
            "the kernels of avx512_bf16 are not used, as CPUs with amx-bf16 run them slowly; to "
            "check this CPU, run TREADLE_ISA=avx512_bf16 treadle bench",
        ],
    ),
    (  # what the model has no use for is no reason
        {},
        {"features": BEST - {"amx-tile"}, "model": ModelFile((), acts={"bf16"})},
        [
            "denies this process amx-tile",
            "avx512_bf16 are not used",
            "BF16 weights are converted to f32",
        ],
    ),
    (  # matrix registers multiply them as they are
        {},
        {"model": ModelFile((), acts={"bf16"})},
        [],
    ),
    (
        {},
        {"model": ModelFile((), ["Q4_K", "F32"], ["Q4_K", "IQ1_S"], {"f32"}, ["F32", "Q8_0"])},
        [
            "there is no kernel for Q4_K, IQ1_S weights, so treadle cannot run this file: use the "
            "model in F32, Q8_0"
        ],
    ),
    ({}, {"model": ModelFile((), problem="no row for x")}, ["cannot run this model: no row for x"]),
]


@pytest.mark.parametrize(
    ("files", "changes", "expected"), REASONS, ids=[str(i) for i in range(len(REASONS))]
)
def test_a_reason_for_lost_speed(
    there: Describe, files: dict[str, str], changes: dict[str, Any], expected: list[str]
) -> None:
    warnings = there(files, **changes)["warnings"]
    assert len(warnings) == len(expected), warnings
    for warning, text in zip(warnings, expected, strict=True):
        assert text in warning


def test_dots_without_an_instruction(there: Describe) -> None:
    """Only where the model asked about has such weights, or none is asked about."""
    for model, said in ((None, True), ({"q8"}, True), ({"f32", "bf16"}, False)):
        about = None if model is None else ModelFile((), acts=model)
        warnings = there(features=frozenset(), model=about)["warnings"]
        assert any("a dot product of bytes takes several" in text for text in warnings) is said


def test_a_cpu_that_treadle_has_no_row_for(
    there: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treadle.profiling import facts

    monkeypatch.setattr("platform.machine", lambda: "vax")
    monkeypatch.setitem(facts.FEATURES, "vax", {"polyf": ("polynomials", ())})
    about = ModelFile((), acts={"f32"})
    (warning,) = there(features=frozenset({"polyf"}), model=about)["warnings"]
    assert "kernels for its extensions: docs/add-an-isa.md tells how to add one" in warning


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
    siblings, few = there(files, allowed=(0, 1, 2, 3))["warnings"]
    assert "4 processors are 2 cores" in siblings
    assert "may run on 4 of 8 processors" in few


def test_a_share_of_processor_time_says_more_than_the_load(there: Describe) -> None:
    busy = Peaks(1e12, None, 1e11, 1e10, cpu_share=0.5)
    (warning,) = there({"proc/loadavg": "3.5 0 0 1/9 4"}, peaks=busy)["warnings"]
    assert "the threads got 50% of the processor time" in warning
    assert there({"proc/loadavg": "3.5 0 0 1/9 4"}, peaks=PEAKS)["warnings"] == []


def test_instruction_sets(there: Describe, monkeypatch: pytest.MonkeyPatch) -> None:
    report = there(features=AVX2 | {"avxvnni", "amx-bf16"})
    assert report["instruction_set"] == {
        "chosen": "avx2_vnni",
        "why": "the best that this CPU can run",
        "can_run": ["portable", "avx2", "avx2_vnni"],
    }
    assert report["cpu"]["unused"] == ["amx-bf16"]  # no row that this CPU can run needs it
    missing = report["cpu"]["missing"]
    assert list(missing) == ["avx512f", "avx512vnni", "avx512vbmi", "avx512bf16"]
    gives = "dots of bf16: faster prompts for BF16 weights (for the kernels of avx512_bf16)"
    assert missing["avx512bf16"] == gives
    missing = there(features=BF16)["cpu"]["missing"]
    assert list(missing) == ["amx-bf16"]
    assert missing["amx-bf16"].endswith("twice as fast (for the kernels of amx_bf16)")
    assert there(features=BEST)["cpu"]["missing"] == {}
    assert "amx-bf16" in there(features=BEST)["cpu"]["used"]
    assert "avxvnni" not in there(features=BEST)["cpu"]["missing"]  # avx512vnni is better
    monkeypatch.setenv("TREADLE_ISA", "avx2")
    report = there(features=BEST)
    assert report["instruction_set"]["chosen"] == "avx2"
    assert report["instruction_set"]["why"] == "TREADLE_ISA asks for it"
    assert "forces avx2, and amx_bf16 would be faster: unset it" in report["warnings"][0]
    with pytest.raises(UnsupportedError, match="this CPU does not support"):
        there(features=frozenset())


def test_dots_of_bf16_that_are_slower_than_none(there: Describe) -> None:
    slow = Peaks(q8=1e12, bf16=1.1e11, f32=2e11, bytes_s=1e10, cpu_share=1.0)
    for features in (BF16, BEST):  # by vectors, by matrix registers
        warning = there(peaks=slow, features=features)["warnings"][-1]
        assert "run at 55% of its rate of f32" in warning
        assert "TREADLE_ISA=avx512_vbmi reads prompts faster" in warning
    assert there(peaks=Peaks(1e12, 4e11, 2e11, 1e10, 1.0))["warnings"] == []


def test_an_architecture_that_has_no_table(
    there: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "sparc64")
    assert there(features=frozenset())["cpu"]["missing"] == {}


# -- the cache ------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_written(
    there: Describe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the cache itself, not the fixture's
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    (warning,) = (text for text in describe(Subject())["warnings"] if str(tmp_path) in text)
    assert "is not writable: every process compiles its kernels; set TREADLE_CACHE" in warning


def test_a_cache_that_cannot_serve(there: Describe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "state", lambda: cache.CacheState("/c", problem="/c: refused"))
    (warning,) = there()["warnings"]
    assert warning.startswith("/c: refused: every process compiles its kernels; set TREADLE_CACHE")
    monkeypatch.setenv("TREADLE_NO_COMPILE", "1")
    report = there()
    assert report["kernel_cache"]["compiling"] is False
    assert report["warnings"][0].startswith("/c: refused: nothing can run;")
    said = "TREADLE_NO_COMPILE=1: a kernel that is not in the cache is an error; unset it"
    assert report["warnings"][1] == said


# -- the model ------------------------------------------------------------------------------------


def test_a_model(there: Describe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for path in parts:
        path.write_bytes(bytes(5000))
    monkeypatch.setattr(residence, "resident_bytes", lambda path: 5000)
    report = there({}, *parts)
    assert report["model"] == {
        "files": [str(path) for path in parts],
        "size_bytes": 10_000,
        "in_memory_bytes": 10_000,
        "in_huge_pages_bytes": 0,
        "formats": [],
        "without_kernel": [],
        "problem": None,
    }
    assert report["warnings"] == []
    monkeypatch.setattr(residence, "resident_bytes", lambda path: None)
    assert there({f"{GROUP}/memory.max": "max"}, *parts)["warnings"] == []


def test_a_chat_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residence, "huge_bytes", lambda path: 0)
    for problem in (None, "its calls are not found again"):
        chat = {"reasoning": None, "tools": "by the template", "calls": "x", "problem": problem}
        report = describe(Subject(ModelFile([], chat=chat)))
        assert report["model"]["chat"] == chat
        assert (problem in report["warnings"]) == (problem is not None)


def test_a_cold_page_cache(
    there: Describe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a model.gguf"
    path.write_bytes(b"")
    os.truncate(path, 4 << 30)  # a hole takes no room
    monkeypatch.setattr(residence, "resident_bytes", lambda path: 1 << 30)
    (warning,) = there({}, path)["warnings"]
    assert warning == (
        "25% of the model is in memory: its first run reads the other 3.0 GiB from disk; "
        f"treadle doctor --reload '{path}' reads it in advance"
    )
    monkeypatch.setattr(residence, "resident_bytes", lambda path: 4 << 30)
    monkeypatch.setattr(residence, "huge_bytes", lambda path: 4 << 30)
    assert there({}, path)["warnings"] == []


def test_small_pages(there: Describe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"")
    os.truncate(path, 4 << 30)
    monkeypatch.setattr(residence, "resident_bytes", lambda path: 4 << 30)
    monkeypatch.setattr(residence, "huge_bytes", lambda path: 1 << 30)
    (warning,) = there({}, path)["warnings"]
    assert warning.startswith("25% of the model is in huge pages, the rest in small ones")
    assert warning.endswith(f"treadle doctor --reload {path} reads the model again")
    for huge in (4 << 30, None):  # None: the system does not say
        monkeypatch.setattr(residence, "huge_bytes", lambda path, huge=huge: huge)
        assert there({}, path)["warnings"] == []
    os.truncate(path, 1 << 20)  # so small that it does not matter
    monkeypatch.setattr(residence, "resident_bytes", lambda path: 1 << 20)
    monkeypatch.setattr(residence, "huge_bytes", lambda path: 0)
    assert there({}, path)["warnings"] == []


def test_a_model_larger_than_memory(
    there: Describe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"")
    os.truncate(path, 4 << 30)
    monkeypatch.setattr(residence, "resident_bytes", lambda path: 1 << 30)
    small = "MemTotal: 4194304 kB\nMemAvailable: 2097152 kB\n"
    (warning,) = there({"proc/meminfo": small}, path)["warnings"]
    assert warning == (
        "the model (4.0 GiB) is larger than the memory available for it (2.0 GiB, for the "
        "machine's free memory), so each token reads from disk: stop other programs, or take a "
        "smaller format"
    )
    group = {"memory.max": str(1 << 30), "memory.stat": f"active_file {5 << 30}"}
    files = {"proc/meminfo": DESKTOP["proc/meminfo"]}
    files |= {f"{GROUP}/{name}": text for name, text in group.items()}
    (warning,) = there(files, path)["warnings"]
    assert "(2.0 GiB, for the control group's limit of 1.0 GiB), so each token reads" in warning
    assert "raise it (docker --memory, Kubernetes limits.memory), or take" in warning


def test_a_small_container(there: Describe) -> None:
    """Which limit holds, and what the reading speed was measured on."""
    files = {
        "proc/self/cgroup": "0::/box",
        f"{GROUP}/box/memory.max": str(300 << 20),
        f"{GROUP}/box/memory.current": str(60 << 20),
    }
    report = there(files, peaks=replace(PEAKS, buffer_bytes=80 << 20))
    assert report["memory"]["usable_bytes"] == 240 << 20
    assert report["memory"]["bound"] == "the control group's limit of 300 MiB"
    assert (report["peaks"]["read_buffer_bytes"], report["peaks"]["read_from"]) == (
        80 << 20,
        "memory",
    )
    (warning,) = report["warnings"]
    assert warning == (
        "the reading speed was measured on 80.0 MiB, not on 256 MiB, so it may be a little too "
        "high. The reason is the control group's limit of 300 MiB: raise it (docker --memory, "
        "Kubernetes limits.memory)"
    )
    report = there(files, peaks=replace(PEAKS, buffer_bytes=20 << 20, from_memory=False))
    assert report["peaks"]["read_from"] == "caches"
    (warning,) = report["warnings"]
    assert "it is the speed of caches, not of memory" in warning


def test_what_was_just_written_is_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100_001))
    assert residence.resident_bytes(path) == 100_001
    path.write_bytes(b"")
    assert residence.resident_bytes(path) == 0


def test_pages_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (5 << 12))
    huge = residence.huge_bytes(path)
    assert huge is None or (huge % residence.HUGE == 0 and huge <= path.stat().st_size)
    os.sync()  # what is not on disk yet cannot be dropped
    assert residence.reread(path) == residence.huge_bytes(path)
    assert residence.resident_bytes(path) == path.stat().st_size
    assert path.read_bytes() == bytes(range(256)) * (5 << 12)
    path.write_bytes(b"")
    assert residence.reread(path) is None
    assert residence.huge_bytes(path) is None


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
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/box\n1:memory:/",
                "g/cpu/box/cpu.cfs_quota_us": "150000",
                "g/cpu/box/cpu.cfs_period_us": "100000",
            },
            1.5,
        ),
        ({"g/cpu/cpu.cfs_quota_us": "50000", "g/cpu/cpu.cfs_period_us": "0"}, None),
    ],
    ids=str,
)
def test_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    root = lay(tmp_path, files)
    assert machine.cgroup_quota(root / "g", root / "proc") == quota


def test_memory_limits(tmp_path: Path) -> None:
    root = lay(tmp_path / "2", {"proc/self/cgroup": "0::/a", "g/a/memory.max": "4096"})
    assert memory.memory_limit(root / "g", root / "proc") == 4096
    v1 = {"proc/self/cgroup": "4:memory:/box/1", "g/memory/box/memory.limit_in_bytes": "8192"}
    root = lay(tmp_path / "1 nested", v1)  # of the group around its own
    assert memory.memory_limit(root / "g", root / "proc") == 8192
    root = lay(tmp_path / "1", {"g/memory/memory.limit_in_bytes": str(2**63 - 4096)})
    assert memory.memory_limit(root / "g", root / "proc") is None


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
    report = describe(Subject(None, None, frozenset(), [0], tmp_path / "sys", tmp_path / "proc"))
    assert report["cpu"]["name"]
    assert report["threads"]["chosen"] == 1
    assert report["memory"]["total_bytes"] == 0
    assert report["processors"]["cores"] is None
    assert json.loads(json.dumps(report)) == report
