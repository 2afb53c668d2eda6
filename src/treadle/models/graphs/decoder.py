"""The decoder: layer after layer of a mixer and an FFN on one stream of states.

::

    x = embed(ids)
    x = layer(x)                         each: models/layer.py
    logits = linear(norm(x))

A stage (``Config.stage``) has some of the layers. It is given the states before them, or gives
those behind them, ``stream``, or both.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from treadle.errors import UnsupportedError
from treadle.files.keys import SIZE_MAX
from treadle.models.archs import ARCHS, Arch
from treadle.models.config import Config, Layer
from treadle.models.ffns import FFNS
from treadle.models.graphs.kinds import (
    ffn_norm_of,
    ffn_of,
    has_wide_norm,
    mixer_of,
    n_rows,
    pooling_of,
    read_experts,
    read_tables,
    read_temperature,
    read_windows,
)
from treadle.models.graphs.recurrence import RMS_EPS, read_heads, read_recurrence
from treadle.models.keys import N_LAYER_MAX, Keys
from treadle.models.layer import build_layer
from treadle.models.mixers import MIXERS
from treadle.models.structure import Graph, Sublayer, TensorRow, with_bias

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows

DECODERS = [name for name, arch in ARCHS.items() if arch.graph == "decoder"]
DECODERS_ONLY = f"treadle has these decoders: {', '.join(DECODERS)}"
POSITIONS = "position_embd.weight"
NEXTN = "nextn_predict_layers"


def build(g: Ops) -> Rows:
    """The states behind the last layer that is computed here."""
    x = g.given("stream", g.config.n_embd) if g.config.here.start else _embedded(g)
    for i in g.config.here:
        x = build_layer(g, i, x, *_sublayers(g.config.layers[i]))
    return x


def _embedded(g: Ops) -> Rows:
    """The states before the first layer."""
    x = g.embed("token_embd", "token_embd", g.config.embd_scale)
    if g.config.n_positions:
        x = g.add_rows("position_embd", x, "position_embd", by="position")
    if g.has("token_types.weight"):
        by = "type" if g.config.n_types > 1 else "first"
        x = g.add_rows("token_types", x, "token_types", by=by)
    if g.has("token_embd_norm.weight"):
        x = g.norm("token_embd_norm", x, "token_embd_norm", centred=g.config.centred)
    return x


def _normed(g: Ops, x: Rows, scale: float = 1.0) -> Rows:
    if not g.has("output_norm.weight"):  # norms behind the sums: it is normed
        return x
    return g.norm("output_norm", x, "output_norm", centred=g.config.centred, scale=scale)


def logits(g: Ops, x: Rows) -> None:
    """Logits of the rows that they are wanted of."""
    h = _normed(g, g.outputs(x), g.config.logit_scale)
    name = "token_embd" if g.config.tied else "output"
    g.result("logits", g.linear("output", h, name))


def embedding(g: Ops, x: Rows) -> None:
    """A vector for each text, and the same of length 1."""
    h, how = _normed(g, x), g.config.pooling
    g.result("pooled", g.pool("pool", h, how))
    g.result("embedding", g.pool("pool.unit", h, how, unit=True))


def states(g: Ops, x: Rows) -> None:
    """The last layer's normed states of all tokens."""
    g.result("states", _normed(g, x))


def stream(g: Ops, x: Rows) -> None:
    """The states of all tokens, for the layers that are computed elsewhere."""
    g.result("stream", x)


def read(keys: Keys, arch: Arch) -> Config:
    """All that the keys say, of a decoder."""
    if not keys.flag("attention.causal", True):
        what = "with attention both ways (an encoder)"
        raise UnsupportedError(f"{keys.gguf.path}: {keys.arch} {what}: {DECODERS_ONLY}")
    return read_config(keys, arch)


def read_config(keys: Keys, arch: Arch) -> Config:
    """All that the keys say, and the factors of the rope."""
    n_block = keys.integer("block_count", lo=1, hi=N_LAYER_MAX)
    # Layers that predict further tokens stand behind the others, and are left out.
    n_layer = n_block - keys.integer(NEXTN, 0, lo=0, hi=n_block - 1)
    n_embd = keys.integer("embedding_length", lo=1, hi=SIZE_MAX)
    n_head, n_head_kv = read_heads(keys, arch, n_block)
    heads = next(filter(None, n_head), 1)
    if n_embd % heads and not keys.has("attention.key_length"):
        keys.fail("attention.head_count", f"{heads} does not divide embedding_length {n_embd}")
    head_dim = keys.integer("attention.key_length", n_embd // heads, lo=1, hi=SIZE_MAX)
    head_dim_v = keys.integer("attention.value_length", n_embd // heads, lo=1, hi=SIZE_MAX)
    n_ctx_train = keys.integer("context_length", lo=1, hi=1 << 31)
    window, local = read_windows(keys, n_layer)
    plain, tables = read_tables(keys, arch, local, head_dim, n_ctx_train)
    ropes = read_temperature(keys, plain)
    n_ff = keys.per_layer("feed_forward_length", n_block, lo=int(not arch.state))
    state = read_recurrence(keys, arch, n_embd) if arch.state else None
    layers = tuple(
        Layer(
            n_head=n_head[i],
            n_head_kv=n_head_kv[i],
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            n_ff=n_ff[i],
            kv_from=i,
            window=window if local[i] else 0,
            rope=tables[i],
            q_rope=len(plain) if len(ropes) > len(plain) else None,
            mixer=mixer_of(keys, arch, i) if n_head_kv[i] else arch.state,
            ffn=ffn_of(keys, arch, i, n_ff[i]) if n_ff[i] else "",
            experts=read_experts(keys, i, n_ff[i]),
            wide_norm=has_wide_norm(keys, i, n_head[i] * head_dim, head_dim),
            state=state,
        )
        for i in range(n_layer)
    )
    width = n_embd / heads if n_layer in arch.width_scaled else head_dim
    ffn_norm = ffn_norm_of(keys, arch)
    # x + r h, layer by layer, is r (x / r + h): the stream is kept in units of r, and norms make
    # the same of it if their eps is kept in those of r**2.
    residual = keys.number("residual_scale", 0.0, lo=0.0) or 1.0
    norm = "attention.layer_norm_epsilon" if arch.norm == "layer" else RMS_EPS
    embd_scale = math.sqrt(n_embd) if arch.embd_scale else 1.0
    logit_scale = keys.number("logit_scale", 0.0, lo=0.0) or 1.0
    return Config(
        arch=arch,
        n_embd=n_embd,
        n_vocab=keys.n_vocab(),
        n_ctx_train=n_ctx_train,
        norm_eps=keys.number(norm, lo=0.0, hi=1.0) / residual**2,
        embd_scale=(keys.number("embedding_scale", 0.0, lo=0.0) or embd_scale) / residual,
        attn_scale=keys.number("attention.scale", 0.0, lo=0.0) or 1.0 / math.sqrt(width),
        attn_softcap=keys.number("attn_logit_softcapping", 0.0, lo=0.0),
        logit_scale=1.0 / logit_scale if arch.divide_logits else logit_scale,
        logit_softcap=keys.number("final_logit_softcapping", 0.0, lo=0.0),
        pooling=pooling_of(keys, arch),
        ropes=ropes,
        layers=layers,
        parallel=not ffn_norm or keys.flag("use_parallel_residual", False),
        ffn_norm=ffn_norm,
        n_positions=n_rows(keys, POSITIONS) or (n_ctx_train if POSITIONS in arch.needs else 0),
        n_types=n_rows(keys, "token_types.weight"),
    )


MODEL_ROWS = (
    TensorRow("token_embd.weight", ("n_vocab", "n_embd")),
    TensorRow(POSITIONS, ("n_positions", "n_embd"), optional=True),  # learned
    *with_bias("output_norm", "n_embd"),
    TensorRow("output.weight", ("n_vocab", "n_embd"), optional=True),  # absent: token_embd's
    TensorRow("rope_freqs.weight", ("n_rope_freq",), optional=True),  # Llama 3: see Rope
    TensorRow("rope_factors_short.weight", ("n_rope_freq",), optional=True),  # Phi 3's
    TensorRow("rope_factors_long.weight", ("n_rope_freq",), optional=True),
)
LAYER_ROWS = (*MIXERS["attention"].rows, *FFNS["gated"].rows)  # of most decoders


def _sublayers(layer: Layer) -> tuple[Sublayer, ...]:
    return MIXERS[layer.mixer], *((FFNS[layer.ffn],) if layer.ffn else ())


DECODER = Graph(
    build=build,
    outputs={"logits": logits, "embedding": embedding, "states": states, "stream": stream},
    rows=MODEL_ROWS,
    sizes=lambda config: {
        "n_vocab": config.n_vocab,
        "n_embd": config.n_embd,
        "n_rope_freq": config.ropes[0].dims // 2 if config.ropes else 0,
        "n_positions": config.n_positions,
        "n_types": config.n_types,
    },
    sublayers=_sublayers,
    read=read,
)
