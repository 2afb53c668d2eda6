"""The kernels that measure: they do all the work they count, and nothing else."""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
import pytest

from tests.kernels import rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from treadle.isa.isa import Isa
from treadle.jit.compile import emit_assembly
from treadle.jit.kernel import trace
from treadle.machine import topology
from treadle.profiling import peaks
from treadle.profiling.peaks import (
    LONG,
    PIECE,
    STREAMS,
    DotPeakKernel,
    MatrixDots,
    Peaks,
    StreamReadKernel,
    measure_peaks,
    operands,
)

ACTS = tuple(peaks.DOTS_PER_VALUE)
CASES = [
    (row, act)
    for row in rows.ALL
    for act in ACTS
    if (act != "bf16" or row.dot_bf16) and (act != "q16" or row.shorts or row.dot_words)
]
WHOLE = {"q8", "q16"}  # sums are whole numbers


def ids(value: object) -> str:
    return value.name if isinstance(value, Isa) else str(value)


@pytest.mark.parametrize(("isa", "act"), CASES, ids=ids)
def test_dots_against_the_twin(
    isa: Isa, act: str, memory: Memory, rng: np.random.Generator
) -> None:
    spec = DotPeakKernel(act, *isa.tiles.peak)
    rounds = 5
    n_items = 3
    w = memory.copy(operands(act, spec.mr, isa.lanes, rng))
    x = memory.copy(operands(act, spec.nr, isa.lanes, rng))
    dtype = np.int32 if act in WHOLE else np.float32
    out = memory.array((n_items, spec.mr * spec.nr), dtype)
    args = {"w": w, "x": x, "rounds": rounds}
    call(spec, isa, memory, {**args, "out": out}, Run(), n_items)
    want = np.zeros(spec.mr * spec.nr, dtype)
    spec.run_ref(spec.args(**args, out=want), None)
    # Operands are below 1, so a sum stays below its terms' number; each addition rounds once.
    depth = rounds * peaks.DOTS_PER_VALUE[act] + math.log2(isa.lanes) + 1
    n_terms = rounds * peaks.DOTS_PER_VALUE[act] * isa.lanes
    tolerance = 0.0 if act in WHOLE else depth * U32 * n_terms
    for item in out:
        assert_close(item, want, tolerance, spec.name)


@pytest.mark.parametrize("shape", [*STREAMS, *LONG], ids=str)
@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
def test_streams_against_the_twin(
    isa: Isa, shape: tuple[int, int], memory: Memory, rng: np.random.Generator
) -> None:
    data = memory.copy(rng.integers(0, 256, 3 * PIECE, np.uint8))
    out = memory.array(3, np.int32)
    want = np.zeros(3, np.int32)
    call(
        StreamReadKernel(*shape), isa, memory, {"data": data, "out": out, "piece": PIECE}, Run(), 3
    )
    StreamReadKernel(*shape).run_ref(StreamReadKernel.args(data=data, out=want, piece=PIECE), None)
    np.testing.assert_array_equal(out, want)


def hot_loop(assembly: str) -> list[str]:
    """The instructions of the longest loop without a branch in it."""
    found: list[str] = []
    label = ""
    body: list[str] = []
    for line in map(str.strip, assembly.splitlines()):
        if line.startswith(".L") and ":" in line:
            label = line.partition(":")[0]
            body = []
        elif line and line[0] not in ".#":
            body.append(line)
            if re.fullmatch(rf"j\w+\s+{re.escape(label)}", line) and len(body) > len(found):
                found = body
    return found


DOT = {
    ("avx2", "q8"): "vpmaddubsw",
    ("avx2", "q16"): "vpmaddwd",
    ("avx2", "f32"): "vfmadd231ps",
    ("avx512", "q8"): "vpmaddubsw",
    ("avx512", "q16"): "vpmaddwd",
    ("avx512", "f32"): "vfmadd231ps",
    ("avx512_vnni", "q8"): "vpdpbusd",
    ("avx512_vnni", "f32"): "vfmadd231ps",
    ("avx512_vbmi", "q8"): "vpdpbusd",
    ("avx512_vbmi", "f32"): "vfmadd231ps",
    ("avx512_bf16", "q8"): "vpdpbusd",
    ("avx512_bf16", "bf16"): "vdpbf16ps",
    ("avx512_bf16", "f32"): "vfmadd231ps",
    ("amx_bf16", "q8"): "vpdpbusd",
    ("amx_bf16", "f32"): "vfmadd231ps",
}


@pytest.mark.parametrize("isa", rows.MATRICES, ids=rows.name)
def test_matrix_dots_against_the_twin(isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    spec = MatrixDots()
    rounds = 5
    n_items = 3
    a, b = (memory.copy(operands("bf16", 2 * 16, 16, rng)) for _ in range(2))
    out = memory.array((n_items, 2, 2, 16, 16), np.float32)
    args = {"w": a, "x": b, "rounds": rounds}
    call(spec, isa, memory, {**args, "out": out}, Run(), n_items)
    want = np.zeros((2, 2, 16, 16))
    spec.run_ref(spec.args(**args, out=want), None)
    for item in out:
        assert_close(item, want, rounds * 32 * U32 * rounds * 32, spec.name)


@pytest.mark.skipif(rows.MATRICES[-1] is rows.MADE_UP, reason="no matrix registers here")
def test_the_matrix_loop_is_nothing_but_dots() -> None:
    isa = rows.MATRICES[-1]
    used = [line.split()[0] for line in hot_loop(emit_assembly(trace(MatrixDots(), isa), isa))]
    assert used.count("tdpbf16ps") == 4
    assert len(used) <= 8


@pytest.mark.parametrize(("isa", "act"), CASES, ids=ids)
def test_the_loop_is_nothing_but_dots(isa: Isa, act: str) -> None:
    spec = DotPeakKernel(act, *isa.tiles.peak)
    loop = hot_loop(emit_assembly(trace(spec, isa), isa))
    known = DOT.get((isa.name, act))
    if known is None:  # a dot is many instructions, or one that this test does not know
        assert len(loop) >= spec.mr * spec.nr
        return
    assert not [line for line in loop if "(%rsp)" in line or "(%rbp)" in line], "spilled"
    used = Counter(line.split()[0] for line in loop)
    assert used[known] == spec.mr * spec.nr
    # Beside them: reading the operands, counting, and what else one such dot consists of.
    others = len(loop) - used[known] - used["vpmaddwd"] - used["vpaddd"]
    assert others <= spec.mr + spec.nr + 4, used


@pytest.mark.parametrize("isa", [rows.ALL[0], rows.ALL[-1]], ids=rows.name)
def test_measuring(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "BUFFER_BYTES", (PIECE, PIECE))
    seen: list[tuple[str, int, int]] = []
    found = measure_peaks(isa, 2, 0.001, progress=lambda *now: seen.append(now))
    assert min(found.as_dict().values()) > 0
    assert (found.bf16 is None) == (isa.dot_bf16 is None and isa.matrix is None)
    assert (found.q16 is None) == (isa.tiles.words == (0, 0))
    assert 0 < found.cpu_share <= 1
    n = len(found.as_dict())
    assert seen == [("measure", i, n) for i in range(n + 1)]


def test_what_is_not_there_has_no_rate() -> None:
    found = Peaks(q8=4e11, bf16=None, f32=1e11, bytes_s=2e10, cpu_share=1.0)
    assert found.as_dict() == {"bytes_s": 2e10, "q8": 4e11, "f32": 1e11}


def test_the_long_stream_of_a_buffer_beyond_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads: shares that are no power of two, and a rest that nobody reads."""
    monkeypatch.setattr(peaks, "BUFFER_BYTES", (PIECE, PIECE))
    monkeypatch.setattr(topology, "cache_bytes", lambda *_: 0)
    found = measure_peaks(rows.ALL[-1], 3, 0.001)
    assert found.from_memory
    assert found.stream_bytes_s is not None
    assert found.as_dict()["stream_bytes_s"] == found.stream_bytes_s > 0


def test_what_was_read_from_caches_is_called_so() -> None:
    """And no stream is told: it would be one of the caches too."""
    found = Peaks(4e11, None, 1e11, 2e11, 1.0, 1 << 20, from_memory=False, stream_bytes_s=1e11)
    assert found.as_dict() == {"cache_bytes_s": 2e11, "q8": 4e11, "f32": 1e11}
