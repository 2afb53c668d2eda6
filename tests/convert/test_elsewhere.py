"""What is said of files that llama.cpp reads otherwise: one test for each thing that it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.hf_cases import CASES, Case
from tests.models.hf_tiny import build, require_transformers
from treadle.convert.hf.folder import open_hf_source
from treadle.convert.llamacpp_differences import reading_differences
from treadle.convert.recipe import Options, notes

_GEMMA = CASES["gemma3"].options


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.sliding_window_pattern", 6),
        ("attention.sliding_window", "wide"),
        ("attention.scale", "abc"),
        ("attn_logit_softcapping", "abc"),
        ("rope.scaling.yarn_beta_fast", "abc"),
    ],
)
def test_values_that_are_of_another_kind(key: str, value: Any) -> None:
    """``--set`` and old files may hold them: nothing can be said of those."""
    keys = {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True], key: value}
    if key == "attn_logit_softcapping":
        del keys["attention.sliding_window"]
    metadata = {f"llama.{name}": value for name, value in keys.items()}
    found = reading_differences(
        {"general.architecture": "llama", **metadata}, ["blk.", "blk.0", "blk"]
    )
    assert all("no sliding window" in note for note in found)


def said_of(folder: Path, family: str, arch: str, *settings: str, **options: Any) -> list[str]:
    require_transformers()
    build(Case(family, arch, options)).save_pretrained(folder)
    source = open_hf_source(folder)
    try:
        found = notes(source, Options(settings=settings))
    finally:
        source.close()
    prefix = "llama.cpp will read this file differently: "
    assert all(note.startswith(prefix) for note in found)
    return [note.removeprefix(prefix) for note in found]


@pytest.mark.parametrize("name", ["llama", "llama-bias", "llama3", "mistral", "qwen2", "qwen3"])
def test_nothing_of_models_that_it_reads_alike(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    assert said_of(tmp_path, case.family, case.arch, **case.options) == []


def test_nothing_of_gemma_and_of_yarn_as_usual(tmp_path: Path) -> None:
    for name in ("gemma3", "qwen2-yarn"):
        case = CASES[name]
        assert said_of(tmp_path / name, case.family, case.arch, **case.options) == []


def test_the_window_of_mistral(tmp_path: Path) -> None:
    (note,) = said_of(tmp_path, "Mistral", "llama", head_dim=32, sliding_window=16)
    assert note.startswith("it has no sliding window in llama; in the file ")
    assert note.endswith("layers have one of 16 tokens, so longer prompts differ")


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_the_window_of_qwen(tmp_path: Path, family: str) -> None:
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    arch = family.lower()
    (note,) = said_of(tmp_path, family, arch, **window)
    assert note.startswith(f"it has no sliding window in {arch}; in the file ")
    off = f"{arch}.attention.sliding_window=0"  # by --set
    assert said_of(tmp_path, family, arch, off, **window) == []


@pytest.mark.parametrize("arch", ["gemma3", "modern-bert", "olmo2"])
def test_layers_that_the_file_names_have_windows(arch: str) -> None:
    """It reads the list where models of the architecture have some."""
    window = {"attention.sliding_window": 8, "attention.sliding_window_pattern": [False, True] * 2}

    def said(arch: str) -> list[str]:
        keys = {f"{arch}.{key}": value for key, value in window.items()}
        return reading_differences({"general.architecture": arch, **keys}, [])

    assert said(arch) == []
    assert "it has no sliding window in qwen3" in said("qwen3")[0]


def test_the_scale_of_gemma(tmp_path: Path) -> None:
    (note,) = said_of(tmp_path, "Gemma3", "gemma3", **{**_GEMMA, "query_pre_attn_scalar": 144})
    assert note == (
        "it derives the attention scale from the model's size; the file says 0.08333 "
        "(query_pre_attn_scalar 144)"
    )


def test_the_softcap_of_attention(tmp_path: Path) -> None:
    (note,) = said_of(tmp_path, "Gemma3", "gemma3", **{**_GEMMA, "attn_logit_softcapping": 4.0})
    assert note == "it has no attention softcap in gemma3; the file says 4"


def test_the_betas_of_yarn(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 16.0}
    rope |= {"original_max_position_embeddings": 32, "attention_factor": 1.5}
    (note,) = said_of(tmp_path, "Qwen3", "qwen3", head_dim=32, rope_parameters=rope)
    assert note == "it uses YaRN betas 32 and 1; run it with --yarn-beta-fast 16"


def test_biases(tmp_path: Path) -> None:
    (note,) = said_of(tmp_path, "Qwen3", "qwen3", head_dim=32, attention_bias=True)
    assert note == "it refuses qwen3 with attn_output.bias ('wrong number of tensors')"


@pytest.mark.parametrize("arch", ["bert", "gpt2", "gpt-oss"])
def test_biases_that_are_in_all_files(arch: str) -> None:
    names = [f"blk.0.{stem}.bias" for stem in ("attn_output", "ffn_up", "ffn_down")]
    assert reading_differences({"general.architecture": arch}, names) == []


def test_a_tensor_of_treadles_own() -> None:
    keys = {"general.architecture": "nomic-bert-moe"}
    (note,) = reading_differences(
        keys, ["blk.1.ffn_down_exps.weight", "blk.1.ffn_exps_bias.weight"]
    )
    assert "it refuses nomic-bert-moe with ffn_exps_bias.weight" in note


@pytest.mark.parametrize(
    ("arch", "norm", "said"),
    [
        ("qwen3moe", False, "in qwen3moe it normalises expert weights to sum to 1 and ignores"),
        ("olmoe", True, "in olmoe it does not normalise expert weights and ignores"),
        ("qwen3moe", True, ""),
        ("qwen2moe", False, ""),
        ("glm4moe", False, ""),  # it asks the file
        ("qwen3moe", "yes", ""),
    ],
)
def test_weights_of_experts(arch: str, norm: Any, said: str) -> None:
    keys = {"general.architecture": arch, f"{arch}.expert_weights_norm": norm}
    found = reading_differences(keys, [])
    assert [said in note for note in found] == ([True] if said else [])
