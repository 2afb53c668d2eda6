"""NeoBERT, which transformers lacks: folders against its formulae in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.random_folder import Tensors, softmax, write_random
from tests.convert.test_hf import convert
from tests.convert.test_hf_encoders import wordpiece
from tests.lowered import lowered
from tests.tiny import rounding
from treadle.api.rerank import Reranker
from treadle.convert.hf.folder import open_hf
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf

N_EMBD = 64
N_FF = 96
N_LAYER = 3
N_VOCAB = 320
N_HEAD = 4
EPS = 1e-5
SAID = 139  # what config.json says of N_FF: two thirds are 92, the next multiple of 8 is 96


def write_folder(folder: Path, *, at: str = "", scores: bool = False, **keys: Any) -> Tensors:
    """Random weights, spelt as in NeoBERT; ``at``: what is before the names."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}encoder.weight": (N_VOCAB, N_EMBD),
        f"{at}layer_norm.weight": (N_EMBD,),
    }
    if at:
        shapes |= {"decoder.weight": (N_VOCAB, N_EMBD), "decoder.bias": (N_VOCAB,)}
    if scores:
        del shapes["decoder.weight"], shapes["decoder.bias"]
        shapes |= {"dense.weight": (N_EMBD, N_EMBD), "dense.bias": (N_EMBD,)}
        shapes |= {"classifier.weight": (1, N_EMBD), "classifier.bias": (1,)}
    for i in range(N_LAYER):
        layer = f"{at}transformer_encoder.{i}."
        shapes |= {
            f"{layer}qkv.weight": (3 * N_EMBD, N_EMBD),
            f"{layer}wo.weight": (N_EMBD, N_EMBD),
            f"{layer}ffn.w12.weight": (2 * N_FF, N_EMBD),
            f"{layer}ffn.w3.weight": (N_EMBD, N_FF),
            f"{layer}attention_norm.weight": (N_EMBD,),
            f"{layer}ffn_norm.weight": (N_EMBD,),
        }
    config = {
        "model_type": "neobert",
        "architectures": ["NeoBERTLMHead" if at else "NeoBERT"],
        "dim_head": N_EMBD // N_HEAD,
        "hidden_size": N_EMBD,
        "intermediate_size": SAID,
        "max_length": 512,
        "norm_eps": EPS,
        "num_attention_heads": N_HEAD,
        "num_hidden_layers": N_LAYER,
        "vocab_size": N_VOCAB,
        **keys,
    }
    tensors = write_random(folder, shapes, config, 9)
    return {name.removeprefix(at): rows for name, rows in tensors.items()}


def states(tensors: Tensors, ids: list[int]) -> np.ndarray:
    """The model's formulae in float64."""
    w = {name: rows.astype(np.float64) for name, rows in tensors.items()}
    n = len(ids)
    dims = N_EMBD // N_HEAD

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
        return np.asarray(x / scale * w[f"{name}.weight"])

    def turned(x: np.ndarray) -> np.ndarray:  # [heads, tokens, dims], neighbours together
        angle = np.arange(n)[:, None] * 10000.0 ** (-np.arange(0, dims, 2) / dims)
        z = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
        return np.stack([z.real, z.imag], -1).reshape(x.shape)

    x = w["encoder.weight"][ids]
    for i in range(N_LAYER):
        at = f"transformer_encoder.{i}."
        qkv = norm(x, f"{at}attention_norm") @ w[f"{at}qkv.weight"].T
        q, k, v = np.split(qkv.reshape(n, N_HEAD, 3 * dims).swapaxes(0, 1), 3, -1)
        p = softmax(turned(q) @ turned(k).swapaxes(1, 2) / math.sqrt(dims))
        x = x + (p @ v).swapaxes(0, 1).reshape(n, -1) @ w[f"{at}wo.weight"].T
        gate, up = np.split(norm(x, f"{at}ffn_norm") @ w[f"{at}ffn.w12.weight"].T, 2, -1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}ffn.w3.weight"].T
    return norm(x, "layer_norm")


@pytest.mark.parametrize("at", ["", "model."])
def test_states(at: str, tmp_path: Path) -> None:
    """Alone and beside others, with the bits of any number of threads."""
    tensors = write_folder(tmp_path / "hf", at=at)
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    ids = np.random.default_rng(7).integers(3, N_VOCAB, 70).tolist()
    exact = states(tensors, ids)
    bits = []
    for path in (tmp_path / "hf", made):
        for threads in (1, 2):
            with treadle.load(path, threads=threads, kv="f32") as model:
                assert model.config.ignored == ()
                lowered(model.engine, 70, 70, "embedding").check()
                found = model.states(ids)
                allowed = 2 * rounding(model.config)
                assert np.abs(found - exact).max() <= allowed * np.abs(exact).max()
                first = exact[0] / np.linalg.norm(exact[0])
                vectors = model.engine.embed([ids[:7], ids, ids[5:8]])
                assert np.abs(vectors[1] - first).max() <= allowed
                bits.append(found)
    assert all(np.array_equal(found, bits[0]) for found in bits)


def test_scores(tmp_path: Path) -> None:
    kinds = ["NeoBERTForSequenceClassification"]
    tensors = write_folder(tmp_path / "hf", at="model.", scores=True, architectures=kinds)
    wordpiece().save(str(tmp_path / "hf" / "tokenizer.json"))
    for path in (tmp_path / "hf", convert(tmp_path / "hf", tmp_path / "made.gguf")):
        with treadle.load(path, threads=1, kv="f32") as model:
            found = model.rerank("Hello world", ["a test", "spaces and lines"])
            first = states(tensors, Reranker(model).pair("Hello world", "a test")[0])[0]
            hidden = np.tanh(tensors["dense.weight"] @ first + tensors["dense.bias"])
            exact = tensors["classifier.weight"][0] @ hidden + tensors["classifier.bias"][0]
            assert abs(found[0] - exact) <= 2 * rounding(model.config)


def test_what_is_written(tmp_path: Path) -> None:
    """The names that the gguf package lists for the architecture, all queries first."""
    gguf = pytest.importorskip("gguf")
    arch = gguf.MODEL_ARCH.NEO_BERT
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
    tensors = write_folder(tmp_path / "hf")
    with open_gguf(convert(tmp_path / "hf", tmp_path / "made.gguf")) as file:
        assert file.metadata["general.architecture"] == gguf.MODEL_ARCH_NAMES[arch]
        assert file.metadata["neo-bert.feed_forward_length"] == N_FF
        assert file.metadata["neo-bert.pooling_type"] == 2
        for name in file.tensors:
            stem = name.rpartition(".")[0]
            assert stem.replace(f"blk.{name.split('.')[1]}.", "blk.{bid}.") in known, name
        rows = tensors["transformer_encoder.1.qkv.weight"].reshape(N_HEAD, 3, -1, N_EMBD)
        found = file.tensors["blk.1.attn_qkv.weight"]
        same = rows.swapaxes(0, 1).reshape(found.shape)
        assert np.array_equal(found.dequantize().reshape(found.shape), same)


def test_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "ngpt", ngpt=True)
    with pytest.raises(UnsupportedError, match="ngpt: is True"):
        open_hf(tmp_path / "ngpt")


def test_a_tensor_that_is_missing(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    write_folder(tmp_path / "hf", at="model.")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.transformer_encoder.2.wo.weight"]
    save_file(tensors, path)
    with pytest.raises(FileError, match=r"model\.transformer_encoder\.2\.wo\.weight.*missing"):
        open_hf(tmp_path / "hf")
