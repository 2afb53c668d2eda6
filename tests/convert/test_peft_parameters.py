"""Adapters of all experts in one parameter, as PEFT trains transformers 5's: logits are those of
the model that they are merged into, by the formula that PEFT's ``ParamWrapper`` has.
"""

from __future__ import annotations

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
from treadle.errors import FileError, TreadleError, UnsupportedError

RANK = 3
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
AT = "base_model.model.model.layers.{}.mlp.experts{}.lora_{}.weight"


def write_merged(model: Any, folder: Path, *, turned: bool, old: bool) -> Path:
    """An adapter of the experts of all layers but the first, which is merged into ``model``; its
    parameters are ``[E, k, m]`` if ``turned``. ``old``: as PEFT 0.18.0 had A and B.
    """
    import torch

    rng = np.random.default_rng(3)
    tensors: dict[str, np.ndarray] = {}
    for i, layer in enumerate(model.model.layers[1:], 1):
        for target, base, alpha in zip(BOTH, (".base_layer", ""), (6, 12), strict=True):
            w = getattr(layer.mlp.experts, target.rpartition(".")[2])
            n, first, last = w.shape
            given, gives = (first, last) if turned or old else (last, first)
            a = (rng.standard_normal((RANK * n, given)) / np.sqrt(given)).astype(np.float32)
            b = (rng.standard_normal((gives, RANK * n)) / 4).astype(np.float32)
            tensors |= {AT.format(i, base, side): half for side, half in (("A", a), ("B", b))}
            by_expert = a.reshape(n, RANK, given), b.reshape(gives, RANK, n)
            order = "eri,ore->eio" if turned or old else "eri,ore->eoi"
            with torch.no_grad():
                delta = np.einsum(order, *(each.astype(np.float64) for each in by_expert))
                w += torch.from_numpy(alpha / RANK * delta)
    config = {"target_parameters": BOTH, "alpha_pattern": {"experts.down_proj": 12}}
    return write_peft(folder, tensors, r=RANK, lora_alpha=6, **config)


@pytest.mark.parametrize(
    ("name", "turned", "old"),
    [("mixtral", False, False), ("mixtral", False, True), ("gpt-oss", True, False)],
    ids=["mixtral", "mixtral, old", "gpt-oss"],
)
def test_logits_are_those_of_the_merged_model(
    name: str, turned: bool, old: bool, tmp_path: Path
) -> None:
    """The folder, and the GGUF file that is made of it; gpt-oss' gates and ups take turns."""
    model, ids = save(own(CASES[name]), tmp_path / "hf"), prompt()
    file = convert(tmp_path / "hf", tmp_path / "model.gguf")
    bare = compute_logits(model, ids)
    folder = write_merged(model, tmp_path / "lora", turned=turned, old=old)
    expected, gguf = compute_logits(model, ids), tmp_path / "lora.gguf"
    assert main(["convert", str(folder), str(gguf), "--base", str(file)]) == 0
    for base, lora in ((tmp_path / "hf", folder), (file, folder), (file, gguf)):
        with treadle.load(base, lora=[lora], threads=1, kv="f32") as loaded:
            bound = rounding(loaded.config)
            assert worst(bare, expected) > 100 * bound
            assert worst(loaded.logits(ids), expected) <= 2 * bound


def write(folder: Path, a: tuple[int, ...], b: tuple[int, ...], *targets: str) -> Path:
    names = [AT.format(0, "", side) for side in "AB"]
    tensors = dict(zip(names, (np.ones(a, np.float32), np.ones(b, np.float32)), strict=True))
    return write_peft(folder, tensors, target_parameters=list(targets))


@pytest.mark.parametrize(
    ("a", "b", "targets"),
    [
        ((24, 64), (65, 24), BOTH),
        ((25, 64), (64, 25), BOTH),
        ((24, 64), (64, 23), BOTH),
        ((24, 64, 1), (64, 24), BOTH),
        ((4, 64), (64, 4), BOTH),
        ((24, 64), (64, 24), BOTH[1:]),
    ],
)
def test_shapes_of_no_parameter(
    tmp_path: Path, data: Path, a: tuple[int, ...], b: tuple[int, ...], targets: list[str]
) -> None:
    """Of eight experts, 64 wide and with 32 of their own."""
    folder = write(tmp_path / "lora", a, b, *targets)
    with pytest.raises(FileError, match=r"experts\.lora_A\.weight: shapes \["):
        treadle.load(data / "arch" / "qwen3moe.gguf", lora=[folder])


def test_two_parameters_that_are_alike(tmp_path: Path, data: Path) -> None:
    folder = write(tmp_path / "lora", (24, 64), (32, 24), "experts.gate_proj", "experts.up_proj")
    with pytest.raises(UnsupportedError, match="gate_proj and up_proj are alike"):
        treadle.load(data / "arch" / "qwen3moe.gguf", lora=[folder])


def test_targets_that_are_no_names(tmp_path: Path, data: Path) -> None:
    folder = write(tmp_path / "lora", (24, 64), (64, 24), *BOTH)
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace(f'"{BOTH[0]}"', "7"))
    with pytest.raises(TreadleError, match=r"target_parameters: is .*expected a list of names"):
        treadle.load(data / "arch" / "qwen3moe.gguf", lora=[folder])
