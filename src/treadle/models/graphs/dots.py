"""dots3-note: latent attention of two sizes. Layers with a window have heads, ranks and a rope base
of their own; the others attend to keys that an indexer chooses.

The rotated part of a cached row has a norm before its rope. GGUF's norms of ranks have the factor
``sqrt(n_embd / rank)`` in their weights, which checkpoints lack.

The indexer rotates pairs of neighbours, as transformers and vLLM do for this checkpoint.
llama.cpp's graph of 2026 rotates halves instead, on the same rows. Both give the same text as long
as it has no more tokens than an indexer chooses (2048).
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.files.metadata import SIZE_MAX
from treadle.models.archs import LOCAL_BASE, PATTERN, WINDOW
from treadle.models.config import Latent
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER
from treadle.models.graphs.kinds import INDEXER_TYPES
from treadle.models.graphs.latent import KEY, KV_RANK, VALUE, check_head_rows
from treadle.models.graphs.positions import read_windows
from treadle.models.keys import N_LAYER_MAX
from treadle.models.rope import Rope

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata

LOCAL = "_swa"  # suffix of keys of layers with a window


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config, with two sizes of latent attention: layers with a window have
    their own ``Latent`` and rope table. Raises UnsupportedError for queries without a rank.
    """
    plain = copy(keys)  # as if no layer had a window
    own = (LOCAL_BASE, WINDOW, PATTERN, INDEXER_TYPES)
    plain.values = {key: value for key, value in keys.values.items() if key not in own}
    config = reading.read(plain, arch)
    n_block = keys.integer("block_count", lo=1, hi=N_LAYER_MAX)
    window, windowed = read_windows(keys, config.n_layer, n_block)
    first = config.layers[0].latent
    if first is None or not first.n_q_rank:
        keys.refuse("attention.q_lora_rank", "is missing: treadle supports queries of a rank")
    wide = _scaled(first, config.norm_eps)
    ropes = config.ropes
    narrow = wide
    if any(windowed):
        narrow = _scaled(_read_local(keys, first), config.norm_eps)
        ropes = (*ropes, Rope(ropes[0].dims, keys.number(LOCAL_BASE, lo=1.001)))
    layers: list[Layer] = []
    for at, local in zip(config.layers, windowed, strict=True):
        if not local:
            layers.append(replace(at, latent=wide))
            continue
        layers.append(
            replace(
                at,
                head_dim=narrow.n_row,
                head_dim_v=narrow.n_kv_rank,
                latent=narrow,
                window=window,
                rope=1,
                mixer="latent",
                indexer=None,
            )
        )
    return replace(config, layers=tuple(layers), ropes=ropes)


def _scaled(sizes: Latent, eps: float) -> Latent:
    """Return ``sizes`` with the scale of scores ``1 / sqrt(sizes.n_q)`` and the epsilon ``eps`` of
    the norms of ranks.
    """
    return replace(sizes, norm_eps=eps, scale=1.0 / math.sqrt(sizes.n_q))


def _read_local(keys: ArchMetadata, wide: Latent) -> Latent:
    """Return the sizes of latent attention in layers with a window. They rotate as many dims as the
    other layers, whose sizes are ``wide``. Raises FileError for sizes that do not match,
    UnsupportedError for heads whose rows are not a multiple of HEAD_ROWS.
    """
    rank = keys.integer(f"{KV_RANK}{LOCAL}", lo=1, hi=SIZE_MAX)
    n_q = keys.integer(f"{KEY}_mla{LOCAL}", lo=wide.n_rope + 1, hi=SIZE_MAX)
    n_v = keys.integer(f"{VALUE}_mla{LOCAL}", lo=1, hi=SIZE_MAX)
    for key, size in ((f"{KV_RANK}{LOCAL}", rank), (f"{VALUE}_mla{LOCAL}", n_v)):
        check_head_rows(keys, key, size)
    for key, expected in ((f"{KEY}{LOCAL}", rank + wide.n_rope), (f"{VALUE}{LOCAL}", rank)):
        if keys.integer(key, expected, lo=1, hi=SIZE_MAX) != expected:
            keys.fail(key, f"is {keys.get(key)}", f"{expected}: one row shared by all heads")
    return replace(wide, n_kv_rank=rank, n_nope=n_q - wide.n_rope, n_v=n_v)


DOTS3 = replace(DECODER, read=read)
