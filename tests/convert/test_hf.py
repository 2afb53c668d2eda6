"""Hugging Face directories, run in place and converted, against transformers and real models."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle
from tests.convert.hf_more_classes import MORE_CLASSES
from tests.models.hf_cases import CASES, Case
from tests.models.hf_tiny import (
    EPS,
    N_TOKENS,
    N_VOCAB,
    build,
    compute_logits,
    require_transformers,
    write_gguf,
)
from tests.reference import forward
from tests.tiny import rounding
from treadle.convert.hf.config import read_config
from treadle.convert.hf.families.registry import FAMILIES
from treadle.convert.hf.folder import open_hf, open_hf_source
from treadle.convert.hf.row_order import halves_to_pairs
from treadle.convert.open import open_model
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import GGUF, GGUFWriter, open_gguf
from treadle.files.safetensors import SafeTensor
from treadle.files.splits import is_hf
from treadle.formats import by_name
from treadle.kernels.matmul.select_activation import has_matrix_act
from treadle.models.load import load_config
from treadle.profiling.report import row_in_use
from treadle.tokenizer.tokenizer import load_tokenizer

_GEMMA = CASES["gemma3"].options
_WINDOW = {"full_attention": "sliding_attention"}

MORE: dict[str, Case] = {  # what GGUF files made by others do not have
    "llama-tied": Case("Llama", "llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "mistral-window": Case("Mistral", "llama", {"head_dim": 32, "sliding_window": 16}),
    "qwen2-window": Case(
        "Qwen2", "qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    ),
    "qwen3-window": Case(
        "Qwen3",
        "qwen3",
        {
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-yarn": Case(
        "Qwen3",
        "qwen3",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.5,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
        },
    ),
    "gemma3-pattern": Case(
        "Gemma3",
        "gemma3",
        {
            **_GEMMA,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "query_pre_attn_scalar": 50,
        },
    ),
}
ALL = {**CASES, **MORE}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """``saved(case)``: a directory written by transformers in shards of 60 KB, and its model."""
    require_transformers()
    import torch

    made: dict[str, tuple[Path, Any]] = {}
    root = tmp_path_factory.mktemp("hf")

    def save(case: str) -> tuple[Path, Any]:
        if case not in made:
            model = build(ALL[case])
            model.to(torch.float32).save_pretrained(root / case, max_shard_size="60KB")
            made[case] = root / case, model.to(torch.float64)
        return made[case]

    return save


@pytest.fixture
def llama(saved: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> Path:
    """A directory to damage."""
    return Path(shutil.copytree(saved("llama")[0], tmp_path / "llama"))


def prompt() -> list[int]:
    return [int(i) for i in np.random.default_rng(7).integers(3, N_VOCAB, N_TOKENS)]


def convert(folder: Path, path: Path, *, mtp: bool = False) -> Path:
    """A GGUF of all that the source hands over, and of nothing else."""
    source = open_hf_source(folder, mtp=mtp)
    writer = GGUFWriter(path)
    for key, value in source.metadata.items():
        writer.add(key, value)
    for tensor in source.tensors.values():
        writer.add_tensor(tensor.name, tensor.shape, tensor.ggml_type, tensor.read)
    writer.write()
    source.close()
    return path


def worst(logits: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


# -- the same logits --------------------------------------------------------------------------


@pytest.mark.parametrize("case", ALL)
def test_runs_in_place_and_converted(
    case: str, saved: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, model = saved(case)
    assert len(list(folder.glob("*.safetensors"))) > 1
    ids = prompt()
    expected = compute_logits(model, prompt())
    for path in (folder, convert(folder, tmp_path / "made.gguf")):
        with treadle.load(path, threads=2, kv="f32") as loaded:
            error = worst(loaded.logits(ids), expected)
            assert error <= rounding(loaded.config), (path, error)


@pytest.mark.parametrize("case", CASES)
def test_converts_to_what_llama_cpp_has(
    case: str, saved: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """Tensor by tensor, byte by byte, and key by key: as the converter of the tests."""
    folder, model = saved(case)
    write_gguf(CASES[case], model, tmp_path / "theirs.gguf")
    with (
        open_gguf(convert(folder, tmp_path / "ours.gguf")) as ours,
        open_gguf(tmp_path / "theirs.gguf") as theirs,
    ):
        assert set(ours.tensors) == set(theirs.tensors)
        for name, tensor in theirs.tensors.items():
            assert ours.tensors[name].shape == tensor.shape
            close = ours.tensors[name].data.view("<f4"), tensor.data.view("<f4")
            if name == "rope_freqs.weight":  # computed, not copied
                np.testing.assert_allclose(*close, rtol=1e-6)
            else:
                np.testing.assert_array_equal(*close)
        for key, value in theirs.metadata.items():
            if not key.startswith("tokenizer."):
                assert ours.metadata[key] == value, key


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["llama3", "qwen2", "gemma3"])
def test_half_precision_stays_in_the_file(case: str, dtype: str, tmp_path: Path) -> None:
    """Weights are views of the mapped files; what is copied is small and counted here."""
    require_transformers()
    import torch

    build(ALL[case]).to(getattr(torch, dtype)).save_pretrained(tmp_path / "hf")
    ids = prompt()
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    with open_hf(tmp_path / "hf") as straight, open_gguf(made) as converted:
        (mapped,) = straight.paths
        copied = 0
        for name, tensor in straight.tensors.items():
            if tensor.path != mapped or not np.shares_memory(tensor.data, tensor.file):
                copied += tensor.n_bytes
            elif tensor.n_bytes == len(tensor.file):
                copied += tensor.n_bytes  # an array of its own
            else:
                assert len(tensor.file) == mapped.stat().st_size
            assert not tensor.data.flags.writeable
            vector = len(tensor.shape) == 1
            assert converted.tensors[name].type_name == ("F32" if vector else tensor.type_name)
        assert copied <= 4 * 64 * 60  # norms and rope factors
        config = load_config(straight)
        assert (
            worst(forward(straight, config, ids), forward(converted, load_config(converted), ids))
            < 1e-6
        )  # gemma's norms round once; rope factors in float32
        exact = forward(straight, config, ids)
        # Of a product's numbers: a bf16's, or two bf16's whose low parts do not meet.
        units = {"bfloat16": 2.0**-8}
        if has_matrix_act(by_name("F16"), row_in_use()):
            units["float16"] = 2.0**-16
        stages = math.sqrt(config.n_layer * 4)
        share = units[dtype] * stages if dtype in units else rounding(config)
        with treadle.load(tmp_path / "hf", threads=2, kv="f32") as loaded:
            assert worst(loaded.logits(ids), exact) <= share


def test_the_text_part_of_a_model_of_text_and_images(tmp_path: Path) -> None:
    require_transformers()
    import torch
    import transformers

    text = {**_GEMMA, "vocab_size": N_VOCAB, "hidden_size": 64, "intermediate_size": 96}
    text |= {"num_attention_heads": 4, "max_position_embeddings": 128, "rms_norm_eps": EPS}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=300,
        eoi_token_index=301,
        image_token_index=302,
        attn_implementation="eager",
    )
    torch.manual_seed(3)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    names = [k for p in tmp_path.glob("*.safetensors") for k in _header(p)]
    assert any("vision_tower" in name for name in names)
    ids = [i for i in prompt() if i < 300]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    with treadle.load(tmp_path, threads=2, kv="f32") as loaded:
        assert loaded.config.n_layer == 8
        assert worst(loaded.logits(ids), expected) <= 4 * rounding(loaded.config)  # f32 both sides


def _header(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    header: dict[str, Any] = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return header


# -- a trained model --------------------------------------------------------------------------

_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


@pytest.fixture(scope="module")
def stories(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K as Hugging Face would ship it."""
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("stories")
    arrays = {}
    with open_gguf(data / "models" / "stories260K.gguf") as gguf:
        for name, tensor in gguf.tensors.items():
            values = tensor.data.view("<f4").reshape(tensor.shape)
            if name.endswith(("attn_q.weight", "attn_k.weight")):
                n_head = 8 if "attn_q" in name else 4
                pairs = values.reshape(n_head, -1, 2, values.shape[1])
                values = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
            stem = name.removesuffix(".weight")
            top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
            top["output"] = "lm_head"
            if stem.startswith("blk."):
                _, i, rest = stem.split(".")
                hf = f"model.layers.{i}.{_NAMES[rest]}.weight"
            else:
                hf = f"{top[stem]}.weight"
            arrays[hf] = values.copy()
        keys = {k.removeprefix("llama."): v for k, v in gguf.metadata.items()}
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": keys["embedding_length"],
        "intermediate_size": keys["feed_forward_length"],
        "num_hidden_layers": keys["block_count"],
        "num_attention_heads": keys["attention.head_count"],
        "num_key_value_heads": keys["attention.head_count_kv"],
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": keys["context_length"],
        "vocab_size": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": "lm_head.weight" not in arrays,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(arrays, folder / "model.safetensors")
    shutil.copy(data / "models" / "tok512.model", folder / "tokenizer.model")
    return folder


@pytest.mark.slow
def test_a_trained_model_tells_its_story(stories: Path, data: Path, tmp_path: Path) -> None:
    """In place and converted: the ids and the text of the GGUF that others made of it."""
    greedy = treadle.Sampling(temperature=0)
    said = []
    for path in (
        data / "models" / "stories260K.gguf",
        stories,
        stories / "model.safetensors",
        convert(stories, tmp_path / "made.gguf"),
    ):
        with treadle.load(path, threads=2) as model:
            said.append("".join(model.generate("Once upon a time", max_tokens=60, sampling=greedy)))
    assert len(set(said)) == 1
    assert ", there was a little girl named Lily" in said[0]


@pytest.mark.slow
def test_the_command_takes_a_directory(stories: Path) -> None:
    command = [sys.executable, "-m", "treadle", "run", str(stories), "Once upon a time"]
    ran = subprocess.run(
        [*command, "-n", "12", "--temp", "0"], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert "there was a little girl" in ran.stdout


def test_the_sampling_that_its_makers_recommend(stories: Path, tmp_path: Path) -> None:
    """In place and converted it is the default, and a call's own settings count before it."""
    folder = shutil.copytree(stories, tmp_path / "hf")
    said = {"do_sample": True, "temperature": 0.0, "top_k": 20, "repetition_penalty": 1.25}
    (folder / "generation_config.json").write_text(json.dumps(said))
    wanted = treadle.Sampling(temperature=0, top_k=20, repeat_penalty=1.25)
    texts = set()
    for path in (folder, convert(folder, tmp_path / "made.gguf")):
        with treadle.load(path, threads=2) as model:
            assert model.sampling == wanted
            for settings in ({}, {"sampling": wanted}, {"repeat_penalty": 1.25}):
                texts.add(model.generate("Once upon a time", max_tokens=40, **settings).finish())
            plain = treadle.Sampling(temperature=0)
            other = model.generate("Once upon a time", max_tokens=40, sampling=plain).finish()
    assert len(texts) == 1
    assert other not in texts


def test_what_counts_as_a_directory(stories: Path, data: Path, tmp_path: Path) -> None:
    assert is_hf(stories)
    assert is_hf(stories / "model.safetensors")
    assert not is_hf(tmp_path)
    assert not is_hf(data / "models" / "stories260K.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert not is_hf(tmp_path)
    shutil.copy(data / "models" / "stories260K.gguf", tmp_path)
    with open_model(tmp_path) as gguf:  # a folder of one GGUF file, whatever lies beside it
        assert gguf.path.name == "stories260K.gguf"


# -- config.json ------------------------------------------------------------------------------

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}
_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "ministral3": "Ministral3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
    "smollm3": "SmolLM3",
    "granite": "Granite",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "exaone4": "Exaone4",
    "seed_oss": "SeedOss",
    "arcee": "Arcee",
    "phi3": "Phi3",
    "glm4": "Glm4",
    "ernie4_5": "Ernie4_5",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
    "nemotron": "Nemotron",
    "gpt_neox": "GPTNeoX",
    "gpt2": "GPT2",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "qwen2_moe": "Qwen2Moe",
    "olmoe": "Olmoe",
    "granitemoe": "GraniteMoe",
    "ernie4_5_moe": "Ernie4_5_Moe",
    "glm4_moe": "Glm4Moe",
    "minimax_m2": "MiniMaxM2",
    "gpt_oss": "GptOss",
    "hunyuan_v1_moe": "HunYuanMoEV1",
    "lfm2": "Lfm2",
    "lfm2_moe": "Lfm2Moe",
    "qwen3_5_text": "Qwen3_5Text",
    "qwen3_5_moe_text": "Qwen3_5MoeText",
    "qwen3_next": "Qwen3Next",
    "granitemoehybrid": "GraniteMoeHybrid",
    "mamba2": "Mamba2",
    "mamba": "Mamba",
    "falcon_mamba": "FalconMamba",
    "jamba": "Jamba",
    "nemotron_h": "NemotronH",
    "falcon_h1": "FalconH1",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "glm4_moe_lite": "Glm4MoeLite",
    "gemma4_text": "Gemma4Text",
    "apertus": "Apertus",
    "bitnet": "BitNet",
    "internlm3": "InternLM3",
    "glm": "Glm",
    "exaone": "Exaone",
    "jais2": "Jais2",
    "dots1": "Dots1",
    "afmoe": "Afmoe",
    "exaone_moe": "ExaoneMoe",
    "granitemoeshared": "GraniteMoeShared",
    "sarvam_moe": "SarvamMoE",
    "minicpm3": "MiniCPM3",
    "youtu": "Youtu",
    "sarvam_mla": "SarvamMLA",
    "solar_open": "SolarOpen",
    "gemma3n_text": "Gemma3nText",
    "bloom": "Bloom",
    "codegen": "CodeGen",
    "gptj": "GPTJ",
    "distilbert": "DistilBert",
    "electra": "Electra",
    "gte": "Gte",
    "jina_embeddings_v3": "JinaEmbeddingsV3",
    "cohere2_moe": "Cohere2Moe",
    "falcon": "Falcon",
    "glm4v_moe_text": "Glm4vMoeText",
    "glm4v_text": "Glm4vText",
    "glm_ocr_text": "GlmOcrText",
    "gpt_bigcode": "GPTBigCode",
    "granite_swa": "GraniteSWA",
    "granitemoe_swa": "GraniteMoeSWA",
    "hunyuan_vl_text": "HunYuanVLText",
    "hy_v3": "HYV3",
    "kimi_linear": "KimiLinear",
    "laguna": "Laguna",
    "llama4_text": "Llama4Text",
    "mellum": "Mellum",
    "mistral4": "Mistral4",
    "mpnet": "MPNet",
    "mpt": "Mpt",
    "olmo": "Olmo",
    "phi": "Phi",
    "phimoe": "Phimoe",
    "qwen2_5_vl_text": "Qwen2_5_VLText",
    "qwen2_vl_text": "Qwen2VLText",
    "qwen3_vl_moe_text": "Qwen3VLMoeText",
    "qwen3_vl_text": "Qwen3VLText",
    **MORE_CLASSES,
    "step3p5": "Step3p7Text",
    "t5": "T5",
    "mt5": "MT5",
    "umt5": "UMT5",
    "mimo_v2_flash": "MiMoV2Flash",
    "dbrx": "Dbrx",
}
_NEEDED: dict[str, dict[str, Any]] = {
    "afmoe": {**_SIZES, "mup_enabled": True},
    "cohere_compass_text": {
        **_SIZES,
        "hidden_size": 512,
        "num_attention_heads": 32,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e4}},
    },
    "dots3_note_text": {},
    "gemma3_text": {},
    "t5": {},
    "mt5": {},
    "umt5": {},
    "deepseek_v4": {},
    "glm5_next_text": {},
    "gpt2": {},
    "gpt_neo": {},
    "dbrx": {},
    "gpt_bigcode": {},
    "gptj": {},
    "codegen": {},
    "mpt": {},
    "mamba2": {},
    "mamba": {},
    "falcon_mamba": {},
    "jamba": {},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "gemma4_text": {},
    "gemma4_unified_text": {},
    "gpt-sw3": {},
    "gemma3n_text": {},
    "deepseek_v2": {**_SIZES, "num_experts_per_tok": 6},
    "distilbert": {},
    "electra": {"embedding_size": 256},
    "step3p5": {
        **_SIZES,
        "layer_types": ["full_attention", "sliding_attention"] * 4,
        "partial_rotary_factors": [0.5, 1.0] * 4,
        "sliding_window": 16,
    },
    "dots1": {**_SIZES, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
}
# What transformers writes of these, and does not put in a file that leaves it out.
_SPOKEN: dict[str, tuple[str, ...]] = {
    "hunyuan_v1_dense": ("head_dim",),
    "hunyuan_v1_moe": ("head_dim",),
    "cohere2": ("head_dim",),
    "granitemoehybrid": ("layer_types",),
    "exaone": ("head_dim",),
    "jais2": ("head_dim",),
}

# Encoders that are another model's config under another name, or checked in test_hf_encoders.py.
_ENCODERS = {
    *("bert", "roberta", "xlm-roberta", "camembert", "nomic_bert", "modernbert", "eurobert"),
}


# transformers' defaults are no such model: no layer has an indexer, or its ratio is missing.
# Folders say more (test_hf_indexed.py).
_SPELLED_OUT = {"minimax_m3_vl_text", "qwen4_exp_text"}


def keys_of(config: dict[str, Any]) -> dict[str, Any]:
    return read_config(config, Path("config.json")).metadata


@pytest.mark.parametrize("name", _CLASSES)
def test_defaults_are_those_of_transformers(name: str) -> None:
    require_transformers()
    import transformers

    own: dict[str, Any] = _NEEDED.get(
        name, _SIZES | {"hidden_size": 512, "num_attention_heads": 32}
    )
    full = getattr(transformers, f"{_CLASSES[name]}Config")(**own).to_dict()
    left_out = {"model_type": name, **own}
    left_out |= {key: full[key] for key in _SPOKEN.get(name, ())}
    assert keys_of(left_out) == keys_of(full)
    known = set(transformers.CONFIG_MAPPING.keys())  # others have code of their own
    assert set(_CLASSES) == (set(FAMILIES) - _ENCODERS - _SPELLED_OUT) & known


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("deepseek_v32", "indexer_types"),
        ("deepseek_v4", "layer_types"),
        ("glm5_next_text", "layer_types"),
        ("gpt_neo", "attention_types"),
    ],
)
def test_lists_where_kinds_of_layers_are_words(name: str, key: str) -> None:
    require_transformers()
    import transformers

    full = getattr(transformers, f"{_CLASSES[name]}Config")().to_dict()
    n_layer = full.get("num_hidden_layers") or full["num_layers"]
    wrong: list[Any] = [["full"]] * n_layer
    with pytest.raises((FileError, UnsupportedError), match=key):
        keys_of({"model_type": name, **full, key: wrong if name != "gpt_neo" else [[wrong, 1]]})


def test_old_and_new_spelling_of_rope() -> None:
    base = {"model_type": "llama", **_SIZES}
    for kind, more in {
        "linear": {"factor": 4.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    }.items():
        old = {"rope_theta": 5e5, "rope_scaling": {"type": kind, **more}}
        new = {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **more}}
        assert keys_of({**base, **old}) == keys_of({**base, **new})
        assert keys_of({**base, **old})["llama.rope.scaling.type"] == kind
    old = {"rope_local_base_freq": 2e4, "rope_theta": 3e6}
    old["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e6}
    local = {"rope_type": "default", "rope_theta": 2e4}
    new = {"rope_parameters": {"full_attention": full, "sliding_attention": local}}
    gemma = {"model_type": "gemma3_text"}
    assert keys_of({**gemma, **old}) == keys_of({**gemma, **new})
    assert keys_of({**gemma, **old})["gemma3.rope.freq_base_swa"] == 2e4


def test_both_spellings_of_rope_in_one_file() -> None:
    """As where YaRN was added by hand to what transformers 5 had written: it takes the older one
    then, and loses the base. Two that say the same are one.
    """
    yarn = {"factor": 4.0, "original_max_position_embeddings": 512}
    new = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **yarn}}
    base = {"model_type": "qwen3", **_SIZES}
    said = keys_of({**base, **new})
    assert keys_of({**base, **new, "rope_scaling": {"type": "yarn", **yarn}}) == said
    for older in ({"rope_type": "yarn", **yarn, "factor": 8.0}, {"type": "linear", "factor": 4.0}):
        with pytest.raises(UnsupportedError, match="rope_scaling: differs from rope_parameters"):
            keys_of({**base, **new, "rope_scaling": older})


def test_a_familys_own_rope() -> None:
    """It is for files that say nothing: one in the older spelling counts before it."""
    base = {"model_type": "gpt_oss", **_SIZES, "rope_parameters": None}
    scaling = "gpt-oss.rope.scaling.type"
    assert keys_of({**base, "rope_scaling": {}})[scaling] == "yarn"
    assert scaling not in keys_of({**base, "rope_scaling": {"rope_type": "default"}})
    linear = {"rope_type": "linear", "factor": 2.0}
    assert keys_of({**base, "rope_scaling": linear})[scaling] == "linear"
    assert scaling not in keys_of({**base, "rope_parameters": {}})
    plain = {"rope_type": "default"}
    found = keys_of({"model_type": "ministral3", **_SIZES, "rope_parameters": plain})
    assert found["mistral3.rope.freq_base"] == 1e4  # of the family's own it is 1e6


def test_keys_that_transformers_obeys_or_ignores() -> None:
    """Attention both ways; windows by a list or a pattern that it does not read in all families."""
    sliding = ["sliding_attention"] * _SIZES["num_hidden_layers"]
    with pytest.raises(UnsupportedError, match="is_causal: is false"):
        keys_of({"model_type": "qwen2", **_SIZES, "is_causal": False})
    mistral = {"model_type": "mistral", **_SIZES}
    assert keys_of({**mistral, "layer_types": sliding}) == keys_of(mistral)
    listed = {**mistral, "layer_types": ["full_attention", *sliding[1:]]}
    with pytest.raises(UnsupportedError, match="layer_types: transformers ignores it"):
        keys_of(listed)
    none = {"sliding_window": None}
    assert keys_of({**listed, **none}) == keys_of({**mistral, **none})
    for name in ("gemma2", "olmo3", "gpt_oss", "cohere2"):
        base = {"model_type": name, **_SIZES}
        obeyed = keys_of({**base, "sliding_window_pattern": 3}) != keys_of(base)
        assert obeyed is (name == "cohere2")


def test_the_context_of_before_the_stretching() -> None:
    """transformers prefers the number that stands outside the rope; where there is none it is the
    context.
    """
    key = "original_max_position_embeddings"
    base = {"model_type": "llama", **_SIZES, "max_position_embeddings": 2048}
    llama3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}

    def read(rope: dict[str, Any], **more: Any) -> list[Any]:
        config = {**base, "rope_scaling": {**rope, "factor": 4.0}, **more}
        hyper = read_config(config, Path("config.json"))
        return [hyper.metadata, *(values.tolist() for values in hyper.factors.values())]

    for rope in ({"rope_type": "yarn"}, llama3):
        expected = read({**rope, key: 512})
        assert read(rope, **{key: 512}) == expected
        assert read({**rope, key: 256}, **{key: 512}) == expected
        assert read(rope) == read({**rope, key: 2048}) != expected


def test_phi3_calls_longrope_yarn() -> None:
    n = _SIZES["hidden_size"] // _SIZES["num_attention_heads"] // 2
    rope = {"short_factor": [1.0] * n, "long_factor": [2.0] * n}
    base = {"model_type": "phi3", **_SIZES, "original_max_position_embeddings": 64}
    found = [keys_of({**base, "rope_scaling": {"type": t, **rope}}) for t in ("yarn", "longrope")]
    assert found[0] == found[1]
    assert found[0]["phi3.rope.scaling.type"] == "longrope"


def test_a_model_of_text_and_images_says_whose_its_text_is() -> None:
    text = {**_SIZES, "sliding_window": None}
    for outer, inner, arch in (
        ("mistral3", {"model_type": "ministral3"}, "mistral3"),
        ("mistral3", {}, "llama"),
        ("gemma3", {"model_type": "gemma3_text", "sliding_window": 8}, "gemma3"),
    ):
        config = {"model_type": outer, "text_config": {**text, **inner}}
        assert keys_of(config)["general.architecture"] == arch
    with pytest.raises(UnsupportedError, match=r"text_config\.model_type 'pixtral'"):
        keys_of({"model_type": "mistral3", "text_config": {**text, "model_type": "pixtral"}})


def test_llama3_factors_are_metas(tmp_path: Path) -> None:
    """Llama 3.1's own numbers: short waves kept, long ones stretched by 8."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = {"model_type": "llama", **_SIZES, "head_dim": 128, "rope_theta": 5e5}
    hyper = read_config({**config, "rope_scaling": scaling}, Path("config.json"))
    factors = hyper.factors["rope_freqs.weight"]
    assert factors.shape == (64,)
    assert set(factors[:29].tolist()) == {1.0}
    assert set(factors[-28:].tolist()) == {8.0}
    assert (np.diff(factors) >= 0).all()


def test_gemma_27b_says_its_scale_in_no_key() -> None:
    big = {"model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376}
    big |= {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128}
    key = "gemma3.attention.scale"
    assert key not in keys_of({**big, "query_pre_attn_scalar": 168})
    assert keys_of({**big, "query_pre_attn_scalar": 100})[key] == pytest.approx(0.1)


def test_what_gemmas_first_files_say() -> None:
    """transformers takes "gelu" for the approximation by tanh there, and there alone."""
    said = {"model_type": "gemma", **_SIZES}
    assert keys_of({**said, "hidden_act": "gelu"}) == keys_of(said)
    with pytest.raises(UnsupportedError, match="hidden_activation"):
        keys_of({"model_type": "gemma2", **_SIZES, "hidden_activation": "gelu"})


def test_keys_of_other_families() -> None:
    """transformers ignores them, though the files of some families have them."""
    experts = {"norm_topk_prob": False, "routed_scaling_factor": 2.0, "n_group": 2, "topk_group": 2}
    caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0}
    mixture = {"num_local_experts": 8, "num_experts_per_tok": 2}
    for said, more in (
        ({"model_type": "mixtral", **_SIZES, **mixture}, experts),
        ({"model_type": "minimax_m2", **_SIZES, **mixture}, experts),
        ({"model_type": "qwen3", **_SIZES}, {**caps, "query_pre_attn_scalar": 100}),
    ):
        assert keys_of({**said, **more}) == keys_of(said)
    glm = {"model_type": "glm4_moe", **_SIZES}
    assert all(keys_of({**glm, key: value}) != keys_of(glm) for key, value in experts.items())


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "starcoder2", "ernie4_5", "nomic_bert"])
def test_families_that_turn_whole_heads(name: str) -> None:
    said = {"model_type": name, **_SIZES}
    assert keys_of({**said, "partial_rotary_factor": 1.0}) == keys_of(said)
    with pytest.raises(
        UnsupportedError, match="partial_rotary_factor: partial RoPE is not supported"
    ):
        keys_of({**said, "partial_rotary_factor": 0.5})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "rwkv"}, "model_type 'rwkv'"),
    ({"model_type": "rwkv"}, "model_type 'rwkv'"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"quantization_config": {"quant_method": "hqq", "nbits": 4}}, "hqq"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model_type": None}, "model_type"),
    ({"model_type": 3}, "model_type"),
    ({"architectures": 3}, "architectures"),
    ({"hidden_size": None}, "hidden_size"),
    ({"hidden_size": 0}, "hidden_size"),
    ({"hidden_size": 1 << 40}, "hidden_size"),
    ({"hidden_size": 64.0}, "hidden_size"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"num_attention_heads": True}, "num_attention_heads"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"rope_theta": -1.0}, "rope_theta"),
    ({"rope_scaling": 4}, "rope_scaling"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor"),
    ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling.factor"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"max_position_embeddings": []}, "max_position_embeddings"),
]


@pytest.mark.parametrize(("changes", "where"), REFUSED, ids=[w for _, w in REFUSED])
def test_models_that_treadle_lacks(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        keys_of({"model_type": "llama", **_SIZES, **changes})
    assert where in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "where"), WRONG, ids=[f"{w}-{i}" for i, (_, w) in enumerate(WRONG)]
)
def test_wrong_numbers(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(FileError) as caught:
        keys_of({"model_type": "llama", **_SIZES, **changes})
    assert caught.value.where == where


def test_windows_that_treadle_lacks() -> None:
    with pytest.raises(UnsupportedError, match="chunked"):
        keys_of(
            {"model_type": "mistral", **_SIZES, "sliding_window": 4, "layer_types": ["chunked"] * 8}
        )
    with pytest.raises(FileError, match="layer_types"):
        keys_of({"model_type": "mistral", **_SIZES, "sliding_window": 4, "layer_types": ["x"]})


def test_a_base_that_grows_with_a_text(tmp_path: Path) -> None:
    """Texts that fit the model's context are read as by transformers, longer ones refused."""
    require_transformers()
    import torch

    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    sizes = {"head_dim": 32, "max_position_embeddings": 64, "rope_parameters": rope}
    theirs = build(Case("Llama", "llama", sizes))
    theirs.to(torch.float32).save_pretrained(tmp_path / "hf")
    ids = prompt()[:N_TOKENS]
    expected = compute_logits(theirs.to(torch.float64), ids)
    for path in (tmp_path / "hf", convert(tmp_path / "hf", tmp_path / "made.gguf")):
        with treadle.load(path, threads=2, kv="f32") as model:
            assert model.n_ctx == 64
            assert worst(model.logits(ids), expected) <= rounding(model.config)
        with pytest.raises(TreadleError, match=r"context=65: .*'dynamic'.* at most 64"):
            treadle.load(path, threads=2, context=65)


# -- checkpoints that are not whole -------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """All tensors of a folder in one file, changed."""
    from safetensors.numpy import load_file, save_file

    arrays: dict[str, np.ndarray] = {}
    for path in folder.glob("*.safetensors"):
        arrays |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    change(arrays)
    save_file(arrays, folder / "model.safetensors")


UP = "model.layers.1.mlp.up_proj.weight"
BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str]] = {
    "missing": (lambda a: a.pop(UP), UP, "missing"),
    "missing norm": (lambda a: a.pop("model.norm.weight"), "model.norm.weight", "missing"),
    "missing head": (lambda a: a.pop("lm_head.weight"), "lm_head.weight", "missing"),
    "surplus": (
        lambda a: a.update({"model.extra.weight": a[UP]}),
        "model.extra.weight",
        "not a tensor",
    ),
    "near miss": (
        lambda a: a.update({UP.replace("up_proj", "up_prj"): a.pop(UP)}),
        "model.layers.1.mlp.up_prj.weight",
        "closest is mlp.up_proj",
    ),
    "a layer too many": (
        lambda a: a.update({UP.replace(".1.", ".3."): a[UP]}),
        UP.replace(".1.", ".3."),
        "3 layers",
    ),
    "misshapen": (lambda a: a.update({UP: a[UP].T.copy()}), UP, "shape [64, 96]"),
    "a vocabulary too small": (
        lambda a: a.update({"model.embed_tokens.weight": a["model.embed_tokens.weight"][:-1]}),
        "model.embed_tokens.weight",
        "shape [319, 64]",
    ),
    "bias in one layer": (
        lambda a: a.update({"model.layers.1.self_attn.q_proj.bias": np.zeros(64, np.float32)}),
        "model.layers.0.self_attn.q_proj.bias",
        "missing",
    ),
    "twice": (
        lambda a: a.update({UP.removeprefix("model."): a[UP]}),
        "",
        "maps to blk.1.ffn_up.weight",
    ),
    "integers": (lambda a: a.update({UP: a[UP].astype(np.int8)}), UP, "weights in I8"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("use", [open_hf, open_hf_source])
def test_broken_checkpoints(case: str, use: Callable[[Path], Any], llama: Path) -> None:
    change, tensor, why = BROKEN[case]
    rewrite(llama, change)
    with pytest.raises(TreadleError) as caught:
        use(llama)
    for words in (tensor, why, "model.safetensors"):
        assert words in str(caught.value)


def test_values_that_are_not_numbers(
    saved: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """A vector is looked at when it is read, matrices by the converter: neither is silent."""
    folder = shutil.copytree(saved("gemma3")[0], tmp_path / "gemma3")
    name = "model.layers.1.input_layernorm.weight"

    def spoil(arrays: dict[str, np.ndarray]) -> None:
        arrays[name][5] = np.inf

    rewrite(folder, spoil)
    with pytest.raises(FileError, match="element 5 is inf") as caught:
        open_hf(folder)
    assert caught.value.where == name
    raw = (folder / "model.safetensors").read_bytes()
    assert caught.value.offset is not None
    assert raw[caught.value.offset :][:4] == np.float32(np.inf).tobytes()
    tensor = open_hf_source(folder).tensors["blk.1.attn_norm.weight"]
    with pytest.raises(FileError, match="element 5 is inf"):
        tensor.read()


def test_ignored_tensors(llama: Path) -> None:
    """Frequencies that old files carry, and in a converter an output that is the embeddings once
    more. Another one counts, even if config.json ties them: transformers does not tie them then.
    """

    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)

    rewrite(llama, change)
    with open_hf(llama) as model:
        assert "output.weight" in model.tensors
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with open_hf(llama) as model:
        own = model.tensors["output.weight"].data.tobytes()
        assert own != model.tensors["token_embd.weight"].data.tobytes()

    def tie(arrays: dict[str, np.ndarray]) -> None:
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()

    rewrite(llama, tie)
    source = open_hf_source(llama)
    assert "output.weight" not in source.tensors
    source.close()

    def differ_at_the_end(arrays: dict[str, np.ndarray]) -> None:
        arrays["lm_head.weight"][-1, -1] += 1

    rewrite(llama, differ_at_the_end)
    source = open_hf_source(llama)
    assert "output.weight" in source.tensors
    source.close()


def test_nothing_of_the_weights_is_read_to_open_a_folder(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output that is the embeddings once more runs as it is: both are not compared for it."""

    def tie(arrays: dict[str, np.ndarray]) -> None:
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()

    rewrite(llama, tie)
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with treadle.load(llama, threads=2) as tied:
        expected = tied.logits(prompt())
    monkeypatch.setattr(SafeTensor, "data", property(lambda tensor: pytest.fail(tensor.name)))
    with open_hf(llama) as model:
        monkeypatch.undo()
        assert "output.weight" in model.tensors

    def drop(arrays: dict[str, np.ndarray]) -> None:
        del arrays["lm_head.weight"]

    rewrite(llama, drop)
    with treadle.load(llama, threads=2) as bare:
        assert np.array_equal(bare.logits(prompt()), expected)


def test_names_of_a_bare_decoder(llama: Path) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        for name in [n for n in arrays if n.startswith("model.")]:
            arrays[name.removeprefix("model.")] = arrays.pop(name)

    with open_hf(llama) as model:
        before = {name: tensor.data.tobytes() for name, tensor in model.tensors.items()}
    rewrite(llama, change)
    with open_hf(llama) as model:
        assert {name: tensor.data.tobytes() for name, tensor in model.tensors.items()} == before


def test_pickles_are_refused(llama: Path) -> None:
    for path in llama.glob("*.safetensors*"):
        path.unlink()
    (llama / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    assert not is_hf(llama)
    with pytest.raises(UnsupportedError, match="safetensors"):
        open_hf(llama)


def test_bad_configs_name_their_file(llama: Path) -> None:
    config = llama / "config.json"
    for text in ("", "[]", "{", '{"model_type": "llama", "model_type": "llama"}'):
        config.write_text(text)
        with pytest.raises(FileError, match=r"config\.json"):
            treadle.load(llama)
    config.unlink()
    config.symlink_to("config.json")
    with pytest.raises(FileError, match=r"config\.json"):
        treadle.load(llama)


def test_a_shard_cut_short(llama: Path) -> None:
    shard = max(llama.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(FileError, match="cut short") as caught:
        treadle.load(llama)
    assert Path(caught.value.path) == shard
    assert caught.value.where


def test_an_unknown_way_to_turn(llama: Path) -> None:
    with open_hf(llama) as model:
        model.metadata = {**model.metadata, "treadle.rope": "sideways"}
        with pytest.raises(FileError, match=r"treadle\.rope"):
            load_config(model)


def test_rows_are_reordered_within_heads() -> None:
    rows = np.arange(8)
    assert halves_to_pairs(rows, 1).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert halves_to_pairs(rows, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_in_place_it_is_a_gguf_to_all_who_ask(stories: Path) -> None:
    from treadle.cli.commands.inspect import describe

    with open_hf(stories) as model:
        assert isinstance(model, GGUF)
        report = describe(model)
        assert report["problems"] == ["chat: the file has no chat template"]
        assert report["n_bytes"] == (stories / "model.safetensors").stat().st_size


def test_weights_at_odd_addresses(tmp_path: Path) -> None:
    """Writers pad their headers as they like: data may begin anywhere, and are used there."""
    require_transformers()
    import torch

    build(ALL["qwen2"]).to(torch.bfloat16).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    with treadle.load(tmp_path, threads=2, kv="f32") as loaded:
        expected = loaded.logits(prompt())
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    path.write_bytes((n + 1).to_bytes(8, "little") + raw[8 : 8 + n] + b" " + raw[8 + n :])
    with treadle.load(tmp_path, threads=2, kv="f32") as loaded:
        tensor = loaded.gguf.tensors["blk.0.ffn_up.weight"]
        assert tensor.offset % 2 == 1
        assert np.shares_memory(tensor.data, tensor.file)
        np.testing.assert_array_equal(loaded.logits(prompt()), expected)


# -- anything at all ----------------------------------------------------------------------------

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def spare(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with every kind of file, for hypothesis to spoil one of at a time."""
    from tests.convert.test_hf_tokenizer import tiny_byte_level

    folder = shutil.copytree(stories, tmp_path_factory.mktemp("spare") / "hf")
    (folder / "tokenizer.model").unlink()
    tiny_byte_level().save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": {"content": "a"}, "eos_token": "b", "chat_template": "x"}
    tokens |= {"added_tokens_decoder": {"3": {"content": "c", "special": True}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    return folder


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_value_anywhere(data: st.DataObject, spare: Path) -> None:
    """One value of one file is replaced: it loads, or the error is typed and names a file."""
    names = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    path = spare / data.draw(st.sampled_from(names))
    before = path.read_text("utf-8")
    values = json.loads(before)
    inner = values
    key: Any = None
    while key is None or (
        isinstance(inner[key], dict | list) and inner[key] and data.draw(st.booleans())
    ):
        inner = inner if key is None else inner[key]
        keys = sorted(inner) if isinstance(inner, dict) else range(len(inner))
        key = data.draw(st.sampled_from(list(keys)))
    inner[key] = data.draw(_JSON)
    said = str(spare)
    try:
        path.write_text(json.dumps(values), "utf-8")
        with open_hf(spare) as model:
            load_config(model)
            load_tokenizer(model).encode("ab")
    except TreadleError as e:
        said = str(e)
    finally:
        path.write_text(before, "utf-8")
    assert str(spare) in said


def test_a_conversion_differs_in_no_weight(llama: Path, tmp_path: Path) -> None:
    """Rows of queries and keys are in another order there, and are compared as they turn."""
    from treadle.cli.file_diff import compare

    converted = convert(llama, tmp_path / "same.gguf")
    with open_hf(llama) as folder, open_gguf(converted) as file:
        for a, b in ((folder, file), (file, folder)):
            report = compare(a, b, 1, lambda *_: None)
            assert {row["relative"] for row in report["tensors"]} == {0.0}
            assert "treadle.rope" in {row["key"] for row in report["metadata"]}


def test_doctor_takes_a_directory(llama: Path) -> None:
    from treadle.cli.commands.doctor import read_model_file

    about = read_model_file(str(llama), lambda *_: None)  # type: ignore[arg-type]
    assert about.files == sorted(llama.glob("*.safetensors"))
    assert about.problem is None


def test_a_directory_without_a_tokenizer(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from treadle.cli import main

    assert main(["convert", str(llama), str(tmp_path / "x.gguf")]) == 0
    assert "has no supported tokenizer" in capsys.readouterr().err
    assert main(["inspect", str(llama)]) == 0
    assert "GGUF version" not in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "x.gguf")]) == 0
    assert "GGUF version 3" in capsys.readouterr().out
