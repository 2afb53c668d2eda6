"""Folders as quantising packages write them: matrices of a plain one are replaced by their parts.

Each function of ``WRITTEN`` gives the parts of a matrix by the ends of their names, and the weights
that they stand for, float32, by the packages' own formulae: codes are put in place one by one, and
floats of eight and sixteen bits are torch's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Parts = dict[str, Any]  # torch tensors by what stands behind the module's name
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
NF4_LIKE = np.sort(np.random.default_rng(3).uniform(-1, 1, 16)).astype(np.float32)


@dataclass(frozen=True)
class Written:
    """``parts(w)`` of a float32 [M, K]; ``kind``: what treadle makes of it; ``settings``: what
    config.json says.
    """

    parts: Callable[[np.ndarray], tuple[Parts, np.ndarray]]
    kind: str
    settings: dict[str, Any]


def torch_of(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(array))


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """As torch rounds to a type of sixteen bits."""
    import torch

    return np.asarray(torch_of(array).to(getattr(torch, dtype)).float().numpy())


def in_words(codes: np.ndarray, bits: int) -> Any:
    """Whole numbers [N, n] as the bits of one long number a row, int32 [N, n * bits / 32]."""
    each = codes[..., None] >> np.arange(bits) & 1
    packed = np.packbits(each.astype(bool).reshape(len(codes), -1), axis=1, bitorder="little")
    return torch_of(packed.view("<i4"))


def spread(each: np.ndarray, n: int) -> np.ndarray:
    return np.repeat(each, n, axis=-1)


# -- floats of eight bits ---------------------------------------------------------------------


def float8(
    block: tuple[int, int] | None, end: str, dtype: str = "float8_e4m3fn", scale: str = "float32"
) -> Callable[[np.ndarray], tuple[Parts, np.ndarray]]:
    """``block``: of weights that share a scale, 0 for all; None: one number without dimensions."""

    def parts(w: np.ndarray) -> tuple[Parts, np.ndarray]:
        import torch

        m, k = block or (0, 0)
        m = m or len(w)
        k = k or w.shape[1]
        grid = -(-len(w) // m), -(-w.shape[1] // k)
        scales = np.empty(grid, np.float32)
        for i, j in np.ndindex(*grid):
            scales[i, j] = np.abs(w[i * m : (i + 1) * m, j * k : (j + 1) * k]).max() / 200
        scales = rounded(scales, scale)
        each = np.repeat(np.repeat(scales, m, 0), k, 1)[: len(w), : w.shape[1]]
        codes = torch_of(w / each).to(getattr(torch, dtype))
        stored = torch_of(scales).to(getattr(torch, scale))
        made = {"weight": codes, end: stored if block else stored.reshape(())}
        return made, rounded(codes.float().numpy() * each, "bfloat16")

    return parts


# -- whole numbers ----------------------------------------------------------------------------


def whole(
    w: np.ndarray, bits: int, group: int, *, symmetric: bool, dtype: str = "float16"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [M, K], scales and zero points [M, G]."""
    groups = w.reshape(len(w), -1, group or w.shape[1])
    top = (1 << bits) - 1
    if symmetric:
        scales = np.abs(groups).max(-1) / (top // 2)
        zeros = np.full(scales.shape, 1 << (bits - 1))
    else:
        low = np.minimum(groups.min(-1), 0)
        high = np.maximum(groups.max(-1), 0)
        scales = (high - low) / top
        zeros = np.rint(-low / scales).astype(int)
    scales = rounded(scales.astype(np.float32), dtype)
    codes = np.rint(groups / scales[..., None]) + zeros[..., None]
    return codes.clip(0, top).astype(int).reshape(w.shape), scales, zeros


def told(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """The weights, in float32."""
    n = codes.shape[1] // scales.shape[1]
    made = (codes - spread(zeros, n)).astype(np.float32) * spread(scales, n)
    return np.asarray(made, np.float32)


def gptq(
    bits: int, group: int, *, symmetric: bool, first: bool = True, shuffled: bool = False
) -> Callable[[np.ndarray], tuple[Parts, np.ndarray]]:
    def parts(w: np.ndarray) -> tuple[Parts, np.ndarray]:
        k = w.shape[1]
        order = np.arange(k) // (group or k)
        places = np.random.default_rng(k).permutation(k) if shuffled else np.arange(k)
        codes, scales, zeros = whole(w[:, places], bits, group, symmetric=symmetric)
        zeros = zeros.clip(1, None)  # what is stored less one is not negative
        weights = np.empty_like(w)
        weights[:, places] = told(codes, scales, zeros)
        stored = np.empty_like(codes)
        index = np.empty_like(order)
        stored[:, places] = codes
        index[places] = order
        made = {
            "qweight": in_words(stored, bits).T.contiguous(),
            "qzeros": in_words((zeros - first).T, bits),
            "scales": torch_of(scales.T).half(),
            "g_idx": torch_of(index.astype(np.int32)),
        }
        return made, rounded(weights, "float16") if shuffled else weights

    return parts


def awq(w: np.ndarray) -> tuple[Parts, np.ndarray]:
    codes, scales, zeros = whole(w, 4, 32, symmetric=False)

    def ordered(rows: np.ndarray) -> Any:
        """Columns 0, 2, 4, 6, 1, 3, 5 and 7 of every eight from the lowest bits on."""
        return in_words(
            rows.reshape(len(rows), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(len(rows), -1), 4
        )

    made = {
        "qweight": ordered(codes.T),
        "qzeros": ordered(zeros.T),
        "scales": torch_of(scales.T).half(),
    }
    return made, told(codes, scales, zeros)


def packed(
    bits: int, group: int, *, symmetric: bool
) -> Callable[[np.ndarray], tuple[Parts, np.ndarray]]:
    """compressed-tensors' words along K."""

    def parts(w: np.ndarray) -> tuple[Parts, np.ndarray]:
        import torch

        codes, scales, zeros = whole(w, bits, group, symmetric=symmetric, dtype="bfloat16")
        made = {
            "weight_packed": in_words(codes, bits),
            "weight_scale": torch_of(scales).bfloat16(),
            "weight_shape": torch.tensor(w.shape),
        }
        if not symmetric:
            made["weight_zero_point"] = in_words(zeros.T, bits).T.contiguous()
        return made, told(codes, scales, zeros)

    return parts


def int8(zero_points: bool) -> Callable[[np.ndarray], tuple[Parts, np.ndarray]]:
    def parts(w: np.ndarray) -> tuple[Parts, np.ndarray]:
        codes, scales, zeros = whole(w, 8, 0, symmetric=not zero_points, dtype="bfloat16")
        made = {
            "weight": torch_of((codes - 128).astype(np.int8)),
            "weight_scale": torch_of(scales).bfloat16(),
        }
        if zero_points:
            made["weight_zero_point"] = torch_of((zeros - 128).astype(np.int8))
        weights = told(codes, scales, zeros)
        return made, rounded(weights, "bfloat16") if zero_points else weights

    return parts


# -- floats of four bits, and bitsandbytes ----------------------------------------------------


def nvfp4(scale: str, number: str, divides: bool) -> Callable[..., tuple[Parts, np.ndarray]]:
    packs = "weight_packed" if divides else "weight"

    def parts(w: np.ndarray) -> tuple[Parts, np.ndarray]:
        import torch

        groups = w.reshape(len(w), -1, 16)
        factor = np.float32(np.abs(w).max() / (6 * 448))
        stored = np.float32(1) / factor if divides else factor
        factor = np.float32(1) / stored if divides else factor
        scales = torch_of(np.abs(groups).max(-1) / 6 / factor).to(torch.float8_e4m3fn)
        each = scales.float().numpy()[..., None]
        codes = np.abs(groups[..., None] / (each * factor)[..., None] - E2M1).argmin(-1)
        pairs = codes.reshape(len(w), -1, 2)
        made = {
            packs: torch_of((pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8)),
            scale: scales,
            number: torch.tensor([float(stored)] if divides else float(stored)),
        }
        return made, (E2M1[codes] * each).reshape(w.shape) * factor

    return parts


def mxfp4(w: np.ndarray) -> tuple[Parts, np.ndarray]:
    groups = w.reshape(len(w), -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))).astype(int) - 2
    each = (2.0 ** exponents[..., None]).astype(np.float32)
    codes = np.abs((groups / each)[..., None] - E2M1).argmin(-1)
    pairs = codes.reshape(len(w), -1, 2)
    made = {
        "weight_packed": torch_of((pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8)),
        "weight_scale": torch_of((exponents + 127).astype(np.uint8)),
    }
    return made, (E2M1[codes] * each).reshape(w.shape)


def table(nested: bool, dtype: str) -> Callable[[np.ndarray], tuple[Parts, np.ndarray]]:
    """bitsandbytes' NF4, but for the values of its table, which the file has."""

    def parts(w: np.ndarray) -> tuple[Parts, np.ndarray]:
        blocks = w.reshape(-1, 64)
        scales = np.abs(blocks).max(-1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": dtype}
        made: Parts = {}
        if nested:
            values = np.linspace(-1, 1, 256, dtype=np.float32)
            offset = float(np.float32(scales.mean()))
            parts = np.split(scales, range(256, len(scales), 256))
            tops = np.array([np.abs(part - offset).max() for part in parts], np.float32)
            each = np.repeat(tops, 256)[: len(scales)]
            which = np.abs((scales - offset)[:, None] / each[:, None] - values).argmin(-1)
            scales = values[which] * each + np.float32(offset)
            made["weight.nested_absmax"] = torch_of(tops)
            made["weight.nested_quant_map"] = torch_of(values)
            made["weight.absmax"] = torch_of(which.astype(np.uint8))
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        else:
            made["weight.absmax"] = torch_of(scales)
        codes = np.abs((blocks / scales[:, None])[..., None] - NF4_LIKE).argmin(-1)
        pairs = codes.reshape(-1, 2)
        said = json.dumps(state | {"shape": list(w.shape)}).encode()
        made |= {
            "weight": torch_of((pairs[:, :1] << 4 | pairs[:, 1:]).astype(np.uint8)),
            "weight.quant_map": torch_of(NF4_LIKE),
            "weight.quant_state.bitsandbytes__nf4": torch_of(np.frombuffer(said, np.uint8).copy()),
        }
        weights = (NF4_LIKE[codes] * scales[:, None]).reshape(w.shape)
        return made, rounded(weights, dtype)

    return parts


def scaled_rows(w: np.ndarray) -> tuple[Parts, np.ndarray]:
    """bitsandbytes' eight bits."""
    import torch

    top = rounded(np.abs(w).max(-1) / 127, "float16") * np.float32(127)  # Q8_0 has them whole
    codes = np.rint(w / top[:, None] * 127).astype(np.int8)
    made = {
        "weight": torch_of(codes),
        "SCB": torch_of(top),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return made, codes.astype(np.float32) * (top[:, None] / np.float32(127))


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
_BNB = {"quant_method": "bitsandbytes"}
WRITTEN: dict[str, Written] = {
    "fp8-blocks": Written(
        float8((48, 64), "weight_scale_inv"), "BF16", {**_FP8, "weight_block_size": [48, 64]}
    ),
    "fp8-number": Written(float8(None, "weight_scale_inv", scale="bfloat16"), "BF16", _FP8),
    "fp8-e5m2": Written(float8((0, 0), "weight_scale", "float8_e5m2"), "BF16", _FP8),
    "fbgemm": Written(float8((1, 0), "weight_scale"), "BF16", {"quant_method": "fbgemm_fp8"}),
    "ct-fp8-rows": Written(
        float8((1, 0), "weight_scale", scale="bfloat16"),
        "BF16",
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "ct-fp8-groups": Written(
        float8((1, 32), "weight_scale"),
        "BF16",
        _compressed("float-quantized", num_bits=8, type="float", strategy="group", group_size=32),
    ),
    "ct-int8": Written(int8(False), "Q8_0", _compressed("int-quantized", num_bits=8)),
    "ct-int8-zeros": Written(int8(True), "BF16", _compressed("int-quantized", num_bits=8)),
    "ct-w4": Written(
        packed(4, 32, symmetric=True), "Q4_0", _compressed("pack", num_bits=4, group_size=32)
    ),
    "ct-w4-zeros": Written(
        packed(4, 64, symmetric=False), "Q4_1", _compressed("p", num_bits=4, group_size=64)
    ),
    "ct-w8": Written(packed(8, 0, symmetric=True), "Q8_0", _compressed("pack", num_bits=8)),
    "ct-nvfp4": Written(
        nvfp4("weight_scale", "weight_global_scale", True),
        "NVFP4",
        _compressed("nvfp4-pack-quantized", num_bits=4, type="float"),
    ),
    "ct-mxfp4": Written(mxfp4, "MXFP4", _compressed("mxfp4-pack-quantized", num_bits=4)),
    "modelopt-nvfp4": Written(
        nvfp4("weight_scale", "weight_scale_2", False),
        "NVFP4",
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
    "modelopt-fp8": Written(
        float8(None, "weight_scale"), "BF16", {"quant_method": "modelopt", "quant_algo": "FP8"}
    ),
    "gptq": Written(gptq(4, 32, symmetric=True), "Q4_0", _GPTQ),
    "gptq-zeros": Written(gptq(4, 64, symmetric=False), "Q4_1", _GPTQ),
    "gptq-v2": Written(
        gptq(4, 0, symmetric=False, first=False), "Q4_1", {**_GPTQ, "checkpoint_format": "gptq_v2"}
    ),
    "gptq-order": Written(
        gptq(4, 32, symmetric=False, shuffled=True), "F16", {**_GPTQ, "desc_act": True}
    ),
    "gptq-2": Written(gptq(2, 32, symmetric=False), "Q4_1", {**_GPTQ, "bits": 2}),
    "gptq-3": Written(gptq(3, 32, symmetric=True), "Q4_0", {**_GPTQ, "bits": 3}),
    "gptq-8": Written(gptq(8, 32, symmetric=True), "Q8_0", {**_GPTQ, "bits": 8}),
    "auto-round": Written(
        gptq(4, 32, symmetric=True),
        "Q4_0",
        {**_GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
    ),
    "awq": Written(awq, "Q4_1", {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "nf4": Written(table(False, "bfloat16"), "BF16", {**_BNB, "load_in_4bit": True}),
    "nf4-nested": Written(table(True, "float16"), "F16", {**_BNB, "load_in_4bit": True}),
    "bnb-int8": Written(scaled_rows, "Q8_0", {**_BNB, "load_in_8bit": True}),
}
BESIDE = {  # scales of what treadle quantises itself
    "input_scale": [1.0],
    "k_scale": [1.0],
    "input_global_scale": [2.0],
}


def quantise(plain: Path, folder: Path, written: Written, expected: Path) -> list[str]:
    """``plain`` with its projections quantised, in ``folder``; in ``expected`` the weights that
    they stand for, in F32. The names of the matrices.
    """
    import torch
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Any] = {}
    for file in sorted(plain.glob("*.safetensors")):
        tensors |= load_file(file)
    parts: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    names: list[str] = []
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if not (module.endswith("_proj") and tensor.ndim == 2):
            parts[name] = weights[name] = tensor.float()
            continue
        made, stood = written.parts(tensor.float().numpy())
        parts |= {f"{module}.{end}": part for end, part in made.items()}
        weights[name] = torch_of(stood)
        names = [*names, name]
        if module.endswith("k_proj"):
            parts |= {f"{module}.{end}": torch.tensor(n) for end, n in BESIDE.items()}
    for to, which in ((folder, parts), (expected, weights)):
        to.mkdir()
        save_file({n: t.clone().contiguous() for n, t in which.items()}, to / "model.safetensors")
        config = json.loads((plain / "config.json").read_text())
        if which is parts:
            config["quantization_config"] = written.settings
        (to / "config.json").write_text(json.dumps(config))
    return names
