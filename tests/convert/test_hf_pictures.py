"""Models of text and pictures: folders as transformers writes them, whole and of the text's part
alone, run in place and converted; the part for pictures is left out.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, worst
from tests.models.hf_tiny import EPS, N_VOCAB, _draw, float64_only, require_transformers
from tests.models.test_arch_truth import check_truth, ids_of
from tests.models.test_config import fake
from tests.tiny import rounding
from treadle.api.projector_choice import NO_PROJECTOR
from treadle.chat.template.template import ChatTemplate
from treadle.cli.commands.inspect import find_parts, find_problems
from treadle.convert.hf.config import read_config
from treadle.convert.hf.folder import open_hf_source
from treadle.convert.lora.lora import _of_peft
from treadle.convert.lora.peft import Peft
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.models.archs import ARCHS
from treadle.models.keys import ArchMetadata
from treadle.models.load import find_arch
from treadle.models.rope_keys import read_ropes

_TEXT = {
    "vocab_size": N_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": EPS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {"depth": 2, "num_heads": 2, "hidden_size": 32, "intermediate_size": 32}
_IDS = {"image_token_id": 310, "video_token_id": 311}
_IDS |= {"vision_start_token_id": 312, "vision_end_token_id": 313}


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections], **more}
    return {"rope_parameters": rope}


_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
# transformers' class by its name's stem: keys of the part for text, of that for pictures, others.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2-vl": ("Qwen2VL", "qwen2vl", _rope(2, 3, 3), {**_VISION, "embed_dim": 32}, _IDS),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        "qwen2vl",
        _rope(2, 3, 3),
        {**_VISION, "out_hidden_size": 64},
        {**_IDS, "tie_word_embeddings": True},
    ),
    "qwen3-vl": (
        "Qwen3VL",
        "qwen3vl",
        {"head_dim": 32, **_rope(6, 5, 5, mrope_interleaved=True)},
        {**_VISION, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]},
        _IDS,
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        "qwen3vlmoe",
        {"head_dim": 32, **_EXPERTS, **_rope(6, 5, 5, mrope_interleaved=True)},
        {**_VISION, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]},
        _IDS,
    ),
}

_CLIP = {"model_type": "clip_vision_model"}
_SIGLIP = {"model_type": "siglip_vision_model"}
_COHERE = {"model_type": "cohere2", "sliding_window": 16}
_HALF = {"partial_rotary_factor": 0.5}
_VIT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_IMAGE = {"image_token_id": 310}
# The decoder is that of a model of text, by another name or by its own.
OTHERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "glm4v": (
        "Glm4v",
        "glm4",
        {**_rope(2, 1, 1, **_HALF)},
        {**_VISION, "out_hidden_size": 64},
        _IDS | {"image_start_token_id": 312, "image_end_token_id": 313},
    ),
    "glm-ocr": (
        "GlmOcr",
        "glm4",
        {"head_dim": 32, **_rope(6, 5, 5, partial_rotary_factor=1.0)},
        {**_VISION, "out_hidden_size": 64},
        _IDS | {"image_start_token_id": 312, "image_end_token_id": 313},
    ),
    "glm4v-moe": (
        "Glm4vMoe",
        "glm4moe",
        {
            "head_dim": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            **_rope(2, 3, 3, **_HALF),
        },
        {**_VISION, "out_hidden_size": 64},
        _IDS | {"image_start_token_id": 312, "image_end_token_id": 313},
    ),
    "hunyuan-vl": (
        "HunYuanVL",
        "hunyuan_vl",
        {
            "head_dim": 32,
            **_rope(4, 4, 4, 4, rope_type="dynamic", alpha=1000.0, factor=1.0),
        },
        {**_VIT, "out_hidden_size": 64, "text_hidden_size": 64},
        {**_IMAGE, "im_start_id": 311, "im_end_id": 312, "im_newline_id": 313},
    ),
    "llava": ("Llava", "llama", {"model_type": "llama"}, {**_VIT, **_CLIP}, {}),
    "llava-next": ("LlavaNext", "llama", {"model_type": "mistral"}, {**_VIT, **_CLIP}, {}),
    "internvl": (
        "InternVL",
        "qwen2",
        {"model_type": "qwen2"},
        {**_VIT, "image_size": [28, 28], "patch_size": [14, 14]},
        _IMAGE,
    ),
    "idefics3": ("Idefics3", "llama", {"model_type": "llama"}, _VIT, _IMAGE),
    "smolvlm": ("SmolVLM", "llama", {"model_type": "llama"}, _VIT, _IMAGE),
    "aya-vision": ("AyaVision", "cohere2", _COHERE, {**_VIT, **_SIGLIP}, {}),
    "cohere2-vision": ("Cohere2Vision", "cohere2", _COHERE, {**_VIT, **_SIGLIP}, {}),
    "lfm2-vl": (
        "Lfm2Vl",
        "lfm2",
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
        {**_VIT, "model_type": "siglip2_vision_model", "num_patches": 16},
        _IMAGE,
    ),
}


def build(name: str) -> Any:
    stem, _, text, vision, more = {**CASES, **OTHERS}[name]
    return build_outer(stem, text, vision, more, name)


def build_outer(
    stem: str, text: dict[str, Any], vision: dict[str, Any], more: dict[str, Any], seed: str
) -> Any:
    """The model in float64; its weights are exact in float32."""
    require_transformers()
    import torch
    import transformers

    config = getattr(transformers, f"{stem}Config")(
        text_config={**_TEXT, **text},
        vision_config=vision,
        attn_implementation="eager",
        **more,
    )
    config.text_config._experts_implementation = "eager"
    for kind in (part.model_type for part in (config.text_config, config.vision_config)):
        for each in (kind.removesuffix("_vision_model"), kind):
            with contextlib.suppress(ImportError):
                importlib.import_module(f"transformers.models.{each}.modeling_{each}")
    model_class = getattr(transformers, f"{stem}ForConditionalGeneration")  # imported before
    with float64_only():
        model = model_class(config).eval()
    rng = np.random.default_rng(sum(seed.encode()))
    tied = getattr(config, "tie_word_embeddings", False)
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            drawn = _draw(rng, each, tuple(parameter.shape), tied)
            parameter.copy_(torch.from_numpy(drawn.astype(np.float64)))
    return model


def logits(model: Any, ids: list[int]) -> np.ndarray:
    """transformers', in float64."""
    import torch

    with float64_only(), torch.no_grad():
        rows: np.ndarray = model(torch.tensor([ids])).logits[0].numpy()
    assert rows.dtype == np.float64
    return rows


def save(model: Any, folder: Path) -> Path:
    import torch

    model.to(torch.float32).save_pretrained(folder)
    model.to(torch.float64)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_in_place_and_converted(name: str, tmp_path: Path) -> None:
    model = build(name)
    expected = logits(model, ids_of())
    folder = save(model, tmp_path / "hf")
    made = convert(folder, tmp_path / "made.gguf")
    check_truth(made, expected)
    for path in (folder, made):
        with treadle.load(path, threads=2, kv="f32") as loaded:
            assert loaded.config.arch.name == CASES[name][1]
            assert loaded.config.ignored == ()
            error = worst(loaded.logits(ids_of()), expected)
            assert error <= rounding(loaded.config), (path, error / rounding(loaded.config))


@pytest.mark.parametrize("name", OTHERS)
def test_known_decoders(name: str, tmp_path: Path) -> None:
    model = build(name)
    expected = logits(model, ids_of())
    folder = save(model, tmp_path / "hf")
    # transformers 5 forgets Cohere's own scale in models of pictures; it is that of the decoder.
    expected *= getattr(model.config.text_config, "logit_scale", 1.0)
    for path in (folder, convert(folder, tmp_path / "made.gguf")):
        with treadle.load(path, threads=2, kv="f32") as loaded:
            assert loaded.config.arch.name == OTHERS[name][1]
            assert loaded.config.ignored == ()
            error = worst(loaded.logits(ids_of()), expected)
            assert error <= rounding(loaded.config), (path, error / rounding(loaded.config))


# -- as folders are published -----------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, np.ndarray]]:
    """``saved(name)``: a directory written by transformers, and treadle's logits of it."""
    made: dict[str, tuple[Path, np.ndarray]] = {}
    root = tmp_path_factory.mktemp("pictures")

    def folder_of(name: str) -> tuple[Path, np.ndarray]:
        if name not in made:
            folder = save(build(name), root / name)
            made[name] = folder, run(folder)
        return made[name]

    return folder_of


def run(folder: Path) -> np.ndarray:
    with treadle.load(folder, threads=2, kv="f32") as loaded:
        rows: np.ndarray = loaded.logits(ids_of())
        return rows


def rewrite(
    folder: Path, to: Path, names: Mapping[str, str], change: Callable[[Any], Any] = lambda x: x
) -> Path:
    """The same with other names of tensors, "" for none, and another config.json."""
    from safetensors.numpy import load_file, save_file

    to.mkdir()
    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        before = next((one for one in names if name.startswith(one)), None)
        if before is not None:
            rows = tensors.pop(name)
            after = names[before]
            if after:
                tensors[after + name.removeprefix(before)] = rows
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(change(json.loads(_config(folder)))))
    return to


def _config(folder: Path) -> str:
    return (folder / "config.json").read_text()


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Older folders of Qwen2-VL have the keys of text outside, and call the rope otherwise."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    kept = {key: value for key, value in text.items() if key not in config and key != "layer_types"}
    return {**kept, **config, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def test_keys_of_text_outside(saved: Any, tmp_path: Path) -> None:
    folder, expected = saved("qwen2-vl")
    flat = rewrite(folder, tmp_path / "flat", {}, _flat)
    config = json.loads(_config(flat))
    assert config["model_type"] == "qwen2_vl"
    assert "hidden_size" in config
    assert "text_config" not in config
    assert np.array_equal(run(flat), expected)


LAYOUTS = {  # of names: MLX's, that of transformers 4, a part for text by itself
    "mlx": {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.visual.": "vision_tower.",
    },
    "older": {"model.language_model.": "model.", "model.visual.": "visual."},
    "alone": {"model.language_model.": "model.", "model.visual.": ""},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3-vl-moe"])
def test_names_of_tensors(name: str, layout: str, saved: Any, tmp_path: Path) -> None:
    folder, expected = saved(name)

    def change(config: dict[str, Any]) -> dict[str, Any]:
        if layout != "alone":
            return config
        kind = CASES[name][0]
        return {**config["text_config"], "architectures": [f"{kind}TextForCausalLM"]}

    assert np.array_equal(run(rewrite(folder, tmp_path / "hf", LAYOUTS[layout], change)), expected)


def test_experts_as_they_are_published(saved: Any, tmp_path: Path) -> None:
    """[in, out], which transformers 5 turns when it loads them."""
    from safetensors.numpy import load_file, save_file

    folder, expected = saved("qwen3-vl-moe")
    turned = rewrite(folder, tmp_path / "hf", {})
    tensors = load_file(turned / "model.safetensors")
    for name, rows in tensors.items():
        if ".experts." in name:
            tensors[name] = np.ascontiguousarray(rows.swapaxes(1, 2))
    shapes = {n.rpartition(".")[2]: r.shape for n, r in tensors.items() if ".experts." in n}
    assert shapes == {"gate_up_proj": (8, 64, 96), "down_proj": (8, 48, 64)}
    save_file(tensors, turned / "model.safetensors")
    assert np.array_equal(run(turned), expected)
    made = convert(turned, tmp_path / "made.gguf")
    with open_gguf(made) as file:
        assert file.tensors["blk.0.ffn_gate_exps.weight"].shape == (8, 48, 64)
    assert np.array_equal(run(made), expected)


def test_keys_that_llama_cpp_asks_for(saved: Any, tmp_path: Path) -> None:
    keys: dict[str, dict[str, Any]] = {}
    for name in CASES:
        made = convert(saved(name)[0], tmp_path / f"{name}.gguf")
        with open_gguf(made) as file:
            arch = file.metadata["general.architecture"]
            keys[name] = {k.removeprefix(f"{arch}."): v for k, v in file.metadata.items()}
    for name, (_, _, text, *_) in CASES.items():
        given = text["rope_parameters"]["mrope_section"]
        assert list(keys[name]["rope.dimension_sections"]) == [*given, 0]
    deep = {name: found.get("n_deepstack_layers") for name, found in keys.items()}
    assert deep == {"qwen2-vl": None, "qwen2.5-vl": None, "qwen3-vl": 2, "qwen3-vl-moe": 2}


def test_a_layer_that_predicts_further_tokens_is_left_out(saved: Any, tmp_path: Path) -> None:
    """GLM-OCR's, which treadle has not: the model is whole without."""
    from safetensors.numpy import load_file, save_file

    folder, expected = saved("glm-ocr")

    def change(config: dict[str, Any]) -> dict[str, Any]:
        config["text_config"]["num_nextn_predict_layers"] = 1
        return config

    further = rewrite(folder, tmp_path / "hf", {}, change)
    tensors = load_file(further / "model.safetensors")
    at = "model.language_model.layers."
    for name in [name for name in tensors if name.startswith(f"{at}2.")]:
        tensors[name.replace(f"{at}2.", f"{at}3.")] = tensors[name]
    save_file(tensors, further / "model.safetensors")
    assert np.array_equal(run(further), expected)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_file_of_glm4_with_m_rope_turns_halves(share: float, saved: Any, tmp_path: Path) -> None:
    """llama.cpp's converter has put the rows so: the first of all pairs, then the second ones."""
    made = tmp_path / "made.gguf"
    moved = tmp_path / "moved.gguf"
    convert(saved("glm4v" if share < 1 else "glm-ocr")[0], made)
    with open_gguf(made) as gguf:
        writer = GGUFWriter(moved)
        head_dim = gguf.metadata["glm4.attention.key_length"]
        assert isinstance(head_dim, int)
        dims = int(head_dim * share)
        order = [*range(0, dims, 2), *range(1, dims, 2), *range(dims, head_dim)]
        for key, value in gguf.metadata.items():
            writer.add(key, value)
        writer.add("glm4.rope.dimension_sections", [dims // 2 - 2, 1, 1, 0])
        for name, tensor in gguf.tensors.items():
            rows = tensor.dequantize()
            if name.endswith(("attn_q.weight", "attn_q.bias", "attn_k.weight", "attn_k.bias")):
                heads = rows.reshape(-1, head_dim, *rows.shape[1:])
                rows = np.ascontiguousarray(heads[:, order]).reshape(rows.shape)
            writer.add_tensor(name, rows.shape, "F32", rows)
        writer.write()
    expected = run(made)
    with treadle.load(moved, threads=2, kv="f32") as loaded:
        assert loaded.config.arch.rope == "neox"
        assert worst(loaded.logits(ids_of()), expected) <= 2 * rounding(loaded.config)


@pytest.mark.parametrize(
    ("arch", "shares", "rope"),
    [
        ("glm4", [8, 12, 12, 0], "neox"),
        ("glm4", [8, 0, 0, 0], "norm"),  # llama.cpp asks whether there are two
        ("glm4", [8], "norm"),
        ("glm4", "no list", "norm"),
        ("ernie4_5", [8, 12, 12, 0], "norm"),  # llama.cpp reads its sections, and turns neighbours
        ("llama", [8, 12, 12, 0], "norm"),
    ],
)
def test_who_turns_halves_by_sections(arch: str, shares: Any, rope: str) -> None:
    metadata = {"general.architecture": arch, f"{arch}.rope.dimension_sections": shares}
    assert find_arch(cast(Any, SimpleNamespace(metadata=metadata))).rope == rope


def test_an_adapter_for_neighbours_of_a_file_of_halves(tmp_path: Path) -> None:
    """It would turn other rows than those that it was made for."""
    peft = Peft(tmp_path, {}, True, b"")
    arch = ARCHS["glm4"]
    assert _of_peft(peft, cast(Any, SimpleNamespace(arch=arch)), pairs=True).ranks == {}
    config = cast(Any, SimpleNamespace(arch=replace(arch, rope="neox")))
    with pytest.raises(
        UnsupportedError, match=r"an M-RoPE GGUF file: apply it to the Hugging Face"
    ):
        _of_peft(peft, config, pairs=True)


def test_alpha_is_in_the_base() -> None:
    """A file of Hunyuan's has the key, of this family alone."""
    keys: dict[str, Any] = {"rope.freq_base": 1e4, "rope.scaling.alpha": 1000.0}
    (rope,) = read_ropes(ArchMetadata(fake("hunyuan_vl", **keys), "hunyuan_vl"), 32, 128)
    assert rope.base == pytest.approx(1e4 * 1000.0 ** (32 / 30))


def test_sizes_that_a_part_leaves_out() -> None:
    """LLaVA 1.5's and Pixtral's say what differs from transformers' own alone."""
    text = {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096}
    made = read_config({"model_type": "llava", "text_config": text}, Path("config.json")).metadata
    sizes = ("embedding_length", "feed_forward_length", "block_count", "attention.head_count_kv")
    assert [made[f"llama.{key}"] for key in sizes] == [4096, 11008, 32, 32]
    with pytest.raises(FileError, match="num_hidden_layers"):
        read_config(text, Path("config.json"))
    idefics = read_config({"model_type": "idefics3", "text_config": text}, Path("config.json"))
    eps = idefics.metadata["llama.attention.layer_norm_rms_epsilon"]
    assert eps == pytest.approx(1e-5)


# -- what is left out is said ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl-moe"])
def test_a_missing_projector_is_said(
    name: str, saved: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once a process for a file, by inspect, and by convert. A folder has its own, and so has a
    file with one beside it; who wants none is told nothing.
    """
    folder = rewrite(saved(name)[0], tmp_path / "hf", {})
    made = convert(folder, tmp_path / "made.gguf")
    caplog.clear()
    treadle.load(made, threads=1, mmproj=False).close()
    for path in (folder, made, folder, made):
        treadle.load(path, threads=1).close()
    assert [record.getMessage() for record in caplog.records] == [f"{made}: {NO_PROJECTOR}"]
    with open_gguf(made) as file:
        assert find_parts(file, None) == (None, [*find_problems(file), f"pictures: {NO_PROJECTOR}"])
    source = open_hf_source(folder)
    source.close()
    assert any("the image and audio parts (" in note for note in source.notes)
    (tmp_path / "beside").mkdir()
    beside = convert(folder, tmp_path / "beside" / "made.gguf")
    (beside.parent / "mmproj-F16.gguf").touch()
    caplog.clear()
    treadle.load(beside, threads=1).close()
    assert not caplog.records


# -- chat templates ----------------------------------------------------------------------------

# As these families' templates are made: of texts and of parts, of parts alone, pictures first.
TEMPLATES = {
    "qwen2-vl": (
        "{% set n = namespace(value=0) %}{% for message in messages %}"
        "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful "
        "assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
        "{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in "
        "content or 'image_url' in content %}{% set n.value = n.value + 1 %}{% if add_vision_id %}"
        "Picture {{ n.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
        "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "qwen3-vl": (
        "{%- macro render_content(content) %}{%- if content is string %}{{- content }}"
        "{%- else %}{%- for item in content %}{%- if 'image' in item or item.type == 'image' %}"
        "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- elif 'text' in item %}"
        "{{- item.text }}{%- endif %}{%- endfor %}{%- endif %}{%- endmacro %}"
        "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\nYou are a helpful "
        "assistant.<|im_end|>\n' }}{%- endif %}{%- for message in messages %}"
        "{{- '<|im_start|>' + message.role + '\n' + render_content(message.content) + "
        "'<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}"
        "{{- '<|im_start|>assistant\n' }}{%- endif %}"
    ),
    "llava": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
        "{{ '<image>\n' }}{% endfor %}"
        "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ content['text'] }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "smolvlm": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}"
        "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ '\n' }}{% endif %}"
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
        "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_with_pictures_render_text(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name])
    said = (("system", "Be brief."), ("user", "hello"), ("assistant", "Hi."), ("user", "bye"))
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said)
    expected += "<|im_start|>assistant\n"
    texts = [{"role": role, "content": text} for role, text in said]
    parts = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in said]
    assert template.render(texts) == expected
    assert template.render(parts) == expected
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(UnsupportedError, match="image_url"):
        template.render([{"role": "user", "content": [picture]}])
