"""Adapters of experts, which are merged into the weights and refused at run time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.loras import Pair, write_gguf
from treadle.cli import main
from treadle.convert import output
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf

SIZES = {"n_expert": 4, "n_ff_exp": 32}
WriteTiny = Callable[..., Path]


def draw(model: Path, parts: tuple[str, ...], rank: int = 3) -> dict[str, Pair]:
    """Of each expert its own: A ``[E, rank, k]`` and B ``[E, m, rank]``."""
    rng, made = np.random.default_rng(5), {}
    with open_gguf(model) as gguf:
        for name, tensor in gguf.tensors.items():
            if name.endswith(tuple(f"{part}.weight" for part in parts)):
                *each, m, k = tensor.shape
                a = rng.standard_normal((*each, rank, k)) / np.sqrt(k)
                b = rng.standard_normal((*each, m, rank)) / np.sqrt(rank)
                made[name] = a.astype(np.float32), b.astype(np.float32)
    assert made
    return made


def fused(model: Path, path: Path) -> Path:
    """Each expert's gate and up in one matrix, as llama.cpp's --fuse-gate-up-exps has them."""
    writer = GGUFWriter(path)
    with open_gguf(model) as gguf:
        for key, value in gguf.metadata.items():
            writer.add(key, value)
        for name, tensor in gguf.tensors.items():
            rows = tensor.dequantize()
            if "ffn_gate_exps" in name:
                continue
            if "ffn_up_exps" in name:
                gate = gguf.tensors[name.replace("_up_", "_gate_")].dequantize()
                name, rows = name.replace("_up_", "_gate_up_"), np.concatenate([gate, rows], 1)
            writer.add_tensor(name, rows.shape, "F32", rows)
        writer.write()
    return path


def quantize(model: Path, target: Path, *lora: str | Path) -> int:
    words = (word for each in lora for word in ("--lora", str(each)))
    return main(["quantize", str(model), str(target), "F32", *words])


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("qwen3moe", ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "attn_v")),
        ("fused", ("ffn_gate_up_exps",)),
    ],
)
def test_each_expert_has_its_own_product(
    tiny: WriteTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str,
    parts: tuple[str, ...],
) -> None:  # fmt: skip
    """In strips of seven rows and in one; the scale is 0.5 of alpha / rank."""
    model = tiny("qwen3moe", "F32", **SIZES)
    if kind == "fused":
        model = fused(model, tmp_path / "fused.gguf")
    pairs = draw(model, parts)
    file = write_gguf(tmp_path / "lora.gguf", pairs, arch="qwen3moe", alpha=6.0)
    assert quantize(model, tmp_path / "whole.gguf", f"{file}=0.5") == 0
    monkeypatch.setattr(output, "TASK_WEIGHTS", 7 * 64)
    assert quantize(model, tmp_path / "strips.gguf", f"{file}=0.5") == 0
    for path in (tmp_path / "whole.gguf", tmp_path / "strips.gguf"):
        with open_gguf(model) as gguf, open_gguf(path) as made:
            for name, tensor in gguf.tensors.items():
                w, found = tensor.dequantize(), made.tensors[name].dequantize()
                a, b = pairs.get(name, (None, None))
                if a is None or b is None:
                    assert np.array_equal(found, w), name
                    continue
                for e in np.ndindex(w.shape[:-2]):
                    np.testing.assert_allclose(found[e], w[e] + b[e] @ a[e], atol=1e-5)


@pytest.mark.parametrize("parts", [("gate", "up"), ("up",)], ids="+".join)
def test_gates_and_up_of_a_model_that_has_them_in_one_matrix(
    tiny: WriteTiny, tmp_path: Path, parts: tuple[str, ...]
) -> None:
    apart, target = tiny("qwen3moe", "F32", **SIZES), tmp_path / "made.gguf"
    pairs = draw(apart, tuple(f"ffn_{part}_exps" for part in parts))
    file = write_gguf(tmp_path / "lora.gguf", pairs, arch="qwen3moe", alpha=6.0)
    model = fused(apart, tmp_path / "fused.gguf")
    assert quantize(model, target, f"{file}=0.5") == 0
    with open_gguf(apart) as gguf, open_gguf(target) as made:
        for i in range(3):
            each = []
            for part in ("gate", "up"):
                name = f"blk.{i}.ffn_{part}_exps.weight"
                w: np.ndarray = gguf.tensors[name].dequantize()
                if name in pairs:
                    w = w + pairs[name][1] @ pairs[name][0]
                each.append(w)
            found = made.tensors[f"blk.{i}.ffn_gate_up_exps.weight"].dequantize()
            np.testing.assert_allclose(found, np.concatenate(each, 1), atol=1e-5)
    short = {name: (a[:, :, :-1], b) for name, (a, b) in pairs.items()}
    file = write_gguf(tmp_path / "bad.gguf", short, arch="qwen3moe")
    with pytest.raises(FileError, match=r"for a matrix of shape \[4, 32, 64\]"):
        treadle.load(model, lora=[file])


def pair(*, n: int = 4, m: int = 32, k: int = 64, rank_b: int = 3, flat: bool = False) -> Pair:
    a, b = np.ones((n, 3, k), np.float32), np.ones((n, m, rank_b), np.float32)
    return (a[0], b[0]) if flat else (a, b)


@pytest.mark.parametrize("sizes", [{"n": 3}, {"m": 33}, {"k": 63}, {"rank_b": 4}, {"flat": True}])
def test_pairs_that_do_not_fit(
    tiny: WriteTiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: dict[str, Any]
) -> None:
    model, given = tiny("qwen3moe", "F32", **SIZES), {"blk.0.ffn_up_exps.weight": pair(**sizes)}
    file = write_gguf(tmp_path / "bad.gguf", given, arch="qwen3moe")
    assert quantize(model, tmp_path / "made.gguf", file) == 1
    said = capsys.readouterr().err
    assert "blk.0.ffn_up_exps.weight: shapes [" in said
    assert "[4, rank, 64] and [4, 32, rank], for a matrix of shape [4, 32, 64]" in said
    assert not (tmp_path / "made.gguf").exists()


def test_experts_in_an_adapter_of_a_plain_matrix(tiny: WriteTiny, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "bad.gguf", {"blk.0.attn_q.weight": pair(m=128)})
    with pytest.raises(FileError, match=r"expected \[rank, 64\] and \[128, rank\]"):
        treadle.load(tiny("llama", "F32"), lora=[file])


def test_at_run_time_they_are_refused(tiny: WriteTiny, tmp_path: Path) -> None:
    model = tiny("qwen3moe", "F32", **SIZES)
    file = write_gguf(tmp_path / "lora.gguf", draw(model, ("ffn_up_exps",)), arch="qwen3moe")
    why = (
        r"lora\.gguf: blk\.0\.ffn_up_exps\.weight: an adapter of experts, which cannot be added at "
        "run time: merge it into a copy of the model with 'treadle quantize --lora'"
    )
    with pytest.raises(UnsupportedError, match=why):
        treadle.load(model, lora=[file])


def test_what_an_expert_gives_is_scaled(
    tiny: WriteTiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """llama.cpp adds what an adapter gives behind the scale."""
    others = {"blk.0.ffn_down_exps.scale": (4,)}
    model = tiny("gemma4", "F32", **SIZES, n_layer=1, others=others)
    file = write_gguf(tmp_path / "lora.gguf", draw(model, ("ffn_down_exps",)), arch="gemma4")
    assert quantize(model, tmp_path / "made.gguf", file) == 1
    assert "what blk.0.ffn_down_exps.weight gives is multiplied by it" in capsys.readouterr().err


def test_matrices_by_head_are_no_experts(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = data / "arch" / "deepseek3.gguf"
    file = write_gguf(tmp_path / "lora.gguf", draw(model, ("attn_v_b",)), arch="deepseek2")
    assert quantize(model, tmp_path / "made.gguf", file) == 1
    assert "blk.0.attn_v_b.weight: an adapter of matrices by head" in capsys.readouterr().err
