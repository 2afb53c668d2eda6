"""Mistral 4's folders: latent attention with a temperature, alone and inside a larger model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import check_both, own
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import check_truth, ids_of
from treadle.convert.hf.folder import open_hf
from treadle.errors import UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf

_ROPE = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,  # three times in the prompt
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
OPTIONS: dict[str, Any] = {
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
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,  # llama.cpp norms both ranks by it, transformers by this number
    "rope_parameters": _ROPE,
}
CASE = Case("Mistral4", "mistral4", OPTIONS)


def test_in_place_and_converted(tmp_path: Path) -> None:
    """In one go, in chunks, by decode, and the keys that say how queries grow."""
    model = save(own(CASE, max_position_embeddings=64), tmp_path / "hf")
    ids = ids_of()
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    truth = compute_logits(model, ids)
    check_truth(made, truth)
    check_truth(tmp_path / "hf", truth, threads_of=(2,))
    with open_gguf(made) as gguf:
        found = {key.partition(".")[2]: value for key, value in gguf.metadata.items()}
        assert gguf.metadata["general.architecture"] == "mistral4"
        assert found["attention.temperature_scale"] == 0.5
        assert found["attention.temperature_length"] == 16
        assert found["rope.scaling.yarn_log_multiplier"] == np.float32(0.1)
        assert found["rope.dimension_count"] == 16


def test_as_the_converter_of_llama_cpp_writes_it(tmp_path: Path) -> None:
    """Gate and up of experts in one tensor; keys that say what the architecture has anyway left
    out, and so the temperature.
    """
    rope = {key: value for key, value in _ROPE.items() if key != "llama_4_scaling_beta"}
    case = own(
        CASE, max_position_embeddings=64, rope_parameters={**rope, "llama_4_scaling_beta": 0.0}
    )
    model = save(case, tmp_path / "hf")
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    theirs = tmp_path / "theirs.gguf"
    left_out = (
        "gating_func",
        "group_count",
        "group_used_count",
        "attn_factor",
        "temperature_length",
    )
    writer = GGUFWriter(theirs)
    with open_gguf(made) as gguf:
        for key, value in gguf.metadata.items():
            if not key.endswith(left_out):
                writer.add(key, value)
        for name, tensor in gguf.tensors.items():
            values = tensor.dequantize()
            if "ffn_gate_exps" in name:
                up = gguf.tensors[name.replace("gate", "up")].dequantize()
                name = name.replace("gate", "gate_up")
                values = np.concatenate([values, up], axis=1)
            if "ffn_up_exps" not in name:
                writer.add_tensor(name, values.shape, "F32", values)
        writer.write()
    check_truth(theirs, compute_logits(model, ids_of()))


@pytest.mark.parametrize("more", [{"q_lora_rank": None}, {"norm_topk_prob": False}])
def test_other_sizes(more: dict[str, Any], tmp_path: Path) -> None:
    check_both(own(CASE, max_position_embeddings=64, **more), tmp_path)


def test_inside_a_model_of_pictures(tmp_path: Path) -> None:
    """As it is published: Mistral 3's outer model, whose text part says what it is."""
    save(own(CASE, max_position_embeddings=64), tmp_path)
    alone = treadle.load(tmp_path, threads=2, kv="f32")
    expected = alone.logits(ids_of(20))
    alone.close()
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": text}))
    with treadle.load(tmp_path, threads=2, kv="f32") as model:
        assert model.config.arch.name == "mistral4"
        assert np.array_equal(model.logits(ids_of(20)), expected)


def test_large_3(tmp_path: Path) -> None:
    """Mistral's own converter calls such a model DeepSeek's: the same bits, temperature and all."""
    save(own(CASE, max_position_embeddings=64), tmp_path / "hf")
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    other = tmp_path / "other.gguf"
    writer = GGUFWriter(other)
    found = []
    with open_gguf(made) as gguf:
        for key, value in {**gguf.metadata, "general.architecture": "deepseek2"}.items():
            writer.add(key.replace("mistral4.", "deepseek2."), value)
        for name, tensor in gguf.tensors.items():
            writer.add_tensor(name, tensor.shape, "F32", tensor.dequantize())
        writer.write()
    for path in (made, other):
        with treadle.load(path, threads=2, kv="f32") as model:
            found.append(model.logits(ids_of()))
    assert np.array_equal(found[0], found[1])


def test_floats_of_eight_bits(tmp_path: Path) -> None:
    """As it is published: a scale for each expert, and for what it reads, which is left out; the
    bits of the same weights in BF16.
    """
    import torch
    from safetensors.torch import load_file, save_file

    save(own(CASE, max_position_embeddings=64), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    whole = load_file(tmp_path / "model.safetensors")
    packed = {}
    for name in [name for name in whole if name.endswith("_proj") or "_proj.w" in name]:
        value = whole[name]
        stem = name.removesuffix(".weight")
        scale = value.abs().amax(tuple(range(value.dim() == 3, value.dim())), keepdim=True) / 448
        scale = scale if value.dim() == 3 else scale.reshape(())
        packed[name] = (value / scale).to(torch.float8_e4m3fn)
        packed[f"{name}_scale_inv"] = scale
        packed[f"{stem}{'_' if stem == name else '.'}activation_scale"] = torch.ones(len(value))
        whole[name] = (packed[name].float() * scale).to(torch.bfloat16)
    said = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    found = []
    for tensors, more in ((whole, {}), ({**whole, **packed}, {"quantization_config": said})):
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
        with treadle.load(tmp_path, threads=2, kv="f32") as model:
            found.append(model.logits(ids_of(20)))
    assert len(packed) > 20
    assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"n_group": 2, "topk_group": 1}, "n_group: treadle supports only one group"),
        ({"rope_interleave": False}, "rope_interleave: is False"),
        ({"rope_parameters": {**_ROPE, "mscale": 0.5}}, "mscale: is 0.5"),
    ],
)
def test_what_is_refused(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    save(own(CASE), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UnsupportedError, match=why):
        open_hf(tmp_path)
