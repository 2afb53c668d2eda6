"""Matrices of quantised checkpoints by the formulae of the packages that write them, in numpy.

``test_quantised.py`` has whole models, and torch's own floats of eight bits; here each layout is a
file of a few tensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.convert.quantized import mlx
from treadle.convert.quantized.checkpoint import find_settings, unquantised
from treadle.errors import FileError, UnsupportedError
from treadle.files.metadata import MetadataReader
from treadle.files.safetensors import SafeTensor, open_safetensors
from treadle.formats import by_name
from treadle.kernels.activation_layout import from_bf16_bits, to_bf16_bits

M = 24
K = 64
Parts = Mapping[str, tuple[str, np.ndarray]]  # by name: safetensors' type, and the bytes' array
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
KINDS = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "int8": "I8"}
KINDS |= {"uint8": "U8", "uint32": "U32"}


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., dict[str, SafeTensor]]:
    """Writes a file of tensors by hand; the types of safetensors that numpy lacks are bytes."""

    def write(**parts: Any) -> dict[str, SafeTensor]:
        header: dict[str, Any] = {}
        data = b""
        for name, part in parts.items():
            kind, array = part if isinstance(part, tuple) else (KINDS[part.dtype.name], part)
            made = np.ascontiguousarray(array)
            place = [len(data), len(data) + made.nbytes]
            header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": place}
            data += made.tobytes()
        text = json.dumps(header).encode()
        path = tmp_path / "model.safetensors"
        path.unlink(missing_ok=True)
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        return dict(open_safetensors(path).tensors)

    return write


def bf16(values: Any) -> tuple[str, np.ndarray]:
    return "BF16", to_bf16_bits(np.asarray(values, np.float32))


def rounded(values: np.ndarray, kind: str = "BF16") -> np.ndarray:
    if kind == "F16":
        return values.astype(np.float16).astype(np.float32)
    return np.asarray(from_bf16_bits(to_bf16_bits(np.asarray(values, np.float32))))


def read(tensors: dict[str, SafeTensor], **settings: Any) -> dict[str, Any]:
    """What a checkpoint with these settings has."""
    return unquantised(tensors, MetadataReader(settings, Path("config.json")))


def values(tensor: Any) -> np.ndarray:
    found = by_name(tensor.dtype).dequantize_rows(tensor.data)
    return np.asarray(found).reshape(tensor.shape)


def check(tensor: Any, kind: str, expected: np.ndarray, most: float = 0.0) -> None:
    assert (tensor.dtype, tensor.shape) == (kind, expected.shape)
    np.testing.assert_allclose(values(tensor), expected, rtol=0, atol=most)


def float8(codes: np.ndarray, *, e4m3: bool = True) -> np.ndarray:
    """By the definition of OCP's 8-bit floats."""
    n_mantissa, bias = (3, 7) if e4m3 else (2, 15)
    exponents = (codes.astype(int) & 127) >> n_mantissa
    mantissas = (codes & ((1 << n_mantissa) - 1)) / (1 << n_mantissa)
    magnitudes = np.where(
        exponents, (1 + mantissas) * 2.0 ** (exponents - bias), mantissas * 2.0 ** (1 - bias)
    )
    return np.where(codes >> 7, -magnitudes, magnitudes).astype(np.float32)


def codes8(*shape: int, top: int = 120) -> np.ndarray:
    """Codes of finite floats of both signs."""
    rng = np.random.default_rng(sum(shape))
    return rng.integers(0, top, shape).astype(np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7


def in_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [N, n] as the bits of one long number a row, int32 [N, n * bits / 32]."""
    rows = []
    for row in codes.tolist():
        whole = sum(code << (bits * i) for i, code in enumerate(row))
        rows.append(np.frombuffer(whole.to_bytes(len(row) * bits // 8, "little"), "<i4"))
    return np.stack(rows)


def pairs(codes: np.ndarray) -> np.ndarray:
    """Codes of four bits, the first in the lower half of a byte."""
    both = codes.reshape(*codes.shape[:-1], -1, 2)
    return np.asarray(both[..., 0] | both[..., 1] << 4, np.uint8)


def draw(high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(high + sum(shape)).integers(0, high, shape)


def scales(*shape: int) -> np.ndarray:
    """Such that products with small whole numbers are exact in sixteen bits."""
    return (2.0 ** np.random.default_rng(len(shape)).integers(-4, 3, shape)).astype(np.float32)


# -- floats of eight bits --------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(8, 32), (24, 64), (7, 20), (1, 64)], ids=str)
def test_blocks_of_float8(block: tuple[int, int], stored: Any) -> None:
    codes = codes8(M, K)
    each = scales(-(-M // block[0]), -(-K // block[1]))
    found = read(
        stored(
            **{"a.weight": ("F8_E4M3", codes), "a.weight_scale_inv": each},
            **{"a.input_scale": np.ones(1, np.float32)},
        ),
        quant_method="fp8",
        weight_block_size=list(block),
    )
    spread = np.repeat(np.repeat(each, block[0], 0), block[1], 1)[:M, :K]
    assert found.keys() == {"a.weight"}  # scales of activations are treadle's own
    check(found["a.weight"], "BF16", rounded(float8(codes) * spread))


def test_one_scale_a_row_a_matrix_or_for_all(stored: Any) -> None:
    codes = codes8(3, M, K)
    for each in (scales(3, M), scales(3), scales(3, 1, 1), scales(1, M, 1), np.float32(0.5)):
        made = np.asarray(each)
        tensors = stored(weight=("F8_E4M3", codes), weight_scale=made)
        found = read(tensors, quant_method="fbgemm_fp8")
        shape = made.shape + (1,) * (3 - made.ndim)
        check(found["weight"], "BF16", rounded(float8(codes) * made.reshape(shape)))
    two = read(stored(w=("F8_E5M2", codes[0]), w_scale=np.float32(0.25)), quant_method="fp8")
    check(two["w"], "BF16", float8(codes[0], e4m3=False) / 4)


def test_float8_with_powers_of_two(stored: Any) -> None:
    codes = codes8(M, K)
    exponents = draw(20, M, K // 32).astype(np.uint8) + 117
    weights = {"num_bits": 8, "type": "float", "group_size": 32}
    found = read(
        stored(**{"a.weight": ("F8_E4M3", codes), "a.weight_scale": ("F8_E8M0", exponents)}),
        quant_method="compressed-tensors",
        config_groups={"group_0": {"weights": weights}},
    )
    spread = np.repeat(2.0 ** (exponents.astype(int) - 127), 32, 1)
    check(found["a.weight"], "BF16", rounded(float8(codes) * spread))


def test_numbers_that_are_not_finite_stay_so(stored: Any) -> None:
    """Who reads the tensor refuses them, with the place."""
    codes = np.full((1, 4), 0x38, np.uint8)
    codes[0, 1:3] = 0x7F, 0xFF
    found = read(stored(w=("F8_E4M3", codes), w_scale=np.float32(1)), quant_method="fp8")
    assert np.isnan(values(found["w"])).tolist() == [[False, True, True, False]]
    codes[0, 1:3] = 0x7C, 0xFC
    found = read(stored(w=("F8_E5M2", codes), w_scale=np.float32(1)), quant_method="fp8")
    assert values(found["w"])[0, 1:3].tolist() == [np.inf, -np.inf]


# -- compressed-tensors ----------------------------------------------------------------------------


def compressed(**weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


def test_bytes_of_compressed_tensors(stored: Any) -> None:
    codes = (draw(255, M, K) - 127).astype(np.int8)
    for each in (scales(M, 1), scales(M), scales(M, 2), scales(1)):
        found = read(
            stored(weight=codes, weight_scale=each), **compressed(num_bits=8, group_size=32)
        )
        spread = np.repeat(each.reshape(-1, each.shape[-1] if each.ndim > 1 else 1), 1, 1)
        spread = np.repeat(spread, K // spread.shape[1], 1)
        check(found["weight"], "Q8_0", codes * spread)
    zeros = (draw(99, M, 2) - 50).astype(np.int8)
    each = scales(M, 2)
    found = read(
        stored(weight=codes, weight_scale=each, weight_zero_point=zeros),
        **compressed(num_bits=8, group_size=32),
    )
    spread, shift = (np.repeat(part, 32, 1) for part in (each, zeros.astype(int)))
    check(found["weight"], "BF16", rounded((codes - shift) * spread))


@pytest.mark.parametrize(
    ("bits", "group", "zeros", "kind"),
    [(4, 32, False, "Q4_0"), (4, 64, True, "Q4_1"), (8, 64, False, "Q8_0"), (2, 16, True, "BF16")],
)
def test_words_of_compressed_tensors(
    bits: int, group: int, zeros: bool, kind: str, stored: Any
) -> None:
    codes = draw(1 << bits, M, K)
    each = scales(M, K // group)
    shift = draw(1 << bits, M, K // group) if zeros else np.full(each.shape, 1 << (bits - 1))
    m_words = -(-M * bits // 32) * 32 // bits
    padded = np.pad(shift, ((0, m_words - M), (0, 0)))
    more = {"w_zero_point": in_words(padded.T, bits).T} if zeros else {}
    tensors = stored(
        **{"a.weight_packed": in_words(codes, bits), "a.weight_scale": bf16(each)},
        **{f"a.weight{name[1:]}": part for name, part in more.items()},
        **{"a.weight_shape": np.array([M, K])},
    )
    found = read(tensors, **compressed(num_bits=bits, group_size=group))
    assert found.keys() == {"a.weight"}
    expected = (codes - np.repeat(shift, group, 1)) * np.repeat(each, group, 1)
    check(found["a.weight"], kind, expected)


def test_words_whose_groups_are_anywhere(stored: Any) -> None:
    codes = draw(16, M, K)
    order = np.random.default_rng(0).permutation(np.arange(K) // 32).astype(np.int32)
    each = scales(M, 2)
    parts = {"weight_packed": in_words(codes, 4), "weight_scale": bf16(each)}
    for index, groups in ((order, order), (np.full(K, -1, np.int32), np.arange(K) // 32)):
        found = read(stored(**parts, weight_g_idx=index), **compressed(num_bits=4, group_size=32))
        kind = "BF16" if index is order else "Q4_0"
        check(found["weight"], kind, (codes - 8) * each[:, groups])


@pytest.mark.parametrize("k", [64, 48])
def test_floats_of_four_bits(k: int, stored: Any) -> None:
    """NVFP4: in its own blocks, or multiplied out where a row has no whole ones."""
    codes = draw(16, M, k)
    inner = codes8(M, k // 16) & 127
    expected = E2M1[codes] * np.repeat(float8(inner), 16, 1)
    for divides, name, number in ((True, "w.weight_packed", 4.0), (False, "w.weight", 0.25)):
        end = "weight_global_scale" if divides else "weight_scale_2"
        tensors = stored(
            **{name: pairs(codes), "w.weight_scale": ("F8_E4M3", inner)},
            **{f"w.{end}": np.array([number], np.float32)},
        )
        method = compressed(num_bits=4) if divides else {"quant_method": "modelopt"}
        found = read(tensors, **method)
        made = found["w.weight"]
        if k == 48:
            check(made, "BF16", rounded(expected / 4))
            continue
        check(made, "NVFP4", expected)
        (factor,) = (each for name, each in found.items() if name != "w.weight")
        assert values(factor).tolist() == [0.25]


def test_floats_of_four_bits_with_powers_of_two(stored: Any) -> None:
    codes = draw(16, M, K)
    exponents = draw(20, M, K // 32).astype(np.uint8) + 117
    parts = {"weight_packed": pairs(codes), "weight_scale": exponents}
    found = read(stored(**parts), **compressed(num_bits=4))
    spread = np.repeat(2.0 ** (exponents.astype(int) - 127), 32, 1)
    check(found["weight"], "MXFP4", E2M1[codes] * spread)


# -- GPTQ and AWQ ----------------------------------------------------------------------------------


def gptq(
    codes: np.ndarray, zeros: np.ndarray, each: np.ndarray, bits: int, less: int = 1
) -> dict[str, np.ndarray]:
    """Words along K; stored zero points are one too small in the first version."""
    return {
        "a.qweight": in_words(codes, bits).T,
        "a.qzeros": in_words((zeros - less).T & ((1 << bits) - 1), bits),
        "a.scales": each.T.astype(np.float16),
    }


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("middle", [False, True])
def test_words_of_gptq(bits: int, middle: bool, stored: Any) -> None:
    m = 32
    codes = draw(1 << bits, m, K)
    each = scales(m, 2)
    zeros = np.full(each.shape, 1 << (bits - 1)) if middle else draw(1 << bits, m, 2)
    index = {"a.g_idx": (np.arange(K) // 32).astype(np.int32)}
    found = read(
        stored(**gptq(codes, zeros, each, bits), **index),
        quant_method="gptq",
        bits=bits,
        group_size=32,
    )
    kind = "Q4_0" if middle else "Q4_1"
    if bits == 8:
        kind = "Q8_0" if middle else "F16"
    expected = (codes - np.repeat(zeros, 32, 1)) * np.repeat(each, 32, 1)
    check(found["a.weight"], kind, expected)


def test_versions_of_gptq(stored: Any) -> None:
    """The second stores zero points as they are; GPTQModel's first takes one from whole words."""
    m = 32
    codes = draw(16, m, K)
    each = scales(m, 2)
    zeros = draw(15, m, 2) + 1
    expected = (codes - np.repeat(zeros, 32, 1)) * np.repeat(each, 32, 1)
    said: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    second = stored(**gptq(codes, zeros, each, 4, 0))
    check(read(second, **said, checkpoint_format="gptq_v2")["a.weight"], "Q4_1", expected)
    rounded = {**said, "quant_method": "auto-round", "packing_format": "auto_round:gptqmodel-v2"}
    check(read(stored(**gptq(codes, zeros, each, 4, 0)), **rounded)["a.weight"], "Q4_1", expected)
    zeros[:, 0] = 0  # words borrow: 0 less one
    whole = in_words(zeros.T, 4).view(np.uint32) - np.uint32(0x11111111)
    parts = {**gptq(codes, zeros, each, 4), "a.qzeros": whole.view(np.int32)}
    found = read(stored(**parts), **said, meta={"quantizer": ["gptqmodel:1.0"]})
    expected = (codes - np.repeat(zeros, 32, 1)) * np.repeat(each, 32, 1)
    check(found["a.weight"], "Q4_1", expected)


def test_groups_of_gptq_that_are_anywhere(stored: Any) -> None:
    m = 32
    codes = draw(16, m, K)
    each = scales(m, 2)
    zeros = draw(15, m, 2) + 1
    order = np.random.default_rng(0).permutation(np.arange(K) // 32).astype(np.int32)
    tensors = stored(**gptq(codes, zeros, each, 4), **{"a.g_idx": order})
    found = read(tensors, quant_method="gptq", bits=4, group_size=32, desc_act=True)
    check(found["a.weight"], "F16", (codes - zeros[:, order]) * each[:, order])


@pytest.mark.parametrize("method", ["awq", "auto-round"])
def test_words_of_awq(method: str, stored: Any) -> None:
    """Columns 0, 2, 4, 6, 1, 3, 5 and 7 of every eight, from the lowest bits on."""
    codes = draw(16, M, K)
    each = scales(M, 2)
    zeros = draw(16, M, 2)

    def ordered(rows: np.ndarray) -> np.ndarray:
        eights = rows.reshape(len(rows), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return in_words(eights.reshape(len(rows), -1), 4)

    parts = {"a.qweight": ordered(codes.T), "a.qzeros": ordered(zeros.T)}
    tensors = stored(**parts, **{"a.scales": each.T.astype(np.float16)})
    said = {"quant_method": method, "bits": 4}
    found = read(tensors, **said, packing_format="auto_round:auto_awq")
    expected = (codes - np.repeat(zeros, 32, 1)) * np.repeat(each, 32, 1)
    check(found["a.weight"], "Q4_1", expected)


# -- bitsandbytes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
def test_tables_of_bitsandbytes(nested: bool, stored: Any) -> None:
    """The even weight in the upper half of a byte; a block of 48 goes over the ends of rows, and
    the last is short.
    """
    table = np.sort(np.random.default_rng(1).standard_normal(16)).astype(np.float32)
    codes = draw(16, 5, K)
    blocks = -(-5 * K // 48)
    state = {"blocksize": 48, "shape": [5, K], "dtype": "float16" if nested else "bfloat16"}
    each = scales(blocks)
    parts: dict[str, Any] = {"w.absmax": each}
    if nested:
        values = np.linspace(-1, 1, 256, dtype=np.float32)
        which = draw(256, blocks).astype(np.uint8)
        tops = scales(-(-blocks // 4))
        each = values[which] * np.repeat(tops, 4)[:blocks] + np.float32(0.5)
        parts = {"w.absmax": which, "w.nested_absmax": tops, "w.nested_quant_map": values}
        state |= {"nested_blocksize": 4, "nested_offset": 0.5}
    said = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors = stored(
        **{"w": pairs(codes.reshape(-1, 2)[:, ::-1].reshape(-1)), "w.quant_map": table},
        **{**parts, "w.quant_state.bitsandbytes__nf4": said},
    )
    found = read(tensors, quant_method="bitsandbytes")
    assert found.keys() == {"w"}
    spread = np.repeat(each, 48)[: 5 * K].reshape(5, K)
    kind = "F16" if nested else "BF16"
    check(found["w"], kind, rounded(table[codes] * spread, kind))


def test_bytes_of_bitsandbytes(stored: Any) -> None:
    codes = (draw(255, M, K) - 127).astype(np.int8)
    tops = scales(M) * 127
    parts = {"a.weight": codes, "a.SCB": tops, "a.weight_format": np.zeros((), np.uint8)}
    found = read(stored(**parts), quant_method="bitsandbytes")
    assert found.keys() == {"a.weight"}
    check(found["a.weight"], "Q8_0", codes * tops[:, None] / 127)


# -- MLX -------------------------------------------------------------------------------------------


def in_mlx(**settings: Any) -> mlx.Quantization:
    config = {"quantization": {"group_size": 32, "bits": 4, **settings}}
    found = mlx.find_quantization(MetadataReader(config, Path("config.json")))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("bits", "group", "kind"), [(4, 32, "Q4_1"), (3, 64, "Q4_1"), (8, 32, "F16"), (6, 64, "F16")]
)
def test_affine_modules_of_mlx(bits: int, group: int, kind: str, stored: Any) -> None:
    codes = draw(1 << bits, M, K)
    each = scales(M, K // group)
    lows = -scales(M, K // group)
    parts: dict[str, Any] = {
        "a.weight": in_words(codes, bits).view(np.uint32),
        "a.scales": each.astype(np.float16),
        "a.biases": lows.astype(np.float16),
    }
    tensors = stored(**parts, **{"norm.weight": np.ones(4, np.float32)})
    found = in_mlx(bits=bits, group_size=group)
    (packed,) = mlx.find_packed(tensors, found, lambda tensor: None).values()
    assert packed.bits_and_group == (bits, group)
    assert packed.shape == (M, K)
    assert packed.n_bytes == sum(part.nbytes for part in parts.values())
    made = mlx.unpack(tensors, found, lambda name: mlx.BLOCKS)
    expected = codes * np.repeat(each, group, 1) + np.repeat(lows, group, 1)
    check(made["a.weight"], kind, expected.astype(np.float32))
    assert made.keys() == {"a.weight", "norm.weight"}
    assert mlx.unpack(tensors, found, lambda name: "").keys() == tensors.keys()


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_floats_of_mlx(mode: str, stored: Any) -> None:
    group = 16 if mode == "nvfp4" else 32
    inner = draw(20, M, K // group).astype(np.uint8) + (50 if mode == "nvfp4" else 117)
    if mode == "mxfp8":
        stored_codes = codes8(M, K)
        weights = float8(stored_codes)
    else:
        codes = draw(16, M, K)
        stored_codes = pairs(codes)
        weights = E2M1[codes]
    each = float8(inner) if mode == "nvfp4" else 2.0 ** (inner.astype(int) - 127)
    tensors = stored(**{"a.weight": stored_codes.view(np.uint32), "a.scales": inner})
    made = mlx.unpack_floats(tensors, in_mlx(mode=mode))
    expected = (weights * np.repeat(each, group, 1)).astype(np.float32)
    kind = {"mxfp4": "MXFP4", "nvfp4": "NVFP4", "mxfp8": "BF16"}[mode]
    check(made["a.weight"], kind, rounded(expected) if kind == "BF16" else expected)
    assert made.keys() == {"a.weight"}


def test_a_module_with_settings_of_its_own() -> None:
    """A key that it lacks has MLX's default, not the model's."""
    found = in_mlx(**{"a": {"bits": 8}, "b": False, "mode": "affine"})
    assert found.settings("a")[:2] == (64, 8)
    assert found.settings("c")[:2] == (32, 4)
    assert found.modules == {"a": {"bits": 8}, "b": False}
    none = MetadataReader({"quantization_config": {"quant_method": "gptq"}}, Path("c"))
    assert mlx.find_quantization(none) is None
    assert mlx.find_quantization(MetadataReader({}, Path("c"))) is None
    with pytest.raises(UnsupportedError, match="MLX quantisation mode 'int1'"):
        in_mlx(mode="int1")


WORDS = np.zeros((M, K // 8), np.uint32)
HALVES = np.ones((M, K // 32), np.float16)
DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "no-weight": ({"a.scales": HALVES}, "has no a.weight"),
    "no-scales": ({"a.weight": WORDS}, "holds packed codes but has no scales"),
    "no-biases": ({"a.weight": WORDS, "a.scales": HALVES}, "has no a.biases"),
    "floats": (
        {"a.weight": WORDS.view(np.float32), "a.scales": HALVES, "a.biases": HALVES},
        "is in F32 but has scales",
    ),
    "scales": (
        {"a.weight": WORDS, "a.scales": HALVES.view(np.int8), "a.biases": HALVES},
        "is in I8",
    ),
    "biases": (
        {"a.weight": WORDS, "a.scales": HALVES, "a.biases": HALVES.astype(np.float32)},
        "is in F32.*as the scales are",
    ),
    "vector": ({"a.weight": WORDS[0], "a.scales": HALVES[0], "a.biases": HALVES[0]}, "a matrix"),
    "rows": (
        {"a.weight": WORDS, "a.scales": HALVES[1:], "a.biases": HALVES},
        f"{M} rows, as the codes have",
    ),
    "bits": (
        {"a.weight": WORDS[:, 1:], "a.scales": HALVES, "a.biases": HALVES},
        "does not fit 4 bits in groups of 32",
    ),
    "shapes": (
        {"a.weight": WORDS, "a.scales": HALVES, "a.biases": HALVES[1:]},
        "as the scales",
    ),
    "said-not": ({"b.weight": WORDS, "b.scales": HALVES, "b.biases": HALVES}, "says it is not"),
    "said-so": ({"c.weight": HALVES}, "is not packed, but config.json says it is"),
}


def test_damaged_modules_of_mlx(stored: Any) -> None:
    found = in_mlx(b=False, c={"bits": 4})
    for parts, message in DAMAGED.values():
        with pytest.raises(FileError, match=message):
            mlx.find_packed(stored(**parts), found, lambda tensor: None)
    with pytest.raises(UnsupportedError, match=r"config\.json: quantization"):
        mlx.find_packed(
            stored(**{"a.weight": WORDS, "a.scales": HALVES, "a.biases": HALVES}),
            in_mlx(group_size=48),
            lambda tensor: None,
        )
    with pytest.raises(FileError, match="is in F16, with scales in U8"):
        mlx.unpack_floats(
            stored(**{"a.weight": HALVES, "a.scales": HALVES.view(np.uint8)}), in_mlx(mode="mxfp4")
        )
    with pytest.raises(FileError, match=r"has no a\.weight"):
        mlx.unpack_floats(stored(**{"a.scales": HALVES.view(np.uint8)}), in_mlx(mode="mxfp4"))


def test_shapes_of_mlx_tell_bits_and_groups(stored: Any) -> None:
    """Where the width of a matrix is known, and its module has no settings of its own."""
    codes = draw(4, M, K)
    tensors = stored(
        **{"a.weight": in_words(codes, 2).view(np.uint32)},
        **{f"a.{name}": np.ones((M, 1), np.float16) for name in ("scales", "biases")},
    )
    (packed,) = mlx.find_packed(tensors, in_mlx(), lambda tensor: K).values()
    assert packed.bits_and_group == (2, 64)


# -- settings, and what is refused -----------------------------------------------------------------


def test_where_settings_are(tmp_path: Path) -> None:
    def found(config: dict[str, Any]) -> Any:
        made = find_settings(MetadataReader(config, tmp_path / "config.json"), tmp_path)
        return made and made.get("quant_method")

    own = {"quant_method": "awq"}
    assert found({}) is None
    assert found({"quantization_config": own}) == "awq"
    assert found({"compression_config": {"quant_method": "compressed-tensors"}}) is not None
    assert found({"text_config": {"quantization_config": own}}) == "awq"
    assert found({"quantization_config": {"quant_method": "quanto"}}) is None
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    assert found({}) == "modelopt"


CODES = codes8(M, K)
ONES = np.ones((M, 1), np.float32)
BYTES = np.zeros((M, K), np.int8)
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no-scale": ({"w": ("F8_E4M3", CODES)}, {"quant_method": "fp8"}, "w_scale is missing"),
    "scale-shape": (
        {"w": ("F8_E4M3", CODES), "w_scale": np.ones((5, 5), np.float32)},
        {"quant_method": "fp8", "weight_block_size": [8, 8]},
        r"shape \[5, 5\] for weights",
    ),
    "scale-kind": (
        {"w": ("F8_E4M3", CODES), "w_scale": BYTES},
        {"quant_method": "fp8"},
        "is in I8",
    ),
    "zero-point": (
        {"weight": BYTES, "weight_scale": ONES},
        compressed(num_bits=8, symmetric=False),
        "weight_zero_point is missing",
    ),
    "byte-scales": (
        {"weight": BYTES, "weight_scale": np.ones((M, 7), np.float32)},
        compressed(num_bits=8),
        r"shape \[24, 7\] for weights",
    ),
    "rows": (
        {"weight": BYTES, "weight_scale": np.ones((M, 2, 1), np.float32)},
        compressed(num_bits=8),
        r"shape \[24, 2, 1\] for 24 rows",
    ),
    "words": (
        {"weight_packed": BYTES, "weight_scale": ONES},
        compressed(num_bits=5),
        "weights per row of 5 bits",
    ),
    "word-shape": (
        {
            "weight_packed": WORDS.view(np.int32),
            "weight_scale": ONES,
            "weight_shape": np.ones(2, np.float32),
        },
        compressed(num_bits=4),
        "is in F32",
    ),
    "transform": ({}, {**compressed(), "transform_config": {"a": 1}}, "rotations"),
    "sparse": ({}, {**compressed(), "sparsity_config": {"format": "2:4"}}, "sparse weights"),
    "pre-scale": (
        {"a.pre_quant_scale": ONES},
        {"quant_method": "modelopt"},
        "activation scales",
    ),
    "four-bits": (
        {"weight": np.zeros((M, 32), np.uint8), "weight_scale": ("F8_E4M3", CODES)},
        {"quant_method": "modelopt"},
        "one scale per 16",
    ),
    "gptq-format": ({}, {"quant_method": "gptq", "checkpoint_format": "x"}, "'x' is not supported"),
    "gptq-rows": (
        {
            "a.qweight": np.zeros((7, 32), np.int32),
            "a.qzeros": np.zeros((2, 4), np.int32),
            "a.scales": np.ones((2, 32), np.float16),
            "a.g_idx": np.zeros(50, np.int32),
        },
        {"quant_method": "gptq", "bits": 4},
        "for rows of 50 weights",
    ),
    "gptq-zeros": (
        {
            "a.qweight": np.zeros((8, 32), np.int32),
            "a.qzeros": np.zeros((2, 5), np.int32),
            "a.scales": np.ones((2, 32), np.float16),
        },
        {"quant_method": "gptq", "bits": 4},
        r"shape \[2, 5\].*\[2, 4\]",
    ),
    "gptq-order": (
        {
            "a.qweight": np.zeros((8, 32), np.int32),
            "a.qzeros": np.zeros((2, 4), np.int32),
            "a.scales": np.ones((2, 32), np.float16),
            "a.g_idx": np.arange(64, dtype=np.int32),
        },
        {"quant_method": "gptq", "bits": 4, "desc_act": True},
        "64 numbers below 2",
    ),
    "awq-version": ({}, {"quant_method": "awq", "version": "gemv"}, "supports only 'gemm'"),
    "awq-bits": ({}, {"quant_method": "awq", "bits": 8}, "only 4-bit AWQ"),
    "awq-zeros": (
        {
            "a.qweight": np.zeros((64, 3), np.int32),
            "a.qzeros": np.zeros((2, 4), np.int32),
            "a.scales": np.ones((2, 24), np.float16),
        },
        {"quant_method": "awq"},
        r"shape \[2, 4\].*\[2, 3\]",
    ),
    "packing": (
        {},
        {"quant_method": "auto-round", "packing_format": "auto_round:x"},
        "'auto_round:x' is not supported",
    ),
    "format": (
        {"a.weight_format": np.ones(1, np.uint8)},
        {"quant_method": "bitsandbytes"},
        "GPU-specific layout",
    ),
    "no-matrix": ({"a.SCB": ONES}, {"quant_method": "bitsandbytes"}, "has no a.weight in I8"),
    "rows-of-scales": (
        {"a.weight": BYTES, "a.SCB": ONES},
        {"quant_method": "bitsandbytes"},
        r"shape \[24, 1\].*\[24\]",
    ),
    "no-table": (
        {"w.quant_state.bitsandbytes__nf4": BYTES[0]},
        {"quant_method": "bitsandbytes"},
        "has no w",
    ),
    "no-json": (
        {"w": BYTES, "w.quant_state.bitsandbytes__fp4": BYTES[0]},
        {"quant_method": "bitsandbytes"},
        "is not JSON",
    ),
}


def test_what_does_not_fit_is_refused(stored: Any) -> None:
    for parts, settings, message in REFUSED.values():
        with pytest.raises((FileError, UnsupportedError), match=message):
            read(stored(**parts), **settings)


def test_scales_that_no_block_can_hold(stored: Any) -> None:
    """The blocks' scales are f16: found as the tensor is read."""
    parts = {"weight": BYTES, "weight_scale": np.full((M, 1), 1e9, np.float32)}
    found = read(stored(**parts), **compressed(num_bits=8))
    with pytest.raises(FileError, match="scales are not finite in f16"):
        values(found["weight"])
    exponents = np.full((M, K // 32), 255, np.uint8)
    parts = {"weight_packed": np.zeros((M, K // 2), np.uint8), "weight_scale": exponents}
    found = read(stored(**parts), **compressed(num_bits=4))
    with pytest.raises(FileError, match="non-finite scale in row 0"):
        values(found["weight"])
