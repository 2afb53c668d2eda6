"""The float64 reference: against transformers, llama2.c's text, and llama.cpp's logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.hf_cases import ALL_CASES
from tests.models.hf_tiny import tiny_models, write_tiny
from tests.reference import forward, kl_divergence
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config
from treadle.models.rope import Rope

# Mean KL from F32 that llama.cpp itself has on this text (data/README.md; F16, BF16: its logits)
KEPT_IN_FLOAT32 = {"llama3", "phi3-longrope"}  # factors of the rope, and that of cos and sin
KL_SCALE = {"F16": 1e-7, "BF16": 5e-6, "Q8_0": 7e-5, "Q4_1": 0.0094, "Q4_0": 0.0173}


def logits_of(path: Path, ids: Any) -> Any:
    with open_gguf(path) as gguf:
        return forward(gguf, load_config(gguf), ids)


def test_every_case_is_listed() -> None:
    assert [name for name, _ in tiny_models()] == list(ALL_CASES)


@pytest.mark.parametrize("name", ALL_CASES)
def test_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    """Both sides are float64: what remains is rounding, and what GGUF keeps in float32."""
    ids, expected = write_tiny(name, tmp_path / "tiny.gguf")
    with open_gguf(tmp_path / "tiny.gguf") as gguf:
        config = load_config(gguf)
        logits = forward(gguf, config, ids)
    assert config.ignored == ()
    scale = np.abs(expected).max()
    assert expected.std() > 1.0  # logits that are all alike would hide an error
    error = np.abs(logits - expected)
    worst = np.unravel_index(error.argmax(), error.shape)
    assert error.max() <= (1e-5 if name in KEPT_IN_FLOAT32 else 1e-11) * scale, (
        name,
        worst,
        error.max(),
    )


@pytest.mark.parametrize("name", ["gemma3", "llama3", "llama-linear", "qwen2-yarn"])
def test_the_prompt_feels_what_the_case_is_about(name: str, tmp_path: Path) -> None:
    """Window, factors and scaling change the logits: a decoder that ignored them is caught."""
    from dataclasses import replace

    ids, expected = write_tiny(name, tmp_path / "tiny.gguf")
    with open_gguf(tmp_path / "tiny.gguf") as gguf:
        config = load_config(gguf)
        blind = replace(
            config,
            layers=tuple(replace(layer, window=0) for layer in config.layers),
            ropes=tuple(Rope(rope.dims, rope.base) for rope in config.ropes),
        )
        assert np.abs(forward(gguf, blind, ids) - expected).max() > 0.1


def test_stories260k_writes_llama2cs_text(data: Path) -> None:
    """Every token of the known greedy text is the likeliest one, given those before."""
    for case in golden(data, "stories260K-F32"):
        ids = case["prompt_tokens"] + case["tokens"]
        logits = logits_of(data / "models/stories260K.gguf", ids[:-1])
        logits = logits[len(case["prompt_tokens"]) - 1 :]
        assert logits.argmax(axis=-1).tolist() == case["tokens"]
        np.testing.assert_allclose(logits.max(axis=-1), case["top1_logits"], atol=5e-5)


@pytest.mark.parametrize("name", ["stories260K", "babyllama105"])
def test_f32_logits_are_llama_cpps(data: Path, name: str) -> None:
    """llama.cpp sums in float32: rows of up to 352 terms, five layers, logits up to 20."""
    folder = "" if name == "stories260K" else "babyllama105/"
    file = f"{name}.gguf" if name == "stories260K" else f"{name}-F32.gguf"
    truth = np.load(data / f"truth/logits_{name}-F32.npz")
    logits = logits_of(data / "models" / (folder + file), truth["tokens"])
    np.testing.assert_allclose(logits, truth["logits"], atol=5e-5)


@pytest.mark.parametrize("kind", KL_SCALE)
def test_quantised_weights_cost_what_llama_cpp_pays(data: Path, kind: str) -> None:
    truth = {k: np.load(data / f"truth/logits_babyllama105-{k}.npz") for k in ("F32", kind)}
    path = data / f"models/babyllama105/babyllama105-{kind}.gguf"
    logits = logits_of(path, truth[kind]["tokens"])
    from_f32 = kl_divergence(truth["F32"]["logits"].astype(np.float64), logits)
    from_llama_cpp = kl_divergence(truth[kind]["logits"].astype(np.float64), logits)
    assert from_f32 <= 1.1 * KL_SCALE[kind]
    assert from_llama_cpp <= 1e-4  # it rounds the activations to int8 as well: no more than that


def golden(data: Path, model: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((data / "truth/llamacpp_greedy.json").read_text())[
        model
    ]
    return cases
