"""The decoder: layer after layer of a mixer and an FFN on one stream of states.

::

    x = embed(ids)
    x = x + post_norm(mixer(norm(x)))    each layer
    x = x + post_norm(ffn(norm(x)))
    logits = linear(norm(x))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from treadle.errors import UnsupportedError
from treadle.files.keys import SIZE_MAX
from treadle.models.archs import ARCHS, Arch
from treadle.models.config import Config, Layer
from treadle.models.ffns import FFNS
from treadle.models.keys import N_LAYER_MAX, Keys
from treadle.models.mixers import MIXERS
from treadle.models.rope import read_ropes
from treadle.models.structure import Graph, Sublayer, TensorRow

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows

POOLINGS = {2: "first", 3: "last"}  # llama.cpp's numbers; all others: the mean
WINDOW_KEY = "attention.sliding_window_pattern"


def build(g: Ops) -> Rows:
    """The states behind the last layer."""
    x = g.embed("token_embd", "token_embd", g.config.embd_scale)
    for i, layer in enumerate(g.config.layers):
        for sublayer in _sublayers(layer):
            x = sublayer.build(g, i, x)
    return x


def logits(g: Ops, x: Rows) -> None:
    """Logits of the rows that they are wanted of."""
    h = g.norm("output_norm", g.outputs(x), "output_norm")
    name = "token_embd" if g.config.tied else "output"
    g.result("logits", g.linear("output", h, name))


def embedding(g: Ops, x: Rows) -> None:
    """A vector for each text, and the same of length 1."""
    h, how = g.norm("output_norm", x, "output_norm"), g.config.pooling
    g.result("pooled", g.pool("pool", h, how))
    g.result("embedding", g.pool("pool.unit", h, how, unit=True))


def states(g: Ops, x: Rows) -> None:
    """The last layer's normed states of all tokens."""
    g.result("states", g.norm("output_norm", x, "output_norm"))


def read(keys: Keys, arch: Arch) -> Config:
    """All that the keys say, and the factors of the rope."""
    _refuse_other_graphs(keys)
    n_layer = keys.integer("block_count", lo=1, hi=N_LAYER_MAX)
    n_embd = keys.integer("embedding_length", lo=1, hi=SIZE_MAX)
    n_head = keys.per_layer("attention.head_count", n_layer)
    n_head_kv = keys.per_layer("attention.head_count_kv", n_layer, n_head)
    for heads, heads_kv in zip(n_head, n_head_kv, strict=True):
        if heads % heads_kv:
            keys.fail("attention.head_count_kv", f"{heads_kv} does not divide {heads} heads")
    if n_embd % n_head[0] and not keys.has("attention.key_length"):
        keys.fail("attention.head_count", f"{n_head[0]} does not divide embedding_length {n_embd}")
    head_dim = keys.integer("attention.key_length", n_embd // n_head[0], lo=1, hi=SIZE_MAX)
    head_dim_v = keys.integer("attention.value_length", n_embd // n_head[0], lo=1, hi=SIZE_MAX)
    n_ctx_train = keys.integer("context_length", lo=1, hi=1 << 31)
    window = keys.integer("attention.sliding_window", 0, lo=0, hi=1 << 31)
    windowed = bool(window) and (arch.window_period > 0 or keys.has(WINDOW_KEY))
    local = _local_layers(keys, arch, n_layer) if windowed else (False,) * n_layer
    n_ff = keys.per_layer("feed_forward_length", n_layer)
    layers = tuple(
        Layer(
            n_head=n_head[i],
            n_head_kv=n_head_kv[i],
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            n_ff=n_ff[i],
            kv_from=i,
            window=window if local[i] else 0,
            rope=int(local[i]),
        )
        for i in range(n_layer)
    )
    width = n_embd / n_head[0] if n_layer in arch.width_scaled else head_dim
    return Config(
        arch=arch,
        n_embd=n_embd,
        n_vocab=keys.n_vocab(),
        n_ctx_train=n_ctx_train,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon", lo=0.0, hi=1.0),
        embd_scale=math.sqrt(n_embd) if arch.embd_scale else 1.0,
        attn_scale=keys.number("attention.scale", 0.0, lo=0.0) or 1.0 / math.sqrt(width),
        attn_softcap=keys.number("attn_logit_softcapping", 0.0, lo=0.0),
        logit_softcap=keys.number("final_logit_softcapping", 0.0, lo=0.0),
        pooling=POOLINGS.get(keys.integer("pooling_type", 1, lo=0, hi=4), "mean"),
        ropes=read_ropes(keys, arch, head_dim, n_ctx_train)[: 1 + any(local)],
        layers=layers,
    )


def _refuse_other_graphs(keys: Keys) -> None:
    name, path = keys.arch, keys.gguf.path
    have = f"treadle has dense decoders only ({', '.join(ARCHS)})"
    n_expert = keys.integer("expert_count", 0, lo=0)
    if n_expert or any("_exps." in t or "ffn_gate_inp." in t for t in keys.gguf.tensors):
        raise UnsupportedError(f"{path}: {name} with a mixture of {n_expert} experts: {have}")
    if not keys.flag("attention.causal", True):
        raise UnsupportedError(f"{path}: {name} with attention both ways (an encoder): {have}")


def _local_layers(keys: Keys, arch: Arch, n_layer: int) -> tuple[bool, ...]:
    """Which layers have the window: the key is a period, or one flag per layer."""
    key = WINDOW_KEY
    flags = keys.get(key)
    if isinstance(flags, Sequence) and not isinstance(flags, (str, bytes)):
        if len(flags) != n_layer or any(flag not in (0, 1) for flag in flags):
            keys.fail(key, f"has {len(flags)} entries", f"{n_layer} flags")
        return tuple(bool(flag) for flag in flags)
    period = keys.integer(key, arch.window_period, lo=0, hi=N_LAYER_MAX)
    return tuple(period == 0 or i % period < period - 1 for i in range(n_layer))


MODEL_ROWS = (
    TensorRow("token_embd.weight", ("n_vocab", "n_embd")),
    TensorRow("output_norm.weight", ("n_embd",)),
    TensorRow("output.weight", ("n_vocab", "n_embd"), optional=True),  # absent: token_embd's
    TensorRow("rope_freqs.weight", ("n_rope_freq",), optional=True),  # Llama 3: see Rope
)
LAYER_ROWS = (*MIXERS["attention"].rows, *FFNS["gated"].rows)  # of most decoders


def _sublayers(layer: Layer) -> tuple[Sublayer, ...]:
    return MIXERS[layer.mixer], FFNS[layer.ffn]


DECODER = Graph(
    build=build,
    outputs={"logits": logits, "embedding": embedding, "states": states},
    rows=MODEL_ROWS,
    sizes=lambda config: {
        "n_vocab": config.n_vocab,
        "n_embd": config.n_embd,
        "n_rope_freq": config.ropes[0].dims // 2,
    },
    sublayers=_sublayers,
    read=read,
)
