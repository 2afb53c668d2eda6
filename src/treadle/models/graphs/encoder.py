"""The encoder: a decoder's layers with bidirectional attention, and no logits.

All tokens of an input are in one run.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.models.archs import BUCKETS, DISTANCES, GATE, N_BUCKETS, TYPES, Arch
from treadle.models.config import Config
from treadle.models.graphs.decoder import DECODER, EMBD_NORM_ROWS, MODEL_ROWS, embedding, states
from treadle.models.graphs.reading import read_config
from treadle.models.keys import ArchMetadata
from treadle.models.structure import Sizes, TensorRow

N_TYPES = "tokenizer.ggml.token_type_count"


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Read a decoder's config; a window reaches half of the key's number to each side."""
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
    layers = (
        replace(at, causal=False, window=at.window // 2 + 1 if at.window else 0)
        for at in config.layers
    )
    return replace(config, layers=tuple(layers))


def _sizes(config: Config) -> Sizes:
    own = {"n_buckets": config.n_buckets, "n_head": config.layers[0].n_head}
    return {**DECODER.sizes(config), **own}


ENCODER = replace(
    DECODER,
    outputs={"embedding": embedding, "states": states},
    rows=(
        *MODEL_ROWS,
        # Relative attention bias of all layers that have none of their own.
        TensorRow("blk.0.attn_rel_b.weight", ("n_buckets", "n_head"), optional=True),
        TensorRow("token_types.weight", ("n_types", "n_embd"), optional=True),  # the first for all
        *EMBD_NORM_ROWS,
    ),
    sizes=_sizes,
    read=read,
)
