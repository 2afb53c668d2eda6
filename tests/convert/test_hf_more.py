"""Families that compute what another one does: Hugging Face folders, run in place and converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.convert.test_hf import convert, prompt, worst
from tests.convert.test_hf_kin import saved
from tests.loras import draw_pairs, peft_names, write_peft
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import check_truth, ids_of
from tests.tiny import rounding
from treadle.convert.hf.config import read_config
from treadle.convert.lora.lora import write_adapter
from treadle.errors import FileError, UnsupportedError

_SLIDING = "sliding_attention"
_WHOLE = "full_attention"
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_BAMBA = {
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
}
_CLOVA = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 0.25}
_UNIFIED = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 16,
    "layer_types": [_SLIDING, _WHOLE, _SLIDING, _WHOLE],
    "tie_word_embeddings": True,
    "final_logit_softcapping": 5.0,
}
CASES: dict[str, Case] = {
    "helium": Case("Helium", "llama", {"head_dim": 16, "num_key_value_heads": 4}),
    "ministral": Case(
        "Ministral",
        "llama",
        {"head_dim": 32, "sliding_window": 16, "layer_types": [_SLIDING, _WHOLE, _SLIDING]},
    ),
    "cwm": Case(
        "Cwm",
        "llama",
        {"head_dim": 16, "num_hidden_layers": 5, "sliding_window": 16, "rope_parameters": _LLAMA3},
    ),
    "vaultgemma": Case(
        "VaultGemma",
        "vaultgemma",
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 16,
            "sliding_window": 16,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "hyperclovax": Case("HyperCLOVAX", "granite", _CLOVA),
    "hyperclovax-plain": Case(
        "HyperCLOVAX",
        "granite",
        {**_CLOVA, "use_post_norm": False, "attention_multiplier": 0.2},
    ),
    "bamba": Case("Bamba", "granitehybrid", _BAMBA),
    "flex_olmo": Case(
        "FlexOlmo",
        "flex_olmo",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "experts_implementation": "eager",
            "pad_token_id": 0,
        },
    ),
    "gemma4_unified": Case("Gemma4Unified", "gemma4", _UNIFIED),
}
# Those whose architecture, or order of rows, no other test has.
THROUGHOUT = ("vaultgemma", "bamba", "flex_olmo")


@pytest.mark.parametrize("name", CASES)
def test_runs_in_place_and_converted(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = saved(case, tmp_path / "hf")
    folder = tmp_path / "hf"
    expected = compute_logits(model, prompt())
    path = convert(folder, tmp_path / "made.gguf")
    for each in (folder, path):
        with treadle.load(each, threads=2, kv="f32") as loaded:
            assert loaded.config.arch.name == case.arch
            assert loaded.config.ignored == ()
            error = worst(loaded.logits(prompt()), expected)
            assert error <= rounding(loaded.config), (each, error / rounding(loaded.config))
    if name in THROUGHOUT:
        check_truth(path, compute_logits(model, ids_of()))


def read(kind: str, **given: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = {"model_type": kind, **sizes, "num_hidden_layers": 4, "vocab_size": 320, **given}
    return read_config(config, Path("config.json")).metadata


def test_the_same_as_another_family() -> None:
    """GPT-SW3 is a GPT-2, IQuest Coder a Llama."""
    gpt: dict[str, Any] = {"n_embd": 64, "n_layer": 4, "n_head": 4}
    assert read("gpt-sw3", **gpt) == read("gpt2", **gpt)
    rope = {"rope_theta": 5e5, "head_dim": 32, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    rope |= {"max_position_embeddings": 4096}
    assert read("iquestcoder", **rope) == read("llama", **rope)


def test_windows_that_are_listed_or_not() -> None:
    flags = "llama.attention.sliding_window_pattern"
    kinds = [_SLIDING, _WHOLE, _WHOLE, _SLIDING]
    assert read("ministral")[flags] == [True] * 4
    assert read("ministral", layer_types=kinds)[flags] == [True, False, False, True]
    assert flags not in read("ministral", sliding_window=None)
    assert read("cwm")[flags] == [False, True, True, True]
    assert read("cwm", layer_types=kinds)[flags] == [True, False, False, True]


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("iquestcoder", "clip_qkv", 8.0),
        ("iquestcoder", "use_sliding_window", True),
        ("bamba", "mamba_n_groups", 2),
    ],
)
def test_what_would_be_wrong_is_refused(kind: str, key: str, value: Any) -> None:
    read(kind)
    with pytest.raises(UnsupportedError, match=key):
        read(kind, **{key: value})


def test_layers_of_bamba_that_are_no_list() -> None:
    for key, wrong in (("attn_layer_indices", "1"), ("layers_block_type", 4)):
        with pytest.raises(FileError, match=key):
            read("bamba", **{key: wrong})


@pytest.mark.parametrize("name", ["bamba", "helium"])
def test_adapters_of_a_folder_and_of_its_file(name: str, tmp_path: Path) -> None:
    """PEFT's rows lie as those of the folder, of which half turns, or which has pairs already; a
    GGUF adapter's as those of the file.
    """
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "hf"
    saved(CASES[name], folder)
    path = convert(folder, tmp_path / "made.gguf")
    pairs = draw_pairs(path, 4, 4, ("attn_q", "attn_k"))
    peft = write_peft(tmp_path / "peft", peft_names(pairs))
    write_adapter(peft, path, tmp_path / "peft.gguf")
    found = []
    for each in (folder, path):
        for adapter in (peft, tmp_path / "peft.gguf"):
            with treadle.load(each, threads=1, kv="f32", lora=[adapter]) as loaded:
                found.append(loaded.logits(prompt()))
    tensors = load_file(folder / "model.safetensors")
    for stem, (a, b) in pairs.items():
        of = "".join(x for x in ("q", "k") if f"attn_{x}" in stem)
        rows = tensors[f"model.layers.{stem.split('.')[1]}.self_attn.{of}_proj.weight"]
        rows += 2.0 * b @ a  # alpha is 8, of rank 4
    save_file(tensors, folder / "model.safetensors")
    with treadle.load(folder, threads=1, kv="f32") as merged:
        expected = merged.logits(prompt())
    assert max(worst(each, expected) for each in found) <= 2e-5
