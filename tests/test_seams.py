"""The claim "one new file": a toy format, a toy instruction set and a toy architecture, end to end.

Each is registered by one line in its table, and everything else, the file, the config, the kernels,
the plan and the cache, takes it from there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.engine.test_engine import decode, prefill, text
from tests.reference import forward
from tests.tiny import rounding, write_model
from treadle.errors import UnsupportedError
from treadle.formats import FORMATS
from treadle.formats.format import Codes, Format
from treadle.isa import ROWS, portable
from treadle.models.archs import ARCHS, PATTERN, Arch

# -- the new file of a format: 32 weights of two bits, in four planes; w = d * (q - 1) -----------

T2 = np.dtype([("qs", "u1", (8,)), ("d", "<f2")])


def quantize(x: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    out = np.empty(x.shape[:-1], T2)
    d = np.abs(x).max(-1)
    out["d"] = d
    q = np.clip(np.rint(x / d[..., None]) + 1, 0, 2).astype(np.uint8)
    a, b, c, e = np.moveaxis(q.reshape(*q.shape[:-1], 4, 8), -2, 0)
    out["qs"] = a | b << 2 | c << 4 | e << 6
    return out


def dequantize(blocks: np.ndarray) -> np.ndarray:
    planes = [blocks["qs"] >> shift & 3 for shift in (0, 2, 4, 6)]
    q = np.concatenate(planes, -1).astype(np.float32) - np.float32(1)
    scaled: np.ndarray = q * blocks["d"].astype(np.float32)[..., None]
    return scaled


def unpack(k: Any, field: Any) -> list[Any]:
    qs = field("qs")
    return [qs >> shift & 3 for shift in (0, 2, 4, 6)]


TOY_FORMAT = Format(
    "T2",
    4242,
    32,
    T2,
    dequantize,
    quantize,
    "q8",
    Codes(unpack, offset=1, top=3, run=8, order=((0,), (1,), (2,), (3,))),
)

# -- the new file of an instruction set ---------------------------------------------------------

EMITTED: list[int] = []


def dot4(k: Any, acc: Any, w: Any, x: Any, w_max: int = 255) -> Any:
    EMITTED.append(w_max)
    return portable.dot4(k, acc, w, x, w_max)


TOY_ISA = replace(portable.PORTABLE, name="toy", vector_bits=256, regs=24, dot4=dot4)

# -- the new row of an architecture -------------------------------------------------------------

TOY_ARCH = Arch(
    "toy",
    rope="norm",
    activation="gelu",
    embd_scale=True,
    keys=((PATTERN, 2),),
    needs=frozenset({"attn_q_norm.weight", "attn_k_norm.weight", "ffn_down.bias"}),
)


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The three lines; and a kernel cache of their own, as these sources are in no key."""
    monkeypatch.setitem(FORMATS, TOY_FORMAT.ggml_id, TOY_FORMAT)
    monkeypatch.setitem(ROWS, TOY_ISA.name, TOY_ISA)
    monkeypatch.setitem(ARCHS, TOY_ARCH.name, TOY_ARCH)
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "kernels"))
    return tmp_path


@pytest.mark.slow
def test_all_three_end_to_end(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(toys / "toy.gguf", "toy", "T2", window=16)
    monkeypatch.setenv("TREADLE_ISA", "toy")
    monkeypatch.setenv("TREADLE_COMPILE_PROCESSES", "1")  # so that ``EMITTED`` is this process's
    EMITTED.clear()
    with treadle.load(toys / "toy.gguf", threads=2, kv="f32") as model:
        assert model.isa is TOY_ISA
        assert [layer.window for layer in model.config.layers] == [16, 0, 16]
        model.plan(512, 128).check()
        assert {s.kernel.split("_")[1] for s in model.plan().match("L*.qkv")} == {"T2"}
        ids = text(50)
        truth = forward(model.gguf, model.config, ids)
        rows = {"prefill": prefill(model.engine, ids), "decode": decode(model.engine, ids)}
        made = model.generate("hello", max_tokens=5)
        made.finish()
        assert made.timings.n_generated
    assert EMITTED  # the row's own dot
    for way, logits in rows.items():
        # A block's largest value is about 2.2 times its deviation, so 8 bits cost each product
        # 2.2 / 127 / sqrt(12) = 0.5 %; 13 products come one after the other. Twice that.
        error = np.sqrt(np.mean((logits - truth) ** 2) / np.mean(truth**2))
        assert rounding(model.config) < error < 2 * 0.005 * np.sqrt(13), (way, error)


@pytest.mark.slow
def test_the_architecture_in_f32_is_exact(toys: Path) -> None:
    write_model(toys / "toy.gguf", "toy", "F32", window=16)
    with treadle.load(toys / "toy.gguf", threads=2, kv="f32", isa="toy") as model:
        ids = text(50)
        truth = forward(model.gguf, model.config, ids)
        for logits in (prefill(model.engine, ids), decode(model.engine, ids)):
            error = np.abs(logits - truth).max() / np.abs(truth).max()
            assert error <= rounding(model.config)


def test_without_their_rows_they_are_refused(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(toys / "toy.gguf", "toy", "T2")
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(ARCHS, "toy")
        with pytest.raises(UnsupportedError, match="architecture 'toy'"):
            treadle.load(toys / "toy.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(ROWS, "toy")
        with pytest.raises(UnsupportedError, match="toy"):
            treadle.load(toys / "toy.gguf", isa="toy")
    monkeypatch.delitem(FORMATS, TOY_FORMAT.ggml_id)
    with pytest.raises(treadle.TreadleError, match="4242"):
        treadle.load(toys / "toy.gguf")
