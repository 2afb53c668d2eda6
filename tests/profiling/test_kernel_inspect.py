"""From a kernel's name in the cache back to its spec, and to its code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kernels import registry, rows
from treadle.devices.cpu.step_loop import StepLoop
from treadle.errors import CacheError
from treadle.isa import choose
from treadle.jit import cache, kernel
from treadle.jit.host import host_features
from treadle.kernels.elementwise.elementwise import Norm
from treadle.profiling import kernel_inspect

SPEC = Norm("q8", 96, 1, 1e-6, outputs=True)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "kernels"))
    monkeypatch.delenv("TREADLE_NO_COMPILE", raising=False)


def test_every_spec_comes_back_from_json() -> None:
    """All in one test: as tests of their own they cost ten times what they do."""
    for spec in [*registry.ALL, StepLoop()]:
        about = {"name": spec.name, **kernel.describe_spec(spec, rows.ALL[0])}
        back = kernel_inspect.spec_of(json.loads(json.dumps(about)))
        assert (back, type(back), back.name) == (spec, type(spec), spec.name)


def test_the_code_of_a_kernel_in_the_cache() -> None:
    isa = rows.ALL[-1]
    code = kernel.object_code(SPEC, isa)
    assert cache.entries() == [cache.CachedKernel(SPEC.name, len(code), isa.name)]
    assert kernel_inspect.ir(SPEC.name) == kernel.trace(SPEC, isa)
    assert f"{kernel.symbol(SPEC)}:" in kernel_inspect.asm(SPEC.name)


def test_of_several_instruction_sets_the_one_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TREADLE_ISA", raising=False)
    lowest = rows.ALL[0]
    best = choose(host_features())
    kernel.object_code(SPEC, lowest)
    assert kernel_inspect.find(SPEC.name)[1] is lowest  # the only one that is there
    kernel.object_code(SPEC, best)
    assert kernel_inspect.find(SPEC.name)[1] is best
    assert kernel_inspect.find(SPEC.name, lowest.name)[1] is lowest
    monkeypatch.setenv("TREADLE_ISA", lowest.name)
    assert kernel_inspect.find(SPEC.name)[1] is lowest
    with pytest.raises(CacheError, match=r"no kernel .* for sve9 in"):
        kernel_inspect.find(SPEC.name, "sve9")


def test_names_that_cannot_be_looked_into() -> None:
    with pytest.raises(CacheError, match="no kernel gemv_none in"):
        kernel_inspect.ir("gemv_none")
    about = {"name": SPEC.name, **kernel.describe_spec(SPEC, rows.ALL[0])}
    for change, reason in (
        ({"module": "os", "spec": "Norm"}, r"made by os\.Norm, which this version"),
        ({"module": "treadle.kernels.absent"}, "which this version of treadle does not have"),
        ({"spec": "Nrom"}, "which this version of treadle does not have"),
        ({"fields": {"act": "q8"}}, "has other fields in this version"),
        ({"fields": None}, "has other fields in this version"),
    ):
        with pytest.raises(CacheError, match=reason):
            kernel_inspect.spec_of({**about, **change})


def test_an_instruction_set_that_has_no_row() -> None:
    about = kernel.describe_spec(SPEC, rows.ALL[0])
    cache.write(SPEC.name, "key", b"code", {**about, "isa": "sve9"})
    with pytest.raises(CacheError, match="is for sve9, which this version of treadle"):
        kernel_inspect.ir(SPEC.name)
