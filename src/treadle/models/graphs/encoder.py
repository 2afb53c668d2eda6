"""The encoder: a decoder's layers with bidirectional attention, and no logits.

All tokens of an input are in one run. EmbeddingGemma 2 also has wider or narrower heads in layers
with a window, norms of values, and per-layer embeddings that are only projections.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.files.metadata import SIZE_MAX
from treadle.models.archs import (
    BUCKETS,
    DISTANCES,
    GATE,
    N_BUCKETS,
    N_OWN,
    TYPES,
    VALUE_NORMED,
    Arch,
)
from treadle.models.config import Config, Layer
from treadle.models.ffns.layer_embeddings import OWN
from treadle.models.graphs.decoder import (
    DECODER,
    EMBD_NORM_ROWS,
    MODEL_ROWS,
    build,
    embedding,
    halves_of,
    states,
)
from treadle.models.graphs.reading import read_config
from treadle.models.keys import ArchMetadata
from treadle.models.structure import Sizes, Sublayer, TensorRow

N_TYPES = "tokenizer.ggml.token_type_count"


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return an encoder's config. In layers with a window, a token attends to half as many tokens
    on each side as the file's key for the window says. Raises UnsupportedError for causal
    attention.
    """
    if keys.flag("attention.causal", False):
        keys.refuse("attention.causal", "causal attention is not supported in an encoder")
    n_types = keys.gguf.metadata.get(N_TYPES)
    if n_types == 1 and not keys.gguf.tensors.keys() >= TYPES:
        arch = replace(arch, needs=arch.needs - TYPES)  # DistilBERT has none
    if arch.lacks >= GATE and "blk.0.ffn_gate.weight" not in keys.gguf.tensors:
        arch = replace(arch, gated=False, activation="relu")  # the first T5, which has no key
    config = read_config(keys, arch)
    if arch.needs >= TYPES and not config.n_types:  # so that the missing tensor has a shape
        config = replace(config, n_types=n_types if isinstance(n_types, int) else 2)
    if arch.needs >= DISTANCES:
        n_buckets = keys.integer(BUCKETS, lo=N_BUCKETS[0], hi=N_BUCKETS[-1])
        config = replace(config, n_buckets=n_buckets)
    n_own = keys.integer(N_OWN, 0, lo=0, hi=SIZE_MAX)
    v_norm = keys.flag(VALUE_NORMED, False)
    layers = []
    for at in config.layers:
        layer = replace(at, causal=False, v_norm=v_norm, n_own=n_own)
        layers.append(_with_window(keys, layer) if at.window else layer)
    return replace(config, layers=tuple(layers))


def _with_window(keys: ArchMetadata, layer: Layer) -> Layer:
    """Return a layer with a window, which reaches half of the file's number of tokens to each side
    (``Layer.window`` also counts the token itself), with the head widths of such layers.
    """
    head_dim = keys.integer("attention.key_length_swa", layer.head_dim, lo=1, hi=SIZE_MAX)
    wide = keys.integer("attention.value_length_swa", layer.head_dim_v, lo=1, hi=SIZE_MAX)
    return replace(layer, window=layer.window // 2 + 1, head_dim=head_dim, head_dim_v=wide)


def parts_of(layer: Layer) -> tuple[Sublayer, ...]:
    """Return a layer's mixer and FFN, and its per-layer embeddings if it has some."""
    return *halves_of(layer), *((OWN,) if layer.n_own else ())


def _sizes(config: Config) -> Sizes:
    n_own = config.layers[0].n_own
    own = {
        "n_buckets": config.n_buckets,
        "n_head": config.layers[0].n_head,
        "n_own": n_own,
        "n_owns": n_own * config.n_layer,
    }
    return {**DECODER.sizes(config), **own}


ENCODER = replace(
    DECODER,
    build=lambda g: build(g, parts_of),
    outputs={"embedding": embedding, "states": states},
    rows=(
        *MODEL_ROWS,
        # Relative attention bias of all layers that have none of their own.
        TensorRow("blk.0.attn_rel_b.weight", ("n_buckets", "n_head"), optional=True),
        TensorRow("token_types.weight", ("n_types", "n_embd"), optional=True),  # the first for all
        *EMBD_NORM_ROWS,
        TensorRow("per_layer_model_proj.weight", ("n_owns", "n_embd"), optional=True),
        TensorRow("per_layer_proj_norm.weight", ("n_own",), optional=True),
    ),
    sizes=_sizes,
    sublayers=parts_of,
    read=read,
    parts=lambda: (*DECODER.parts(), OWN),
)
