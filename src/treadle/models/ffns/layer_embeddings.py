"""Gemma's per-layer embeddings: a sublayer that uses embedding values of its own layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from treadle.models.structure import Sublayer, TensorRow

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, x: Rows) -> Rows:
    """Return ``proj(act(gate(x)) * e)``, f32 ``[N, n_embd]``, for the states ``x``: ``e`` are layer
    ``i``'s columns of the per-layer embeddings (``owns``), ``gate`` and ``proj`` its matrices.
    """
    at = f"L{i}.own"
    blk = f"blk.{i}"
    fn = g.config.arch.activation
    n = g.config.layers[i].n_own
    own = g.columns(g.once("own", owns), i * n, n)
    h = g.gated(f"{at}.{fn}", g.linear(f"{at}.gate", x, f"{blk}.inp_gate"), own, fn)
    return g.linear(f"{at}.proj", h, f"{blk}.proj")


def owns(g: Ops) -> Rows:
    """Return the per-layer embeddings of all layers, f32 ``[N, n_layer * n_own]``: for each token
    the scaled sum of its row of a table and of a normed projection of its embedding.

    A media token has row 0 of the table, that of padding, and a projection of its media row. If the
    file has no table, only the projection is returned.
    """
    config = g.config
    n = config.layers[0].n_own
    looks_up = g.has("per_layer_token_embd.weight")
    half = math.sqrt(0.5) if looks_up else 1.0
    # Gemma divides the projection by the scale of embeddings, which rows of media do not have. The
    # norm makes up for any factor but in its epsilon.
    scale = config.embd_scale if config.with_media else 1.0
    x = g.embed("own.embd", "token_embd", scale)
    if config.with_media:
        x = g.call("media_rows", "own.media", x)
    x = g.linear("own.proj", x, "per_layer_model_proj")
    eps = config.norm_eps * scale**2
    x = g.norm("own.norm", x, "per_layer_proj_norm", heads=config.n_layer, scale=half, eps=eps)
    if not looks_up:
        return g.columns(x, 0, n * config.n_layer)  # the norm is a step once
    looked_up = g.embed("own.token_embd", "per_layer_token_embd", half * math.sqrt(n))
    return g.add(looked_up, x)


OWN = Sublayer(
    label="own",
    before="",
    after="post_norm",
    after_sum="",
    build=build,
    rows=(
        TensorRow("inp_gate.weight", ("n_own", "n_embd")),
        TensorRow("proj.weight", ("n_embd", "n_own")),
        TensorRow("post_norm.weight", ("n_embd",)),
    ),
    sizes=lambda layer: {},
)
