from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.fake import FakeModel
from treadle.cli import bench

FIELDS = [
    "test", "depth", "threads", "sequences", "tok_s", "tok_s_min", "tok_s_max", "bytes_s", "ops_s",
    "share_of_peak", "engine",
]  # fmt: skip


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that reaches 1 GB/s and 1 Gop/s, on which every timing takes 1, 2, 3 ... ms."""
    ticks = (0.001 * n for i in range(1000) for n in (0, i))
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    peaks = {"bytes_s": 1e9, "q8": 1e9, "bf16": 1e9, "f32": 1e9}
    monkeypatch.setattr(bench, "measured_peaks", lambda model, progress: peaks)


def test_json_has_the_contracts_fields(run: Run, model: FakeModel, gguf: str) -> None:
    ran = run("bench", gguf, "-p", "6", "-n", "4", "-d", "0,8", "-r", "3", "--json")
    assert (ran.code, ran.err) == (0, "")
    results = json.loads(ran.out)
    assert [list(result) for result in results] == [FIELDS] * 4
    assert [(r["test"], r["depth"]) for r in results] == [
        ("pp6", 0), ("tg4", 0), ("pp6", 8), ("tg4", 8),
    ]  # fmt: skip
    first = results[0]  # its repetitions took 1, 2 and 3 ms; the one before is not counted
    assert first["tok_s"] == pytest.approx(6 / 0.002)
    assert first["tok_s_min"] == pytest.approx(6 / 0.003)
    assert first["tok_s_max"] == pytest.approx(6 / 0.001)
    assert first["bytes_s"] == pytest.approx((32 + 216 + 144 + 288) / 0.002)
    assert first["ops_s"] == pytest.approx((6 * 640 + 144) / 0.002)
    least = (32 + 384 * 6 + 256 * 6 + 288) / 1e9
    assert first["share_of_peak"] == pytest.approx(least / 0.002)
    # The next test's took 5, 6 and 7 ms; each of its 4 tokens is a pass over the weights.
    assert results[1]["bytes_s"] == pytest.approx(4 * (32 + 216 + 144 + 288) / 0.006)
    assert results[1]["ops_s"] == pytest.approx(4 * (640 + 144) / 0.006)
    assert (first["threads"], first["sequences"], first["engine"]) == (2, 1, "treadle")


def test_a_model_is_loaded_for_each_number_of_threads(
    run: Run, model: FakeModel, gguf: str
) -> None:
    run("bench", gguf, "-p", "6", "-n", "0", "-d", "8", "-t", "1,2", "-r", "1")
    settings = [call[2] for call in model.calls if call[0] == "load"]
    assert settings == [{"threads": 1, "context": 14}, {"threads": 2, "context": 14}]
    assert model.calls[-1] == ("close",)


def test_what_is_fed(run: Run, model: FakeModel, gguf: str) -> None:
    run("bench", gguf, "-p", "0", "-n", "3", "-d", "600", "-r", "1")
    fed = [call[1:] for call in model.calls if call[0] == "feed"]
    once = [(512, 512), (88, 600), (1, 601), (1, 602), (1, 603)]
    assert fed == once * 2


def test_the_table(run: Run, model: FakeModel, gguf: str) -> None:
    ran = run("bench", gguf, "-p", "6", "-n", "0", "-r", "1")
    header, line = ran.out.splitlines()
    assert header.split()[:4] == ["engine", "test", "depth", "threads"]
    assert line.split()[:5] == ["treadle", "pp6", "0", "2", "6000.0"]


@pytest.mark.parametrize("args", [["-p", "x"], ["-t", "0"], ["-p", "0", "-n", "0"], ["-d", "-1"]])
def test_wrong_numbers(run: Run, model: FakeModel, gguf: str, args: list[str]) -> None:
    assert run("bench", gguf, *args).code == 2


def test_another_program_is_timed_in_turns(
    run: Run, model: FakeModel, gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Llama:
        ctx = "context"

        def __init__(self, path: str, **settings: Any) -> None:
            model.calls.append(("llama", path, settings["n_threads"]))

        def reset(self) -> None:
            pass

        def eval(self, ids: list[int]) -> None:
            model.calls.append(("eval", len(ids)))

    fake = ModuleType("llama_cpp")
    vars(fake).update(Llama=Llama, llama_synchronize=lambda ctx: model.calls.append((ctx,)))
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    against = ["--against", "llama-cpp-python"]
    ran = run("bench", gguf, "-p", "6", "-n", "0", "-r", "2", "--json", *against)
    turns = [call[0] for call in model.calls if call[0] in ("feed", "eval")]
    assert turns == ["feed", "eval"] * 3
    ours, theirs = json.loads(ran.out)
    assert (ours["engine"], theirs["engine"]) == ("treadle", "llama-cpp-python")
    assert theirs["share_of_peak"] is None


def test_another_program_that_is_not_there(
    run: Run, model: FakeModel, gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    ran = run("bench", gguf, "--against", "llama-cpp-python")
    assert ran.code == 1
    assert "pip install 'treadle[bench]'" in ran.err
