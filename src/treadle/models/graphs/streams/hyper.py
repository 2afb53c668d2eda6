"""Qwen 3.8 Flash Next: layers on several streams of hidden states (hyper-connections), and n-gram
embeddings.

::

    x = [embed(ids)] * n
    for each layer:
        x = x + ngrams(ids, x)                      in the layer that has them
        for each half: x = x + weights(x) * half(mix(x))
    logits = linear(mix(x))

``mix`` norms each stream and takes a gated mean of them, so sublayers have no input norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.files.metadata import SIZE_MAX
from treadle.models.config import Hyper, Indexer
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER, UNSTAGED_OUTPUTS, first, halves_of
from treadle.models.graphs.indexing import INDEX_DIM, INDEX_HEADS, INDEX_TOP, MOST_HEADS
from treadle.models.graphs.ngrams import (
    LAYERS,
    NGRAMS,
    TABLE,
    read_ngrams,
)
from treadle.models.graphs.streams.parts import N_STREAMS, hyper_of
from treadle.models.mixers.names import GATE_INDEXED
from treadle.models.structure import Sizes, Sublayer, TensorRow, built_by_graph

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata
    from treadle.models.ops import Ops, Rows

RANK = "hyper_connection.low_rank"
RATIOS = "attention.compress_ratios"
MOST_STREAMS = 16


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config, with the streams, the indexers and the n-grams."""
    config = reading.read(keys, arch)
    n_layer = config.n_layer
    hyper = Hyper(
        n=keys.integer(N_STREAMS, lo=2, hi=MOST_STREAMS),
        n_embd=config.n_embd,
        n_rank=keys.integer(RANK, lo=1, hi=SIZE_MAX),
    )
    places = keys.integers(LAYERS, 0, n_layer - 1) if keys.has(LAYERS) else []
    if len(places) > 1:
        keys.refuse(LAYERS, f"{len(places)} layers: treadle supports one with n-grams")
    grams = read_ngrams(keys, config) if places else None
    ratios = keys.per_layer(RATIOS, n_layer, [0] * n_layer, lo=0)
    layers: list[Layer] = []
    for i, at in enumerate(config.layers):
        at = replace(at, hyper=hyper, ngrams=grams if i in places else None)
        if at.n_head_kv:
            if i in places:
                keys.refuse(LAYERS, f"layer {i} has attention: treadle supports n-grams in others")
            at = replace(at, mixer=GATE_INDEXED, indexer=_read_indexer(keys, config, ratios[i]))
        layers.append(at)
    if grams is not None:
        config = replace(config, arch=replace(config.arch, needs=config.arch.needs | {TABLE}))
    return replace(config, layers=tuple(layers), parallel=False, n_streams=hyper.n)


def _read_indexer(keys: ArchMetadata, config: Config, unit: int) -> Indexer:
    """Return the sizes of an indexer that chooses blocks of ``unit`` keys. Raises FileError for
    sizes out of range.
    """
    if not 1 < unit <= MOST_UNIT:
        keys.fail(RATIOS, f"holds {unit} for a layer with attention", f"2 to {MOST_UNIT}")
    budget = keys.integer(INDEX_TOP, lo=unit, hi=SIZE_MAX)
    if budget % unit:
        keys.fail(INDEX_TOP, f"is {budget}", f"a multiple of {unit}")
    turned = config.ropes[0].dims if config.ropes else 1
    return Indexer(
        n_head=keys.integer(INDEX_HEADS, lo=1, hi=MOST_HEADS),
        head_dim=keys.integer(INDEX_DIM, lo=turned, hi=SIZE_MAX),
        top=budget // unit,
        rope=config.arch.rope,
        norm_eps=config.norm_eps,
        unit=unit,
        pooled=True,
    )


MOST_UNIT = 64


# -- the data flow --------------------------------------------------------------------------------


def mix(g: Ops, label: str, x: Rows, stem: str, inject: str = "") -> tuple[Rows, Rows | None]:
    """Return two results for the ``n`` streams ``x``: their gated mean, f32 ``[N, n_embd]``, which
    a sublayer reads; and, if ``inject`` names a matrix, its products f32 ``[N, n]``, which weigh
    the sublayer's result in each stream, else None. ``stem``: begins the names of the norm and the
    gate; ``label``: begins the steps' labels.
    """
    n = hyper_of(g.config).n
    xn = g.call("normed_streams", f"{label}.norm", x, n=n, weight=f"{stem}_norm")
    names = [f"{stem}_down", *([inject] if inject else [])]
    low, *weights = g.linears(f"{label}.down", xn, names)
    low = g.call("multiplied", f"{label}.scale", low, gain=1.0 / n)
    gate = g.linear(f"{label}.up", g.activate(f"{label}.silu", low, "silu"), f"{stem}_up")
    mixed = g.call("mixed_streams", f"{label}.mix", xn, gate, n=n)
    return mixed, weights[0] if weights else None


def build(g: Ops) -> Rows:
    """Build the layers; return ``mix`` of the streams after the last, f32 ``[N, n_embd]``."""
    n = hyper_of(g.config).n
    x = g.call("repeated", "streams", first(g), n=n)
    for i in g.config.stage_layers:
        at = g.config.layers[i]
        if at.ngrams:
            x = g.call("ngrams", f"L{i}.ngrams", x, layer=i, n=n, weights=f"blk.{i}.ple")
        for half, name in zip(halves_of(at), ("attn", "ffn"), strict=True):
            label = f"L{i}.{name}_streams"
            stem = f"blk.{i}.hc_{name}"
            h, weights = mix(g, label, x, stem, f"{stem}_inject")
            h = half.build(g, i, h)
            assert weights is not None
            x = g.call("add_to_streams", f"{label}.add", x, h, weights, n=n, scale=1.0 / n)
        x = g.steer(f"L{i}.control", x, layer=i)
    return mix(g, "output_streams", x, "output_hc")[0]


def logits(g: Ops, x: Rows) -> None:
    """Declare the output "logits", of the requested rows of ``x``, which ``mix`` has normed: there
    is no further norm.
    """
    h = g.call("output_rows", "output_rows", x)
    g.result("logits", g.linear("output", h, "token_embd" if g.config.tied else "output"))


def _rows_of(stem: str, *, adds: bool) -> tuple[TensorRow, ...]:
    """Return the tensor rows of one ``mix``. ``stem``: begins their names; ``adds``: include the
    matrix that weighs a sublayer's result in each stream.
    """
    inject = (TensorRow(f"{stem}_inject.weight", ("n_streams", "n_streams_embd")),) if adds else ()
    return (
        TensorRow(f"{stem}_norm.weight", ("n_streams_embd",)),
        TensorRow(f"{stem}_down.weight", ("n_streams_rank", "n_streams_embd")),
        TensorRow(f"{stem}_up.weight", ("n_streams_embd", "n_streams_rank")),
        *inject,
    )


STREAMS = built_by_graph(
    "streams", (*_rows_of("hc_attn", adds=True), *_rows_of("hc_ffn", adds=True))
)


def parts_of(layer: Layer) -> tuple[Sublayer, ...]:
    """Return a layer's mixer and FFN, and, as sublayers without steps, the tensors of its mixes
    and, if it adds n-gram embeddings, those of n-grams.
    """
    return *halves_of(layer), STREAMS, *((NGRAMS,) if layer.ngrams else ())


def _sizes(config: Config) -> Sizes:
    hyper = hyper_of(config)
    grams = next((layer.ngrams for layer in config.layers if layer.ngrams), None)
    return {
        **DECODER.sizes(config),
        "n_streams": hyper.n,
        "n_streams_rank": hyper.n_rank,
        "n_streams_embd": hyper.n * config.n_embd,
        "n_gram_rows": grams.n_rows if grams else 0,
        "n_gram_row": grams.n_row if grams else 0,
    }


HYPER = replace(
    DECODER,
    build=build,
    outputs={**UNSTAGED_OUTPUTS, "logits": logits},
    rows=(
        *DECODER.rows,
        *_rows_of("output_hc", adds=False),
        TensorRow(TABLE, ("n_gram_rows", "n_gram_row"), optional=True),
    ),
    sizes=_sizes,
    sublayers=parts_of,
    read=read,
    parts=lambda: (*DECODER.parts(), STREAMS, NGRAMS),
)
