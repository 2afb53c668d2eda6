"""Families near DeepSeek's: Hugging Face folders, run in place and converted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.mlx_files import set_config
from tests.convert.test_hf import convert
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import check_both, own
from tests.mlx_package import import_mlx, to_numpy
from tests.models.hf_cases import Case
from tests.models.hf_tiny import build, compute_logits
from tests.models.test_arch_truth import check_truth, ids_of
from treadle.convert.hf.config import read_config
from treadle.convert.hf.folder import open_hf
from treadle.convert.llamacpp_differences import reading_differences
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf

SIZES: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
}
MINICPM3 = Case("MiniCPM3", "minicpm3", SIZES)
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,  # a text of 40 has the long factors
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 3.0, 4.0, 4.0],
}
PLM: dict[str, Any] = {
    **SIZES,
    "q_lora_rank": None,
    "v_head_dim": 32,
    "first_k_dense_replace": 4,
    "tie_word_embeddings": True,
}
# As llama.cpp's converter names them; and scales that it leaves out.
KEYS = {
    "attention.head_count_kv": 4,
    "attention.q_lora_rank": 32,
    "attention.kv_lora_rank": 32,
    "attention.key_length": 48,
    "attention.value_length": 16,
    "rope.dimension_count": 16,
    "embedding_scale": 12.0,
    "residual_scale": np.float32(0.7),
    "logit_scale": 0.25,
}


def test_minicpm3(tmp_path: Path) -> None:
    """In one go, in chunks, by decode."""
    model = save(own(MINICPM3), tmp_path / "hf")
    truth = compute_logits(model, ids_of())
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, truth)
    check_truth(tmp_path / "hf", truth, threads_of=(2,))
    with open_gguf(made) as gguf:
        found = {key.partition(".")[2]: value for key, value in gguf.metadata.items()}
        assert {key: found[key] for key in KEYS} == KEYS
        assert gguf.tensors["blk.0.attn_kv_b.weight"].shape == (4 * 48, 32)
        assert reading_differences(gguf.metadata, gguf.tensors) == []


@pytest.mark.filterwarnings("ignore:with a context over .* long rope factors")
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tie_word_embeddings": True, "rope_parameters": _LONG}, set()),
        (
            {"v_head_dim": 48, "scale_depth": None, "dim_model_base": None},
            {"fixes residual_scale, logit_scale at 0.7 (file: 1), 0.25 (file: 1)"},
        ),
        (
            {"q_lora_rank": None, "scale_emb": 6, "attention_bias": True},
            {"fixes embedding_scale at 12 (file: 6)", "with attn_q.weight", "_mqa.bias"},
        ),
    ],
)
def test_other_sizes(more: dict[str, Any], says: set[str], tmp_path: Path) -> None:
    """And what llama.cpp makes of them."""
    with open_gguf(check_both(own(MINICPM3, **more), tmp_path)) as gguf:
        notes = reading_differences(gguf.metadata, gguf.tensors)
    assert len(notes) == len(says)
    assert all(any(text in note for note in notes) for text in says)


@pytest.mark.parametrize("more", [{}, {"q_lora_rank": 32, "tie_word_embeddings": False}])
def test_plm(more: dict[str, Any], tmp_path: Path) -> None:
    """transformers has no such model: DeepSeek's attention, around its own FFN."""
    folder = tmp_path / "hf"
    model = squared(Case("DeepseekV2", "plm", {**PLM, **more}))
    model.float().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "plm", "architectures": ["PLMForCausalLM"], "hidden_act": "relu2"}
    (folder / "config.json").write_text(json.dumps(config))
    truth = compute_logits(model.double(), ids_of())
    made = convert(folder, tmp_path / "made.gguf")
    check_truth(made, truth)
    check_truth(folder, truth, threads_of=(2,))
    with open_gguf(made) as gguf:
        notes = reading_differences(gguf.metadata, gguf.tensors)
        assert [note.partition(" with ")[2] for note in notes] == (
            ["attn_q_a.weight, output.weight ('wrong number of tensors')"] if more else []
        )


def squared(case: Case) -> Any:
    """The model, whose FFNs square what is above 0, and have no gate."""
    import torch
    from transformers.activations import ACT2FN

    model = build(own(case))
    rng = np.random.default_rng(5)
    for layer in model.model.layers:
        parts = {"up_proj": (96, 64), "act": None, "down_proj": (64, 96)}
        layer.mlp = torch.nn.Sequential()
        for name, shape in parts.items():
            part = ACT2FN["relu2"] if shape is None else torch.nn.Linear(*shape[::-1], bias=False)
            if shape is not None:
                values = rng.standard_normal(shape).astype(np.float32) / shape[1] ** 0.5
                part.weight = torch.nn.Parameter(torch.from_numpy(values))
            layer.mlp.add_module(name, part)
    return model


YOUTU = Case("Youtu", "deepseek2", {**SIZES, "v_head_dim": 32, "tie_word_embeddings": True})
_YARN = {
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize("more", [{}, {"q_lora_rank": None, "tie_word_embeddings": False}])
def test_youtu(more: dict[str, Any], tmp_path: Path) -> None:
    """DeepSeek's graph without experts, with the keys that llama.cpp's converter writes."""
    with open_gguf(check_both(own(YOUTU, **more), tmp_path)) as gguf:
        found = {key.partition(".")[2]: value for key, value in gguf.metadata.items()}
        assert gguf.metadata["general.architecture"] == "deepseek2"
        assert found["leading_dense_block_count"] == 4
        assert found["expert_feed_forward_length"] == found["feed_forward_length"] == 96
        assert found["expert_shared_count"] == 0
        assert not {"expert_count", "expert_gating_func"} & found.keys()
        assert ("attention.q_lora_rank" in found) == (not more)
        notes = reading_differences(gguf.metadata, gguf.tensors)
        assert [note.partition("does ")[2] for note in notes] == (
            ["not load deepseek2 files with 4 layers and without attention.q_lora_rank"]
            if more
            else []
        )
        for layers, n_vocab, n in ((27, 320, 0), (48, 128256, 0), (48, 320, bool(more))):
            more_keys = {"deepseek2.block_count": layers, "deepseek2.vocab_size": n_vocab}
            assert len(reading_differences({**gguf.metadata, **more_keys}, gguf.tensors)) == n


def test_sarvam_as_its_own_code_spelt_it(tmp_path: Path) -> None:
    """transformers computes it by its class of DeepSeek V3."""
    options = {
        **SIZES,
        "q_lora_rank": None,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **_YARN},
    }
    model = save(own(Case("DeepseekV3", "deepseek2", options)), tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    for old, new in (
        ("n_routed_experts", "num_experts"),
        ("n_shared_experts", "num_shared_experts"),
    ):
        config[new] = config.pop(old)
    for key in (
        "rope_parameters",
        "n_group",
        "topk_group",
        "q_lora_rank",
        "num_nextn_predict_layers",
    ):
        config.pop(key, None)
    config |= {"model_type": "sarvam_mla", "head_dim": 48, "q_head_dim": 48, "rope_theta": 10000.0}
    path.write_text(json.dumps({**config, "rope_scaling": {"type": "deepseek_yarn", **_YARN}}))
    made = convert(path.parent, tmp_path / "made.gguf")
    truth = compute_logits(model, ids_of())
    check_truth(made, truth)
    check_truth(path.parent, truth, threads_of=(2,))


@pytest.mark.parametrize("more", [{}, {"attention_bias": True, "n_shared_experts": 2}])
def test_solar_open(more: dict[str, Any], tmp_path: Path) -> None:
    """GLM 4.5's graph: all layers have experts, whole heads turn, and nothing norms them."""
    options = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 32,
        "routed_scaling_factor": 1.5,
        **more,
    }
    case = own(Case("SolarOpen", "glm4moe", options))
    with open_gguf(check_both(case, tmp_path)) as gguf:
        assert gguf.metadata["glm4moe.rope.dimension_count"] == 32
        assert "blk.0.ffn_up.weight" not in gguf.tensors
        assert reading_differences(gguf.metadata, gguf.tensors) == []


def test_solar_open_as_it_is_published() -> None:
    """With keys that say what it has not."""
    config = {
        "model_type": "solar_open",
        "num_hidden_layers": 2,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "partial_rotary_factor": 1.0,
        "use_qk_norm": False,
        "first_k_dense_replace": 0,
        "rope_theta": 1000000,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536},
    }
    assert read_config(config, Path("config.json")).metadata["glm4moe.rope.freq_base"] == 1e6
    for change in ({"use_qk_norm": True}, {"first_k_dense_replace": 1}):
        with pytest.raises(UnsupportedError, match=next(iter(change))):
            read_config({**config, **change}, Path("config.json"))


def test_packed_by_mlx(tmp_path: Path) -> None:
    """A matrix in several arrays is unpacked to be cut."""
    from safetensors.numpy import load_file, save_file

    mx = import_mlx()
    found = []
    save(own(MINICPM3), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    packed = {}
    for name in [name for name in tensors if "kv_b_proj" in name]:
        parts = mx.quantize(mx.array(tensors[name]), group_size=32, bits=4)
        for part, value in zip(("weight", "scales", "biases"), parts, strict=True):
            packed[f"{name.removesuffix('weight')}{part}"] = np.array(value)
        plain = to_numpy(mx.dequantize(*parts, group_size=32, bits=4))
        tensors[name] = plain.astype(np.float16).astype(np.float32)
    for weights in (tensors, {**tensors, **packed}):
        save_file(weights, tmp_path / "model.safetensors")
        if weights is not tensors:
            set_config(tmp_path, quantization={"group_size": 32, "bits": 4})
        with treadle.load(tmp_path, threads=1, kv="f32") as model:
            found.append(model.logits(ids_of()))
            kind = model.gguf.tensors["blk.0.attn_kv_b.weight"].type_name
    assert kind not in ("F32", "F16")
    assert np.abs(found[0] - found[1]).max() <= 1e-3 * np.abs(found[0]).max()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"kv_lora_rank": "many"}, "kv_lora_rank: is 'many'"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0}},
            r"rope_parameters\.mscale_all_dim: not supported",
        ),
    ],
)
def test_what_is_refused(change: dict[str, Any], why: str) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
    config = {"model_type": "minicpm3", **sizes, "num_attention_heads": 4}
    read_config(config, Path("config.json"))
    with pytest.raises((FileError, UnsupportedError), match=why):
        read_config({**config, **change}, Path("config.json"))


def test_what_is_at_odds(tmp_path: Path) -> None:
    save(own(MINICPM3), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, says in (
        ({"v_head_dim": 32}, r"kv_b_proj\.weight: shape \[192, 32\]"),
        ({"q_lora_rank": None}, r"self_attn\.q_proj\.weight: the tensor is missing"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(FileError, match=says):
            open_hf(tmp_path)
