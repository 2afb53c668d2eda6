"""Adapters of modules that become matrices by rules: against transformers' merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert import test_hf_hybrids as hybrids
from tests.convert import test_hf_mamba as mamba
from tests.convert.test_hf import convert, prompt, worst
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import own
from tests.loras import write_peft
from tests.models.hf_tiny import compute_logits
from tests.tiny import rounding
from treadle.convert.hf.families.registry import FAMILIES
from treadle.convert.lora.lora import open_adapter
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

# The modules whose rows or columns lie otherwise, or that have other names by their kind.
CASES = {
    "qwen35": (hybrids.CASES["qwen35"], ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj")),
    "qwen3next": (hybrids.CASES["qwen3next"], ("in_proj_qkvz", "in_proj_ba", "out_proj")),
    "falconh1": (mamba.FURTHER["falconh1-factors"], ("q_proj", "gate_proj", "up_proj", "in_proj")),
    "granitehybrid": (mamba.CASES["granitehybrid"], ("input_linear", "output_linear")),
    "granite-dense": (mamba.FURTHER["granite-dense"], ("input_linear", "in_proj", "q_proj")),
    "granite": (mamba.FURTHER["granite-attention"], ("input_linear", "output_linear")),
    "nemotronh": (mamba.CASES["nemotronh"], ("in_proj", "q_proj")),
}


def test_llamas_adapters_have_the_row_order_of_llama() -> None:
    """Helium is a Llama too, with rows in GGUF's order: it must not come first."""
    llamas = [family for family in FAMILIES.values() if family.arch == "llama"]
    assert llamas[0] is FAMILIES["llama"]
    assert [family.paired for family in llamas].count(True) == 1
    assert not llamas[0].paired


def write_merged(model: Any, kinds: tuple[str, ...], folder: Path) -> Path:
    """An adapter of all modules of these names, which are merged into ``model``."""
    import torch

    rng = np.random.default_rng(3)
    tensors = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or not name.endswith(kinds):
            continue
        m, k = module.weight.shape
        a = (rng.standard_normal((4, k)) / np.sqrt(k)).astype(np.float32)
        b = (rng.standard_normal((m, 4)) / 4).astype(np.float32)
        for side, half in (("A", a), ("B", b)):
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = half
        with torch.no_grad():
            module.weight += torch.from_numpy(2.0 * b.astype(np.float64) @ a)  # alpha / r
    found = {name.split(".")[-3] for name in tensors}
    assert found == set(kinds)
    return write_peft(folder, tensors)


@pytest.mark.parametrize("name", CASES)
def test_against_merged_weights(name: str, tmp_path: Path) -> None:
    case, kinds = CASES[name]
    model = save(own(case), tmp_path / "hf")
    ids = prompt()
    file = convert(tmp_path / "hf", tmp_path / "made.gguf")
    bare = compute_logits(model, ids)
    adapter = write_merged(model, kinds, tmp_path / "lora")
    expected = compute_logits(model, ids)
    for path in (tmp_path / "hf", file):
        with treadle.load(path, threads=1, kv="f32", lora=[adapter]) as loaded:
            bound = rounding(loaded.config)
            assert worst(bare, expected) > 100 * bound
            assert worst(loaded.logits(ids), expected) <= 2 * bound  # the adapter's products too


def one_module(folder: Path, module: str, m: int, k: int) -> Path:
    pair = {"A": np.zeros((4, k), np.float32), "B": np.zeros((m, 4), np.float32)}
    at = f"base_model.model.model.layers.0.{module}.lora_"
    return write_peft(folder, {f"{at}{side}.weight": half for side, half in pair.items()})


def test_what_cannot_be_mapped_says_so(tmp_path: Path, data: Path) -> None:
    folder = one_module(tmp_path / "lora", "self_attn.kv_b_proj", 64, 32)
    with pytest.raises(UnsupportedError, match=r"kv_b_proj.*: its adapter cannot be mapped"):
        treadle.load(data / "arch" / "deepseek3.gguf", lora=[folder])


@pytest.mark.parametrize(
    ("name", "module", "n"),
    [
        ("mixtral", "block_sparse_moe.gate", 4),
        ("mixtral", "mlp.gate", 4),
        ("minimaxm2", "mlp.gate", 8),
        ("granitemoe", "block_sparse_moe.router.layer", 8),
        ("granitemoe", "block_sparse_moe.router", 8),
    ],
)
def test_routers_as_transformers_5_calls_them(
    name: str, module: str, n: int, tmp_path: Path, data: Path
) -> None:
    """Its files call them as before."""
    folder = one_module(tmp_path / "lora", module, n, 64)
    with open_gguf(data / "arch" / f"{name}.gguf") as gguf:
        assert [*open_adapter(folder, gguf, load_config(gguf)).ranks] == [
            "blk.0.ffn_gate_inp.weight"
        ]


def test_factors_that_a_file_does_not_say(tmp_path: Path, data: Path) -> None:
    """llama.cpp's converter multiplies the weights and does not say by what."""
    path = data / "arch" / "falconh1.gguf"
    folder = one_module(tmp_path / "scaled", "self_attn.q_proj", 128, 64)
    with pytest.raises(
        UnsupportedError, match=r"attention_in_multiplier, which this GGUF file lacks: load"
    ):
        treadle.load(path, lora=[folder])
    folder = one_module(tmp_path / "plain", "feed_forward.up_proj", 7, 64)
    with pytest.raises(FileError, match=r"blk\.0\.ffn_up\.weight: .*shapes"):
        treadle.load(path, lora=[folder])  # named, and held against the matrix


def test_halves_of_another_shape(tmp_path: Path, data: Path) -> None:
    folder = one_module(tmp_path / "lora", "linear_attn.in_proj_z", 7, 64)
    with pytest.raises(
        FileError, match=r"shape \[7, 4\] does not fit the conversion to blk\.0\.attn_gate\.weight"
    ):
        treadle.load(data / "arch" / "qwen35.gguf", lora=[folder])
