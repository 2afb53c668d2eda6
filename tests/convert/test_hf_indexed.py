"""Families whose attention sees the keys that an indexer chooses: folders, in place and converted,
against transformers in float64, with texts of more tokens than are chosen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import own
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import check_truth, ids_of
from treadle.convert.hf.config import read_config
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_n_heads": 12,  # so many that no score is 0, as if it were tied
    "index_head_dim": 32,
    "index_topk": 9,
}
CASES = {
    "deepseek32": Case("DeepseekV32", "deepseek32", {**LATENT, "n_group": 2}),
    "glm-dsa": Case(
        "GlmMoeDsa",
        "glm-dsa",
        {**LATENT, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
}
M3: dict[str, Any] = {
    "head_dim": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 64,
    "rotary_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_block_size": 4,
    "index_topk_blocks": 3,
    "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
    "mlp_layer_types": ["dense", *["sparse"] * 3],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}


def test_minimax_m3(tmp_path: Path) -> None:
    """And with the names of its own folder, and its spelling of the sizes."""
    from safetensors.numpy import load_file, save_file

    model = save(own(Case("MiniMaxM3VL", "minimax-m3", M3)), tmp_path / "hf")
    truth = compute_logits(model, ids_of())
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, truth)
    check_truth(tmp_path / "hf", truth, threads_of=(2,))
    with open_gguf(made) as gguf:
        found = {key.partition(".")[2]: value for key, value in gguf.metadata.items()}
    expected = {
        "feed_forward_length": 96,
        "expert_feed_forward_length": 32,
        "expert_shared_count": 2,
        "leading_dense_block_count": 1,
        "rope.dimension_count": 16,
        "attention.indexer.head_count": 2,
        "attention.indexer.key_length": 32,
        "attention.indexer.top_k": 3,
        "attention.indexer.block_size": 4,
        "attention.indexer.local_blocks": 1,
    }
    assert {key: found[key] for key in expected} == expected
    path = tmp_path / "hf" / "model.safetensors"
    tensors: dict[str, Any] = {}
    for name, x in load_file(path).items():
        for old, new in (
            (".mlp.gate.e_score", ".block_sparse_moe.e_score"),
            (".mlp.gate.", ".block_sparse_moe.gate."),
            (".mlp.experts.", ".block_sparse_moe.experts."),
            (".mlp.shared_experts.", ".block_sparse_moe.shared_experts."),
            (".self_attn.indexer.", ".self_attn.index_"),
        ):
            name = name.replace(old, new)
        if "experts.down_proj" in name and x.ndim == 3:
            at = name.replace("down_proj", "")
            tensors |= {f"{at}{i}.w2.weight": part.copy() for i, part in enumerate(x)}
        elif "experts.gate_up_proj" in name and x.ndim == 3:
            at = name.replace("gate_up_proj", "")
            for i, part in enumerate(x):
                gate, up = np.split(part, 2)
                tensors |= {f"{at}{i}.w1.weight": gate.copy(), f"{at}{i}.w3.weight": up.copy()}
        elif "gate_up_proj" in name:
            for part, half in zip(("gate_proj", "up_proj"), np.split(x, 2), strict=True):
                tensors[name.replace("gate_up_proj", part)] = half.copy()
        else:
            tensors[name] = x
    save_file(tensors, path)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    older = {
        "sparse_num_index_heads": config.pop("index_n_heads"),
        "sparse_index_dim": config.pop("index_head_dim"),
        "sparse_topk_blocks": config.pop("index_topk_blocks"),
        "sparse_block_size": config.pop("index_block_size"),
        "sparse_local_block": config.pop("index_local_blocks"),
        "sparse_attention_freq": [0, 1, 1, 1],
    }
    for key in ("layer_types", "mlp_layer_types", "shared_intermediate_size"):
        del config[key]
    config |= {"sparse_attention_config": older, "moe_layer_freq": [0, 1, 1, 1]}
    config["n_shared_experts"] = 2
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with treadle.load(made, threads=2) as one, treadle.load(tmp_path / "hf", threads=2) as other:
        assert np.array_equal(one.logits(ids_of()), other.logits(ids_of()))


M3_KEYS = {
    "model_type": "minimax_m3_vl_text",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "layer_types": ["full_attention", *["minimax_m3_sparse"] * 2],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types: 0 indexers, 2 layers"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types: is .* a list of 3"),
        ({"shared_intermediate_size": 100}, "shared_intermediate_size: is 100"),
        ({"swiglu_limit": 5.0}, "swiglu_limit"),
    ],
)
def test_what_of_minimax_m3_is_refused(more: dict[str, Any], says: str) -> None:
    read_config(M3_KEYS, Path("config.json"))
    with pytest.raises((FileError, UnsupportedError), match=says):
        read_config({**M3_KEYS, **more}, Path("config.json"))


QWEN4 = Case(
    "Qwen4Exp",
    "qwen4exp",
    {
        "head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "hc_count": 3,
        "hc_lowrank": 16,
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 12,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [3],
        "ple_embed_dim": 64,
        "ple_conv_kernel_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 16,
        "split_ngram_parts": 2,
        "eos_token_id": ids_of()[20],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
        },
    },
)


def test_qwen4(tmp_path: Path) -> None:
    """Streams, blocks of keys, and n-grams that begin anew in the middle of the text; the table is
    in two parts in the folder.
    """
    model = save(own(QWEN4), tmp_path / "hf")
    truth = compute_logits(model, ids_of())
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, truth)
    check_truth(tmp_path / "hf", truth, threads_of=(2,))
    layer = model.model.layers[2].ple.ple_embedding
    with open_gguf(made) as gguf:
        found = {key.partition(".")[2]: value for key, value in gguf.metadata.items()}
        for key, theirs in (
            ("ple.layer_multipliers", layer.layer_multipliers),
            ("ple.head_vocab_sizes", layer.ngram_heads_vocab_sizes),
            ("ple.head_offsets", layer.ngram_heads_offsets),
        ):
            ours: Any = found[key]
            assert list(ours) == theirs.tolist()
        assert gguf.tensors["per_layer_token_embd.weight"].shape == (240, 16)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    """In one go, in chunks, by decode, for every number of threads."""
    model = save(own(CASES[name]), tmp_path / "hf")
    truth = compute_logits(model, ids_of())
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, truth)
    check_truth(tmp_path / "hf", truth, threads_of=(2,))
    with open_gguf(made) as gguf:
        assert gguf.metadata["general.architecture"] == name
        assert gguf.metadata[f"{name}.attention.indexer.top_k"] == 9
        types: Any = gguf.metadata.get(f"{name}.attention.indexer.types")
        assert (types and list(types)) == ([True, False] * 2 if name == "glm-dsa" else None)


GLM = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 5,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"],
}
TYPES = "glm-dsa.attention.indexer.types"


@pytest.mark.parametrize(
    ("more", "full"),
    [
        ({}, None),
        ({"index_topk_pattern": "FSSFS"}, [True, False, False, True, False]),
        ({"index_topk_freq": 2}, [True, True, False, True, False]),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, [True, False, False, True, False]),
    ],
)
def test_layers_with_an_indexer(more: dict[str, Any], full: list[bool] | None) -> None:
    """As transformers reads a pattern, or a rule."""
    import transformers

    found = read_config({**GLM, **more}, Path("config.json")).metadata.get(TYPES)
    assert found == full
    theirs = transformers.GlmMoeDsaConfig(**{**GLM, **more}).indexer_types
    assert theirs == ["full" if each else "shared" for each in full or [True] * 5]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"indexer_types": ["full"] * 4}, "indexer_types: is .*: expected 5"),
        ({"index_topk_pattern": "FSSFX"}, "indexer_types"),
        ({"index_topk": "many"}, "index_topk: is 'many'"),
    ],
)
def test_what_is_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises((FileError, UnsupportedError), match=says):
        read_config({**GLM, **more}, Path("config.json"))
