"""Mamba-2 (Dao and Gu, 2024): each head's state is a matrix that decays and to which each token
adds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.models.config import StateSpec
from treadle.models.ops import TensorSlice
from treadle.models.structure import Sizes, Sublayer, TensorRow, with_bias

if TYPE_CHECKING:
    from treadle.models.config import Layer, Recurrence
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``out(norm(y * silu(z)))`` of layer ``i``: y is the output of the scan, z a projection
    of ``h``. The norm is optional (Falcon has none).
    """
    at = f"L{i}.ssm"
    blk = f"blk.{i}.ssm"
    state = state_of(g.config.layers[i])
    n = state.n_inner
    channels = state.n_channels
    sizes = (0, n), (n, channels), (n + channels, state.n_head)
    z, xbc, dt = g.linears(f"{at}.in", h, [TensorSlice(f"{blk}_in", *size) for size in sizes])
    xbc = g.call("convolution", f"{at}.conv", xbc, layer=i, weight=f"{blk}_conv1d")
    rates = g.call("rates", f"{at}.dt", dt, a=f"{blk}_a", bias=f"{blk}_dt.bias")
    y = g.call("mamba2", f"{at}.scan", xbc, rates, layer=i, weight=f"{blk}_d")
    norm = f"{blk}_norm.weight" if g.has(f"{blk}_norm.weight") else ""
    given = {"norm": norm, "groups": state.n_group, "gate_first": True}
    y = g.call("silu_gate", f"{at}.gate", y, z, layer=i, **given)
    return g.linear(f"{at}.out", y, f"{blk}_out")


def state_of(layer: Layer) -> Recurrence:
    """Return ``layer.state``, the state sizes of a recurrent layer, which must not be None."""
    assert layer.state is not None
    return layer.state


def sizes_of(layer: Layer) -> Sizes:
    """Return the sizes named in the tensor shapes of a recurrent layer, by name."""
    state = state_of(layer)
    return {
        "one": 1,
        "n_conv": state.n_conv,
        "n_channels": state.n_channels,
        "n_ssm_in": state.n_inner + state.n_channels + state.n_head,
        "n_ssm_head": state.n_head,
        "n_ssm_group": state.n_group,
        "n_in_group": state.n_inner // state.n_group,
        "n_inner": state.n_inner,
    }


ROWS = (
    *with_bias("ssm_in", "n_ssm_in", "n_embd"),
    TensorRow("ssm_conv1d.weight", ("n_channels", "n_conv")),
    TensorRow("ssm_conv1d.bias", ("n_channels",), optional=True),
    TensorRow("ssm_dt.bias", ("n_ssm_head",)),
    TensorRow("ssm_a", ("n_ssm_head", "one")),
    TensorRow("ssm_d", ("n_ssm_head", "one")),
    TensorRow("ssm_norm.weight", ("n_ssm_group", "n_in_group"), optional=True),
    *with_bias("ssm_out", "n_embd", "n_inner"),
)
MAMBA2 = Sublayer(
    label="ssm",
    before="attn_norm",
    after="",
    after_sum="",
    build=build,
    rows=(*with_bias("attn_norm", "n_embd"), *ROWS),
    sizes=sizes_of,
    memory=lambda layer: (StateSpec("mamba2", (), state_of(layer).n_values),),
)
