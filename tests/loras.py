"""Small random adapters, as GGUF files and as PEFT's folders, and models with these merged."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.reference import forward
from treadle.convert.lora.lora import open_adapter
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.models.config import Config

Pair = tuple[np.ndarray, np.ndarray]  # A [rank, k], B [m, rank]
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
PEFT = dict(
    zip(
        MATRICES,
        (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        ),
        strict=True,
    )
)


def draw_pairs(
    model: Path, rank: int, seed: int, only: Iterable[str] = MATRICES
) -> dict[str, Pair]:
    """By the names of a model's tensors; A x is about as large as x, and B A x as W x."""
    rng = np.random.default_rng(seed)
    made = {}
    with open_gguf(model) as gguf:
        for name, tensor in gguf.tensors.items():
            if name.rpartition(".weight")[0].rpartition(".")[2] in only:
                m, k = tensor.shape
                a = rng.standard_normal((rank, k)) / np.sqrt(k)
                b = rng.standard_normal((m, rank)) / np.sqrt(rank)
                made[name] = a.astype(np.float32), b.astype(np.float32)
    assert made
    return made


def write_gguf(
    path: Path, pairs: Mapping[str, Pair], *, arch: str = "llama", alpha: float = 8.0, **keys: Any
) -> Path:
    """An adapter as llama.cpp writes it."""
    writer = GGUFWriter(path)
    said = {"general.type": "adapter", "general.architecture": arch, "adapter.type": "lora"}
    for key, value in {**said, "adapter.lora.alpha": alpha, **keys}.items():
        writer.add(key, value)
    for name, pair in pairs.items():
        for side, matrix in zip("ab", pair, strict=True):
            writer.add_tensor(f"{name}.lora_{side}", matrix.shape, "F32", matrix)
    writer.write()
    return path


def write_peft(folder: Path, tensors: Mapping[str, np.ndarray], **config: Any) -> Path:
    """A folder of PEFT's: tensors by their full names."""
    folder.mkdir()
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps({**said, **config}))
    head = {}
    data = b""
    for name, array in tensors.items():
        raw = array.astype(np.float32).tobytes()
        at = [len(data), len(data) + len(raw)]
        head[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": at}
        data += raw
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    raw = len(text).to_bytes(8, "little") + text + data
    (folder / "adapter_model.safetensors").write_bytes(raw)
    return folder


def peft_names(pairs: Mapping[str, Pair]) -> dict[str, np.ndarray]:
    """The pairs of a llama as PEFT names them, their rows as they are."""
    made = {}
    for name, pair in pairs.items():
        _, layer, stem, _ = name.split(".")
        module = f"base_model.model.model.layers.{layer}.{PEFT[stem]}"
        for side, matrix in zip("AB", pair, strict=True):
            made[f"{module}.lora_{side}.weight"] = matrix
    return made


def merged(
    model: Path, config: Config, adapters: Mapping[Path, float], ids: list[int]
) -> np.ndarray:
    """Logits in float64 of the model whose weights have the adapters added."""
    with open_gguf(model) as gguf:
        ranks = [(open_adapter(path, gguf, config).ranks, s) for path, s in adapters.items()]
        tensors = {}
        for name, tensor in gguf.tensors.items():
            w = tensor.dequantize().astype(np.float64)
            for low, scale in ((mine[name], s) for mine, s in ranks if name in mine):
                w = w + scale * low.factor * low.b().astype(np.float64) @ low.a()
            tensors[name] = SimpleNamespace(type_name="F64", dequantize=lambda w=w: w)
        both: Any = SimpleNamespace(tensors=tensors)
        return np.asarray(forward(both, config, ids))


def with_names(model: Path, path: Path, names: Mapping[str, str]) -> Path:
    """The model with parts of its tensors' names replaced, as a converter spells them."""
    writer = GGUFWriter(path)
    with open_gguf(model) as gguf:
        for key, value in gguf.metadata.items():
            writer.add(key, value)
        for name, tensor in gguf.tensors.items():
            for ours, theirs in names.items():
                name = name.replace(ours, theirs)
            writer.add_tensor(name, tensor.shape, "F32", tensor.dequantize())
        writer.write()
    return path
