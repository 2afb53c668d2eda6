"""Single matrices of quantised checkpoints, by the formulae of the packages that write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.convert.quantised_files import (
    WRITTEN,
    Parts,
    float8,
    in_words,
    nvfp4,
    rounded,
    table,
    told,
    torch_of,
)
from treadle.convert.quantized.checkpoint import unquantised
from treadle.convert.sources.derived_tensors import DerivationRule, make_tensors, transposed, upper
from treadle.errors import FileError, UnsupportedError
from treadle.files.metadata import MetadataReader
from treadle.files.safetensors import SafeTensor, open_safetensors
from treadle.formats import by_name

pytest.importorskip("torch")

AT = "model.layers.0."
RNG = np.random.default_rng(0)


def values(tensor: SafeTensor) -> np.ndarray:
    return by_name(tensor.dtype).dequantize_rows(tensor.data).reshape(tensor.shape)


def unpacked(folder: Path, parts: Parts, settings: dict[str, Any]) -> dict[str, SafeTensor]:
    """What becomes of modules' parts; they stay mapped while they are used."""
    from safetensors.torch import save_file

    named = {AT + name: part.clone().contiguous() for name, part in parts.items()}
    save_file(named, folder / "model.safetensors")
    with open_safetensors(folder / "model.safetensors") as file:
        return unquantised(file.tensors, MetadataReader(settings, folder / "config.json"))


def check(folder: Path, parts: Parts, settings: dict[str, Any], expected: np.ndarray) -> None:
    """The module "a" has these weights: in blocks, or rounded to BF16."""
    made = unpacked(folder, {f"a.{end}": part for end, part in parts.items()}, settings)
    assert list(made) == [f"{AT}a.weight"]
    tensor = made[f"{AT}a.weight"]
    if tensor.dtype == "BF16":
        expected = rounded(expected, "bfloat16")
    np.testing.assert_array_equal(values(tensor), expected)


def compressed(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }


@pytest.mark.parametrize("kind", ["uint8", "float8_e8m0fnu"])
def test_scales_that_are_exponents(kind: str, tmp_path: Path) -> None:
    """MXFP8 of compressed-tensors, and ``scale_fmt`` ue8m0 of fp8: they were taken for numbers."""
    import torch

    exponents = RNG.integers(118, 130, (8, 4)).astype(np.uint8)
    codes = torch_of(RNG.standard_normal((8, 128)).astype(np.float32)).to(torch.float8_e4m3fn)
    each = np.repeat(2.0 ** (exponents.astype(np.float32) - 127), 32, 1)
    scales = torch_of(exponents).view(getattr(torch, kind))
    settings = {"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
    for end, said in (
        ("weight_scale", compressed(num_bits=8, type="float", group_size=32)),
        ("weight_scale_inv", settings),
    ):
        check(tmp_path, {"weight": codes, end: scales}, said, codes.float().numpy() * each)


def test_rows_with_scales_beside_blocks(tmp_path: Path) -> None:
    """A checkpoint may have groups of several strategies."""
    parts, weights = float8((1, 0), "weight_scale")(RNG.standard_normal((64, 128)).astype("f4"))
    said = compressed(num_bits=8, type="float", strategy="block", block_structure=[32, 64])
    check(tmp_path, parts, said, weights)


def test_last_groups_that_are_cut(tmp_path: Path) -> None:
    """Of 64 of 96 weights: they were taken for two of 48."""
    import torch

    codes = RNG.integers(0, 16, (16, 96))
    zeros = np.full((16, 2), 8)
    scales = rounded(RNG.uniform(0.5, 1, (16, 2)).astype(np.float32), "bfloat16")
    expected = told(codes, np.repeat(scales, [64, 32], 1), np.repeat(zeros, [64, 32], 1))
    parts = {
        "weight_packed": in_words(codes, 4),
        "weight_scale": torch_of(scales),
        "weight_shape": torch.tensor([16, 96]),
    }
    check(tmp_path, parts, compressed(num_bits=4, group_size=64), expected)
    parts = {
        "qweight": in_words(codes, 4).T,
        "qzeros": in_words(zeros.T - 1, 4),
        "scales": torch_of(scales.T),
    }
    check(tmp_path, parts, {"quant_method": "gptq", "bits": 4, "group_size": 64}, expected)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_points_of_gptqs_first_version(bits: int, tmp_path: Path) -> None:
    """GPTQModel takes one from all of a word at once, so below a zero point of 0 the next one lacks
    another; its constants for three bits take 4, 2 and 1 of codes.
    """
    codes, zeros = (RNG.integers(0, 1 << bits, shape) for shape in ((32, 64), (32, 2)))
    zeros[3] = 0
    scales = rounded(RNG.uniform(0.5, 1, (32, 2)).astype(np.float32), "float16")
    taken = {
        2: [0b01010101010101010101010101010101],
        3: [
            0b00100100100100100100100100100100,
            0b10010010010010010010010010010010,
            0b01001001001001001001001001001001,
        ],
        4: [0b00010001000100010001000100010001],
        8: [0b00000001000000010000000100000001],
    }[bits]
    words = in_words(zeros.T, bits).numpy().view(np.uint32)
    words = words - np.resize(np.array(taken, np.uint32), words.shape[1])
    parts = {
        "qweight": in_words(codes, bits).T,
        "qzeros": torch_of(words.view(np.int32)),
        "scales": torch_of(scales.T).bfloat16() if bits == 8 else torch_of(scales.T),
    }
    scales = rounded(scales, "bfloat16") if bits == 8 else scales
    said = {"quant_method": "gptq", "bits": bits, "group_size": 32}
    made = unpacked(
        tmp_path,
        {f"a.{end}": part for end, part in parts.items()},
        {**said, "meta": {"quantizer": ["gptqmodel:5.0"]}},
    )[f"{AT}a.weight"]
    truth = told(codes, scales, zeros)
    most = np.abs(truth).max() * 2.0**-8
    np.testing.assert_allclose(values(made), truth, rtol=0, atol=most)


@pytest.mark.parametrize("shape", [(16, 64), (3, 100), (5, 7)])
def test_bitsandbytes_bytes_in_other_types(shape: tuple[int, int], tmp_path: Path) -> None:
    """``bnb_4bit_quant_storage``; and a last block of which there is a part alone."""
    import torch

    whole = -(-np.prod(shape) // 64) * 64
    weights = np.zeros(whole, np.float32)
    weights[: np.prod(shape)] = RNG.uniform(-1, 1, np.prod(shape))
    parts, stood = table(False, "bfloat16")(weights.reshape(-1, 64))
    kept = -(-np.prod(shape) // 2)
    parts["weight"] = parts["weight"].reshape(-1)[:kept].reshape(-1, 1)
    state = "weight.quant_state.bitsandbytes__nf4"
    said = json.loads(bytes(parts[state].numpy())) | {"shape": list(shape)}
    parts[state] = torch_of(np.frombuffer(json.dumps(said).encode(), np.uint8).copy())
    expected = stood.reshape(-1)[: np.prod(shape)].reshape(shape)
    settings = {"quant_method": "bitsandbytes"}
    check(tmp_path, parts, settings, expected)
    if kept % 4 == 0:
        for kind in (torch.bfloat16, torch.float32):
            stored = parts["weight"].reshape(-1).view(kind)
            check(tmp_path, parts | {"weight": stored}, settings, expected)


def test_rows_that_lie_as_a_gpu_wanted_them(tmp_path: Path) -> None:
    """Older bitsandbytes could write them so."""
    parts, _ = WRITTEN["bnb-int8"].parts(RNG.standard_normal((32, 64)).astype(np.float32))
    parts["weight_format"] += 2
    with pytest.raises(UnsupportedError, match="weight_format"):
        unpacked(
            tmp_path, {f"a.{end}": p for end, p in parts.items()}, {"quant_method": "bitsandbytes"}
        )


TYPES = {  # parts whose type was not looked at
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "ct-w4-zeros": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
    "ct-int8-zeros": ("weight_scale", "weight_zero_point"),
    "ct-mxfp4": ("weight_scale",),
    "modelopt-nvfp4": ("weight_scale", "weight_scale_2"),
    "fp8-blocks": ("weight_scale_inv",),
    "nf4": ("weight.absmax", "weight.quant_map"),
    "nf4-nested": ("weight.nested_absmax", "weight.nested_quant_map"),
    "bnb-int8": ("SCB",),
}


@pytest.mark.parametrize("method", TYPES)
def test_parts_in_another_type_or_shape(method: str, tmp_path: Path) -> None:
    import torch

    written = WRITTEN[method]
    parts, _ = written.parts(RNG.standard_normal((64, 128)).astype(np.float32))
    for end in TYPES[method]:
        part = parts[end]
        others = {torch.float32: torch.int32, torch.int32: torch.float32}.get(
            part.dtype, torch.int16
        )
        flat = part.reshape(-1)
        for spoilt in (part.to(others), flat[:0], torch.cat([flat, flat[:1]])):
            changed = {f"a.{name}": p for name, p in parts.items()} | {f"a.{end}": spoilt}
            with pytest.raises((FileError, UnsupportedError)) as caught:
                unpacked(tmp_path, changed, written.settings)
            assert f"{AT}a." in str(caught.value)


@pytest.mark.parametrize(
    ("method", "end", "said"),
    [
        ("gptq-order", "g_idx", {}),
        ("ct-int8-zeros", "weight_zero_point", compressed(num_bits=8, symmetric=False)),
        (
            "ct-w4-zeros",
            "weight_zero_point",
            compressed(num_bits=4, group_size=64, symmetric=False),
        ),
    ],
)
def test_parts_that_settings_speak_of(
    method: str, end: str, said: dict[str, Any], tmp_path: Path
) -> None:
    """Without them the others are a whole matrix, which is another one."""
    written = WRITTEN[method]
    parts, _ = written.parts(RNG.standard_normal((64, 128)).astype(np.float32))
    named = {f"a.{name}": part for name, part in parts.items() if name != end}
    with pytest.raises(FileError, match=end):
        unpacked(tmp_path, named, written.settings | said)


@pytest.mark.parametrize(
    "raw", [b"[]", b'{"a":' + b"[" * 10000, b'{"blocksize": 64, "shape": [-8, -8]}']
)
def test_what_bitsandbytes_says_is_damaged(raw: bytes, tmp_path: Path) -> None:
    parts, _ = table(False, "bfloat16")(RNG.standard_normal((32, 64)).astype(np.float32))
    parts["weight.quant_state.bitsandbytes__nf4"] = torch_of(np.frombuffer(raw, np.uint8).copy())
    with pytest.raises(FileError, match="quant_state"):
        unpacked(
            tmp_path, {f"a.{end}": p for end, p in parts.items()}, {"quant_method": "bitsandbytes"}
        )


def test_a_rule_takes_a_factor_into_the_weights(tmp_path: Path) -> None:
    """NVFP4's number stands beside a matrix by its name, which a rule changes: the model was
    refused.
    """
    rows = RNG.standard_normal((32, 64)).astype(np.float32)
    parts, weights = nvfp4("weight_scale", "weight_scale_2", False)(rows)
    found = unpacked(
        tmp_path, {f"a.{end}": p for end, p in parts.items()}, {"quant_method": "modelopt"}
    )
    assert {t.dtype for t in found.values()} == {"NVFP4", "F32"}
    for make, expected in ((upper, weights[:16]), (transposed, weights.T)):
        made = make_tensors(found, [DerivationRule(("a.weight",), {"b.weight": make})])
        assert list(made) == [f"{AT}b.weight"]
        np.testing.assert_array_equal(values(made[f"{AT}b.weight"]), rounded(expected, "bfloat16"))


def test_experts_in_two_kinds_of_blocks(tmp_path: Path) -> None:
    """One whose zero points are all in the middle is Q4_0 beside others in Q4_1."""
    parts: Parts = {}
    truth = []
    for i, method in enumerate(("gptq", "gptq-zeros")):
        made, weights = WRITTEN[method].parts(RNG.standard_normal((32, 64)).astype(np.float32))
        parts |= {f"experts.{i}.{end}": part for end, part in made.items()}
        truth.append(weights)
    found = unpacked(tmp_path, parts, WRITTEN["gptq"].settings)
    assert sorted(t.dtype for t in found.values()) == ["Q4_0", "Q4_1"]
    tensor = make_tensors(found, [])[f"{AT}experts.weight"]
    assert (tensor.dtype, tensor.shape) == ("BF16", (2, 32, 64))
    np.testing.assert_allclose(
        values(tensor), np.stack(truth), rtol=0, atol=2.0**-7 * np.abs(truth).max()
    )
