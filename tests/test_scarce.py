"""Models that memory does not hold: experts are asked for as chosen, and users are told."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import treadle
from tests.conftest import WriteTiny
from tests.kernels.asked import ADVICE, Asked
from treadle.api.model import Model
from treadle.cli import load
from treadle.cli.stats import disk
from treadle.devices.cpu import residence
from treadle.devices.cpu.residence import Shortage
from treadle.engine.batch import BatchItem
from treadle.machine.memory import MemoryBound
from treadle.system import SYSTEM

BOUND = MemoryBound(1000, 5000, "the limit of a test", "raise it")
SHORT = Shortage(3 << 30, 1 << 30, BOUND)
SIZES = {"n_expert": 7, "n_ff_exp": 64}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residence, "shortage", lambda paths: SHORT)


def run(model: Model, n_tokens: int) -> np.ndarray:
    seq = model.engine.cache.sequence()
    try:
        return model.engine.run([BatchItem(seq, list(range(3, 3 + n_tokens)))])
    finally:
        seq.close()


def chosen(model: Model, n_tokens: int) -> dict[int, set[int]]:
    """Each layer's experts, by the numpy twins."""
    found = {}
    for i in range(len(model.config.layers)):
        label = f"L{i}.ffn.route"
        seq = model.engine.cache.sequence()
        parts = [BatchItem(seq, list(range(3, 3 + n_tokens)))]
        plan, arena = model.engine.run_reference(parts, until=label)
        seq.close()
        (step,) = plan.match(label)
        spec: Any = step.spec
        at = plan.offsets[step.args["chosen"]]
        found[i] = set(arena[at : at + 4 * n_tokens * spec.n_used].view(np.int32).tolist())
    return found


@pytest.mark.parametrize("n_tokens", [1, 40])
@pytest.mark.parametrize(
    ("arch", "fmt", "matrices"),
    [("qwen3moe", "Q8_0", ("gate", "up", "down")), ("gpt-oss", "BF16", ("gate", "up", "down"))],
)
def test_experts_are_asked_for(
    arch: str,
    fmt: str,
    matrices: tuple[str, ...],
    n_tokens: int,
    tiny: WriteTiny,
    short: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that are chosen, all of their matrices, before the products; no others."""
    path = tiny(arch, fmt, **SIZES)
    asked = Asked()
    monkeypatch.setattr(SYSTEM, "fetch_call", lambda: (asked.address, ADVICE))
    with treadle.load(path, threads=2, context=640) as model:
        layers = chosen(model, n_tokens)
        asked.clear()
        run(model, n_tokens)
        expected = set()
        for i, experts in layers.items():
            for name in matrices:
                tensor = model.gguf.tensors[f"blk.{i}.ffn_{name}_exps.weight"]
                (array,) = tensor.arrays
                each = array.nbytes // tensor.shape[0]
                for expert in experts:
                    begin = array.ctypes.data + expert * each
                    early = begin % mmap.PAGESIZE
                    expected.add((begin - early, each + early, ADVICE))
        assert set(asked) == expected


def test_the_same_bits(tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the system's own calls."""
    path = tiny("qwen3moe", "Q8_0", **SIZES)
    made = []
    for _ in range(2):
        with treadle.load(path, threads=2, context=640) as model:
            made.append([run(model, n) for n in (1, 40)])
            assert bool(model.engine.plan(1).match("*.fetch")) == (len(made) == 2)
        monkeypatch.setattr(residence, "shortage", lambda paths: SHORT)
    for a, b in zip(*made, strict=True):
        assert np.array_equal(a, b)


def test_shortage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file has of memory already is there for it, where it counts as taken."""
    path = tmp_path / "model"
    page = mmap.PAGESIZE
    path.write_bytes(os.urandom(10 * page))
    size = path.stat().st_size

    def given(free: int, of_files: int = 0) -> Shortage | None:
        bounds = [MemoryBound(1 << 30, 1 << 30, "a", "b"), MemoryBound(free, 0, "c", "d", of_files)]
        monkeypatch.setattr(residence, "page_bounds", lambda *where: bounds)
        return residence.shortage([path])

    assert given(size) is None
    monkeypatch.setattr(residence, "resident_bytes", lambda path: 3 * page)
    assert given(size - 3 * page, 5 * page) is None
    short = given(size - 3 * page - 1, 5 * page)
    assert short is not None
    assert (short.n_bytes, short.free_bytes, short.bound.what) == (size, size - 1, "c")
    short = given(size - 3 * page)  # of free memory pages of files are a part
    assert short is not None
    assert short.free_bytes == size - 3 * page
    path.unlink()
    assert given(0) is None
    monkeypatch.setattr(residence, "page_bounds", lambda *where: [])
    assert residence.shortage([tmp_path]) is None


def test_users_are_told(
    tiny: WriteTiny,
    short: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress: Any = SimpleNamespace(close=lambda: None)
    for arch, cost in (
        ("qwen3moe", "experts are read from disk when"),
        ("llama", "every token reads"),
    ):
        sizes = SIZES if arch == "qwen3moe" else {}
        path = tiny(arch, "Q8_0", **sizes)
        with treadle.load(path) as model:
            text = load.from_disk(model)
            assert (
                f"{path.name} needs 3.0 GiB, but memory has 1.0 GiB (the limit of a test)" in text
            )
            assert cost in text
            monkeypatch.setattr(residence, "read_bytes", lambda: 5 << 20)
            assert disk(model) == "5.0 MiB read"
            monkeypatch.setattr(residence, "read_bytes", lambda: None)
            assert disk(model) == ""
        load.load_model(str(path), progress).close()
        assert capsys.readouterr().err == ""  # so small ones fit
        monkeypatch.setattr(load, "WORTH_ASKING", 0)
        load.load_model(str(path), progress).close()
        assert text in capsys.readouterr().err.replace("\n", " ")
        monkeypatch.setattr(load, "WORTH_ASKING", 1 << 28)


def test_what_was_read(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    assert residence.read_bytes(tmp_path) is None
    (tmp_path / "self" / "io").write_text("rchar: 9\nread_bytes: 4096\nwrite_bytes: 7\n")
    assert residence.read_bytes(tmp_path) == 4096


def test_a_file_without_its_name(tiny: WriteTiny, tmp_path: Path) -> None:
    """It is gone before the first plan asks how large it is."""
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny("qwen3moe", "Q8_0", **SIZES).read_bytes())
    with treadle.load(path, threads=1, context=640) as model:
        path.unlink()
        assert np.isfinite(run(model, 4)).all()


LIMITED = """
import resource, sys
from pathlib import Path
from treadle.devices.cpu import residence
from treadle.machine.memory import MemoryBound
path = Path(sys.argv[1])
residence.page_bounds = lambda *where: [MemoryBound(1 << 20, 1 << 20, "a limit", "raise it")]
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
assert residence.resident_bytes(path) is None
assert residence.huge_bytes(path) is None
short = residence.shortage([path])
assert (short.n_bytes, short.free_bytes) == (8 << 30, 1 << 20), short
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS, and a file of holes")
def test_a_model_that_a_process_may_not_map(tmp_path: Path) -> None:
    """``ulimit -v``: nobody can say how much of it is in memory."""
    path = tmp_path / "model.gguf"
    path.touch()
    os.truncate(path, 8 << 30)
    command = [sys.executable, "-W", "error", "-c", LIMITED, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
