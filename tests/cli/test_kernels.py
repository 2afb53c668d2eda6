from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

import treadle.jit
import treadle.profiling
from tests.cli.conftest import Run
from treadle.jit.cache import CachedKernel


@pytest.fixture(autouse=True)
def cached(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        CachedKernel("rmsnorm_k64", 2048, "avx2"),
        CachedKernel("gemv_F32_f32_k64", 4096, "avx2"),
    ]
    cache = SimpleNamespace(entries=lambda: list(entries))
    inspect = SimpleNamespace(ir=lambda name: f"; IR of {name}", asm=lambda name: f"{name}:\n ret")
    monkeypatch.setattr(treadle.jit, "cache", cache, raising=False)
    monkeypatch.setattr(treadle.profiling, "kernel_inspect", inspect, raising=False)


def test_the_list(run: Run) -> None:
    ran = run("kernels")
    assert (ran.code, ran.err) == (0, "")
    assert [line.split() for line in ran.out.splitlines()] == [
        ["kernel", "code", "isa"],
        ["gemv_F32_f32_k64", "4.0", "KiB", "avx2"],
        ["rmsnorm_k64", "2.0", "KiB", "avx2"],
    ]


def test_json(run: Run) -> None:
    assert json.loads(run("kernels", "--json").out)[0] == {
        "name": "rmsnorm_k64",
        "n_bytes": 2048,
        "isa": "avx2",
    }


def test_the_code_of_one(run: Run) -> None:
    assert run("kernels", "rmsnorm_k64", "--ir").out == "; IR of rmsnorm_k64\n"
    assert run("kernels", "rmsnorm_k64", "--asm").out == "rmsnorm_k64:\n ret\n"
    assert len(run("kernels", "rmsnorm_k64").out.splitlines()) == 2


def test_a_name_that_is_not_there(run: Run) -> None:
    ran = run("kernels", "rmsnorm_64", "--asm")
    assert (ran.code, ran.out) == (1, "")
    assert "did you mean rmsnorm_k64?" in ran.err
    assert run("kernels", "--ir").code == 2


def test_code_is_no_json(run: Run) -> None:
    ran = run("kernels", "rmsnorm_k64", "--ir", "--json")
    assert (ran.code, ran.out) == (2, "")
