"""Hunyuan 4: layers on several streams of hidden states (independent hyper-connections).

::

    x = [embed(ids)] * n
    for each half of each layer:
        mix = linear(norm(x))                       of all streams together, without weights
        h = half(norm(sum of x, each stream times a weight))
        x = x + h, times another weight for each stream
    logits = linear(norm(sum of x, each stream times a weight))

Weights are sigmoids of a column of ``mix``. In contrast to DeepSeek V4's, streams are not mixed
with each other. Only routed experts have limited gates.

llama.cpp's converter keeps the checkpoint's order of the rows of queries and keys, and pairs are
neighbours. transformers rotates halves of the same rows; Tencent's own llama.cpp, vLLM and MLX do
not: see docs/design-decisions.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.config import Hyper
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER, UNSTAGED_OUTPUTS, first, halves_of
from treadle.models.graphs.indexing import INDEX_TOP
from treadle.models.graphs.streams.hyper import MOST_STREAMS
from treadle.models.graphs.streams.parts import EPSILON, N_STREAMS, hyper_of
from treadle.models.mixers.names import INDEX_SHARED, INDEXED
from treadle.models.structure import Sizes, Sublayer, TensorRow, built_by_graph

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata
    from treadle.models.ops import Ops, Rows

MAGNITUDE = "hyper_connection.magnitude"
_GATED = {
    "latent": "latent_gated",
    INDEXED: "latent_gated_indexed",
    INDEX_SHARED: "latent_gated_shared",
}


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config, with the streams, and indexers if the file has any."""
    if not keys.integer(INDEX_TOP, 0, lo=0):
        arch = replace(arch, mixer="latent")
    config = reading.read(keys, arch)
    hyper = Hyper(
        n=keys.integer(N_STREAMS, lo=2, hi=MOST_STREAMS),
        n_embd=config.n_embd,
        magnitude=keys.number(MAGNITUDE, lo=0.0, hi=1e6),
        eps=keys.number(EPSILON, lo=0.0, hi=1.0),
    )
    layers: list[Layer] = []
    for at in config.layers:
        if at.mixer not in _GATED:
            keys.refuse("attention.q_lora_rank", "is missing: treadle supports queries of a rank")
        index = at.indexer
        if index is not None and at.latent is not None:  # the last dims turn
            index = replace(
                index, first=index.head_dim - at.latent.n_rope, norm_eps=config.norm_eps
            )
        layers.append(replace(at, mixer=_GATED[at.mixer], hyper=hyper, indexer=index))
    return replace(config, layers=tuple(layers), parallel=False, n_streams=hyper.n)


# -- the data flow --------------------------------------------------------------------------------


def build(g: Ops) -> Rows:
    """Build the layers; return the weighted sum of the streams after the last layer, f32
    ``[N, n_embd]``.
    """
    hyper = hyper_of(g.config)
    n = hyper.n
    x = g.call("repeated", "streams", first(g), n=n)
    for i in g.config.stage_layers:
        for half, name in zip(halves_of(g.config.layers[i]), ("attn", "ffn"), strict=True):
            label = f"L{i}.{name}_streams"
            stem = f"blk.{i}.hc_{name}"
            h, mix = summed(g, label, x, stem)
            h = g.norm(f"L{i}.{half.label}.norm", h, f"blk.{i}.{half.before}")
            h = half.build(g, i, h)
            more = {"magnitude": hyper.magnitude, "eps": hyper.eps}
            x = g.call("spread_to_streams", f"{label}.add", x, h, mix, n=n, weights=stem, **more)
        x = g.steer(f"L{i}.control", x, layer=i)
    return summed(g, "output_streams", x, "output_hc")[0]


def summed(g: Ops, label: str, x: Rows, stem: str) -> tuple[Rows, Rows]:
    """Return the weighted sum of the streams ``x``, f32 ``[N, n_embd]``, and ``mix``, of whose
    columns all weights of the streams are made. ``stem``: begins the names of the matrix, scale and
    base of these weights; ``label``: begins the steps' labels.
    """
    hyper = hyper_of(g.config)
    mix = g.linear(f"{label}.mix", g.norm(f"{label}.norm", x, ""), f"{stem}_fn")
    h = g.call("sum_of_streams", f"{label}.sum", x, mix, n=hyper.n, weights=stem, eps=hyper.eps)
    return h, mix


def _rows_of(stem: str, n_mix: str, n_scale: str) -> tuple[TensorRow, ...]:
    """Return the tensor rows that weigh the streams for one sublayer, or for the output. ``stem``:
    begins their names; ``n_mix``, ``n_scale``: names of the sizes in their shapes.
    """
    return (
        TensorRow(f"{stem}_fn.weight", (n_mix, "n_streams_embd")),
        TensorRow(f"{stem}_base.weight", (n_mix,)),
        TensorRow(f"{stem}_scale.weight", (n_scale,)),
    )


WEIGHED_STREAMS = built_by_graph(
    "streams",
    rows=(*_rows_of("hc_attn", "n_mix", "two"), *_rows_of("hc_ffn", "n_mix", "two")),
    sizes=lambda layer: {"two": 2},
)


def parts_of(layer: Layer) -> tuple[Sublayer, ...]:
    """Return a layer's mixer and FFN, and the tensors that weigh the streams."""
    return *halves_of(layer), WEIGHED_STREAMS


def _sizes(config: Config) -> Sizes:
    n = hyper_of(config).n
    sizes = {"n_streams": n, "n_mix": 2 * n, "n_streams_embd": n * config.n_embd}
    return {**DECODER.sizes(config), **sizes}


INDEPENDENT = replace(
    DECODER,
    build=build,
    outputs=UNSTAGED_OUTPUTS,
    rows=(*DECODER.rows, *_rows_of("output_hc", "n_streams", "one")),
    sizes=_sizes,
    sublayers=parts_of,
    read=read,
    parts=lambda: (*DECODER.parts(), WEIGHED_STREAMS),
)
