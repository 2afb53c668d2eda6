"""Adapters with a module an expert, merged: against transformers' models with the same added."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, prompt, worst
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import CASES, own
from tests.loras import write_peft
from tests.models.hf_tiny import compute_logits
from tests.tiny import rounding
from treadle.cli import main
from treadle.errors import FileError
from treadle.files.gguf import open_gguf

# Where the modules of gate, up and down are, before transformers 5 made one parameter of experts'.
NAMES = {
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen3moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
}
WITHOUT = 1  # the expert that has none
RANK = 3


def write_merged(name: str, model: Any, folder: Path, **config: Any) -> Path:
    """An adapter of the experts of all layers but the first, which is merged into ``model``."""
    import torch

    rng = np.random.default_rng(3)
    tensors = {}
    (at, words) = NAMES[name]
    alphas = config.get("alpha_pattern", {})
    for i, layer in enumerate(model.model.layers[1:], 1):
        gate_up = layer.mlp.experts.gate_up_proj
        down = layer.mlp.experts.down_proj
        for e in (e for e in range(len(down)) if e != WITHOUT):
            for word, w in zip(words, (*gate_up[e].chunk(2), down[e]), strict=True):
                m, k = w.shape
                a = (rng.standard_normal((RANK, k)) / np.sqrt(k)).astype(np.float32)
                b = (rng.standard_normal((m, RANK)) / 4).astype(np.float32)
                module = f"model.layers.{i}.{at}.{e}.{word}"
                for side, half in (("A", a), ("B", b)):
                    tensors[f"base_model.model.{module}.lora_{side}.weight"] = half
                alpha = next((alphas[p] for p in alphas if re.search(f"{p}$", module)), 6)
                with torch.no_grad():
                    w += torch.from_numpy(alpha / RANK * b.astype(np.float64) @ a)
    return write_peft(folder, tensors, r=RANK, lora_alpha=6, **config)


@pytest.mark.parametrize(
    ("name", "alphas"), [("mixtral", {r"experts\.2\.\w+": 12}), ("qwen3moe", {})], ids=NAMES
)
def test_logits_are_those_of_the_merged_model(
    name: str, alphas: dict[str, int], tmp_path: Path
) -> None:
    """The folder, and the GGUF file that is made of it."""
    model = save(own(CASES[name]), tmp_path / "hf")
    ids = prompt()
    file = convert(tmp_path / "hf", tmp_path / "model.gguf")
    bare = compute_logits(model, ids)
    folder = write_merged(name, model, tmp_path / "lora", alpha_pattern=alphas)
    expected = compute_logits(model, ids)
    gguf = tmp_path / "lora.gguf"
    for base in (tmp_path / "hf", file):
        assert main(["convert", str(folder), str(gguf), "--base", str(base), "--force"]) == 0
    with open_gguf(gguf) as made, open_gguf(file) as whole:
        n, m, k = whole.tensors["blk.1.ffn_down_exps.weight"].shape
        assert made.tensors["blk.1.ffn_down_exps.weight.lora_a"].shape == (n, RANK, k)
        b = made.tensors["blk.1.ffn_down_exps.weight.lora_b"].dequantize()
        assert b.shape == (n, m, RANK)
        assert [e for e in range(n) if not b[e].any()] == [WITHOUT]
    for i, lora in enumerate((folder, gguf)):
        target = tmp_path / f"{i}.gguf"
        assert main(["quantize", str(file), str(target), "F32", "--lora", str(lora)]) == 0
        with treadle.load(target, threads=1, kv="f32") as loaded:
            bound = rounding(loaded.config)
            assert worst(bare, expected) > 100 * bound
            assert worst(loaded.logits(ids), expected) <= 2 * bound  # the sum is rounded too
    for base, lora in ((file, folder), (file, gguf), (tmp_path / "hf", folder)):
        with treadle.load(base, lora=[lora], threads=1, kv="f32") as loaded:
            assert worst(loaded.logits(ids), expected) <= 2 * bound


def experts(folder: Path, *ranks: int, first: int = 0, dtype: Any = np.float32) -> Path:
    tensors = {}
    for e, rank in enumerate(ranks, first):
        at = f"base_model.model.model.layers.0.mlp.experts.{e}.up_proj.lora_"
        tensors[f"{at}A.weight"] = np.ones((rank, 64), dtype)
        tensors[f"{at}B.weight"] = np.ones((32, rank), dtype)
    return write_peft(folder, tensors)


@pytest.mark.parametrize(
    ("ranks", "first", "why"),
    [
        ((4, 5), 0, r"experts\.1\.up_proj.*shape \[5, 64\].*one rank for all experts"),
        ((4, 4), 7, r"experts\.8\.up_proj.*is of another model \(expected experts 0 to 7\)"),
    ],
)
def test_experts_that_do_not_fit(
    tmp_path: Path, data: Path, ranks: tuple[int, ...], first: int, why: str
) -> None:
    folder = experts(tmp_path / "lora", *ranks, first=first)
    with pytest.raises(FileError, match=why):
        treadle.load(data / "arch" / "qwen3moe.gguf", lora=[folder])


def test_values_that_are_not_finite(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are told by the expert's own name."""
    folder = experts(tmp_path / "lora", 4, 4, 4)
    weights = folder / "adapter_model.safetensors"
    raw = weights.read_bytes()
    weights.write_bytes(raw[:-4] + np.float32(np.nan).tobytes())
    words = [str(data / "arch" / "qwen3moe.gguf"), str(tmp_path / "made.gguf"), "F32"]
    assert main(["quantize", *words, "--allow-requantize", "--lora", str(folder)]) == 1
    said = capsys.readouterr().err
    assert "experts.2.up_proj.lora_B.weight: holds a value that is not a finite number" in said
