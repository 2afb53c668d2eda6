"""Jais: folders, run in place and converted, against its forward pass written out in float64, of
the folder's own tensors and words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert
from tests.models.hf_tiny import EPS
from tests.models.test_arch_truth import check_truth, ids_of
from tests.reference import attention
from treadle.convert.hf.config import read_config
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

# no power of two, an odd width
N_LAYER = 2
N_EMBD = 96
N_HEAD = 6
N_FF = 85
N_VOCAB = 320
CONFIG: dict[str, Any] = {
    "model_type": "jais",
    "architectures": ["JAISLMHeadModel"],
    "activation_function": "swiglu",
    "alibi_scaling": None,
    "layer_norm_epsilon": EPS,
    "n_embd": N_EMBD,
    "n_head": N_HEAD,
    "n_inner": N_FF,
    "n_layer": N_LAYER,
    "n_positions": 256,
    "position_embedding_type": "alibi",
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "vocab_size": N_VOCAB,
}
FIRST = {"embeddings_scale": 2.5, "width_scale": 0.75, "scale_qk_dot_by_d": True}  # the 13B
FAMILY = {
    "mup_embeddings_scale": 2.5,
    "mup_output_alpha": 1.5,
    "mup_width_scale": 0.5,
    "mup_scale_qk_dot_by_d": True,
    "tie_word_embeddings": True,
}
FOLDERS = {"first": {**FIRST, "tie_word_embeddings": False}, "family": FAMILY, "untold": FIRST}
Tensors = dict[str, np.ndarray]


def drawn() -> Tensors:
    """Weights that keep activations near 1; queries and keys are large, scores are divided by
    more than elsewhere.
    """
    rng = np.random.default_rng(11)
    made: Tensors = {"transformer.wte.weight": 0.3 * rng.standard_normal((N_VOCAB, N_EMBD))}
    made["lm_head.weight"] = 0.4 * rng.standard_normal((N_VOCAB, N_EMBD))
    made["transformer.relative_pe.slopes"] = np.ones((N_HEAD, 1, 1))

    def norm(name: str) -> None:
        made[f"{name}.weight"] = 1.0 + 0.25 * rng.standard_normal(N_EMBD)
        made[f"{name}.bias"] = 0.3 * rng.standard_normal(N_EMBD)

    for i in range(N_LAYER):
        at = f"transformer.h.{i}"
        for name in ("ln_1", "ln_2"):
            norm(f"{at}.{name}")
        for name, n, m in (
            ("attn.c_attn", N_EMBD, 3 * N_EMBD),
            ("attn.c_proj", N_EMBD, N_EMBD),
            ("mlp.c_fc", N_EMBD, N_FF),
            ("mlp.c_fc2", N_EMBD, N_FF),
            ("mlp.c_proj", N_FF, N_EMBD),
        ):
            made[f"{at}.{name}.weight"] = 1.4 * rng.standard_normal((n, m)) / math.sqrt(n)
            made[f"{at}.{name}.bias"] = 0.3 * rng.standard_normal(m)
        made[f"{at}.attn.c_attn.weight"][:, : 2 * N_EMBD] *= 2
        made[f"{at}.attn.bias"] = np.ones((1, 1, 4, 4))  # a mask
    norm("transformer.ln_f")
    return {name: x.astype(np.float32) for name, x in made.items()}


def truth_of(tensors: Tensors, scales: tuple[float, float], head: str) -> np.ndarray:
    """Logits of ``ids_of()``; ``scales``: of embeddings and of logits."""
    own = {name: x.astype(np.float64) for name, x in tensors.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
        return np.asarray(x * own[f"{name}.weight"] + own[f"{name}.bias"])

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return np.asarray(x @ own[f"{name}.weight"] + own[f"{name}.bias"])

    x = own["transformer.wte.weight"][ids_of()] * scales[0]
    size = N_EMBD // N_HEAD
    for i in range(N_LAYER):
        at = f"transformer.h.{i}"
        qkv = linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn")
        q, k, v = (part.reshape(len(x), N_HEAD, size) for part in np.split(qkv, 3, -1))
        mixed = attention(q, k, v, 1.0 / size, 0.0, 0, alibi=8.0)
        x = x + linear(mixed.reshape(len(x), -1), f"{at}.attn.c_proj")
        h = norm(x, f"{at}.ln_2")
        gate = linear(h, f"{at}.mlp.c_fc2")
        h = linear(h, f"{at}.mlp.c_fc") * gate / (1 + np.exp(-gate))
        x = x + linear(h, f"{at}.mlp.c_proj")
    return np.asarray(norm(x, "transformer.ln_f") @ own[head].T * scales[1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, np.ndarray]]:
    """``saved(kind)``: a folder, and its logits."""
    from safetensors.numpy import save_file

    root, found = tmp_path_factory.mktemp("jais"), dict[str, tuple[Path, np.ndarray]]()

    def save(kind: str) -> tuple[Path, np.ndarray]:
        if kind not in found:
            (root / kind).mkdir()
            tensors = drawn()
            tied = kind != "first"
            if kind == "family":  # safetensors keeps one of two that are the same
                del tensors["lm_head.weight"]
            save_file(tensors, root / kind / "model.safetensors")
            config = json.dumps({**CONFIG, **FOLDERS[kind]})
            (root / kind / "config.json").write_text(config)
            head = "transformer.wte.weight" if tied else "lm_head.weight"
            found[kind] = root / kind, truth_of(tensors, (2.5, 0.75), head)
        return found[kind]

    return save


@pytest.mark.slow
def test_agrees_with_its_forward_pass(
    saved: Callable[[str], tuple[Path, np.ndarray]], tmp_path: Path
) -> None:
    folder, truth = saved("first")
    assert truth.std() > 0.5
    check_truth(convert(folder, tmp_path / "made.gguf"), truth)
    check_truth(folder, truth, threads_of=(2,))


def test_an_output_that_is_tied(
    saved: Callable[[str], tuple[Path, np.ndarray]], tmp_path: Path
) -> None:
    """It has another scale than the embeddings, and so is a matrix of its own in a file; a copy
    that the folder has is not read.
    """
    bits = []
    for kind in ("family", "untold"):
        folder, truth = saved(kind)
        path = convert(folder, tmp_path / f"{kind}.gguf")
        with open_gguf(path) as gguf:
            assert "output.weight" in gguf.tensors
        for each in (folder, path):
            with treadle.load(each, threads=2, kv="f32") as model:
                bits.append(model.logits(ids_of()))
            assert np.abs(bits[-1] - truth).max() <= 1e-5 * np.abs(truth).max()
    assert all(np.array_equal(each, bits[0]) for each in bits)


def test_as_llama_cpps_converter_writes_it(
    saved: Callable[[str], tuple[Path, np.ndarray]], tmp_path: Path
) -> None:
    with open_gguf(convert(saved("first")[0], tmp_path / "made.gguf")) as gguf:
        found = dict(gguf.metadata)
        tensors = gguf.tensors
        embeddings = tensors["token_embd.weight"].dequantize()
        gate = tensors["blk.1.ffn_gate.weight"].dequantize()
    own = drawn()
    assert np.array_equal(embeddings, own["transformer.wte.weight"] * np.float32(2.5))
    assert np.array_equal(gate, own["transformer.h.1.mlp.c_fc2.weight"].T)
    assert found["general.architecture"] == "jais"
    assert found["jais.attention.max_alibi_bias"] == 8.0
    assert found["jais.feed_forward_length"] == N_FF
    assert found["jais.context_length"] == 256
    assert "jais.rope.freq_base" not in found


def test_a_file_without_the_bias_of_distances(
    saved: Callable[[str], tuple[Path, np.ndarray]], tmp_path: Path
) -> None:
    """There is no other position: all models have the same."""
    path = convert(saved("first")[0], tmp_path / "made.gguf")
    with open_gguf(path) as gguf:
        metadata = dict(gguf.metadata)
        del metadata["jais.attention.max_alibi_bias"]
        gguf.metadata = metadata
        config = load_config(gguf)
    assert (config.alibi, config.attn_scale) == (8.0, N_HEAD / N_EMBD)


def keys_of(**changes: Any) -> dict[str, Any]:
    config = {**CONFIG, **FAMILY, **changes}
    return read_config({k: v for k, v in config.items() if v != "left out"}, Path("c")).metadata


def test_texts_longer_than_those_of_training() -> None:
    """Their slopes are stretched by their length: the context ends before."""
    scaling = {"type": "linear", "train_seq_len": 128}
    assert keys_of(alibi_scaling=scaling)["jais.context_length"] == 128
    assert keys_of(alibi_scaling={**scaling, "train_seq_len": 512})["jais.context_length"] == 256


@pytest.mark.parametrize(
    ("key", "value", "kind", "said"),
    [
        (
            "position_embedding_type",
            "left out",
            UnsupportedError,
            "'learned': treadle supports only alibi",
        ),
        ("mup_scale_qk_dot_by_d", "left out", UnsupportedError, "divided by the head size"),
        ("activation_function", "gelu_new", UnsupportedError, "activation_function: 'gelu_new'"),
        ("scale_attn_by_inverse_layer_idx", True, UnsupportedError, "inverse_layer_idx: is True"),
        ("mup_embeddings_scale", 0, FileError, "mup_embeddings_scale: is 0"),
        ("alibi_scaling", {"train_seq_len": "x"}, FileError, "alibi_scaling.train_seq_len: is 'x'"),
    ],
)
def test_what_is_refused(key: str, value: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        keys_of(**{key: value})
