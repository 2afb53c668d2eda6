"""EAGLE 3 (Li and others, 2025): a drafter of one layer that reads the states of three layers of
the model.

::

    s = fc(the model's states before three layers, side by side)       of the token before
    x = [norm(embed(id)), norm(s)]
    x = s + attention(x)
    x = x + ffn(norm(x))
    logits = linear(norm(x))                     of the drafter's own vocabulary; d2t has its tokens
    s = x                                        for the next token, if the model has not run it
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.files.metadata import SIZE_MAX
from treadle.models.config import DraftTraits
from treadle.models.drafters.target import (
    DRAFT_ROWS,
    FEATURES,
    TARGET_LAYERS,
    build_nothing,
    n_draft_vocab,
    sizes_of,
    target_layers,
)
from treadle.models.ffns import FFNS
from treadle.models.graphs import decoder, reading
from treadle.models.graphs.decoder import DECODER
from treadle.models.mixers import MIXERS
from treadle.models.structure import TensorRow, with_bias

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata
    from treadle.models.ops import Ops, Rows
    from treadle.models.structure import Sublayer

STATES = "eagle3.states"  # a run's input: states of the drafter, of the token before each
AHEAD = "ahead"  # the output for runs that are given ``STATES``, and the states after
N_TARGET = "target_hidden_size"
NORM_RESIDUAL = "norm_before_residual"
NORM_BEFORE = "norm_before_fc"
N_STATES = 3  # layers whose states it reads


def ahead(g: Ops, x: Rows) -> None:
    """Declare the outputs "logits" and AHEAD, the states after the layer, both computed from the
    drafter's own states of each row's previous token (input STATES). ``x`` is not used.
    """
    _predict(g, g.given(STATES, g.config.n_embd))


def fused(g: Ops, x: Rows) -> None:
    """Declare the outputs "logits" and AHEAD, the states after the layer, both computed from the
    target's states of each row's previous token (input FEATURES). ``x`` is not used.
    """
    assert g.config.draft is not None
    x = g.given(FEATURES, N_STATES * g.config.n_target)
    if g.config.draft.norm_before:
        x = g.norm("enc.output_norm", x, "enc.output_norm")
    _predict(g, g.linear("fc", x, "fc"))


def _predict(g: Ops, states: Rows) -> None:
    """Build the drafter's layer, and declare the outputs "logits" and AHEAD, the states after it.
    ``states``: f32 ``[N, n_embd]``, of each row's previous token.
    """
    assert g.config.draft is not None
    n = g.config.n_embd
    norms = ("blk.0.attn_norm", "blk.0.attn_norm_2")
    h = g.call("embedded_before", "L0.attn.input", states, weight="token_embd", norms=norms)
    x = states
    if g.config.draft.norm_residual:
        x = g.call("take", "L0.attn.residual", h, first=n, n=n)
    x = g.add(x, ATTENTION.build(g, 0, h))
    x = g.add(x, FFNS["gated"].build(g, 0, g.norm("L0.ffn.norm", x, "blk.0.ffn_norm")))
    decoder.logits(g, x)
    g.result(AHEAD, x)


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return the drafter's config. Raises UnsupportedError for more than one layer, or another FFN
    than a gated one.
    """
    config = reading.read(keys, arch)
    if config.n_layer != 1:
        keys.refuse("block_count", f"is {config.n_layer}: treadle supports drafters of one layer")
    if config.layers[0].ffn != "gated":
        keys.refuse("feed_forward_length", f"treadle supports no {config.layers[0].ffn} FFN here")
    n_target = keys.integer(N_TARGET, config.n_embd, lo=1, hi=SIZE_MAX)
    layers = target_layers(keys)
    if len(layers) not in (0, N_STATES):
        keys.fail(TARGET_LAYERS, f"has {len(layers)} entries", f"{N_STATES}, one per state")
    norm_before = keys.flag(NORM_BEFORE, False)
    if norm_before and "enc.output_norm.weight" not in keys.gguf.tensors:
        keys.fail(
            NORM_BEFORE, "is true, but there is no enc.output_norm.weight", "both, or neither"
        )
    traits = DraftTraits(
        layers,
        norm_before=norm_before,
        norm_residual=keys.flag(NORM_RESIDUAL, False),
    )
    n_draft = n_draft_vocab(keys, config.n_vocab)
    return replace(config, n_target=n_target, draft=traits, n_draft_vocab=n_draft)


ATTENTION = replace(
    MIXERS["attention"],
    rows=(
        TensorRow("attn_norm.weight", ("n_embd",)),
        TensorRow("attn_norm_2.weight", ("n_embd",)),
        *with_bias("attn_q", "n_q", "twice_n_embd"),
        *with_bias("attn_k", "n_k", "twice_n_embd"),
        *with_bias("attn_v", "n_v", "twice_n_embd"),
        *with_bias("attn_output", "n_embd", "n_attn"),
    ),
)


def parts_of(layer: Layer) -> tuple[Sublayer, ...]:
    """Return the drafter's two sublayers: an attention that reads embeddings and states, and the
    FFN.
    """
    return ATTENTION, FFNS["gated"]


EAGLE3 = replace(
    DECODER,
    build=build_nothing,
    outputs={"logits": fused, AHEAD: ahead},
    rows=DRAFT_ROWS,
    sizes=lambda config: {
        **sizes_of(config, N_STATES),
        "n_enc_norm": N_STATES * config.n_target,
        "twice_n_embd": 2 * config.n_embd,
    },
    sublayers=parts_of,
    read=read,
    parts=lambda: (ATTENTION, FFNS["gated"]),
)
