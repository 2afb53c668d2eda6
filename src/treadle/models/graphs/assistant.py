"""Gemma 4's assistant: a drafter whose layers have no keys and values, but read those that the
target model has of the text.

::

    x = pre_projection([embedding, state])      both the target's, of the last token
    x = layer(x)                                attention over the target's keys and values
    logits = linear(norm(x))
    state = post_projection(norm(x))            for the next token that it drafts

The assistants of E2B and E4B have an output matrix in clusters of similar tokens. Scores of the
clusters' centroids choose the few clusters that are multiplied.

All tokens of one draft have the position of the text's last token, and attend to the tokens before
it. Layers with a window read the target's last layer with one, the others its last layer without.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from treadle.errors import FileError, UnsupportedError
from treadle.files.metadata import SIZE_MAX
from treadle.formats import by_name
from treadle.models.config import Clusters
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER, halves_of, normed
from treadle.models.keys import NEXTN
from treadle.models.layer import build_layer
from treadle.models.mixers.names import SHARED
from treadle.models.structure import TensorRow

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata
    from treadle.models.ops import Ops, Rows

GRAPH = "assistant"
GIVEN = "assistant.input"  # embedding and state of each token, side by side
N_TARGET = "embedding_length_out"
CENTROIDS = "masked_embd_centroids.weight"
ORDERING = "masked_embd_ordering"  # the token of each row, cluster by cluster
N_USED = "centroid_top_k"  # clusters per token; not in llama.cpp's files
USUAL_USED = 32
WHOLE = 64  # rows: clusters of a multiple of these are multiplied separately


def build(g: Ops) -> Rows:
    """Build the layers on a projection of the input GIVEN (the target's embedding and state, side
    by side, f32 ``[N, 2 * n_target]``); return the states after the last layer.
    """
    x = g.given(GIVEN, 2 * g.config.n_target)
    x = g.linear("nextn.pre_projection", x, "nextn.pre_projection")
    for i in g.config.stage_layers:
        x = build_layer(g, i, g.layer(i, x), *halves_of(g.config.layers[i]))
    return g.layer(g.config.stage_layers.stop, x)


def ahead(g: Ops, x: Rows) -> None:
    """Declare the outputs "logits" and "ahead", the projected state for the next token, f32
    ``[n_rows, n_target]``, both of the requested rows.
    """
    if g.config.clusters is None:
        h = normed(g, g.outputs(x))
        y = g.linear("output", h, "token_embd")
    else:  # each token is an output
        h = normed(g, x)
        n, n_used = g.config.clusters.n, g.config.clusters.n_used
        scores = g.linear("centroids", h, CENTROIDS.removesuffix(".weight"))
        y = g.call("clustered", "output", h, scores, weight="output", n=n, n_used=n_used)
    g.result("logits", y)
    g.result("ahead", g.linear("nextn.post_projection", h, "nextn.post_projection"))


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return the assistant's config. Which of the target's layers each of its layers reads is not
    known yet; ``bound`` sets it.
    """
    # The key counts all of the file's layers, which reading would leave out.
    keys.values = {key: value for key, value in keys.values.items() if key != NEXTN}
    config = reading.read(keys, arch)
    n_target = keys.integer(N_TARGET, lo=1, hi=SIZE_MAX)
    most = config.layers[0]
    head_dim = keys.integer("attention.key_length_swa", most.head_dim, lo=1, hi=SIZE_MAX)
    head_dim_v = keys.integer("attention.value_length_swa", most.head_dim_v, lo=1, hi=SIZE_MAX)
    layers = []
    for i, layer in enumerate(config.layers):
        at = replace(layer, mixer=SHARED, kv_from=config.n_layer + i)
        if at.window:
            at = replace(at, head_dim=head_dim, head_dim_v=head_dim_v)
        layers.append(at)
    clusters = _clusters(keys, config.n_vocab)
    return replace(config, n_target=n_target, layers=tuple(layers), clusters=clusters)


def _clusters(keys: ArchMetadata, n_vocab: int) -> Clusters | None:
    """Return the clusters of the output matrix' rows, None if the file has no such clusters. Raises
    FileError if one of their two tensors is missing, or if they do not divide ``n_vocab``.
    """
    n = keys.n_rows(CENTROIDS)
    has = bool(n), ORDERING in keys.gguf.tensors
    if has == (False, False):
        return None
    if has != (True, True):
        where = ORDERING if n else CENTROIDS
        raise FileError("the tensor is missing", path=keys.gguf.path, where=where)
    if n_vocab % n:
        expected = f"a number that divides {n_vocab} tokens"
        raise FileError(f"has {n} rows", path=keys.gguf.path, where=CENTROIDS, expected=expected)
    return Clusters(n, keys.integer(N_USED, min(USUAL_USED, n), lo=1, hi=n))


def clustered(config: Config, gguf: GGUF) -> tuple[GGUF, Config]:
    """Return the assistant's file and config, with its output matrix reordered in memory, cluster
    by cluster. Without clusters both are returned unchanged. If a cluster's size is no multiple of
    ``WHOLE`` rows, the config loses its clusters, so that all rows are multiplied.

    Raises FileError if the file's order does not have each token once, UnsupportedError if it is
    not stored as integers.
    """
    if config.clusters is None:
        return gguf, config
    ignored = (*config.ignored, ORDERING)
    embeddings = gguf.tensors["token_embd.weight"]
    n_vocab, n_embd = embeddings.shape
    m = n_vocab // config.clusters.n
    if m % WHOLE:
        ignored = (*ignored, CENTROIDS)
        return gguf, replace(config, clusters=None, ignored=ignored)
    order = order_of(gguf)
    fmt = embeddings.format
    assert fmt is not None
    if len(embeddings.arrays) > 1:  # a folder's format in parts
        fmt = by_name("F16")
        rows = fmt.quantize_rows(embeddings.dequantize()).reshape(n_vocab, -1)[order]
    else:
        rows = fmt.join(embeddings.arrays).reshape(n_vocab, -1)[order]
    rows.flags.writeable = False
    result = copy.copy(gguf)
    result.tensors = dict(gguf.tensors)
    made = embeddings.in_memory("output.weight", (n_vocab, n_embd), fmt, rows.reshape(-1))
    result.tensors["output.weight"] = made
    n_logits = m * config.clusters.n_used
    ignored = (*ignored, "token_embd.weight")
    return result, replace(config, n_draft_vocab=n_logits, ignored=ignored)


def order_of(gguf: GGUF) -> np.ndarray:
    """Return the token id of each row of the output matrix in cluster order, int64 ``[n_vocab]``,
    as the file lists them. Raises FileError unless each token is there once, UnsupportedError
    unless they are integers of 32 or 64 bits.
    """
    table = gguf.tensors[ORDERING]
    kinds = {26: "<i4", 27: "<i8"}  # ggml's numbers of integers of 32 and 64 bits
    if table.ggml_type not in kinds:
        raise UnsupportedError(f"{gguf.path}: {ORDERING}: expected integers (I32 or I64)")
    order = np.frombuffer(table.data.tobytes(), kinds[table.ggml_type]).astype(np.int64)
    if not np.array_equal(np.sort(order), np.arange(len(order))):
        expected = "each token once"
        raise FileError(
            "is no order of all tokens", path=gguf.path, where=ORDERING, expected=expected
        )
    return order


def bound(config: Config, gguf: GGUF, target: Config) -> Config:
    """Return the assistant's config for the model ``target``: ``kv_from`` of each layer is the
    number of layers of the assistant plus a layer of the target.

    Raises UnsupportedError if the assistant cannot draft for this model.
    """

    def refuse(what: str) -> UnsupportedError:
        return UnsupportedError(f"{gguf.path}: cannot draft for this model: {what}")

    if target.arch.nextn != "normed" or not all(layer.v_norm for layer in target.layers):
        raise refuse(f"it reads the keys and values of a Gemma 4, not of {target.arch.name}")
    if target.n_embd != config.n_target:
        raise refuse(f"it drafts for states of {config.n_target} values, not {target.n_embd}")
    layers: list[Layer] = []
    for i, layer in enumerate(config.layers):
        alike = [at for at in target.layers if at.window == layer.window]
        if not alike:
            found = f"a window of {layer.window} tokens" if layer.window else "no window"
            raise refuse(f"its layer {i} has {found}, as none of the model's has")
        source = target.layers[alike[-1].kv_from]
        sizes = source.head_dim, source.head_dim_v
        if (layer.head_dim, layer.head_dim_v) != sizes or layer.n_head % source.n_head_kv:
            found = f"{layer.n_head} heads of {layer.head_dim}"
            raise refuse(f"its layer {i} has {found}, the model {source.n_head_kv} of {sizes[0]}")
        from_ = config.n_layer + alike[-1].kv_from
        layers.append(replace(layer, n_head_kv=source.n_head_kv, kv_from=from_))
    return replace(config, layers=tuple(layers))


ASSISTANT = replace(
    DECODER,
    build=build,
    outputs={"logits": ahead, "ahead": ahead},
    rows=(
        *DECODER.rows,
        TensorRow("nextn.pre_projection.weight", ("n_embd", "twice_n_target")),
        TensorRow("nextn.post_projection.weight", ("n_target", "n_embd")),
        TensorRow(CENTROIDS, ("n_centroids", "n_embd"), optional=True),
        TensorRow(ORDERING, ("n_vocab",), optional=True),
    ),
    sizes=lambda config: {
        **DECODER.sizes(config),
        "n_target": config.n_target,
        "n_centroids": config.clusters.n if config.clusters else 0,
        "twice_n_target": 2 * config.n_target,
    },
    read=read,
)
