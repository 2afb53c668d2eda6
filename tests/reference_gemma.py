"""What Gemma 4 adds to a layer, in float64 and plain numpy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from tests.reference import Array, Layer, activate, gate_of, mixture, rms_norm


def given_its_own(maps: Layer, x: Array, ids: Sequence[int]) -> Array:
    """x [n_tokens, n_embd], and what the layer makes of its own values of each token."""
    return x + own_part(maps, x, ids)


def own_part(maps: Layer, x: Array, ids: Sequence[int]) -> Array:
    """What it makes of these. Tokens behind the table's rows have the first. Without a table
    its own values are a projection alone.
    """
    config = maps.config
    n = maps.at.n_own
    eps = maps.config.norm_eps
    here = slice(maps.i * n, (maps.i + 1) * n)
    embedded = maps.tensor("token_embd.weight")[np.asarray(ids)]
    made = embedded @ maps.tensor("per_layer_model_proj.weight")[here].T
    own = rms_norm(made, maps.tensor("per_layer_proj_norm.weight"), eps)
    with suppress(KeyError):
        table = maps.tensor("per_layer_token_embd.weight")
        rows = [i if i < len(table) else 0 for i in ids]
        own = (own + table[rows, here] * np.sqrt(n)) * np.sqrt(0.5)
    h = activate(maps.linear(x, "inp_gate"), config.arch.activation) * own
    return maps.norm(maps.linear(h, "proj"), "post_norm")


def beside(maps: Layer, x: Array) -> Array:
    """The sum of an FFN and of experts, each with its norms."""
    h = maps.norm(x, "ffn_norm")
    fn = maps.config.arch.activation
    h = gate_of(maps.linear(h, "ffn_gate"), maps.linear(h, "ffn_up"), fn)
    dense = maps.norm(maps.linear(h, "ffn_down"), "post_ffw_norm_1")
    routed = maps.norm(x, "ffn_gate_inp_norm") / np.sqrt(x.shape[1])
    made = mixture(maps, maps.norm(x, "pre_ffw_norm_2"), routed)
    return dense + maps.norm(made, "post_ffw_norm_2")
