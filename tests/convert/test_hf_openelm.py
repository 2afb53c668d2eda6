"""OpenELM: folders in Apple's spelling, against layers of transformers' Qwen 3, each of other
sizes; and keys of published folders.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.convert.test_hf import convert
from tests.convert.test_hf_older import fill
from tests.models.hf_tiny import compute_logits, float64_only, require_transformers
from tests.models.test_arch_truth import check_truth, ids_of
from treadle.convert.hf.config import read_config
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf

HEADS = [4, 4, 8]
HEADS_KV = [2, 2, 4]
WIDTHS = [32, 64, 96]
CONFIG: dict[str, Any] = {
    "model_type": "openelm",
    "architectures": ["OpenELMForCausalLM"],
    "activation_fn_name": "swish",
    "ffn_dim_divisor": 32,
    "ffn_multipliers": [0.5, 0.72, 1.6],  # 32, 46 (32 would be too little), 102
    "ffn_with_glu": True,
    "head_dim": 16,
    "max_context_length": 128,
    "model_dim": 64,
    "normalization_layer_name": "rms_norm",
    "normalize_qk_projections": True,
    "num_gqa_groups": 2,
    "num_kv_heads": HEADS_KV,
    "num_query_heads": HEADS,
    "num_transformer_layers": 3,
    "qkv_multipliers": [0.5, 1.0],
    "rope_freq_constant": 10000,
    "rope_max_length": 256,
    "share_input_output_layers": True,
    "vocab_size": 320,
}


def twin() -> Any:
    """Qwen 3 of transformers, its layers of these sizes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP

    def config(i: int) -> Any:
        return Qwen3Config(
            vocab_size=320,
            hidden_size=64,
            num_hidden_layers=len(HEADS),
            num_attention_heads=HEADS[i],
            num_key_value_heads=HEADS_KV[i],
            head_dim=16,
            intermediate_size=WIDTHS[i],
            max_position_embeddings=128,
            rms_norm_eps=float(np.float32(1e-6)),
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            use_cache=False,
            attn_implementation="eager",
        )

    with float64_only():
        model = Qwen3ForCausalLM(config(0)).eval()
        for i, layer in enumerate(model.model.layers):
            layer.self_attn, layer.mlp = Qwen3Attention(config(i), i), Qwen3MLP(config(i))
        model.eval()
    fill(model)
    return model


def respelt(model: Any) -> dict[str, np.ndarray]:
    """Its tensors as Apple's folders have them."""
    own = {name: x.detach().float().numpy() for name, x in model.named_parameters()}
    made = {
        "transformer.token_embeddings.weight": own["model.embed_tokens.weight"],
        "transformer.norm.weight": own["model.norm.weight"],
    }
    for i in range(len(HEADS)):
        at = f"model.layers.{i}."
        to = f"transformer.layers.{i}."
        qkv = [own[f"{at}self_attn.{x}_proj.weight"] for x in "qkv"]
        gated = [own[f"{at}mlp.{x}_proj.weight"] for x in ("gate", "up")]
        made |= {
            f"{to}attn.qkv_proj.weight": np.concatenate(qkv),
            f"{to}attn.q_norm.weight": own[f"{at}self_attn.q_norm.weight"],
            f"{to}attn.k_norm.weight": own[f"{at}self_attn.k_norm.weight"],
            f"{to}attn.out_proj.weight": own[f"{at}self_attn.o_proj.weight"],
            f"{to}attn_norm.weight": own[f"{at}input_layernorm.weight"],
            f"{to}ffn_norm.weight": own[f"{at}post_attention_layernorm.weight"],
            f"{to}ffn.proj_1.weight": np.concatenate(gated),
            f"{to}ffn.proj_2.weight": own[f"{at}mlp.down_proj.weight"],
        }
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, np.ndarray]:
    """A folder, what is converted of it, and its logits."""
    require_transformers()
    from safetensors.numpy import save_file

    model = twin()
    folder = tmp_path_factory.mktemp("openelm") / "hf"
    folder.mkdir()
    save_file(respelt(model), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    path = convert(folder, folder.parent / "openelm.gguf")
    return folder, path, compute_logits(model, ids_of())


def test_agrees_with_transformers(made: tuple[Path, Path, np.ndarray]) -> None:
    folder, path, truth = made
    assert truth.std() > 0.5
    check_truth(path, truth)
    check_truth(folder, truth, threads_of=(2,))


def test_as_llama_cpps_converter_writes_it(made: tuple[Path, Path, np.ndarray]) -> None:
    with open_gguf(made[1]) as gguf:
        found: dict[str, Any] = dict(gguf.metadata)
        shapes = {name: tensor.shape for name, tensor in gguf.tensors.items()}
    assert found["general.architecture"] == "openelm"
    assert list(found["openelm.attention.head_count"]) == HEADS
    assert list(found["openelm.attention.head_count_kv"]) == HEADS_KV
    assert list(found["openelm.feed_forward_length"]) == WIDTHS
    assert found["openelm.rope.dimension_count"] == 16
    assert shapes["blk.2.attn_qkv.weight"] == (256, 64)
    assert shapes["blk.1.ffn_gate.weight"] == shapes["blk.1.ffn_up.weight"] == (64, 64)
    assert "output.weight" not in shapes


def keys_of(**changes: Any) -> dict[str, Any]:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value != "left out"}
    return read_config(config, Path("config.json")).metadata


def test_sizes_of_published_models() -> None:
    """270M: 16 layers."""
    found = keys_of(
        num_transformer_layers=16,
        model_dim=1280,
        head_dim=64,
        ffn_dim_divisor=256,
        ffn_multipliers=[
            0.5,
            0.73,
            0.97,
            1.2,
            1.43,
            1.67,
            1.9,
            2.13,
            2.37,
            2.6,
            2.83,
            3.07,
            3.3,
            3.53,
            3.77,
            4.0,
        ],
        num_query_heads=[12] * 5 + [16] * 7 + [20] * 4,
        num_kv_heads=[3] * 5 + [4] * 7 + [5] * 4,
    )
    widths = [768, 1024, 1280, 1536, 1792, 2048, 2560, 2816, 3072, 3328, 3584, 3840, 4352, 4608]
    assert found["openelm.feed_forward_length"] == [*widths, 4864, 5120]


def test_sizes_that_all_layers_share() -> None:
    """They are numbers then."""
    found = keys_of(num_query_heads=[4] * 3, num_kv_heads=2, ffn_multipliers=2.0)
    assert found["openelm.attention.head_count"] == 4
    assert found["openelm.attention.head_count_kv"] == 2
    assert found["openelm.feed_forward_length"] == [128] * 3


@pytest.mark.parametrize(
    ("key", "value", "kind", "said"),
    [
        ("share_input_output_layers", False, UnsupportedError, "share_input_output_layers: is"),
        ("ffn_with_glu", False, UnsupportedError, "ffn_with_glu: is False"),
        ("activation_fn_name", "gelu", UnsupportedError, "activation_fn_name: 'gelu'"),
        ("ffn_multipliers", [1.0] * 4, FileError, "ffn_multipliers: has 4 entries"),
        ("ffn_multipliers", [1.0, "a", 1.0], FileError, r"ffn_multipliers\[1\]: is 'a'"),
        ("num_query_heads", [4, 4], FileError, "num_query_heads: is"),
        ("num_kv_heads", [2, 0, 2], FileError, "num_kv_heads: is"),
    ],
)
def test_what_is_refused(key: str, value: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        keys_of(**{key: value})
