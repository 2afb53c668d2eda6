"""The command line on an emulated card, and what it says where there is none."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.cli.conftest import Run
from tests.cli.conftest import run as run
from tests.conftest import WriteTiny
from tests.devices.cuda.cards import cards
from tests.devices.cuda.emulated import EmulatedDriver
from tests.devices.cuda.fake_cuda import FakeCuda
from treadle.devices.cuda import facts, libcuda, library
from treadle.devices.cuda.device import Cuda
from treadle.devices.cuda.libcuda import CudaDriver
from treadle.devices.cuda.library import Library
from treadle.errors import CacheError
from treadle.quantize.imatrix.matrix import read

TEXT = "a dog"  # few tokens: tiles for more of them take half a minute to compile


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EmulatedDriver]]:
    monkeypatch.setattr(facts, "COPIED", 1 << 16)
    with cards() as made:
        yield made
        gc.collect()  # commands leave a model to the end of the process


@pytest.fixture
def path(tiny: WriteTiny) -> str:
    return str(tiny("llama", "F32"))


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without NVIDIA's driver, though this one has it."""
    monkeypatch.setattr(library, "NAMES", ("libabsent.so.1", "absent.dll"))


def of_json(run: Run, *args: str) -> Any:
    ran = run(*args, "--json")
    assert (ran.code, ran.err) == (0, "")
    return json.loads(ran.out)


def test_run(run: Run, path: str, drivers: list[EmulatedDriver]) -> None:
    """The CPU's text; ``--stats`` names the card."""
    args = ["run", path, TEXT, "-n", "6", "--temp", "0", "-c", "64", "--kv", "f32"]
    ours, theirs = (of_json(run, *args, "--device", name) for name in ("cuda:1", "cpu"))
    assert len(drivers) == 1
    assert ours["ids"] == theirs["ids"]
    assert len(ours["ids"]) == 6
    assert "device   emulated GPU\n" in run(*args, "--device", "cuda", "--stats").err


def test_bench(run: Run, path: str, drivers: list[EmulatedDriver]) -> None:
    """Shares are of the card's own bandwidth; of the processors nothing is told."""
    args = ["bench", path, "-p", "6", "-n", "2", "-r", "1", "--device", "cuda"]
    prompt, text = of_json(run, *args)
    for result in (prompt, text):
        assert list(result["peaks"]) == ["bandwidth"]
        assert result["peak"] == "bandwidth"
        assert 0 < result["share_of_peak"] < 1
        assert result["tok_s"] > 0
        assert result["processor_time_share"] is None
    assert (prompt["test"], text["test"]) == ("pp6", "tg2")
    ran = run(*args, "-n", "0")
    assert (ran.code, ran.err) == (0, "")
    assert drivers[0].facts.name in ran.out.splitlines()[0]
    assert "thread" not in ran.out


def test_plan(run: Run, path: str, drivers: list[EmulatedDriver]) -> None:
    """Each step's time is the driver's, and kinds are those of the CPU's kernels."""
    args = ["plan", path, "-p", "3", "--device", "cuda"]
    steps = of_json(run, *args)
    found = of_json(run, *args, "--profile")
    assert [step["label"] for step in found["steps"]] == [step["label"] for step in steps]
    assert {step["seconds"] for step in found["steps"]} == {1.0}
    assert found["sum_s"] == len(steps)
    kinds = {kind["kind"] for kind in found["kinds"]}
    assert kinds == {"matmul", "attention", "norm", "rope", "pack", "embed", "top"}
    assert list(found["peaks"]) == ["bandwidth"]


def test_perplexity(run: Run, path: str, drivers: list[EmulatedDriver], tmp_path: Path) -> None:
    """Beside the same model on the CPU: so a card's own rounding is measured."""
    text = tmp_path / "text"
    text.write_text(TEXT * 6)
    args = ["perplexity", path, str(text), "-c", "16", "--chunks", "1", "--kv", "f32"]
    found = of_json(run, *args, "--kl-from", path, "--device", "cuda")
    assert len(drivers) == 1  # the reference's device is the CPU
    assert found["ratio"]["value"] == pytest.approx(1, abs=1e-3)
    assert found["kl_max"] < 1e-5
    assert found["top1"]["value"] == 1


def test_imatrix(run: Run, path: str, drivers: list[EmulatedDriver], tmp_path: Path) -> None:
    (text := tmp_path / "text").write_text(TEXT * 6)
    made = []
    for name in ("cuda", "cpu"):
        args = ["imatrix", path, str(text), "-c", "16", "--chunks", "1", "--device", name]
        assert run(*args, "-o", str(tmp_path / name)).code == 0
        made.append(read(tmp_path / name).entries)
    assert made[0].keys() == made[1].keys()
    for name, entry in made[0].items():
        theirs = made[1][name].sums
        assert np.allclose(entry.sums, theirs, rtol=1e-2, atol=1e-2 * theirs.mean()), name
    assert len(drivers) == 1


def test_embed(run: Run, path: str, drivers: list[EmulatedDriver]) -> None:
    ours, theirs = (
        of_json(run, "embed", path, "dog", "cat", "-c", "64", "--device", name)
        for name in ("cuda", "cpu")
    )
    for a, b in zip(ours, theirs, strict=True):
        assert a["embedding"] == pytest.approx(b["embedding"], abs=1e-3)
    assert len(drivers) == 1


def test_serve(
    run: Run, path: str, drivers: list[EmulatedDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is served is on the card; ``tests/devices/cuda/test_served.py`` has the rest."""
    found: list[Any] = []

    def serve(model: treadle.Model, settings: object, port: int, grace: float, ready: Any) -> None:
        found.append(model.engine.device)
        ready("http://there")

    monkeypatch.setattr("treadle.server.serve.serve", serve)
    ran = run("serve", path, "--device", "cuda", "-c", "64", "--sequences", "2")
    assert (ran.code, ran.out) == (0, "http://there\n")
    assert "is ready: emulated GPU, up to 64 tokens per request" in ran.err
    assert isinstance(found[0], Cuda)


# -- what is refused ------------------------------------------------------------------------------

WORDS = {
    "run": ["x"],
    "chat": [],
    "bench": [],
    "plan": ["--profile"],
    "perplexity": [__file__],
    "embed": ["x"],
    "rerank": ["x", "y"],
    "imatrix": [__file__, "-o", "{tmp}/out"],
    "serve": [],
}


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize("command", WORDS)
def test_without_a_driver_it_is_one_clear_line(
    command: str, run: Run, path: str, tmp_path: Path
) -> None:
    words = [word.format(tmp=tmp_path) for word in WORDS[command]]
    ran = run(command, path, *words, "--device", "cuda")
    assert (ran.code, ran.out) == (1, "")
    why = "no GPU driver found: cannot load libabsent.so.1 or absent.dll"
    assert ran.err == f"treadle: error: {why}\n"


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("tpu", "'tpu': expected one of cpu, cuda, wgpu"),
        ("", "'': expected one of cpu, cuda, wgpu"),
        ("cuda:x", "'cuda:x': expected a number, as in 'cuda:1'"),
        ("cpu:1", "'cpu:1': 'cpu' takes no number"),
        ("wgpu:1", "'wgpu:1': 'wgpu' takes no number"),
    ],
)
def test_names_of_no_device_are_wrong_usage(device: str, why: str, run: Run, path: str) -> None:
    ran = run("run", path, "x", "--device", device)
    assert (ran.code, ran.out) == (2, "")
    wrong = f"treadle: error: Invalid value for '--device': {why}"
    assert ran.err == f"{wrong}\nSee 'treadle run --help'.\n"


@pytest.mark.parametrize(
    ("device", "why"), [("cuda:9", "no GPU 9: this process can use 2, numbered from 0")]
)
def test_devices_that_there_are_not(
    device: str, why: str, run: Run, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCuda(count=2)
    monkeypatch.setattr(libcuda, "CudaDriver", lambda ordinal: CudaDriver(ordinal, Library(fake)))
    ran = run("run", path, "x", "--device", device)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"treadle: error: {why}\n"
    assert not fake.kept


# -- doctor ---------------------------------------------------------------------------------------


@pytest.fixture
def no_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processors' are not measured: that takes a second."""

    def measure(*_: object, **named: object) -> None:
        raise CacheError("not now")

    monkeypatch.setattr("treadle.profiling.peaks.measure_peaks", measure)


@pytest.mark.usefixtures("no_peaks")
def test_doctor_names_the_card(run: Run, drivers: list[EmulatedDriver]) -> None:
    gpu = of_json(run, "doctor")["gpu"]
    (driver,) = drivers
    assert gpu["cuda"] == driver.facts.name
    assert (gpu["driver"], gpu["compute_capability"]) == ("CUDA 12.0", "8.0")
    assert gpu["multiprocessors"] == driver.facts.n_units
    assert gpu["memory_bytes"] == gpu["free_bytes"] == driver.facts.n_bytes
    assert gpu["copy_bytes_s"] > 0
    assert f"cuda                {driver.facts.name}" in run("doctor").out


@pytest.mark.usefixtures("no_peaks", "no_driver")
def test_doctor_says_why_there_is_no_card(run: Run) -> None:
    assert of_json(run, "doctor")["gpu"]["cuda"].startswith("no GPU driver found: ")
