"""The models that ``hf_tiny`` makes: small, one for each thing that architectures differ in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One model: transformers' class by its name's stem, GGUF's architecture, and what differs."""

    family: str
    arch: str
    options: Mapping[str, Any] = field(default_factory=dict)
    head: str = "ForCausalLM"  # of the class's name


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def _gemma_rope(**full: Any) -> dict[str, Any]:
    """Two bases; ``full`` is what the global layers have."""
    return {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6, **full},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    }


_GEMMA = {
    "num_hidden_layers": 8,  # layer 5 is global, the others have the window
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "num_key_value_heads": 1,
    "sliding_window": 16,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}

CASES: dict[str, Case] = {
    "llama": Case("Llama", "llama"),
    "llama-bias": Case(
        "Llama",
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-linear": Case("Llama", "llama", _rope("linear", factor=4.0)),
    "llama3": Case(
        "Llama",
        "llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,  # so small that the prompt feels it
        ),
    ),
    "mistral": Case("Mistral", "llama", {"head_dim": 32, "sliding_window": None}),
    "qwen2": Case("Qwen2", "qwen2"),
    "qwen2-yarn": Case(
        "Qwen2",
        "qwen2",
        {
            "tie_word_embeddings": True,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=32),
        },
    ),
    "qwen3": Case("Qwen3", "qwen3", {"head_dim": 32}),
    "gemma3": Case("Gemma3", "gemma3", {**_GEMMA, **_gemma_rope()}),
    "gemma3-linear": Case(
        "Gemma3", "gemma3", {**_GEMMA, **_gemma_rope(rope_type="linear", factor=8.0)}
    ),
    "gemma3-softcap": Case(
        "Gemma3",
        "gemma3",
        {
            **_GEMMA,
            **_gemma_rope(),
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 5.0,
        },
    ),
}
# Architectures that llama.cpp reads from files of their own names, and `convert` does not write.
MORE_CASES: dict[str, Case] = {
    "gemma": Case(
        "Gemma",
        "gemma",
        {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    ),
    "exaone4": Case(
        "Exaone4",
        "exaone4",
        {"num_hidden_layers": 4, "sliding_window": 16, "sliding_window_pattern": 4},
    ),
    "exaone4-no-window": Case(
        "Exaone4",
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "phi3-longrope": Case(
        "Phi3",
        "phi3",
        {
            "sliding_window": 20,
            "pad_token_id": 0,
            "original_max_position_embeddings": 32,
            **_rope(
                "longrope",
                original_max_position_embeddings=32,  # a text of 48 has the long factors
                short_factor=[1.0] * 8,
                long_factor=[1.0, 1.1, 1.3, 1.7, 2.0, 3.0, 4.0, 4.0],
            ),
        },
    ),
    "mistral3": Case(
        "Ministral3",
        "mistral3",
        {
            "head_dim": 32,
            "pad_token_id": 0,
            **_rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,  # three times in the prompt
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.5,
            ),
        },
    ),
    "gptneox": Case("GPTNeoX", "gptneox", {"num_key_value_heads": 4}),
    "gptneox-in-turn": Case(
        "GPTNeoX", "gptneox", {"use_parallel_residual": False, "num_key_value_heads": 4}
    ),
    "gpt2": Case(
        "GPT2",
        "gpt2",
        {"n_positions": 128, "n_inner": 96, "num_key_value_heads": 4, "tie_word_embeddings": True},
        "LMHeadModel",
    ),
}
ALL_CASES = CASES | MORE_CASES
ENCODER_CASES: dict[str, Case] = {
    "nomic-bert": Case("NomicBert", "nomic-bert", {"num_key_value_heads": 4}, "Model"),
    "eurobert": Case("EuroBert", "eurobert", {"pad_token_id": 0}, "Model"),
}
