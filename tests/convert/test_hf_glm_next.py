"""GLM-5.3-Flash: its folder, in place and converted, against transformers in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.convert.test_hf import convert
from tests.models import hf_tiny
from tests.models.hf_tiny import EPS, N_VOCAB, compute_logits, float64_only, require_transformers
from tests.models.test_arch_truth import check_truth, ids_of
from treadle.files.gguf import open_gguf

TEXT: dict[str, Any] = {
    "vocab_size": N_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 0,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_topk": 12,
    "index_kpool": 4,
    "index_n_heads": 12,  # so many that no score is 0, as if it were tied
    "index_head_dim": 32,
    "linear_head_dim": 32,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 4,
    "hc_mult": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "layer_types": ["linear_attention", *["indexed_attention"] * 2, "linear_attention"],
    "indexer_types": ["full", "full", "shared", "full"],
    "swiglu_limit": 1.5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "rms_norm_eps": EPS,
    "pad_token_id": 0,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
    "projection_intermediate_size": 64,
}


def saved(folder: Path) -> Any:
    """transformers has its head only behind a tower."""
    require_transformers()
    import torch
    import transformers

    config = transformers.Glm5NextConfig(text_config=TEXT, vision_config=VISION)
    config._attn_implementation = "eager"
    kind = transformers.Glm5NextForConditionalGeneration
    with float64_only():
        model = kind(config).eval()
    rng = np.random.default_rng(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = hf_tiny._draw(rng, name, tuple(parameter.shape), tied=False)
            parameter.copy_(torch.from_numpy(value.astype(np.float64)))
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(torch.from_numpy(0.2 * rng.standard_normal(buffer.shape)).float())
    model.set_experts_implementation("eager")
    model.to(torch.float32).save_pretrained(folder)
    return model.to(torch.float64)


def test_agrees_with_transformers(tmp_path: Path) -> None:
    """In one go, in chunks, by decode, for every number of threads."""
    truth = compute_logits(saved(tmp_path / "hf"), ids_of())
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, truth)
    check_truth(tmp_path / "hf", truth, threads_of=(2,))
    with open_gguf(made) as gguf:
        found = {key.partition(".")[2]: value for key, value in gguf.metadata.items()}
    assert found["attention.indexer.kpool"] == 4
    assert found["leading_dense_block_count"] == 1
    kinds: Any = found["attention.head_count_kv"]
    assert list(kinds) == [0, 1, 1, 0]
