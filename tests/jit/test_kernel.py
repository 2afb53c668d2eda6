"""From a spec to an address: traced once, compiled once, kept, and found again without LLVM's
front end.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from llvmlite.binding.context import GlobalContextRef

from tests.jit.emit import ir_text
from treadle.errors import CacheError, CompileError
from treadle.isa.portable import PORTABLE
from treadle.jit import cache, kernel
from treadle.jit.builder import Builder
from treadle.jit.compile import emit_object, optimise
from treadle.jit.kernel import isa_key, load_kernels, object_code, trace
from treadle.jit.types import f32, i32
from treadle.jit.values import Val
from treadle.kernels.elementwise.elementwise import Embed

SPEC = Embed("F32", 32)


@pytest.fixture
def folder(own_kernels: Path) -> Path:
    return own_kernels


def test_tracing_is_a_function_of_the_spec() -> None:
    assert trace(SPEC, PORTABLE) == trace(SPEC, PORTABLE)
    assert trace(SPEC, PORTABLE) != trace(Embed("F32", 64), PORTABLE)


def test_a_miss_compiles_and_keeps(folder: Path) -> None:
    code = object_code(SPEC, PORTABLE)
    assert code[:4] == b"\x7fELF"
    assert cache.read(SPEC.name, isa_key(PORTABLE)) == code


def test_compiling_gives_the_same_bytes() -> None:
    text = trace(SPEC, PORTABLE)
    assert emit_object(text, PORTABLE) == emit_object(text, PORTABLE)


def test_a_hit_neither_traces_nor_compiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = object_code(SPEC, PORTABLE)
    monkeypatch.setattr(kernel, "trace", None)
    assert object_code(SPEC, PORTABLE) == code
    monkeypatch.setenv("TREADLE_NO_COMPILE", "1")
    assert object_code(SPEC, PORTABLE) == code


def test_a_miss_is_an_error_where_compiling_is_forbidden(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREADLE_NO_COMPILE", "1")
    with pytest.raises(
        CacheError, match=r"embed_F32_k32 is not in the cache .*kernels, and TREADLE_NO_COMPILE=1"
    ):
        object_code(SPEC, PORTABLE)


def test_a_truncated_object_is_compiled_again(folder: Path) -> None:
    code = object_code(SPEC, PORTABLE)
    (file,) = folder.glob("*.o")
    file.write_bytes(file.read_bytes()[:100])
    assert load_kernels([SPEC], PORTABLE)[SPEC.name]
    assert cache.read(SPEC.name, isa_key(PORTABLE)) == code


def test_a_refused_cache_costs_a_line_and_no_more(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with caplog.at_level(logging.WARNING, "treadle"):
        assert object_code(SPEC, PORTABLE)[:4] == b"\x7fELF"
        object_code(SPEC, PORTABLE)
    assert len(caplog.records) == 1
    assert "writable by other users" in caplog.text
    assert list(folder.iterdir()) == [], "nothing was read from it or written to it"
    monkeypatch.setenv("TREADLE_NO_COMPILE", "1")
    with pytest.raises(CacheError, match="writable by other users"):
        object_code(SPEC, PORTABLE)


def test_each_kernel_is_loaded_once_and_told(folder: Path) -> None:
    told: list[tuple[str, int, int]] = []
    specs = [SPEC, Embed("F32", 64), SPEC]
    first = load_kernels(specs, PORTABLE, lambda *step: told.append(step))
    assert list(first) == ["embed_F32_k32", "embed_F32_k64"]
    assert told[-1] == ("compile", 2, 2)
    assert load_kernels(specs, PORTABLE) == first


def test_ctrl_c_in_the_linker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM has the library by then; its name was wanted again, and refused for good."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("treadle.jit.elf.load", lambda symbol, code: None)
    with monkeypatch.context() as patch:
        patch.setattr("llvmlite.binding.orcjit.ResourceTracker", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_kernels([SPEC], PORTABLE)
    assert load_kernels([SPEC], PORTABLE)[SPEC.name]


def test_a_module_is_in_no_context_that_llvm_empties_as_it_ends() -> None:
    """Or a child that was forked in the middle of ``optimise`` aborts when it exits."""
    module = optimise(trace(SPEC, PORTABLE), PORTABLE)
    assert not isinstance(module._context, GlobalContextRef)


def test_ir_that_llvm_refuses_is_a_compile_error() -> None:
    def build(k: Builder, p: Val) -> None:
        k.call("llvm.fabs.f32", f32, [k.const(1, i32).ir])

    with pytest.raises(CompileError, match="LLVM rejects"):
        emit_object(ir_text(PORTABLE, 1, build), PORTABLE)


def test_a_warm_start_does_not_import_the_emitter(folder: Path) -> None:
    """A kernel that is in the cache is linked and no more; with compiling forbidden it works as
    well.
    """
    object_code(SPEC, PORTABLE)
    script = (
        "import sys\n"
        "from treadle.isa.portable import PORTABLE\n"
        "from treadle.jit.kernel import load_kernels\n"
        "from treadle.kernels.elementwise.elementwise import Embed\n"
        "assert load_kernels([Embed('F32', 32)], PORTABLE)['embed_F32_k32']\n"
        "print('treadle.jit.values' in sys.modules)\n"
    )
    source = str(Path(kernel.__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": source, "TREADLE_NO_COMPILE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "False", "")


def test_threads_that_want_one_kernel_make_it_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llvmlite's tables and LLVM's linker are for one thread at a time."""
    traced: list[int] = []
    wanted = threading.Event()
    second = threading.Thread(target=load_kernels, args=([SPEC], PORTABLE, lambda *_: wanted.set()))

    def slow(*args: Any) -> str:
        if not traced:
            second.start()
            assert wanted.wait(60)  # past its look for a kernel that is there
        traced.append(1)
        return trace(*args)

    monkeypatch.setattr(kernel, "trace", slow)
    load_kernels([SPEC], PORTABLE)
    second.join()
    assert traced == [1]
