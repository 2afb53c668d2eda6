"""Nemotron-H as transformers computes it: dense layers, and experts in a smaller space, of which
there is no shared file.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.models.hf_tiny import (
    N_VOCAB,
    byte_vocabulary,
    compute_logits,
    float64_only,
    require_transformers,
)
from tests.reference import forward
from tests.tiny import rounding
from treadle.errors import FileError
from treadle.files.gguf import GGUFWriter
from treadle.formats import by_name

LAYERS = ("linear_attention", "ffn", "full_attention", "ffn")
NAMES = {  # GGUF's stems, by transformers' names, a layer's number cut off
    "embeddings": "token_embd",
    "norm_f": "output_norm",
    "lm_head": "output",
    "norm": "attn_norm",
    "in_proj": "ssm_in",
    "conv1d": "ssm_conv1d",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "mixer.norm": "ssm_norm",
    "out_proj": "ssm_out",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "gate": "ffn_gate_inp",
    "gate.e_score_correction_bias": "exp_probs_b.bias",
    "experts.up_proj": "ffn_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "shared_experts.up_proj": "ffn_up_shexp",
    "shared_experts.down_proj": "ffn_down_shexp",
    "fc1_latent_proj": "ffn_latent_down",
    "fc2_latent_proj": "ffn_latent_up",
}


def build(ffn: str, latent: int | None) -> Any:
    """The transformers model, in float64; its weights are exact in float32."""
    import torch
    import transformers

    config = transformers.NemotronHConfig(
        vocab_size=N_VOCAB,
        hidden_size=64,
        layers_block_type=[ffn if name == "ffn" else name for name in LAYERS],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
        ssm_state_size=16,
        mamba_num_heads=4,
        mamba_head_dim=32,
        n_groups=2,
        n_routed_experts=8,
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
        moe_intermediate_size=48,
        moe_shared_expert_intermediate_size=40,
        moe_latent_size=latent,
        layer_norm_epsilon=float(np.float32(1e-5)),
        attn_implementation="eager",
        experts_implementation="eager",
    )
    kind = transformers.NemotronHForCausalLM  # imported here: see float64_only
    with float64_only():
        model = kind(config).eval()
    rng = np.random.default_rng(11)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            x = rng.standard_normal(tuple(value.shape))
            if name.endswith("norm.weight"):
                x = 1.0 + 0.25 * x
            elif x.ndim >= 2 and "embeddings" not in name:
                x = 1.4 * x / np.sqrt(x.shape[-1])
            value.copy_(torch.from_numpy((0.5 * x if x.ndim == 1 else x).astype(np.float32)))
    return model


def write(model: Any, path: Path, **more: Any) -> None:
    """As llama.cpp's converter does."""
    config = model.config
    moe = "moe" in model.config.layers_block_type
    writer = GGUFWriter(path)
    arch = "nemotron_h_moe" if moe else "nemotron_h"
    n_ff = config.moe_intermediate_size if moe else config.intermediate_size
    writer.add("general.architecture", arch)
    keys = {
        "context_length": 4096,
        "embedding_length": 64,
        "block_count": len(LAYERS),
        "feed_forward_length": [n_ff * (name == "ffn") for name in LAYERS],
        "attention.head_count": 4,
        "attention.head_count_kv": [2 * (name == "full_attention") for name in LAYERS],
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.inner_size": 128,
        "ssm.time_step_rank": 4,
        "expert_count": 8 * moe,
        "expert_used_count": 3,
        "expert_feed_forward_length": 48,
        "expert_shared_feed_forward_length": 40,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
    }
    if config.moe_latent_size:
        keys["moe_latent_size"] = config.moe_latent_size
    for key, value in {**keys, **more}.items():
        writer.add(f"{arch}.{key}", value)
    for key, value in byte_vocabulary().items():
        writer.add(f"tokenizer.ggml.{key}", value)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        x = value.detach().numpy().astype(np.float32)
        kind = ".bias" if name.endswith(".bias") else ".weight"
        stem = name.removeprefix("model.").removesuffix(kind)
        layer = ""
        if stem.startswith("layers."):
            _, number, stem = stem.split(".", 2)
            layer = f"blk.{number}."
            stem = stem if stem == "mixer.norm" else stem.removeprefix("mixer.")
        to = layer + NAMES[stem]
        x = {
            "A_log": lambda x: -np.exp(x)[:, None],
            "D": lambda x: x[:, None],
            "conv1d": lambda x: x.reshape(len(x), -1) if x.ndim > 1 else x,
            "mixer.norm": lambda x: x.reshape(2, -1),
        }.get(stem, lambda x: x)(x)
        if not to.endswith((".bias", ".weight", "ssm_a", "ssm_d")):
            to += kind
        writer.add_tensor(to, x.shape, by_name("F32"), np.ascontiguousarray(x))
    writer.write()


@pytest.mark.parametrize(("ffn", "latent"), [("mlp", None), ("moe", 32)])
def test_agrees_with_transformers(ffn: str, latent: int | None, tmp_path: Path) -> None:
    require_transformers()
    model = build(ffn, latent)
    write(model, tmp_path / "tiny.gguf")
    ids = np.random.default_rng(7).integers(3, N_VOCAB, 40).tolist()
    truth = compute_logits(model, ids)
    with treadle.load(tmp_path / "tiny.gguf", threads=2, kv="f32") as made:
        assert made.config.ignored == ()
        exact = forward(made.gguf, made.config, ids)
        # transformers adds the product of the chunk's sums in another order, in float64.
        assert np.abs(exact - truth).max() <= 1e-6 * np.abs(truth).max()
        for n in (1, 512):
            made.plan(n).check()
        with closing(made.session()) as session:
            rows = [session.logits([token]) for token in ids]
        for logits in (made.logits(ids), np.concatenate(rows)):
            error = np.abs(logits - truth).max() / np.abs(truth).max()
            assert error <= rounding(made.config), error / rounding(made.config)


def test_a_latent_space_without_its_matrices(tmp_path: Path) -> None:
    require_transformers()
    write(build("moe", None), tmp_path / "tiny.gguf", moe_latent_size=32)
    with pytest.raises(FileError, match=r"ffn_latent_down\.weight"):
        treadle.load(tmp_path / "tiny.gguf")
