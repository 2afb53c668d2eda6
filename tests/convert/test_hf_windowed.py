"""Families with experts and windows: Hugging Face folders, in place and converted, against
transformers, by every way to read a text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, prompt, worst
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import own
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.reference import forward
from tests.tiny import rounding
from treadle.convert.hf.folder import open_hf, open_hf_source
from treadle.convert.llamacpp_differences import reading_differences
from treadle.errors import UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

_GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "sliding_window": 16,
}
_GRANITE_EXPERTS = {**_GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2}
_WIDE = "full_attention"
_COHERE = {
    "head_dim": 32,
    "sliding_window": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "logit_scale": 0.25,
    "tie_word_embeddings": True,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MELLUM = {
    "head_dim": 32,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_LAGUNA = {
    **_MELLUM,
    "layer_types": [_WIDE, "sliding_attention"] * 2,
    "shared_expert_intermediate_size": 32,
}

CASES: dict[str, Case] = {
    "granite-swa": Case("GraniteSWA", "granite_swa", _GRANITE),
    "granite-swa-nope": Case(
        "GraniteSWA",
        "granite_swa",
        {**_GRANITE, "layer_rope_theta": [0, 5e5, 5e5, 0], "tie_word_embeddings": True},
    ),
    "granite-swa-experts": Case("GraniteMoeSWA", "granite_swa", _GRANITE_EXPERTS),
    "granite-swa-shared": Case(
        "GraniteMoeSWA",
        "granite_swa",
        {**_GRANITE_EXPERTS, "shared_intermediate_size": 64, "layer_rope_theta": [0, 1e4, 0, 1e4]},
    ),
    "cohere2moe": Case("Cohere2Moe", "cohere2moe", {**_COHERE, "first_k_dense_replace": 1}),
    "cohere2moe-rms": Case(
        "Cohere2Moe",
        "cohere2moe",
        {
            **_COHERE,
            "rms_norm_eps": 1e-5,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "num_shared_experts": 2,
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "layer_types": [_WIDE, _WIDE, "sliding_attention", _WIDE],
            "prefix_dense_intermediate_size": 160,
        },
    ),
    "mellum": Case("Mellum", "mellum", {**_EXPERTS, **_MELLUM}),
    "mellum-yarn": Case(
        "Mellum",
        "mellum",
        {
            **_EXPERTS,
            **_MELLUM,
            "norm_topk_prob": True,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "hy_v3": Case(
        "HYV3",
        "hy_v3",
        {**_EXPERTS, "head_dim": 32, "num_shared_experts": 2, "router_scaling_factor": 1.5},
    ),
    "jais2": Case("Jais2", "jais2", {"hidden_act": "relu2"}),
    "laguna": Case("Laguna", "laguna", {**_EXPERTS, **_LAGUNA}),
    "laguna-heads": Case(
        "Laguna",
        "laguna",
        {
            **_EXPERTS,
            **_LAGUNA,
            "gating": "per-element",
            "num_attention_heads_per_layer": [4, 6, 2, 4],
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "moe_routed_scaling_factor": 2.5,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "partial_rotary_factor": 0.5,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "laguna-whole": Case(
        "Laguna",
        "laguna",
        {**_EXPERTS, **_LAGUNA, "layer_types": [_WIDE] * 4, "shared_expert_intermediate_size": 64},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_in_place_and_converted(name: str, tmp_path: Path) -> None:
    case = own(CASES[name])
    model = save(case, tmp_path / "hf")
    ids = prompt()
    exact = compute_logits(model, ids)
    for path in (tmp_path / "hf", convert(tmp_path / "hf", tmp_path / "made.gguf")):
        with treadle.load(path, threads=2, kv="f32") as loaded:
            assert loaded.config.ignored == ()
            assert loaded.config.arch.name == case.arch
            share = rounding(loaded.config)
            whole = loaded.logits(ids)
            assert worst(whole, exact) <= share
            assert worst(forward(loaded.gguf, loaded.config, ids), exact) <= share
            for chunk in (1, 3, 64):
                loaded.engine.cache.forget()
                with loaded.session() as session:
                    rows = [
                        session.logits(ids[at : at + chunk]) for at in range(0, len(ids), chunk)
                    ]
                assert worst(np.concatenate(rows), exact) <= share, chunk
        with treadle.load(path, threads=1, kv="f32") as alone:
            assert np.array_equal(alone.logits(ids), whole)


def test_dense_layers_that_no_key_tells(tmp_path: Path) -> None:
    """llama.cpp's converter writes none for Hunyuan 3: the tensors say it."""
    save(own(CASES["hy_v3"]), tmp_path / "hf")
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    with open_gguf(made) as file:
        said = load_config(file)
        key = "hy_v3.leading_dense_block_count"
        file.metadata = {name: it for name, it in file.metadata.items() if name != key}
        found = load_config(file)
    assert [layer.ffn for layer in found.layers] == ["gated", *["experts"] * 3]
    assert found == said


def changed(case: str, folder: Path, **keys: Any) -> Path:
    """The folder of a case with other keys."""
    save(own(CASES[case]), folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **keys}))
    return folder


@pytest.mark.parametrize(
    ("case", "keys", "why"),
    [
        ("granite-swa", {"layer_rope_theta": [0, 1e4, 5e5, 0]}, "layer_rope_theta: has 2 bases"),
        ("granite-swa", {"no_rope_layers": [1, 1, 0, 1]}, "no_rope_layers: transformers ignores"),
        ("cohere2moe", {"shared_expert_combination_strategy": "sum"}, "strategy: is 'sum'"),
        ("cohere2moe", {"prefix_dense_sliding_window_pattern": 2}, "pattern: is 2"),
        ("cohere2moe", {"expert_selection_fn": "tanh"}, "expert_selection_fn: 'tanh'"),
        (
            "mellum",
            {"mlp_layer_types": ["dense"] + ["sparse"] * 3},
            "mlp_layer_types: dense layers are not supported",
        ),
        ("hy_v3", {"mlp_layer_types": ["sparse", "dense"] * 2}, "mlp_layer_types: .* first"),
        ("laguna", {"moe_router_logit_softcapping": 5.0}, "softcapping: is 5.0"),
    ],
)
def test_what_is_refused(case: str, keys: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=why):
        open_hf(changed(case, tmp_path, **keys))


BIASES = {"attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize(
    ("case", "more"), [("granite-swa", BIASES), ("laguna", {}), ("jais2", {}), ("cohere2moe", {})]
)
def test_llama_cpp_reads_them_alike(case: str, more: dict[str, Any], tmp_path: Path) -> None:
    save(own(CASES[case], **more), tmp_path)
    source = open_hf_source(tmp_path)
    assert reading_differences(source.metadata, source.tensors) == []
    source.close()


def test_the_one_base_of_mellum(tmp_path: Path) -> None:
    save(own(CASES["mellum"]), tmp_path)
    source = open_hf_source(tmp_path)
    (note,) = reading_differences(source.metadata, source.tensors)
    assert note.endswith("llama.cpp uses RoPE base 500000 in window layers; the file says 10000")
    source.close()
