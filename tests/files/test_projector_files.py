"""Which of several projector files belongs to a model, by names that real ones have."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.files.projector_files import (
    is_projector_name,
    named_for_another,
    projectors_beside,
    ranked_projectors,
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mmproj-F16.gguf", True),
        ("mmproj.gguf", True),
        ("Qwen2.5-VL-3B-Instruct-mmproj-f16.gguf", True),
        ("folder/mmproj-model-f16.GGUF", True),
        ("mmproj-F16.safetensors", False),
        ("mmproj-models/gemma-3-4b-it-Q4_K_M.gguf", False),
        ("nommproj.gguf", False),
    ],
)
def test_names(name: str, expected: bool) -> None:
    assert is_projector_name(name) == expected


@pytest.mark.parametrize(
    ("model", "first"),
    [
        ("gemma-3-4b-it-Q4_K_M.gguf", "mmproj-gemma-3-4b-it-f16.gguf"),
        ("Qwen3VL-2B-Instruct-Q8_0.gguf", "mmproj-Qwen3-VL-2B-Instruct-BF16.gguf"),
        ("pixtral-12b-Q4_K_M.gguf", "mmproj-model-f16.gguf"),  # named for none
    ],
)
def test_the_one_named_for_the_model_is_first(model: str, first: str) -> None:
    names = [
        "mmproj-Qwen3-VL-2B-Instruct-BF16.gguf",
        "mmproj-Qwen3-VL-2B-Instruct-Q8_0.gguf",
        "mmproj-gemma-3-4b-it-f16.gguf",
        "mmproj-model-f16.gguf",
        model,
    ]
    assert ranked_projectors(names, model)[0] == first
    assert ranked_projectors(names, model)[-1].startswith(("mmproj-gemma", "mmproj-Qwen"))
    assert named_for_another("mmproj-SmolVLM-f16.gguf", model)
    assert not named_for_another(first, model)


def test_types_in_order() -> None:
    """BF16 contains F16, but is another type."""
    kinds = ["F32", "BF16", "odd", "Q8_0", "F16"]
    found = ranked_projectors([f"mmproj-{kind}.gguf" for kind in kinds], "")
    assert found == [f"mmproj-{kind}.gguf" for kind in ("F16", "BF16", "Q8_0", "F32", "odd")]


def test_beside(tmp_path: Path) -> None:
    model = tmp_path / "a" / "b-Q8_0.gguf"
    model.parent.mkdir()
    for path in (model, tmp_path / "mmproj-f16.gguf", model.with_name("mmproj-b-bf16.gguf")):
        path.touch()
    assert projectors_beside(model) == [model.with_name("mmproj-b-bf16.gguf")]
    assert projectors_beside(model.with_name("mmproj-b-bf16.gguf")) == []
    snapshot = tmp_path / "models--o--r" / "snapshots" / "0123"
    inner = snapshot / "BF16" / "b-00001-of-00002.gguf"
    inner.parent.mkdir(parents=True)
    inner.touch()
    (snapshot / "mmproj-f16.gguf").touch()
    (snapshot.parent / "mmproj-f16.gguf").touch()
    assert projectors_beside(inner) == [snapshot / "mmproj-f16.gguf"]
