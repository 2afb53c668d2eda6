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
from treadle.convert.lora.lora import open_adapter
from treadle.convert.open import open_model
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.models.load import load_config

RANK = 3
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
AT = "base_model.model.model.layers.{}.mlp.experts{}.lora_{}.weight"


def write_merged(model: Any, folder: Path, *, turned: bool, wrong: bool) -> Path:
    """An adapter of the experts of all layers but the first, which is merged into ``model``; its
    parameters are ``[E, k, m]`` if ``turned``. ``wrong``: as PEFT has A and B where it takes them
    to be the other way round.
    """
    import torch

    rng = np.random.default_rng(3)
    tensors: dict[str, np.ndarray] = {}
    for i, layer in enumerate(model.model.layers[1:], 1):
        for target, base, alpha in zip(BOTH, (".base_layer", ""), (6, 12), strict=True):
            w = getattr(layer.mlp.experts, target.rpartition(".")[2])
            n, first, last = w.shape
            given, gives = (first, last) if turned != wrong else (last, first)
            a = (rng.standard_normal((RANK * n, given)) / np.sqrt(given)).astype(np.float32)
            b = (rng.standard_normal((gives, RANK * n)) / 4).astype(np.float32)
            tensors |= {AT.format(i, base, side): half for side, half in (("A", a), ("B", b))}
            by_expert = a.reshape(n, RANK, given), b.reshape(gives, RANK, n)
            order = "eri,ore->eio" if turned != wrong else "eri,ore->eoi"
            with torch.no_grad():
                delta = np.einsum(order, *(each.astype(np.float64) for each in by_expert))
                w += torch.from_numpy(alpha / RANK * delta)
    config = {"target_parameters": BOTH, "alpha_pattern": {"experts.down_proj": 12}}
    return write_peft(folder, tensors, r=RANK, lora_alpha=6, **config)


@pytest.mark.parametrize(
    ("name", "turned", "wrong"),
    [("mixtral", False, False), ("mixtral", False, True), ("gpt-oss", True, False)],
    ids=["mixtral", "mixtral, old", "gpt-oss"],
)
def test_logits_are_those_of_the_merged_model(
    name: str, turned: bool, wrong: bool, tmp_path: Path
) -> None:
    """The folder, and the GGUF file that is made of it; gpt-oss' gates and ups take turns."""
    model = save(own(CASES[name]), tmp_path / "hf")
    ids = prompt()
    file = convert(tmp_path / "hf", tmp_path / "model.gguf")
    bare = compute_logits(model, ids)
    folder = write_merged(model, tmp_path / "lora", turned=turned, wrong=wrong)
    expected = compute_logits(model, ids)
    gguf = tmp_path / "lora.gguf"
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


SQUARE = {"A": np.arange(24.0 * 64).reshape(24, 64), "B": np.zeros((64, 24))}  # gates and ups
OTHERS = {  # downs, as A is of what they are given, and of what they give
    True: {"A": np.ones((24, 32)), "B": np.ones((64, 24))},
    False: {"A": np.ones((24, 64)), "B": np.ones((32, 24))},
}


@pytest.mark.parametrize("version", [None, "0.18.1", "0.19"])
@pytest.mark.parametrize("others", [None, True, False])
def test_square_ones_lie_as_others_do(
    tmp_path: Path, data: Path, version: str | None, others: bool | None
) -> None:
    """Alone as their version of PEFT has them."""
    pairs = {".base_layer": SQUARE} | ({"": OTHERS[others]} if others is not None else {})
    tensors = {AT.format(0, at, side): pairs[at][side] for at in pairs for side in "AB"}
    folder = write_peft(tmp_path / "lora", tensors, target_parameters=BOTH, peft_version=version)
    with open_model(data / "arch" / "qwen3moe.gguf") as gguf:
        low = open_adapter(folder, gguf, load_config(gguf)).ranks["blk.0.ffn_up_exps.weight"]
        straight = version == "0.19" if others is None else others
        assert (bool(low.a().any()), bool(low.b().any())) == (straight, not straight)


def test_square_ones_that_nothing_tells_of(tiny: Any, tmp_path: Path) -> None:
    """PEFT has them either way, by what transformers says of its module."""
    model = tiny("gpt-oss", "F32", n_expert=8, n_ff_exp=64)
    tensors = {AT.format(0, "", side): half for side, half in SQUARE.items()}
    folder = write_peft(tmp_path / "lora", tensors, target_parameters=BOTH, peft_version="0.19.1")
    with pytest.raises(UnsupportedError, match=r"experts\.lora_A\.weight: a square matrix"):
        treadle.load(model, lora=[folder])


def test_two_parameters_that_are_alike(tmp_path: Path, data: Path) -> None:
    folder = write(tmp_path / "lora", (24, 64), (32, 24), "experts.gate_proj", "experts.up_proj")
    with pytest.raises(UnsupportedError, match="gate_proj and up_proj have the same shape"):
        treadle.load(data / "arch" / "qwen3moe.gguf", lora=[folder])


def test_targets_that_are_no_names(tmp_path: Path, data: Path) -> None:
    folder = write(tmp_path / "lora", (24, 64), (64, 24), *BOTH)
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace(f'"{BOTH[0]}"', "7"))
    with pytest.raises(TreadleError, match=r"target_parameters: is .*expected a list of names"):
        treadle.load(data / "arch" / "qwen3moe.gguf", lora=[folder])
