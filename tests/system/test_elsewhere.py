"""treadle where what Linux has is gone, and macOS', Windows' or FreeBSD's calls are fakes
(``elsewhere.py``).

Shown is that the files for these systems run, and that nothing else needs Linux. Whether the
systems do as their documents say, only they can tell.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

SYSTEMS = ["darwin", "win32", "freebsd"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fakes stand on Linux' calls")


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """The file that has the names of the fakes that were called."""
    path = tmp_path / "calls"
    path.touch()
    return path


def environment(calls: Path, system: str = "") -> dict[str, str]:
    own = {"TREADLE_CALLS": str(calls), "TREADLE_SYSTEM": system, "PYTHONPATH": str(ROOT)}
    return {**os.environ, **own, "HOME": str(calls.parent), "PYTHONWARNINGS": "ignore"}


def start(calls: Path, system: str, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.system.elsewhere", system, *args]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment(calls, system), **pipes)


def treadle(calls: Path, system: str, *args: str) -> str:
    """What the command prints there; on Linux without a ``system``."""
    if system:
        process = start(calls, system, *args)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return out
    command = [sys.executable, "-m", "treadle", *args]
    return subprocess.run(
        command, env=environment(calls), capture_output=True, text=True, timeout=300, check=True
    ).stdout


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the shipped model writes on Linux."""
    folder = tmp_path_factory.mktemp("linux")
    return treadle(folder / "calls", "", *RUN)


RUN = ("run", "-n", "12", "--temp", "0", "-t", "2", "def read_text(path):")


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_shipped_model_writes_the_same_text(system: str, calls: Path, text: str) -> None:
    assert text.strip()
    assert treadle(calls, system, *RUN) == text


NAMES = {"darwin": "Apple M0", "win32": "x86_64", "freebsd": "Apple M0"}  # there is no registry
CACHES = {"darwin": 12 << 20, "win32": 24 << 20, "freebsd": 0}
FAST = {"darwin": 2, "win32": 2, "freebsd": 6}  # cores: FreeBSD does not tell them apart


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_doctor_tells_what_the_system_told(system: str, calls: Path) -> None:
    report = json.loads(treadle(calls, system, "doctor", "--json"))
    assert (report["cpu"]["name"], report["cpu"]["architecture"]) == (NAMES[system], "x86_64")
    counts = list(report["threads"]["bounds"].values())
    assert counts[1:] == [6, FAST[system]]  # cores, and those of the faster kind
    assert counts[0] == 4 or system == "darwin"
    memory = report["memory"]
    assert (memory["total_bytes"], memory["available_bytes"]) == (8 << 30, 2 << 30)
    assert memory["largest_cache_bytes"] == CACHES[system]
    assert "once a millisecond" not in json.dumps(report)  # there is something to sleep on


QUANTIZE = ("quantize", str(ROOT / "src/treadle/data/demo.gguf"))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file that Linux writes."""
    path = tmp_path_factory.mktemp("quantized") / "linux.gguf"
    treadle(path.with_name("calls"), "", *QUANTIZE, str(path), "Q4_0", "--allow-requantize")
    return path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_quantize_writes_the_same_file(
    system: str, calls: Path, tmp_path: Path, quantized: bytes
) -> None:
    path = tmp_path / f"{system}.gguf"
    treadle(calls, system, *QUANTIZE, str(path), "Q4_0", "--allow-requantize")
    assert path.read_bytes() == quantized
    assert ("locking" in calls.read_text()) == (system == "win32")
    assert not list(tmp_path.glob(".*.part*"))


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_server_answers_and_ends(system: str, calls: Path) -> None:
    process = start(calls, system, "serve", "--port", "0")
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            assert json.load(answer) == {"status": "ok"}
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    finally:
        process.kill()
        process.wait()


TEAM = """
import sys, time
import pytest
from tests.system.elsewhere import become
become(sys.argv[1])
from treadle.isa.portable import PORTABLE
from treadle.devices.cpu.memory_layouts import SLEEPERS
from treadle.devices.cpu.thread_team import Team
from tests.devices.cpu.test_thread_team import SIZES, Chain
team, chain = Team(3, PORTABLE, 64), Chain(PORTABLE, SIZES)
n_asleep = team._shared.memory.bytes[SLEEPERS:SLEEPERS + 8].view("i8")
for _ in range(3):
    chain.run(team)
    chain.check()
    late = time.monotonic() + 60
    while n_asleep[0] < 2:  # before the next run all workers are asleep
        assert time.monotonic() < late
        time.sleep(0.001)
team.close()
"""
WAKES = {
    "darwin": "os_sync_wake_by_address_all",
    "win32": "WakeByAddressAll",
    "freebsd": "syscall",
}


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_workers_sleep_and_are_woken(system: str, calls: Path) -> None:
    """Without a wake-up the team's end would wait for ever: no worker naps."""
    command = [sys.executable, "-c", TEAM, system]
    ran = subprocess.run(
        command, env=environment(calls), capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert WAKES[system] in calls.read_text().split()


TIMES = """
import sys
import numpy, pytest
from tests.system.elsewhere import become
become(sys.argv[1])
from treadle.isa.portable import PORTABLE
from treadle.devices.cpu.thread_team import Team, step_times
from tests.devices.cpu.test_thread_team import SIZES, Chain
team, chain = Team(2, PORTABLE, 64), Chain(PORTABLE, SIZES, 40)
times = numpy.zeros((len(SIZES) + 1, 2), numpy.int64)
chain.run(team, times.ctypes.data)
assert times[0].any() and (step_times(times) >= 0).all(), times
"""


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_steps_are_timed(system: str, calls: Path) -> None:
    command = [sys.executable, "-c", TIMES, system]
    ran = subprocess.run(
        command, env=environment(calls), capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("system", [*SYSTEMS, "posix"])
def test_without_the_systems_calls_there_are_fallbacks(system: str, calls: Path, text: str) -> None:
    """``TREADLE_SYSTEM`` alone, with nothing faked: naps for wake-ups."""
    command = [sys.executable, "-m", "treadle", *RUN]
    ran = subprocess.run(
        command, env=environment(calls, system), capture_output=True, text=True, timeout=300
    )
    assert (ran.returncode, ran.stdout) == (0, text), ran.stderr
