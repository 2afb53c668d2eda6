"""DeepSeek V4: streams of hidden states, caches of compressed keys, and in the first layers experts
that a table chooses by token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.files.metadata import SIZE_MAX
from treadle.models.archs import WINDOW
from treadle.models.config import Compressed, Indexer
from treadle.models.ffns import TOKEN_EXPERTS
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import TAPPED
from treadle.models.graphs.indexing import INDEX_DIM, INDEX_HEADS, INDEX_TOP, MOST_HEADS
from treadle.models.graphs.kinds import Q_RANK
from treadle.models.graphs.latent import check_head_rows
from treadle.models.graphs.streams.manifold import MANIFOLD, ahead_streams, read_hyper
from treadle.models.keys import N_LAYER_MAX, NEXTN
from treadle.models.mixers.names import ROWS, ROWS_AND_CHOSEN_UNITS, ROWS_AND_UNITS

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata

RATIOS = "attention.compress_ratios"
UNIT_BASE = "attention.compress_rope_freq_base"
OUT_GROUPS = "attention.output_group_count"
OUT_RANK = "attention.output_lora_rank"
TOKEN_LAYERS = "hash_layer_count"
N_FF = "feed_forward_length"
N_FF_EXP = "expert_feed_forward_length"
OVERLAPPING = 4  # tokens of units that overlap, in layers with an indexer; DeepSeek's others: 128
MOST_UNIT = 4096
MOST_GROUPS = 256


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config, with streams of states, the number of tokens that each compressed
    key stands for (a unit), and indexers in layers whose queries see only some of the units.
    """
    own: dict[str, Any] = {}
    if not keys.has(N_FF):  # there are no dense layers
        own[N_FF] = keys.integer(N_FF_EXP, lo=1, hi=SIZE_MAX)
    n_block = keys.integer("block_count", lo=1, hi=N_LAYER_MAX)
    n_main = n_block - keys.integer(NEXTN, 0, lo=0, hi=n_block - 1)
    if f"blk.{n_main}.nextn.eh_proj.weight" not in keys.gguf.tensors:
        own[NEXTN] = 0  # as in llama.cpp: the key counts layers that its files leave out
    if not keys.has("attention.value_length"):  # a row is key and value
        own["attention.value_length"] = keys.integer("attention.key_length", lo=2, hi=SIZE_MAX)
    keys.values = {**keys.values, **own}
    config = reading.read(keys, arch)
    hyper = read_hyper(keys, config.n_embd)
    window = keys.integer(WINDOW, lo=1, hi=1 << 31)
    rope = config.ropes[0]
    base = keys.number(UNIT_BASE, lo=1.001)
    # YaRN's factor of cosines is left out, as its authors trained the model.
    ropes = (
        replace(rope, scaling="none", scale=1.0, attn_factor=1.0),
        replace(rope, base=base, yarn_log_multiplier=1.0, attn_factor=1.0),
    )
    n_by_token = keys.integer(TOKEN_LAYERS, 0, lo=0)
    units = _units(keys, config.n_layer)
    layers: list[Layer] = []
    for i, at in enumerate(config.layers):
        if at.experts is None or at.n_head_kv != 1 or at.head_dim != at.head_dim_v:
            keys.fail("attention.head_count_kv", f"layer {i}", "experts, and one row for all heads")
        if i < n_by_token:
            at = replace(at, ffn=TOKEN_EXPERTS, experts=replace(at.experts, by_token=True))
        chooses = units[i] == OVERLAPPING
        layers.append(
            replace(
                at,
                hyper=hyper,
                window=window,
                rope=int(units[i] > 0),
                mixer=(ROWS_AND_CHOSEN_UNITS if chooses else ROWS_AND_UNITS) if units[i] else ROWS,
                compressed=_read_sizes(keys, at, rope.dims, units[i]),
                indexer=_read_indexer(keys, arch, rope.dims) if chooses else None,
            )
        )
    return replace(config, layers=tuple(layers), ropes=ropes, parallel=False, n_streams=hyper.n)


def _units(keys: ArchMetadata, n_layer: int) -> list[int]:
    """Return for each layer the number of tokens that one compressed key stands for, 0 for layers
    without compressed keys. Raises FileError for too few numbers, UnsupportedError for numbers that
    are no powers of two.
    """
    found = keys.get(RATIOS)
    if not hasattr(found, "__len__") or isinstance(found, (str, bytes)) or len(found) < n_layer:
        keys.fail(RATIOS, f"is {found!r:.60}", f"at least {n_layer} numbers, one for each layer")
    units = list(found)[:n_layer]
    for unit in units:
        sound = isinstance(unit, (int, np.integer)) and 0 <= unit <= MOST_UNIT
        if not sound or unit & (unit - 1) or 0 < unit < OVERLAPPING:
            what = f"0, or powers of two from {OVERLAPPING} to {MOST_UNIT}"
            keys.refuse(RATIOS, f"holds {unit!r:.60}: treadle supports {what}")
    further = list(found)[n_layer : n_layer + keys.integer(NEXTN, 0, lo=0)]
    if any(further):
        what = "treadle supports only MTP layers without units"
        keys.refuse(RATIOS, f"is {further!r:.60} of the MTP layers: {what}")
    return [int(unit) for unit in units]


def _read_sizes(keys: ArchMetadata, at: Layer, n_rope: int, unit: int) -> Compressed:
    groups = keys.integer(OUT_GROUPS, lo=1, hi=MOST_GROUPS)
    if at.n_head % groups:
        keys.fail(OUT_GROUPS, f"{groups} does not divide {at.n_head} heads")
    rank = keys.integer(OUT_RANK, lo=1, hi=SIZE_MAX)
    check_head_rows(keys, OUT_RANK, rank)
    return Compressed(
        n_q_rank=keys.integer(Q_RANK, lo=1, hi=SIZE_MAX),
        n_rope=n_rope,
        n_groups=groups,
        n_o_rank=rank,
        unit=unit,
        overlap=unit == OVERLAPPING,
    )


def _read_indexer(keys: ArchMetadata, arch: Arch, n_rope: int) -> Indexer:
    head_dim = keys.integer(INDEX_DIM, lo=n_rope, hi=SIZE_MAX)
    return Indexer(
        n_head=keys.integer(INDEX_HEADS, lo=1, hi=MOST_HEADS),
        head_dim=head_dim,
        top=keys.integer(INDEX_TOP, lo=1, hi=SIZE_MAX),
        rope=arch.rope,
        first=head_dim - n_rope,
        unit=OVERLAPPING,
    )


def mtp_layer(config: Config) -> Layer:
    """Return the record of an MTP layer of the model ``config``: its attention reads rows of tokens
    but no units of compressed keys, and a router, not a table, chooses its experts.
    """
    at = config.layers[-1]
    assert at.compressed is not None
    assert at.experts is not None
    return replace(
        at,
        mixer=ROWS,
        compressed=replace(at.compressed, unit=0, overlap=False),
        indexer=None,
        rope=0,
        ffn="experts" if at.ffn == TOKEN_EXPERTS else at.ffn,
        experts=replace(at.experts, by_token=False),
    )


COMPRESSED_GRAPH = replace(
    MANIFOLD,
    outputs={**MANIFOLD.outputs, "ahead": ahead_streams, TAPPED: MANIFOLD.outputs["logits"]},
    read=read,
    mtp_layer=mtp_layer,
)
