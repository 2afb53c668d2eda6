"""Family row of BitNet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.convert.hf.families.defaults import COMMON
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import LLAMA
from treadle.convert.sources.derived_tensors import DerivationRule, Rows
from treadle.files.metadata import MetadataReader
from treadle.formats import by_name


def _ternary(rows: Rows) -> Rows:
    """Round f32 weights to -1, 0 or 1 times their mean magnitude, as BitNet's code does; return
    BF16 as uint8 [rows, 2 * columns].
    """
    scale = max(float(np.abs(rows).mean(dtype=np.float64)), 1e-5)
    found = np.clip(np.rint(rows / np.float32(scale)), -1, 1) * np.float32(scale)
    return by_name("BF16").quantize_rows(found.astype(np.float32)).reshape(rows.shape[0], -1)


def _master(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules that make BitNet's master weights ternary when they are read, if
    ``quantization_config`` says so. Raises UnsupportedError for packed weights.
    """
    settings = keys.within("quantization_config")
    if settings is None:
        return ()
    mode = settings.text("quantization_mode", "offline")
    kind = settings.text("linear_class", "")
    if (mode, kind) != ("online", "autobitlinear"):
        settings.refuse(
            "quantization_mode",
            f"{mode!r:.40}: packed BitNet weights are not supported: use the master weights (the "
            "folder whose name ends in bf16)",
        )
    names = [f"self_attn.{x}_proj" for x in "qkvo"]
    names += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    return [
        DerivationRule((f"{name}.weight",), {f"{name}.weight": _ternary}, floats=True, dtype="BF16")
        for name in names
    ]


BITNET_FAMILIES: dict[str, Family] = {
    "bitnet": Family(
        "bitnet-b1.58",
        {
            **COMMON,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "vocab_size": 128256,
            "num_key_value_heads": 5,
            "max_position_embeddings": 2048,
        },
        {
            **LLAMA,
            "self_attn.attn_sub_norm": "attn_sub_norm",
            "mlp.ffn_sub_norm": "ffn_sub_norm",
        },
        activation="relu2",
        derived=_master,
        packed="bitnet",
    ),
}
