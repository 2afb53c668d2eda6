"""Directories as mlx-lm writes them, made of small random ``transformers`` models.

Every module that mlx-lm would pack is packed by ``mlx.core.quantize``; the model is then given what
was written, unpacked by ``mlx.core.dequantize`` in f32, so that transformers says what it computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.mlx_package import DTYPES, import_mlx, to_numpy

Settings = Mapping[str, Any]
PARTS = ("weight", "scales", "biases")


def write_mlx(
    model: Any,
    folder: Path,
    *,
    bits: int,
    group: int,
    dtype: str,
    modules: Settings | None = None,
    shard_bytes: int = 1 << 30,
    rename: Callable[[str], str] = str,
) -> None:
    """``modules``: settings by name, False for modules that stay as they are; ``dtype`` by
    safetensors' name; ``rename`` what tensors are called in the file.
    """
    import torch

    mx = import_mlx()
    arrays: dict[str, Any] = {}
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        given = mx.array(parameter.detach().numpy().astype(np.float32))
        values = given.astype(getattr(mx, DTYPES[dtype]))
        own = settings_of(rename(name).removesuffix(".weight"), bits, group, modules)
        if values.ndim == 2 and own is not None and values.shape[1] % own[1] == 0:
            packed = mx.quantize(values, own[1], own[0])
            for part, array in zip(PARTS, packed, strict=True):
                arrays[rename(name.removesuffix("weight") + part)] = array
            floats = (packed[0], *(array.astype(mx.float32) for array in packed[1:]))
            values = mx.dequantize(*floats, own[1], own[0])
        else:
            arrays[rename(name)] = values
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(to_numpy(values).astype(np.float64)))
    save(arrays, folder, shard_bytes)
    model.config.save_pretrained(folder)
    set_config(
        folder,
        quantization={"group_size": group, "bits": bits, "mode": "affine", **(modules or {})},
    )


def settings_of(
    module: str, bits: int, group: int, modules: Settings | None
) -> tuple[int, int] | None:
    """Bits and group of one module, None where it is not to be packed."""
    own = (modules or {}).get(module, True)
    if own is False:
        return None
    return (bits, group) if own is True else (own["bits"], own["group_size"])


def set_config(folder: Path, **keys: Any) -> None:
    """mlx-lm writes the settings twice."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | keys
    if "quantization" in keys:
        config["quantization_config"] = keys["quantization"]
    path.write_text(json.dumps(dict(sorted(config.items()))))


def save(arrays: Mapping[str, Any], folder: Path, shard_bytes: int) -> None:
    """One file, or several and their index."""
    mx = import_mlx()
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Any]] = [{}]
    for name, array in arrays.items():
        full = sum(a.nbytes for a in shards[-1].values()) + array.nbytes > shard_bytes
        if shards[-1] and full:
            shards.append({})
        shards[-1][name] = array
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = names if len(shards) > 1 else ["model.safetensors"]
    weight_map: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        mx.save_safetensors(str(folder / name), shard, metadata={"format": "mlx"})
        weight_map |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        total = sum(a.nbytes for a in arrays.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
