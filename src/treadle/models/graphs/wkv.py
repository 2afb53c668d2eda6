"""RWKV-7: recurrent states in all layers. The first layer has its own mixer, and its values are
mixed into those of the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.files.metadata import SIZE_MAX
from treadle.models.config import Recurrence
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config
    from treadle.models.keys import ArchMetadata

HEAD = "wkv.head_size"
SHIFTS = "token_shift_count"
DECAY, RATE, VALUE, GATE = (
    f"attention.{name}_lora_rank" for name in ("decay", "iclr", "value_residual_mix", "gate")
)


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config, with the sizes of the states. In models with RWKV's own FFN, which
    has no gate, the state of a layer also keeps the previous token's FFN input.
    """
    config = reading.read(keys, arch)
    n_embd = config.n_embd
    size = keys.integer(HEAD, lo=1, hi=SIZE_MAX)
    if n_embd % size:
        keys.fail(HEAD, f"{size} does not divide embedding_length {n_embd}")
    n_shifts = 1 if arch.gated else 2
    keys.integer(SHIFTS, n_shifts, lo=n_shifts, hi=n_shifts)
    ranks = [keys.integer(key, lo=1, hi=SIZE_MAX) for key in (DECAY, RATE, VALUE)]
    state = Recurrence(
        n_conv=2,  # a token, and the previous one
        n_channels=n_shifts * n_embd,
        n_head=n_embd // size,
        head_dim=size,
        n_state=size,
        n_group=n_embd // size,
        ranks=(*ranks, keys.integer(GATE, 0, lo=0, hi=SIZE_MAX)),
    )
    layers = (
        replace(
            at,
            n_head=0,
            n_head_kv=0,
            mixer="wkv" if i else "wkv_first",
            ffn=at.ffn if arch.gated else "channel_mix",
            state=state,
        )
        for i, at in enumerate(config.layers)
    )
    return replace(config, layers=tuple(layers))


# A stage would also need the first layer's values.
_WHOLE = {name: made for name, made in DECODER.outputs.items() if name not in ("stream", "ahead")}
WKV = replace(DECODER, read=read, outputs=_WHOLE)
