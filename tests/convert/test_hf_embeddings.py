"""Newer models of vectors: EmbeddingGemma 2 and llama-embed, in place and converted, against
transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert
from tests.convert.test_hf_encoders import save
from tests.lowered import lowered
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import ids_of
from tests.tiny import rounding
from treadle.convert.hf.config import read_config
from treadle.errors import UnsupportedError

LLAMA = Case("Llama", "llama-embed", {"is_causal": False}, "Model")
GEMMA = Case(
    "EmbeddingGemma2",
    "embedding-gemma2",
    {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "sliding_window": 5,  # tokens to each side
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 32,
        "embedding_dim": 48,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    },
    "TextModel",
)


def check(path: Path, truth: np.ndarray, map_: np.ndarray, arch: str) -> list[np.ndarray]:
    """States times ``map_`` are transformers'; vectors are their mean, alone and beside others, on
    any number of threads.
    """
    ids = ids_of()
    mean = truth.mean(0)
    made = []
    for threads in (1, 2, 3):
        with treadle.load(path, threads=threads, kv="f32") as model:
            assert model.config.arch.name == arch
            assert set(model.config.ignored) <= {"dense_2.weight"}
            for output in ("states", "embedding"):
                for n in (1, 512):
                    lowered(model.engine, n, 1, output).check()
            allowed = 2 * rounding(model.config)
            found = model.states(ids) @ map_.T
            assert np.abs(found - truth).max() <= allowed * np.abs(truth).max()
            vectors = model.embed([ids_of(7)[::-1], ids, ids_of(3)])
            error = np.abs(vectors[1] - mean / np.linalg.norm(mean)).max()
            assert error <= 4 * allowed
            with pytest.raises(UnsupportedError, match=r"no logits|does not generate"):
                model.logits(ids)
            made.append(np.concatenate([found.ravel(), vectors.ravel()]))
    assert all(np.array_equal(each, made[0]) for each in made)
    return made


def test_embedding_gemma_2(tmp_path: Path) -> None:
    """Its matrix after the pooling is a tensor of the model; its window is a radius."""
    model = save(GEMMA, tmp_path / "hf")
    truth = compute_logits(model, ids_of())
    matrix = model.embedding_projection.weight.detach().numpy()
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    both = [check(path, truth, matrix, GEMMA.arch) for path in (tmp_path / "hf", made)]
    assert np.array_equal(both[0][0], both[1][0])
    with treadle.load(made, threads=1) as loaded:
        assert [layer.window for layer in loaded.config.layers] == [6, 0, 6, 0]
        assert [layer.head_dim for layer in loaded.config.layers] == [32, 64, 32, 64]
        assert loaded.embed([ids_of(5)]).shape == (1, 48)


def test_embedding_gemma_2_as_it_is_published(tmp_path: Path) -> None:
    """The text is a part, and towers of others are left out."""
    from safetensors.numpy import load_file, save_file

    save(GEMMA, tmp_path)
    with treadle.load(tmp_path, threads=1, kv="f32") as plain:
        expected = plain.embed([ids_of()])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {f"language_model.{name}": rows for name, rows in tensors.items()}
    tensors["vision_tower.x.weight"] = np.ones((2, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    config: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["EmbeddingGemma2Model"], "model_type": "embedding_gemma2"}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": config}))
    with treadle.load(tmp_path, threads=1, kv="f32") as whole:
        assert np.array_equal(whole.embed([ids_of()]), expected)


def test_llama_embed(tmp_path: Path) -> None:
    model = save(LLAMA, tmp_path / "hf")
    truth = compute_logits(model, ids_of())
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    for path in (tmp_path / "hf", made):
        check(path, truth, np.eye(64), LLAMA.arch)
    # As Nemotron's folder has it.
    config = json.loads((tmp_path / "hf/config.json").read_text())
    plain = read_config(config, Path("config.json")).metadata
    config |= {"model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"]}
    del config["is_causal"]
    assert read_config(config, Path("config.json")).metadata == plain
