"""Inkling (Thinking Machines): attention with biases by distance (relative logits) in place of a
rope, and short convolutions of keys, values and the results of attention and FFN.

llama.cpp has no such architecture. Names and keys are those of the forks whose files are published.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.files.metadata import SIZE_MAX
from treadle.models.archs import LEADING_DENSE
from treadle.models.config import Recurrence, RelativeBias
from treadle.models.ffns import CONVOLVED, CONVOLVED_EXPERTS
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER
from treadle.models.graphs.experts import N_EXPERT_MAX
from treadle.models.graphs.recurrence import N_CONV_MAX
from treadle.models.rope import scale_only

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata

RANK = "d_rel"
REACH = "rel_extent"
LOCAL_REACH = "rel_extent_swa"
TAPS = "shortconv_kernel"
N_DENSE = "dense_block_count"
DIVISOR = "logit_scale_denom"
FLOOR = "log_scaling_n_floor"
ALPHA = "log_scaling_alpha"
UNPADDED_VOCAB = "unpadded_vocab_size"
REACH_MAX = 1 << 16  # tokens; rows of biases are made for all of them


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config, with the sizes of the biases by distance (``Layer.relative``) and
    of the convolutions (``Layer.state``).
    """
    divisor = keys.number(DIVISOR, lo=1e-9)
    own = {LEADING_DENSE: keys.integer(N_DENSE, 0, lo=0), "logit_scale": divisor}
    keys.values = {**keys.values, **own}
    config = reading.read(keys, arch)
    rank = keys.integer(RANK, lo=1, hi=SIZE_MAX)
    n_conv = keys.integer(TAPS, lo=2, hi=N_CONV_MAX)
    reach = keys.integer(REACH, lo=1, hi=REACH_MAX)
    local = keys.integer(LOCAL_REACH, lo=1, hi=REACH_MAX) if _windowed(config) else reach
    n_shared = keys.integer("expert_shared_count", 0, lo=0, hi=N_EXPERT_MAX)
    floor = keys.integer(FLOOR, 0, lo=0, hi=1 << 31)
    alpha = keys.number(ALPHA, 0.0, lo=0.0, hi=1e6)
    tempered = bool(floor and alpha)

    def layer(at: Layer) -> Layer:
        n_kv = at.n_head_kv * (at.head_dim + at.head_dim_v)
        experts = at.experts
        if experts is not None:
            if not n_shared:
                keys.refuse("expert_shared_count", "0: treadle supports experts beside shared ones")
            experts = replace(experts, n_ff_shared=0, n_shared=n_shared)
        return replace(
            at,
            relative=RelativeBias(rank, local if at.window else reach),
            state=Recurrence(n_conv, n_kv + 2 * config.n_embd),
            q_rope=0 if tempered and not at.window else None,
            ffn=CONVOLVED if experts is None else CONVOLVED_EXPERTS,
            experts=experts,
        )

    n_unpadded = keys.integer(UNPADDED_VOCAB, 0, lo=0, hi=config.n_vocab)
    return replace(
        config,
        attn_scale=1.0 / config.layers[0].head_dim,  # of normed queries and keys
        ropes=(scale_only(alpha, floor, 1, smooth=True),) if tempered else (),
        layers=tuple(map(layer, config.layers)),
        n_unpadded=0 if n_unpadded == config.n_vocab else n_unpadded,
    )


def _windowed(config: Config) -> bool:
    return any(at.window for at in config.layers)


INKLING = replace(DECODER, read=read)
