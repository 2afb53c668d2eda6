"""Step 3.5 and 3.7: folders as transformers writes them and as they are published, in place and
converted, and files as llama.cpp's converter writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, prompt, worst
from tests.convert.test_hf_bailing import names_are_known
from tests.convert.test_hf_pictures import rewrite
from tests.models.hf_tiny import EPS, N_VOCAB, _draw, float64_only, require_transformers
from tests.models.test_arch_truth import check_truth, ids_of
from treadle.convert.hf.folder import open_hf, open_hf_source
from treadle.convert.llamacpp_differences import reading_differences
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUF, GGUFWriter, open_gguf
from treadle.kernels.activations import ACTIVATIONS, gated
from treadle.models.load import load_config

_WIDE = "full_attention"
_NARROW = "sliding_attention"
N_LAYER = 4
N_NEXTN = 2
STEP: dict[str, Any] = {
    "vocab_size": N_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": N_LAYER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": EPS,
    "layer_types": [_WIDE, _NARROW, _NARROW, _WIDE],
    "sliding_window": 16,
    "num_sliding_attention_heads": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "share_expert_dim": 64,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "swiglu_limits": [0.0, 0.0, 0.5, 0.25],
    "swiglu_limits_shared": [0.5, 0.0, 0.3, None],
    "rope_theta": [5e5, 1e4, 1e4, 5e5],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
    "moe_router_scaling_factor": 2.5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 8.0,
    },
}
_VISION = {"width": 32, "heads": 2, "layers": 1, "image_size": 28, "patch_size": 14}


def build_step(**text: Any) -> Any:
    """transformers' model in float64."""
    require_transformers()
    import torch
    import transformers

    config = transformers.Step3p7Config(
        text_config={**STEP, **text}, vision_config={**_VISION, "mlp_ratio": 1.0}
    )
    config._attn_implementation = config.text_config._attn_implementation = "eager"
    kind = transformers.Step3p7ForConditionalGeneration
    with float64_only():
        model = kind(config).eval()
    rng = np.random.default_rng(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = _draw(rng, name, tuple(parameter.shape), tied=False).astype(np.float64)
            shift = "norm" in name and "vision" not in name
            parameter.copy_(torch.from_numpy(value - shift))
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(torch.from_numpy(0.2 * rng.standard_normal(buffer.shape)))
    return model


Saved = tuple[Path, np.ndarray]


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A folder that transformers has written, and its logits of ``ids_of()``."""
    model = build_step()
    folder = tmp_path_factory.mktemp("step") / "hf"
    expected = logits(model, ids_of())
    save(model, folder)
    return folder, expected


def logits(model: Any, ids: list[int]) -> np.ndarray:
    import torch

    with float64_only(), torch.no_grad():
        rows: np.ndarray = model(torch.tensor([ids])).logits[0].numpy()
    return rows


def save(model: Any, folder: Path) -> None:
    import torch

    model.to(torch.float32).save_pretrained(folder)


def run(path: Path) -> np.ndarray:
    with treadle.load(path, threads=2, kv="f32") as loaded:
        assert [name for name in loaded.config.ignored if "nextn" not in name] == []
        rows: np.ndarray = loaded.logits(ids_of())
        return rows


def test_in_every_way(step: Saved, tmp_path: Path) -> None:
    folder, expected = step
    made = convert(folder, tmp_path / "made.gguf")
    check_truth(made, expected)
    assert np.array_equal(run(folder), run(made))
    names_are_known(made, {"attn_gate", "exp_probs_b", "ffn_up_shexp", "attn_q_norm"})
    with open_gguf(made) as file:
        layers = load_config(file).layers
        found = [(at.n_head, at.window, at.rope, at.ffn, at.activation) for at in layers]
        assert found == [
            (4, 0, 0, "gated", "silu_to_0.5"),
            (6, 16, 1, "experts", ""),
            (6, 16, 1, "experts", "silu_to_0.300000012"),
            (4, 0, 0, "experts", ""),
        ]
        chosen = [at.experts.activation for at in layers if at.experts]
        assert chosen == ["", "silu_to_0.5", "silu_to_0.25"]
        assert file.metadata["step35.rope.dimension_count"] == 32  # twice that of wide layers
        assert file.tensors["rope_freqs.weight"].dequantize()[8:].tolist() == [1.0] * 8
        assert reading_differences(file.metadata, file.tensors) == []


def test_a_long_text(tmp_path: Path) -> None:
    """Past the window, and past the context of before the stretching; without limits."""
    none = {"swiglu_limits": None, "swiglu_limits_shared": None}
    model = build_step(**none, rope_scaling=None, num_sliding_attention_heads=None)
    ids = prompt()
    expected = logits(model, ids)
    save(model, tmp_path / "hf")
    with treadle.load(tmp_path / "hf", threads=2, kv="f32") as loaded:
        assert worst(loaded.logits(ids), expected) < 1e-5
        assert {at.n_head for at in loaded.config.layers} == {4}


# -- as folders are published -----------------------------------------------------------------


def published(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of Step-3.5-Flash, whose lists count the layers behind the last as well."""
    text = config["text_config"]
    words = {
        "num_key_value_heads": "num_attention_groups",
        "n_routed_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_top_k",
    }
    kept = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"}
    kept |= {"num_attention_heads", "max_position_embeddings", "rms_norm_eps", "sliding_window"}
    kept |= {"moe_intermediate_size", "share_expert_dim", "moe_router_scaling_factor"}
    made = {key: text[key] for key in kept} | {word: text[key] for key, word in words.items()}
    behind = {"layer_types": _NARROW, "rope_theta": 1e4, "partial_rotary_factors": 1.0}
    behind |= {"swiglu_limits": 0.0, "swiglu_limits_shared": 0.0}
    made |= {key: STEP[key] + [value] * N_NEXTN for key, value in behind.items()}
    return {
        **made,
        "model_type": "step3p5",
        "architectures": ["Step3p5ForCausalLM"],
        "rope_scaling": STEP["rope_scaling"],
        "yarn_only_types": [_WIDE],
        "moe_layers_enum": "1,2,3",
        "moe_every_n_layer": 1,
        "moe_router_activation": "sigmoid",
        "norm_expert_weight": True,
        "use_head_wise_attn_gate": True,
        "use_moe_router_bias": True,
        "use_qk_norm": True,
        "zero_centered": True,
        "num_nextn_predict_layers": N_NEXTN,
        "attention_other_setting": {
            "attention_type": _NARROW,
            "num_attention_heads": 6,
            "num_attention_groups": 2,
            "head_dim": 32,
        },
    }


def publish(
    folder: Path, to: Path, change: Callable[[dict[str, Any]], Any] = lambda config: config
) -> Path:
    """With layers that predict further tokens, as published folders have them."""
    from safetensors.numpy import load_file, save_file

    names = {"vision_model.": "", "vit_large_projector.": ""}
    rewrite(folder, to, names, lambda config: change(published(config)))
    tensors = load_file(to / "model.safetensors")
    for i in range(N_LAYER, N_LAYER + N_NEXTN):
        more = {f"model.layers.{i}.{name}.weight": np.ones(64, np.float32) for name in "eh"}
        like = [name for name in tensors if name.startswith("model.layers.1.self_attn.")]
        more |= {name.replace("layers.1.", f"layers.{i}."): tensors[name] for name in like}
        more[f"model.layers.{i}.eh_proj.weight"] = np.ones((64, 128), np.float32)
        more[f"model.layers.{i}.transformer.shared_head.norm.weight"] = np.ones(64, np.float32)
        tensors |= more
    save_file(tensors, to / "model.safetensors")
    return to


def test_as_it_is_published(step: Saved, tmp_path: Path) -> None:
    folder, _ = step
    open_hf(publish(folder, tmp_path / "hf")).close()
    assert np.array_equal(run(tmp_path / "hf"), run(folder))
    ours, theirs = (open_hf_source(at) for at in (folder, tmp_path / "hf"))
    names = {"general.name"}
    same = [{k: v for k, v in s.metadata.items() if k not in names} for s in (ours, theirs)]
    assert same[0] == same[1]
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert any("MTP layer" in note for note in theirs.notes)
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"norm_expert_weight": False}, "norm_expert_weight: is False"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation: is 'softmax'"),
        ({"moe_layers_enum": "1,3"}, "mlp_layer_types: treadle supports only dense layers first"),
        ({"partial_rotary_factors": [0.25, 1, 1, 0.25]}, "is 0.25, and 1 in window layers"),
        ({"attention_other_setting": {"num_attention_groups": 4}}, "num_attention_groups: is 4"),
    ],
)
def test_what_is_refused(change: dict[str, Any], why: str, step: Saved, tmp_path: Path) -> None:
    publish(step[0], tmp_path / "hf", lambda config: config | change)
    with pytest.raises(UnsupportedError, match=why):
        open_hf(tmp_path / "hf")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layer_types": [_WIDE] * 5}, r"layer_types: is \[.* \(expected a list of 4\)"),
        ({"swiglu_limits": [-1.0] * 4}, r"swiglu_limits: is .* \(expected limits, 0 or null"),
        ({"moe_layers_enum": "1,x"}, r"moe_layers_enum: is '1,x' \(expected numbers of layers\)"),
    ],
)
def test_what_is_damaged(change: dict[str, Any], why: str, step: Saved, tmp_path: Path) -> None:
    publish(step[0], tmp_path / "hf", lambda config: config | change)
    with pytest.raises(FileError, match=why):
        open_hf(tmp_path / "hf")


# -- files of llama.cpp's converter ------------------------------------------------------------


def of_llama_cpp(made: Path, to: Path, **more: Any) -> Path:
    """A file with what its converter writes: keys for each layer, also those behind the last."""
    with open_gguf(made) as file:
        writer = GGUFWriter(to)
        own = _longer(file)
        own |= {"step35.moe_every_n_layers": 1, "step35.nextn_predict_layers": N_NEXTN}
        own |= {f"step35.{key}": value for key, value in more.items()}
        for key, value in {**file.metadata, **own}.items():
            writer.add(key, value)
        for name, tensor in file.tensors.items():
            writer.add_tensor(name, tensor.shape, "F32", tensor.dequantize())
        for i in range(N_LAYER, N_LAYER + N_NEXTN):
            proj = np.ones((64, 128), np.float32)
            writer.add_tensor(f"blk.{i}.nextn.eh_proj.weight", proj.shape, "F32", proj)
        writer.write()
    return to


def _longer(file: GGUF) -> dict[str, Any]:
    n = N_LAYER + N_NEXTN
    more: dict[str, float] = {"attention.head_count": 6, "attention.head_count_kv": 2}
    more |= {"attention.sliding_window_pattern": True, "swiglu_clamp_exp": 0.0}
    more |= {"swiglu_clamp_shexp": 0.0}
    made: dict[str, Any] = {"step35.block_count": n}
    for key, value in more.items():
        found: Any = file.metadata[f"step35.{key}"]
        found = [found] * N_LAYER if isinstance(found, int) else list(found)
        made[f"step35.{key}"] = [*found, *[value] * N_NEXTN]
    return made


def test_files_of_its_converter(step: Saved, tmp_path: Path) -> None:
    made = convert(step[0], tmp_path / "made.gguf")
    assert np.array_equal(run(of_llama_cpp(made, tmp_path / "theirs.gguf")), run(made))


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ([1.0] * 3, "swiglu_clamp_exp: has 3 entries"),
        ([1.0, -1.0, *[0.0] * 4], "swiglu_clamp_exp: holds -1.0"),
    ],
)
def test_limits_that_are_none(limits: list[float], why: str, step: Saved, tmp_path: Path) -> None:
    made = convert(step[0], tmp_path / "made.gguf")
    of_llama_cpp(made, tmp_path / "theirs.gguf", swiglu_clamp_exp=limits)
    with open_gguf(tmp_path / "theirs.gguf") as file, pytest.raises(FileError, match=why):
        load_config(file)


def test_a_limit_by_its_name() -> None:
    x = np.array([-3.0, 0.5, 9.0])
    up = np.array([-9.0, 0.25, 2.0])
    silu = ACTIVATIONS["silu"].exact(x)
    assert gated("silu_to_1.5", x, up).tolist() == [silu[0] * -1.5, silu[1] * 0.25, 1.5 * 1.5]
    with pytest.raises(KeyError, match="sine"):
        ACTIVATIONS["sine"]
