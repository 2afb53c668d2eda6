"""DeepSeek V4: folders, in place and converted, against transformers in float64."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

import treadle
from tests.convert.quantised_files import float8, mxfp4, torch_of
from tests.convert.test_hf import convert
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import own
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import check_truth, ids_of
from treadle.files.gguf import open_gguf
from treadle.files.tensor import Tensor

KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
V4 = Case(
    "DeepseekV4",
    "deepseek4",
    {
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "q_lora_rank": 32,
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "sliding_window": 12,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 12,  # so many that no score is 0, as if it were tied
        "index_head_dim": 32,
        "index_topk": 5,
        "partial_rotary_factor": 0.5,
        "layer_types": [KINDS[0], KINDS[1], KINDS[2], KINDS[1]],
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
        "compress_rates": {KINDS[1]: 4, KINDS[2]: 16},
        "hc_mult": 3,
        "swiglu_limit": 1.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 10000.0,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
)


def test_agrees_with_transformers(tmp_path: Path) -> None:
    """In one go, in chunks, by decode, for every number of threads."""
    model = save(own(V4), tmp_path / "hf")
    truth = compute_logits(model, ids_of())
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, truth)
    check_truth(tmp_path / "hf", truth, threads_of=(2,))


_BYTES = re.compile(r".+\.(?:w[qko][a-z_]*|shared_experts\.w\d)")
_PAIRS = re.compile(r".+\.experts\.\d+\.w\d")
_SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"}


def _as_published(plain: Path, folder: Path, meant: Path) -> None:
    """Write ``plain`` with the types of DeepSeek's own checkpoints (FP8 in blocks, experts in
    MXFP4, both with powers of two beside them), and in ``meant`` the weights that these stand for.
    """
    import torch
    from safetensors.torch import load_file, save_file

    parts: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        parts[name] = weights[name] = tensor
        if module != name and _PAIRS.fullmatch(module):
            made, stood = mxfp4(tensor.numpy())
            parts[name] = made["weight_packed"].view(torch.int8)
            parts[f"{module}.scale"] = made["weight_scale"].view(torch.float8_e8m0fnu)
        elif module != name and _BYTES.fullmatch(module):
            made, stood = float8((32, 32), "scale", scale="float8_e8m0fnu")(tensor.numpy())
            parts[name] = made["weight"]
            parts[f"{module}.scale"] = made["scale"]
        else:
            continue
        weights[name] = torch_of(stood)
    config = json.loads((plain / "config.json").read_text())
    for to, which in ((folder, parts), (meant, weights)):
        to.mkdir()
        save_file({n: t.clone().contiguous() for n, t in which.items()}, to / "model.safetensors")
        if which is parts:
            config["quantization_config"] = {**_SETTINGS, "weight_block_size": [32, 32]}
        else:
            config.pop("quantization_config", None)
        (to / "config.json").write_text(json.dumps(config))


def _values(tensor: Tensor) -> Any:
    return tensor.data if tensor.type_name == "I32" else tensor.dequantize()


def test_bytes_and_pairs_of_published_checkpoints(tmp_path: Path) -> None:
    save(own(V4), tmp_path / "hf")
    _as_published(tmp_path / "hf", tmp_path / "own", tmp_path / "meant")
    kinds = set[str]()
    with (
        treadle.load(tmp_path / "own", threads=1) as model,
        treadle.load(tmp_path / "meant", threads=1) as meant,
    ):
        expected = meant.gguf.tensors
        assert model.gguf.tensors.keys() == expected.keys()
        for name, tensor in model.gguf.tensors.items():
            assert np.array_equal(_values(tensor), _values(expected[name])), name
            kinds.add(tensor.type_name)
        assert kinds == {"F32", "BF16", "MXFP4", "I32"}
        assert np.isfinite(model.logits(ids_of())).all()
        made = convert(tmp_path / "own", tmp_path / "made.gguf")
        with open_gguf(made) as written:
            found = written.tensors
            assert found.keys() == expected.keys()
            for name, tensor in found.items():
                assert np.array_equal(_values(tensor), _values(expected[name])), name
