"""The claim "one small file": an encoder. Tokens see each other both ways; LayerNorm with a bias
stands behind each sum, as in BERT; a text's vector is the mean of its tokens' states.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import treadle
from tests.engine.test_engine import text
from tests.reference import Array, activate, log_softmax, rope, tensor_of
from tests.tiny import rounding, write_model
from tests.toys.conftest import Register
from treadle.errors import UnsupportedError
from treadle.models.archs import ARCHS, Arch
from treadle.models.config import Config, Layer
from treadle.models.graphs import GRAPHS
from treadle.models.graphs.decoder import DECODER
from treadle.models.keys import ArchMetadata
from treadle.models.layer import build_layer
from treadle.models.mixers.attention import ATTENTION
from treadle.models.structure import Graph, Sublayer, TensorRow

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows

NEEDS = frozenset({"attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"})


def normed(stem: str) -> tuple[TensorRow, ...]:
    return TensorRow(f"{stem}.weight", ("n_embd",)), TensorRow(f"{stem}.bias", ("n_embd",))


def attend(g: Ops, i: int, h: Rows) -> Rows:
    at = f"L{i}.attn"
    blk = f"blk.{i}.attn"
    table = g.config.layers[i].rope
    assert table is not None
    q, k, v = g.linears(f"{at}.qkv", h, [f"{blk}_q", f"{blk}_k", f"{blk}_v"])
    q = g.rope(f"{at}.rope", q, table)
    k = g.rope(f"{at}.rope", k, table)
    return g.linear(f"{at}.output", g.attend(at, i, q, k, v), f"{blk}_output")


def feed(g: Ops, i: int, h: Rows) -> Rows:
    at = f"L{i}.ffn"
    blk = f"blk.{i}.ffn"
    gate, up = g.linears(f"{at}.gate_up", h, [f"{blk}_gate", f"{blk}_up"])
    return g.linear(f"{at}.down", g.gated(f"{at}.gelu", gate, up, "gelu"), f"{blk}_down")


BOTH_WAYS = Sublayer(
    label="attn",
    before="",
    after="",
    after_sum="attn_output_norm",
    build=attend,
    rows=(
        *(row for row in ATTENTION.rows if "norm" not in row.name),
        *normed("attn_output_norm"),
    ),
    sizes=ATTENTION.sizes,
    memory=ATTENTION.memory,
)
FEED = Sublayer(
    label="ffn",
    before="",
    after="",
    after_sum="layer_output_norm",
    build=feed,
    rows=(
        TensorRow("ffn_gate.weight", ("n_ff", "n_embd")),
        TensorRow("ffn_up.weight", ("n_ff", "n_embd")),
        TensorRow("ffn_down.weight", ("n_embd", "n_ff")),
        *normed("layer_output_norm"),
    ),
    sizes=lambda layer: {"n_ff": layer.n_ff},
)


def sublayers(layer: Layer) -> tuple[Sublayer, Sublayer]:
    return BOTH_WAYS, FEED


def build(g: Ops) -> Rows:
    x = g.embed("token_embd", "token_embd", 1.0)
    x = g.norm("token_embd_norm", x, "token_embd_norm", centred=True)
    for i, layer in enumerate(g.config.layers):
        x = build_layer(g, i, x, *sublayers(layer))
    return x


def embedding(g: Ops, x: Rows) -> None:
    g.result("embedding", g.pool("embedding", x, g.config.pooling, unit=True))


def read(keys: ArchMetadata, arch: Arch) -> Config:
    config = DECODER.read(keys, arch)
    return replace(config, layers=tuple(replace(at, causal=False) for at in config.layers))


ENCODER = Graph(
    build=build,
    outputs={"embedding": embedding},
    rows=(TensorRow("token_embd.weight", ("n_vocab", "n_embd")), *normed("token_embd_norm")),
    sizes=DECODER.sizes,
    sublayers=sublayers,
    read=read,
)


# -- in plain numpy -------------------------------------------------------------------------------


def vector(model: treadle.Model, ids: list[int]) -> Array:
    tensor = tensor_of(model.gguf)
    config = model.config

    def norm(x: Array, stem: str) -> Array:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps)
        return np.asarray(x * tensor(f"{stem}.weight") + tensor(f"{stem}.bias"))

    def linear(x: Array, stem: str, bias: float = 1.0) -> Array:
        return np.asarray(x @ tensor(f"{stem}.weight").T + (bias and tensor(f"{stem}.bias")))

    x = norm(tensor("token_embd.weight")[ids], "token_embd_norm")
    for i, at in enumerate(config.layers):
        q, k, v = (
            linear(x, f"blk.{i}.attn_{name}").reshape(len(x), n, -1)
            for name, n in (("q", at.n_head), ("k", at.n_head_kv), ("v", at.n_head_kv))
        )
        assert at.rope is not None
        inv_freq, factor = config.ropes[at.rope].frequencies()
        q, k = (rope(each, inv_freq, factor, config.arch.rope) for each in (q, k))
        k, v = (np.repeat(each, at.n_head // at.n_head_kv, axis=1) for each in (k, v))
        weight = np.exp(log_softmax(np.einsum("qhd,khd->hqk", q, k) * config.attn_scale))
        a = np.einsum("hqk,khd->qhd", weight, v).reshape(len(x), -1)
        x = norm(x + linear(a, f"blk.{i}.attn_output"), f"blk.{i}.attn_output_norm")
        gate, up = (linear(x, f"blk.{i}.ffn_{name}", 0.0) for name in ("gate", "up"))
        h = linear(activate(gate, "gelu") * up, f"blk.{i}.ffn_down", 0.0)
        x = norm(x + h, f"blk.{i}.layer_output_norm")
    mean = x.mean(0)
    return np.asarray(mean / np.linalg.norm(mean))


@pytest.mark.slow
@pytest.mark.parametrize("isa", [None, "portable"])
def test_an_encoder(isa: str | None, register: Register, tmp_path: Path) -> None:
    """Texts of one token, of several pages, and all of them in one run."""
    register(ARCHS, "encoder", Arch("encoder", graph="encoder", norm="layer", needs=NEEDS))
    register(GRAPHS, "encoder", ENCODER)
    write_model(tmp_path / "toy.gguf", "encoder", n_embd=128, n_layer=2, head_dim_v=64)
    with treadle.load(tmp_path / "toy.gguf", threads=2, kv="f32", isa=isa) as model:
        engine = model.engine
        for n in (1, 512):
            engine.plan(n, 1, "embedding").check()
        texts = [text(n)[::-1] for n in (1, 3, 40, 100, 2)]
        exact = [vector(model, ids) for ids in texts]
        for found in (engine.embed(texts), np.concatenate([engine.embed([ids]) for ids in texts])):
            assert np.abs(found - exact).max() <= 4 * rounding(model.config)
        assert np.abs(exact[2] - vector(model, texts[2][::-1])).max() > 0.01  # order has a say
        error = np.abs(engine.embed([text(600)])[0] - vector(model, text(600))).max()
        assert error <= 4 * rounding(model.config)  # longer than a prefill's chunk
        with pytest.raises(UnsupportedError, match=r"no logits: .* does not generate text"):
            engine.plan(output="logits")
        assert "embedding" in engine.plan().outputs  # its main one
