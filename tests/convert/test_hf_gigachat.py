"""GigaChat 3.5, which transformers 5.24 lacks: folders, in place and converted, against a forward
pass in plain numpy and float64.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.gigachat_published import Published
from tests.convert.test_hf import convert
from tests.models.hf_tiny import N_VOCAB
from tests.models.test_arch_truth import check_truth, ids_of
from tests.models.test_indexed import changed
from tests.models.ways import NARROW, check_instruction_set, check_returns
from tests.reference import forward
from tests.tiny import draw
from treadle.convert.hf.config import read_config
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config
from treadle.selftest import model_check

CONFIG: dict[str, Any] = {
    "architectures": ["GigaChat35ForCausalLM"],
    "model_type": "gigachat3_5",
    "vocab_size": N_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 100000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "full_attention_layers": [1],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "swiglu_limit": 1.5,
    "scoring_func": "sigmoid",
    "norm_type": "ZeroCenteredGatedNorm",
    "layernorm_type": "pre_post",
    "gated_attention": True,
    "use_mla_scaling_factor": True,
    "linear_gating_type": "gated_rmsnorm_sigmoid_zero_centered",
}
N_RANK = 8
LATENT = {
    "q_a_proj": (48, 64),
    "q_b_proj": (160, 48),
    "kv_a_proj_with_mqa": (48, 64),
    "kv_b_proj": (224, 32),
    "gate_proj": (128, 64),
    "o_proj": (64, 128),
}
DELTA = {"in_proj_qkvz": (192, 64), "in_proj_ba": (8, 64), "out_proj": (64, 64)}
NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
)


def tensors_of() -> dict[str, np.ndarray]:
    """A checkpoint's tensors as published: experts one by one."""
    rng = np.random.default_rng(5)
    tensors: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int) -> None:
        tensors[f"{name}.weight"] = draw(rng, name.replace("embed", "embd"), shape)

    def add_norm(name: str, n: int) -> None:
        tensors[f"{name}.weight"] = (0.25 * rng.standard_normal(n)).astype(np.float32)
        for which, shape in (("up", (N_RANK, n)), ("down", (n, N_RANK))):
            weight = 1.4 * rng.standard_normal(shape) / np.sqrt(shape[1])
            tensors[f"{name}.gate_{which}_projection.weight"] = weight.astype(np.float32)

    for name in ("model.embed_tokens", "lm_head"):
        add(name, N_VOCAB, 64)
    add_norm("model.norm", 64)
    for i in range(3):
        at = f"model.layers.{i}"
        for norm in NORMS:
            add_norm(f"{at}.{norm}", 64)
        for name, shape in (LATENT if i == 1 else DELTA).items():
            add(f"{at}.self_attn.{name}", *shape)
        if i == 1:
            add_norm(f"{at}.self_attn.q_a_layernorm", 48)
            add_norm(f"{at}.self_attn.kv_a_layernorm", 32)
        else:
            add(f"{at}.self_attn.conv1d", 128, 1, 4)
            tensors[f"{at}.self_attn.norm.weight"] = np.linspace(-0.2, 0.3, 16, dtype=np.float32)
            tensors[f"{at}.self_attn.A_log"] = rng.uniform(0, 1, 4).astype(np.float32)
            tensors[f"{at}.self_attn.dt_bias"] = rng.standard_normal(4).astype(np.float32)
        if i:
            add(f"{at}.mlp.gate", 8, 64)
            bias = 0.2 * rng.standard_normal(8)
            tensors[f"{at}.mlp.gate.e_score_correction_bias"] = bias.astype(np.float32)
        experts = [f"experts.{e}." for e in range(8)] + ["shared_experts."] if i else [""]
        n_ff = 32 if i else 96
        for expert in experts:
            for one, shape in (("gate", (n_ff, 64)), ("up", (n_ff, 64)), ("down", (64, n_ff))):
                add(f"{at}.mlp.{expert}{one}_proj", *shape)
    return tensors


def write_folder(folder: Path) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    save_file(tensors_of(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_in_every_way(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf")
    made = convert(folder, tmp_path / "made.gguf")
    given = tensors_of()
    with open_gguf(made) as file:
        config = load_config(file)
        assert [at.mixer for at in config.layers] == [
            "delta_sigmoid",
            "latent_norm_gated",
            "delta_sigmoid",
        ]
        for key, value in {
            "attention.recurrent_layers": [True, False, True],
            "attention.key_length": 48,
            "attention.key_length_mla": 40,
            "swiglu_clamp_exp": [1.5] * 3,
            "ssm.group_count": 2,
        }.items():
            found: Any = file.metadata[f"gigachat35.{key}"]
            assert (found if isinstance(value, int) else [*found]) == value
        at = "model.layers.0.self_attn"
        norm = file.tensors["blk.0.ssm_norm.weight"].dequantize()
        assert np.allclose(norm, 1 + given[f"{at}.norm.weight"])
        both = given[f"{at}.in_proj_ba.weight"].reshape(2, 2, 2, 64)  # by key head
        for i, name in enumerate(("beta", "alpha")):
            rows = file.tensors[f"blk.0.ssm_{name}.weight"].dequantize()
            assert np.array_equal(rows, both[:, i].reshape(4, 64))
        qkvz = given[f"{at}.in_proj_qkvz.weight"].reshape(2, 96, 64)
        rows = file.tensors["blk.0.attn_qkv.weight"].dequantize()
        assert np.array_equal(rows[64:], qkvz[:, 32:64].reshape(64, 64))
    truth = Published(given, CONFIG).logits(ids_of())
    check_truth(made, truth)
    check_truth(folder, truth)
    check_returns(made)


def test_the_last_gate_is_made_before_logits_are_scaled(tmp_path: Path) -> None:
    made = convert(write_folder(tmp_path / "hf"), tmp_path / "made.gguf")
    scaled = changed(made, tmp_path / "scaled.gguf", "", logit_scale=0.25)
    check_truth(scaled, 0.25 * Published(tensors_of(), CONFIG).logits(ids_of()))


@pytest.mark.slow
def test_on_another_instruction_set(tmp_path: Path) -> None:
    made = convert(write_folder(tmp_path / "hf"), tmp_path / "made.gguf")
    with open_gguf(made) as file:
        truth = forward(file, load_config(file), ids_of())
    check_instruction_set(made, ids_of(), truth, NARROW)


def test_layers_by_kind() -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention"]
    more = {key: value for key, value in CONFIG.items() if key != "full_attention_layers"}
    made = read_config({**more, "layer_types": kinds}, Path("config.json")).metadata
    assert [*made["gigachat35.attention.recurrent_layers"]] == [False, True, True]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"full_attention_layers": [3]}, r"full_attention_layers: is \[3\].*layers from 0 to 2"),
        ({"full_attention_layers": None}, "full_attention_layers: is missing"),
        ({"norm_type": "LlamaRMSNorm"}, "norm_type"),
        ({"layernorm_type": "pre"}, "layernorm_type"),
        ({"linear_sigmoid_gate_scale": 1.0}, "linear_sigmoid_gate_scale"),
        ({"linear_attn_o_norm_eps": 1e-5}, "linear_attn_o_norm_eps: treadle supports only"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads: is 5.*multiple of 2"),
        ({"use_shared_expert_sigmoid": True}, "use_shared_expert_sigmoid"),
    ],
)
def test_what_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises((FileError, UnsupportedError), match=why):
        read_config({**CONFIG, **change}, Path("config.json"))


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        ("output_norm_gate_up.weight", "output_norm_gate_up.weight"),
        ("blk.1.attn_kv_a_norm_gate_down.weight", "attn_kv_a_norm_gate_down.weight: .*missing"),
        ("blk.2.post_ffw_norm_gate_up.weight", "post_ffw_norm_gate_up.weight: .*missing"),
    ],
)
def test_files_without_gates(lost: str, why: str, tmp_path: Path) -> None:
    with open_gguf(convert(write_folder(tmp_path / "hf"), tmp_path / "made.gguf")) as file:
        del file.tensors[lost]
        with pytest.raises(FileError, match=why):
            load_config(file)


@pytest.mark.slow
def test_the_self_test_checks_its_kernels(tmp_path: Path) -> None:
    made = convert(write_folder(tmp_path / "hf"), tmp_path / "made.gguf")
    with treadle.load(made, threads=1, n_sequences=4, context=128) as model:
        report = model_check.CheckReport({}, {}, quick=True)
        model_check.check_kernels(model, report)
    assert report.failures == []
    labels = {kernel.label for kernel in report.kernels}
    assert {"L0.delta.gate", "L1.attn.kv_a_norm.gate", "output_rows"} <= labels
