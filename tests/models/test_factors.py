"""Numbers beside matrices, by which llama.cpp multiplies what these give. Its converter writes them
for NVFP4 checkpoints; here they stand beside matrices in Q8_0 that are as much smaller, by powers
of two, so that the model is the same.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import treadle
from tests.loras import draw_pairs, write_gguf
from treadle.cli import main
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUF, GGUFWriter, open_gguf
from treadle.formats import by_name

ARCHS = (
    *("arcee", "glm4", "cohere2", "starcoder2", "falconh1", "qwen35", "lfm2"),
    *("mixtral", "gpt-oss", "qwen2moe", "deepseek3"),
)
# In files of llama.cpp's these are no codes, or have no factors.
OTHERS = ("token_embd", "attn_k_b", "attn_v_b", "ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d")


def matrices(gguf: GGUF) -> list[str]:
    """The stems of what is multiplied."""
    stems = [name.removesuffix(".weight") for name in gguf.tensors if name.endswith(".weight")]
    return [
        stem
        for stem in stems
        if len(shape := gguf.tensors[f"{stem}.weight"].shape) > 1 and shape[-1] % 32 == 0
        if stem.rpartition(".")[2] not in OTHERS
    ]


def write(source: Path, to: Path, factors: bool, odd: dict[str, np.ndarray] | None = None) -> Path:
    """The file with its matrices in Q8_0; with ``factors`` each is divided by a power of two,
    which stands beside it; ``odd``: more tensors.
    """
    rng = np.random.default_rng(0)
    writer = GGUFWriter(to)
    with open_gguf(source) as gguf:
        for key, value in gguf.metadata.items():
            writer.add(key, value)
        stems = matrices(gguf)
        assert len(stems) > 5
        for name, tensor in gguf.tensors.items():
            values = tensor.dequantize()
            stem = name.removesuffix(".weight")
            if stem == name or stem not in stems:
                writer.add_tensor(name, tensor.shape, "F32", values)
                continue
            n = tensor.shape[0] if len(tensor.shape) > 2 else 1
            by = 2.0 ** rng.integers(-3, 4, n)
            if factors:
                values = values / by.reshape(-1, *[1] * (values.ndim - 1))
                writer.add_tensor(f"{stem}.scale", (n,), "F32", by.astype(np.float32))
            data = by_name("Q8_0").quantize_rows(values.astype(np.float32))
            writer.add_tensor(name, tensor.shape, "Q8_0", data)
        for name, values in (odd or {}).items():
            writer.add_tensor(name, values.shape, "F32", values)
    writer.write()
    return to


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_products_are_multiplied(arch: str, data: Path, tmp_path: Path) -> None:
    source = data / "arch" / f"{arch}.gguf"
    made = []
    ids = np.random.default_rng(1).integers(3, 300, 40).tolist()
    for factors in (False, True):
        path = write(source, tmp_path / f"{factors}.gguf", factors)
        with treadle.load(path, threads=2) as model:
            assert bool(model.config.factors) is factors
            assert not model.config.ignored
            with model.session() as session:
                parts = [session.logits(ids[:1]), session.logits(ids[1:4]), session.logits(ids[4:])]
            made.append((model.logits(ids), np.concatenate(parts)))
    for plain, own in zip(*made, strict=True):
        assert np.abs(own - plain).max() <= 2e-5 * np.abs(plain).max()


@pytest.mark.slow
def test_factors_beside_floats(data: Path, tmp_path: Path) -> None:
    """What ``quantize`` makes of such a file has them, too."""
    made = []
    for factors in (False, True):
        path = write(data / "arch" / "mixtral.gguf", tmp_path / f"{factors}.gguf", factors)
        whole = tmp_path / f"{factors}-F32.gguf"
        assert main(["quantize", str(path), str(whole), "F32", "--allow-requantize"]) == 0
        with treadle.load(whole, threads=2) as model:
            assert bool(model.config.factors) is factors
            made.append(np.concatenate([model.logits(ids) for ids in ([3], [4, 5], [*range(40)])]))
    assert np.abs(made[1] - made[0]).max() <= 2e-5 * np.abs(made[0]).max()


def test_factors_in_parts_and_deterministic(data: Path, tmp_path: Path) -> None:
    path = write(data / "arch" / "mixtral.gguf", tmp_path / "x.gguf", True)
    ids = list(range(3, 43))
    with treadle.load(path, threads=2, deterministic=True) as model:
        whole = model.logits(ids)
        with model.session() as session:
            parts = [session.logits(ids[:7]), session.logits(ids[7:])]
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("token_embd.scale", (1,), "a factor of token_embd.weight: not supported"),
        ("blk.0.ffn_norm.scale", (1,), "a factor of blk.0.ffn_norm.weight:"),
    ],
)
def test_what_is_not_multiplied(
    name: str, shape: tuple[int, ...], message: str, data: Path, tmp_path: Path
) -> None:
    odd = {name: np.ones(shape, np.float32)}
    path = write(data / "arch" / "arcee.gguf", tmp_path / "x.gguf", False, odd=odd)
    with pytest.raises(UnsupportedError, match=message):
        treadle.load(path)


def test_a_factor_of_another_shape(data: Path, tmp_path: Path) -> None:
    odd = {"blk.0.attn_q.scale": np.ones(64, np.float32)}
    path = write(data / "arch" / "arcee.gguf", tmp_path / "x.gguf", False, odd=odd)
    with pytest.raises(FileError, match=r"attn_q.scale: shape \[64\] .*\[1\]"):
        treadle.load(path)


def test_no_adapter_is_merged_with_them(data: Path, tmp_path: Path) -> None:
    """At run time what it adds is not multiplied; in the matrix it would be."""
    path = write(data / "arch" / "smollm3.gguf", tmp_path / "x.gguf", True)
    with open_gguf(path) as gguf:
        arch = str(gguf.metadata["general.architecture"])
    adapter = write_gguf(tmp_path / "a.gguf", draw_pairs(path, 4, 0, ["attn_q"]), arch=arch)
    words = ["quantize", str(path), str(tmp_path / "y.gguf"), "Q8_0", "--allow-requantize"]
    assert main([*words, "--lora", str(adapter)]) == 1
    assert not (tmp_path / "y.gguf").exists()
    with treadle.load(path, threads=2, lora=[adapter]) as model:
        assert model.logits([3, 4, 5]).shape == (3, 320)
