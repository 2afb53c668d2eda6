"""The first Qwen, of which llama.cpp's converter writes one matrix of queries, keys and values, and
counts the rows of gate and up together: transformers' Qwen 2 computes the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.convert.test_hf import convert
from tests.models.hf_cases import Case
from tests.models.hf_tiny import build, compute_logits, require_transformers
from tests.models.test_arch_truth import check_truth, ids_of
from treadle.errors import FileError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.models.load import load_config

N_FF = 96


def as_the_first(source: Path, to: Path) -> Path:
    """A file of Qwen 2 as one of Qwen."""
    writer = GGUFWriter(to)
    with open_gguf(source) as gguf:
        keys: dict[str, Any] = dict(gguf.metadata)
        keys["general.architecture"] = "qwen"
        for key, value in keys.items():
            value = 2 * N_FF if key.endswith("feed_forward_length") else value
            if not key.endswith("head_count_kv"):
                writer.add(key.replace("qwen2.", "qwen."), value)
        for name, tensor in gguf.tensors.items():
            values = tensor.dequantize()
            if ".attn_q." in name:
                parts = [gguf.tensors[name.replace("attn_q", f"attn_{x}")] for x in "qkv"]
                values = np.concatenate([part.dequantize() for part in parts])
                name = name.replace("attn_q", "attn_qkv")
            if ".attn_k." not in name and ".attn_v." not in name:
                writer.add_tensor(name, values.shape, "F32", values)
        writer.write()
    return to


def test_agrees_with_transformers(tmp_path: Path) -> None:
    require_transformers()
    import torch

    model = build(Case("Qwen2", "qwen2", {"num_key_value_heads": 4}))
    model.to(torch.float32).save_pretrained(tmp_path / "hf")
    truth = compute_logits(model.to(torch.float64), ids_of())
    assert truth.std() > 0.5
    made = as_the_first(convert(tmp_path / "hf", tmp_path / "new.gguf"), tmp_path / "old.gguf")
    check_truth(made, truth)
    with open_gguf(made) as gguf:
        config = load_config(gguf)
        assert {layer.n_ff for layer in config.layers} == {N_FF}
        metadata: dict[str, Any] = {**gguf.metadata, "qwen.feed_forward_length": 191}
        gguf.metadata = metadata
        with pytest.raises(FileError, match=r"qwen\.feed_forward_length: is 191"):
            load_config(gguf)
