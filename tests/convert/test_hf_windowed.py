"""Families with experts and windows: Hugging Face folders, in place and converted, against
transformers, by every way to read a text.
"""

from __future__ import annotations

from pathlib import Path

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
}


@pytest.mark.parametrize("name", CASES)
def test_in_place_and_converted(name: str, tmp_path: Path) -> None:
    case = own(CASES[name])
    model, ids = save(case, tmp_path / "hf"), prompt()
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
