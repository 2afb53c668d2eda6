"""Jina's BERT (ALiBi, a gated FFN) and the one for code (LayerNorm of queries and keys, a second
norm behind attention, the gate behind what it gates): folders in place and converted, and GGUF's
other spelling, against what the formulae give in float64. The code is no part of transformers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.random_folder import Formulae, Tensors, gelu, softmax, write_random
from tests.convert.test_hf import convert
from tests.lowered import lowered
from tests.tiny import rounding
from treadle.convert.hf.folder import open_hf
from treadle.errors import UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf

N_EMBD = 96
N_FF = 160
N_LAYER = 3
N_VOCAB = 320
EPS = 1e-12
CODE_NORMS = ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1")


def write_folder(folder: Path, n_head: int, *, code: bool = False, **keys: Any) -> Tensors:
    """Random weights, spelt as in jina-embeddings-v2-base-en or -base-code; float32."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (N_VOCAB, N_EMBD),
        "embeddings.token_type_embeddings.weight": (2, N_EMBD),
        "embeddings.LayerNorm.weight": (N_EMBD,),
        "embeddings.LayerNorm.bias": (N_EMBD,),
        "pooler.dense.weight": (N_EMBD, N_EMBD),
        "pooler.dense.bias": (N_EMBD,),
    }
    for i in range(N_LAYER):
        at = f"encoder.layer.{i}."
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes[f"{at}attention.{name}.weight"] = (N_EMBD, N_EMBD)
            shapes[f"{at}attention.{name}.bias"] = (N_EMBD,)
        both, down = ("up_gated_layer", "down_layer") if code else ("gated_layers", "wo")
        shapes[f"{at}mlp.{both}.weight"] = (2 * N_FF, N_EMBD)
        shapes[f"{at}mlp.{down}.weight"] = (N_EMBD, N_FF)
        shapes[f"{at}mlp.{down}.bias"] = (N_EMBD,)
        own = (*CODE_NORMS, "layer_norm_2") if code else ("mlp.layernorm",)
        for name in ("attention.output.LayerNorm", *own):
            shapes[f"{at}{name}.weight"] = shapes[f"{at}{name}.bias"] = (N_EMBD,)
    config = {
        "model_type": "bert",
        "architectures": ["JinaBertForMaskedLM"],
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "hidden_act": "gelu",
        "vocab_size": N_VOCAB,
        "hidden_size": N_EMBD,
        "num_hidden_layers": N_LAYER,
        "num_attention_heads": n_head,
        "intermediate_size": N_FF,
        "max_position_embeddings": 512,
        "layer_norm_eps": EPS,
        "type_vocab_size": 2,
        **keys,
    }
    return write_random(folder, shapes, config, n_head)


def states(tensors: Tensors, ids: list[int], n_head: int, *, code: bool) -> np.ndarray:
    """The model's formulae in float64."""
    formulae = Formulae(tensors, EPS)
    w = formulae.w
    norm = formulae.norm
    linear = formulae.linear

    def heads(x: np.ndarray) -> np.ndarray:
        return x.reshape(len(ids), n_head, -1).swapaxes(0, 1)

    def slopes(n: int) -> list[float]:
        if n & (n - 1) == 0:
            return [2.0 ** (-8.0 * (h + 1) / n) for h in range(n)]
        power = 1 << (n.bit_length() - 1)
        return slopes(power) + slopes(2 * power)[::2][: n - power]

    at = np.arange(len(ids))
    bias = -np.array(slopes(n_head))[:, None, None] * abs(at[:, None] - at[None])
    x = w["embeddings.word_embeddings.weight"][ids]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(N_LAYER):
        stem = f"encoder.layer.{i}."
        names = (f"{stem}attention.self.{name}" for name in ("query", "key", "value"))
        q, k, v = (linear(x, name) for name in names)
        if code:
            q = norm(q, f"{stem}{CODE_NORMS[0]}")
            k = norm(k, f"{stem}{CODE_NORMS[1]}")
        q = heads(q)
        k = heads(k)
        v = heads(v)
        score = q @ k.swapaxes(1, 2) / math.sqrt(N_EMBD // n_head) + bias
        y = (softmax(score) @ v).swapaxes(0, 1).reshape(len(ids), -1)
        y = linear(y, f"{stem}attention.output.dense")
        before = x
        x = norm(x + y, f"{stem}attention.output.LayerNorm")
        if code:
            x = norm(before + x, f"{stem}layer_norm_1")
            up, gate = np.split(linear(x, f"{stem}mlp.up_gated_layer"), 2, axis=1)
        else:
            gate, up = np.split(linear(x, f"{stem}mlp.gated_layers"), 2, axis=1)
        down, last = ("down_layer", "layer_norm_2") if code else ("wo", "mlp.layernorm")
        x = norm(x + linear(gelu(gate) * up, f"{stem}mlp.{down}"), f"{stem}{last}")
    return x


def respell(path: Path, made: Path) -> Path:
    """The same in GGUF's other spelling: one matrix as two, as llama.cpp's converter had them at
    first, or two as one, as it has them now, in a checkpoint's order.
    """
    writer = GGUFWriter(made)
    with open_gguf(path) as file:
        for key, value in file.metadata.items():
            writer.add(key, value, file.types[key])
        for name, tensor in file.tensors.items():
            gate = name.replace("up", "gate")
            (rows, *k) = tensor.shape
            parts = [(name, tensor.data)]
            if "ffn_up" in name and gate not in file.tensors:
                half = len(tensor.data) // 2
                rows = rows // 2
                parts = [(gate, tensor.data[:half]), (name, tensor.data[half:])]
            elif "ffn_up" in name:
                both = np.concatenate([tensor.data, file.tensors[gate].data])
                rows = 2 * rows
                parts = [(name, both)]
            elif "ffn_gate" in name:
                parts = []
            for to, data in parts:
                writer.add_tensor(to, (rows, *k), tensor.ggml_type, data)
        writer.write()
    return made


@pytest.mark.slow
@pytest.mark.parametrize("code", [False, True], ids=["text", "code"])
@pytest.mark.parametrize("n_head", [4, 6])
def test_states(n_head: int, code: bool, tmp_path: Path) -> None:
    """Alone and beside others, with the bits of any number of threads."""
    tensors = write_folder(tmp_path / "hf", n_head, code=code)
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    ids = np.random.default_rng(7).integers(3, N_VOCAB, 150).tolist()
    exact = states(tensors, ids, n_head, code=code)
    bits = []
    for path in (tmp_path / "hf", made, respell(made, tmp_path / "other.gguf")):
        for threads in (1, 2):
            with treadle.load(path, threads=threads, kv="f32") as model:
                assert model.config.ignored == ()
                lowered(model.engine, 1, 1, "embedding").check()
                found = model.states(ids)
                allowed = 2 * rounding(model.config)
                assert np.abs(found - exact).max() <= allowed * np.abs(exact).max()
                vectors = model.engine.embed([ids[:7], ids, ids[5:8]])
                mean = exact.mean(0) / np.linalg.norm(exact.mean(0))
                assert np.abs(vectors[1] - mean).max() <= allowed
                bits.append(found)
    for found in bits[1:]:
        assert np.array_equal(found, bits[0])


@pytest.mark.parametrize("code", [False, True], ids=["text", "code"])
def test_what_is_written(code: bool, tmp_path: Path) -> None:
    """The names that the gguf package lists for the architecture."""
    gguf = pytest.importorskip("gguf")
    arch = gguf.MODEL_ARCH.JINA_BERT_V2
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
    write_folder(tmp_path / "hf", 4, code=code)
    with open_gguf(convert(tmp_path / "hf", tmp_path / "made.gguf")) as file:
        assert file.metadata["general.architecture"] == gguf.MODEL_ARCH_NAMES[arch]
        assert file.metadata["jina-bert-v2.attention.causal"] is False
        assert file.metadata[gguf.Keys.Tokenizer.TOKEN_TYPE_COUNT] == 2
        for name in file.tensors:
            stem = name.rpartition(".")[0]
            assert stem.replace(f"blk.{name.split('.')[1]}.", "blk.{bid}.") in known, name
        assert file.tensors["blk.0.ffn_up.weight"].shape == ((1 if code else 2) * N_FF, N_EMBD)


def test_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "relu", 4, feed_forward_type="reglu")
    with pytest.raises(UnsupportedError, match="feed_forward_type: is 'reglu'"):
        open_hf(tmp_path / "relu")
