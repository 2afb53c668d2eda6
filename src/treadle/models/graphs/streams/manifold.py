"""Layers on several streams of hidden states, with mixes computed for each token
(manifold-constrained hyper-connections: DeepSeek V4, 2026).

::

    x = [embed(ids)] * n
    for each half of each layer:
        pre, post, comb = weights(x)                of n, n, and n * n streams, see below
        x = post * half(norm(sum pre x)) + comb x
    logits = linear(norm(sum pre x))                 or of their mean (GLM-5.3-Flash)

    weights(x) = sinkhorn(fn(norm(x)) * scale + base)         norm: of all streams together
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.config import Hyper
from treadle.models.graphs import decoder
from treadle.models.graphs.decoder import DECODER, first, halves_of
from treadle.models.graphs.streams.parts import EPSILON, N_STREAMS, hyper_of
from treadle.models.layer import normed_for
from treadle.models.structure import Graph, Sizes, Sublayer, TensorRow, built_by_graph

if TYPE_CHECKING:
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata
    from treadle.models.ops import Ops, Rows

ROUNDS = "hyper_connection.sinkhorn_iterations"
MOST_STREAMS = 8
MOST_ROUNDS = 1000


def read_hyper(keys: ArchMetadata, n_embd: int) -> Hyper:
    """Return the sizes of the streams, each of ``n_embd`` values. Raises FileError for sizes out of
    range.
    """
    return Hyper(
        n=keys.integer(N_STREAMS, lo=2, hi=MOST_STREAMS),
        n_embd=n_embd,
        rounds=keys.integer(ROUNDS, lo=1, hi=MOST_ROUNDS),
        eps=keys.number(EPSILON, lo=0.0, hi=1.0),
    )


def weighed(g: Ops, label: str, x: Rows, stem: str, rounds: int) -> tuple[Rows, Rows]:
    """Return ``sum pre x``, the weighted sum of the streams ``x``, and each token's weights (pre,
    post and comb). ``stem``: begins the names of the weights' matrix, scale and base; ``label``:
    begins the steps' labels; ``rounds``: rounds of Sinkhorn's normalisation of comb, 0 if only the
    sum is needed.
    """
    hyper = hyper_of(g.config)
    normed = g.norm(f"{label}.norm", x, "")
    made = g.linear(f"{label}.fn", normed, f"{stem}_fn")
    weights = g.call(
        "stream_weights",
        f"{label}.weights",
        made,
        n=hyper.n,
        rounds=rounds,
        eps=hyper.eps,
        stem=stem,
    )
    return g.call("weighed_streams", f"{label}.mix", x, weights, n=hyper.n), weights


def build(g: Ops) -> Rows:
    """Build the layers; return the streams after the last, f32 ``[N, n_streams * n_embd]``."""
    return build_layers(g, g.call("repeated", "streams", first(g), n=hyper_of(g.config).n))


def build_layers(g: Ops, x: Rows) -> Rows:
    """Build the layers on the streams ``x``; return the streams after the last."""
    hyper = hyper_of(g.config)
    for i in g.config.stage_layers:
        _tap(g, i, x)
        for half, name in zip(halves_of(g.config.layers[i]), ("attn", "ffn"), strict=True):
            label = f"L{i}.{name}_streams"
            h, weights = weighed(g, label, x, f"blk.{i}.hc_{name}", hyper.rounds)
            h = half.build(g, i, normed_for(g, i, h, half))
            x = g.call("blended_streams", f"{label}.blend", x, h, weights, n=hyper.n)
        x = g.steer(f"L{i}.control", x, layer=i)
    _tap(g, g.config.stage_layers.stop, x)
    return x


def _tap(g: Ops, i: int, x: Rows) -> None:
    """Make the mean of the streams ``x`` before layer ``i`` an output, if a drafter reads it."""
    if g.tapped(i):
        g.layer(i, g.call("weighed_streams", f"L{i}.tap", x, n=hyper_of(g.config).n))


def mixed(g: Ops, x: Rows) -> Rows:
    """Return the weighted sum of the streams ``x`` after the last layer; their mean if the file has
    no weights for it.
    """
    if not g.has("output_hc_fn.weight"):
        return g.call("weighed_streams", "output_streams.mean", x, n=hyper_of(g.config).n)
    return weighed(g, "output_streams", x, "output_hc", 0)[0]


def logits(g: Ops, x: Rows) -> None:
    """Declare the output "logits", of the requested rows of the mixed streams."""
    decoder.logits(g, mixed(g, x))


def embedding(g: Ops, x: Rows) -> None:
    """Declare the outputs "pooled" and "embedding" as ``decoder.embedding`` does, of the mixed
    streams.
    """
    decoder.embedding(g, mixed(g, x))


def states(g: Ops, x: Rows) -> None:
    """Declare the output "states": the mixed and normed states of all tokens."""
    decoder.states(g, mixed(g, x))


def ahead(g: Ops, x: Rows) -> None:
    """Declare the outputs "logits" and "ahead": the mixed streams of all tokens, f32
    ``[N, n_embd]``, for MTP layers that read one stream of states.
    """
    decoder.ahead(g, mixed(g, x))


def ahead_streams(g: Ops, x: Rows) -> None:
    """Declare the outputs "logits" and "ahead": all streams of all tokens, f32
    ``[N, n_streams * n_embd]``, for MTP layers that read all streams.
    """
    logits(g, x)
    g.result("ahead", x)


def _rows_of(stem: str, *, whole: bool) -> tuple[TensorRow, ...]:
    """Return the tensor rows that make a token's weights of the streams. ``stem``: begins their
    names; ``whole``: for pre, post and comb, else for pre only.
    """
    sizes = ("n_stream_weights", "n_stream_scales") if whole else ("n_streams", "one")
    return (
        TensorRow(f"{stem}_fn.weight", (sizes[0], "n_streams_embd")),
        TensorRow(f"{stem}_scale.weight", sizes[1:]),
        TensorRow(f"{stem}_base.weight", sizes[:1]),
    )


WEIGHTS = built_by_graph(
    "stream_weights", (*_rows_of("hc_attn", whole=True), *_rows_of("hc_ffn", whole=True))
)


def parts_of(layer: Layer) -> tuple[Sublayer, ...]:
    """Return a layer's mixer and FFN, and the tensors of the streams' weights."""
    return *halves_of(layer), WEIGHTS


def _sizes(config: Config) -> Sizes:
    n = hyper_of(config).n
    return {
        **DECODER.sizes(config),
        "n_streams": n,
        "n_streams_embd": n * config.n_embd,
        "n_stream_weights": n * (2 + n),
        "n_stream_scales": 3,
    }


MANIFOLD: Graph = replace(
    DECODER,
    build=build,
    outputs={"logits": logits, "embedding": embedding, "states": states, "ahead": ahead},
    rows=(*DECODER.rows, *_rows_of("output_hc", whole=False)),
    sizes=_sizes,
    sublayers=parts_of,
    parts=lambda: (*DECODER.parts(), WEIGHTS),
)
