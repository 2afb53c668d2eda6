"""DeepSeek V4: folders, in place and converted, against transformers in float64."""

from __future__ import annotations

from pathlib import Path

from tests.convert.test_hf import convert
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import own
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import check_truth, ids_of

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
    check_truth(tmp_path / "hf", truth)
