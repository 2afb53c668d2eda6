"""Nomic's BERT with experts: folders in place and converted, against what its formulae give in
float64. transformers loads such a folder and leaves the experts out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.changed_gguf import write_changed
from tests.convert.random_folder import Formulae, Tensors, gelu, softmax, write_random
from tests.convert.test_hf import convert
from tests.lowered import lowered
from tests.tiny import rounding
from treadle.convert.hf.folder import open_hf
from treadle.errors import TreadleError, UnsupportedError
from treadle.files.gguf import open_gguf

N_EMBD = 64
N_FF = 96
N_LAYER = 4
N_VOCAB = 320
N_HEAD = 4
EPS = 1e-5
N_EXPERT = 8
N_USED = 2
BASE = 10000.0


def write_folder(
    folder: Path, routed: Sequence[int] = range(1, N_LAYER, 2), **keys: Any
) -> Tensors:
    """Random weights, spelt as in nomic-embed-text-v2-moe; float32. routed: layers of experts."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (N_VOCAB, N_EMBD),
        "embeddings.token_type_embeddings.weight": (1, N_EMBD),
        "emb_ln.weight": (N_EMBD,),
        "emb_ln.bias": (N_EMBD,),
    }
    for i in range(N_LAYER):
        at = f"encoder.layers.{i}."
        matrices: dict[str, tuple[int, ...]] = {
            "attn.Wqkv": (3 * N_EMBD, N_EMBD),
            "attn.out_proj": (N_EMBD, N_EMBD),
        }
        if i not in routed:
            matrices |= {"mlp.fc1": (N_FF, N_EMBD), "mlp.fc2": (N_EMBD, N_FF)}
        else:
            shapes[f"{at}mlp.router.layer.weight"] = (N_EXPERT, N_EMBD)
            shapes[f"{at}mlp.experts.mlp.w1"] = (N_EXPERT * N_FF, N_EMBD)
            shapes[f"{at}mlp.experts.mlp.w2"] = (N_EXPERT * N_FF, N_EMBD)
            shapes[f"{at}mlp.experts.bias"] = (N_EMBD,)
        for name, shape in matrices.items():
            shapes |= {f"{at}{name}.weight": shape, f"{at}{name}.bias": shape[:1]}
        for name in ("norm1", "norm2"):
            shapes[f"{at}{name}.weight"] = shapes[f"{at}{name}.bias"] = (N_EMBD,)
    config = {
        "model_type": "nomic_bert",
        "architectures": ["NomicBertModel"],
        "activation_function": "gelu",
        "vocab_size": N_VOCAB,
        "n_embd": N_EMBD,
        "n_layer": N_LAYER,
        "n_head": N_HEAD,
        "n_inner": N_FF,
        "n_positions": 512,
        "rotary_emb_base": BASE,
        "rotary_emb_fraction": 1.0,
        "layer_norm_epsilon": EPS,
        "type_vocab_size": 1,
        "num_experts": N_EXPERT,
        "moe_top_k": N_USED,
        "moe_every_n_layers": 2,
        "prenorm": False,
        "causal": False,
        **keys,
    }
    return write_random(folder, shapes, config, 5)


def states(tensors: Tensors, ids: list[int], *, bias: bool) -> np.ndarray:
    """The model's formulae in float64; ``bias``: of the sums of experts."""
    formulae = Formulae(tensors, EPS)
    w = formulae.w
    norm = formulae.norm
    linear = formulae.linear
    n = len(ids)
    dims = N_EMBD // N_HEAD

    def turned(x: np.ndarray) -> np.ndarray:  # [heads, tokens, dims], halves together
        angle = np.arange(n)[:, None] * BASE ** (-np.arange(0, dims, 2) / dims)
        a = x[..., : dims // 2]
        b = x[..., dims // 2 :]
        cos = np.cos(angle)
        sin = np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def experts(x: np.ndarray, at: str) -> np.ndarray:
        weights = softmax(linear(x, f"{at}router.layer"))
        first = w[f"{at}experts.mlp.w1"].reshape(N_EXPERT, N_FF, N_EMBD)
        second = w[f"{at}experts.mlp.w2"].reshape(N_EXPERT, N_FF, N_EMBD)
        made = np.zeros_like(x)
        for t in range(n):
            for e in np.argsort(-weights[t])[:N_USED]:
                made[t] += weights[t, e] * (gelu(first[e] @ x[t]) @ second[e])
        return made + bias * w[f"{at}experts.bias"]

    x = w["embeddings.word_embeddings.weight"][ids]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "emb_ln")
    for i in range(N_LAYER):
        at = f"encoder.layers.{i}."
        qkv = linear(x, f"{at}attn.Wqkv").reshape(n, 3, N_HEAD, dims).transpose(1, 2, 0, 3)
        p = softmax(turned(qkv[0]) @ turned(qkv[1]).swapaxes(1, 2) / math.sqrt(dims))
        y = (p @ qkv[2]).swapaxes(0, 1).reshape(n, -1)
        x = norm(x + linear(y, f"{at}attn.out_proj"), f"{at}norm1")
        if f"{at}mlp.router.layer.weight" in w:
            y = experts(x, f"{at}mlp.")
        else:
            y = linear(gelu(linear(x, f"{at}mlp.fc1")), f"{at}mlp.fc2")
        x = norm(x + y, f"{at}norm2")
    return x


def without_bias(path: Path, made: Path) -> Path:
    """The same as llama.cpp's converter has it."""
    return write_changed(path, made, without=lambda name: "exps_bias" in name)


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 90])
def test_states(n: int, tmp_path: Path) -> None:
    """Alone and beside others, with the bits of any number of threads."""
    tensors = write_folder(tmp_path / "hf")
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    ids = np.random.default_rng(7).integers(3, N_VOCAB, n).tolist()
    of_llama_cpp = without_bias(made, tmp_path / "without.gguf")
    for path in (tmp_path / "hf", made, of_llama_cpp):
        exact = states(tensors, ids, bias=path != of_llama_cpp)
        bits = []
        for threads in (1, 2):
            with treadle.load(path, threads=threads, kv="f32") as model:
                assert model.config.ignored == ()
                assert [bool(layer.experts) for layer in model.config.layers] == [False, True] * 2
                lowered(model.engine, n, n, "embedding").check()
                found = model.states(ids)
                allowed = 2 * rounding(model.config)
                assert np.abs(found - exact).max() <= allowed * np.abs(exact).max()
                vectors = model.engine.embed([ids[:7], ids, ids[5:8] or ids])
                mean = exact.mean(0) / np.linalg.norm(exact.mean(0))
                assert np.abs(vectors[1] - mean).max() <= allowed
                bits.append(found)
        assert np.array_equal(bits[0], bits[1])


@pytest.mark.parametrize("routed", [range(N_LAYER), (), range(0, N_LAYER, 2)])
def test_every_layer(routed: Sequence[int], tmp_path: Path) -> None:
    """Every first layer: those that have a router, be it all or none."""
    tensors = write_folder(tmp_path / "hf", routed, moe_every_n_layers=1)
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    for path in (tmp_path / "hf", made):
        with treadle.load(path, threads=1, kv="f32") as model:
            had = [bool(layer.experts) for layer in model.config.layers]
            assert had == [i in routed for i in range(N_LAYER)]
            ids = [3, 4, 5, 6, 7]
            exact = states(tensors, ids, bias=True)
            allowed = 2 * rounding(model.config) * np.abs(exact).max()
            assert np.abs(model.states(ids) - exact).max() <= allowed


def test_what_is_written(tmp_path: Path) -> None:
    """The names that the gguf package lists for the architecture, and the bias of its sums."""
    gguf = pytest.importorskip("gguf")
    arch = gguf.MODEL_ARCH.NOMIC_BERT_MOE
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
    tensors = write_folder(tmp_path / "hf")
    with open_gguf(convert(tmp_path / "hf", tmp_path / "made.gguf")) as file:
        assert file.metadata["general.architecture"] == gguf.MODEL_ARCH_NAMES[arch]
        assert file.metadata[gguf.Keys.LLM.MOE_EVERY_N_LAYERS.format(arch="nomic-bert-moe")] == 2
        for name in file.tensors:
            stem = name.rpartition(".")[0].replace(f"blk.{name.split('.')[1]}.", "blk.{bid}.")
            assert stem in known or stem == "blk.{bid}.ffn_exps_bias", name
        down = file.tensors["blk.1.ffn_down_exps.weight"]
        w2 = tensors["encoder.layers.1.mlp.experts.mlp.w2"].reshape(N_EXPERT, N_FF, N_EMBD)
        assert np.array_equal(down.dequantize().reshape(down.shape), w2.swapaxes(1, 2))


def test_texts_longer_than_those_of_training(tmp_path: Path) -> None:
    """A factor stretches them by their length: the context ends before."""
    keys: dict[str, Any] = {"rotary_scaling_factor": 2, "max_trained_positions": 256}
    write_folder(tmp_path / "hf", **keys)
    for path in (tmp_path / "hf", convert(tmp_path / "hf", tmp_path / "made.gguf")):
        with treadle.load(path, threads=1) as model:
            assert model.n_ctx == 256
        with pytest.raises(TreadleError, match="expected at most 256"):
            treadle.load(path, threads=1, context=512)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moe_normalize_expert_weights", True),
        ("expert_choice_router", True),
        ("prenorm", True),
        ("rotary_emb_interleaved", True),
        ("rotary_emb_scale_base", 512.0),
    ],
)
def test_refused(key: str, value: Any, tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", **{key: value})
    with pytest.raises(UnsupportedError, match=key):
        open_hf(tmp_path / "hf")
