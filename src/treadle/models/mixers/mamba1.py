"""Mamba (Gu and Dao, 2023): each channel has a small state, whose decay depends on the input.

For each token a step size dt sets the decay, B what it adds to the state, and C what is read.
Falcon Mamba applies norms without weights to dt, B and C, and Jamba norms with weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.models.config import StateSpec
from treadle.models.mixers.mamba2 import state_of
from treadle.models.ops import TensorSlice
from treadle.models.structure import Sizes, Sublayer, TensorRow, with_bias

if TYPE_CHECKING:
    from treadle.models.config import Layer
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``out(y * silu(z))`` of layer ``i``: y is the output of the selective scan, z a
    projection of ``h``.
    """
    at = f"L{i}.ssm"
    blk = f"blk.{i}.ssm"
    state = state_of(g.config.layers[i])
    n = state.n_inner
    n_rank = state.n_rank
    n_state = state.n_state
    x, z = g.linears(f"{at}.in", h, [TensorSlice(f"{blk}_in", *size) for size in ((0, n), (n, n))])
    x = g.call("convolution", f"{at}.conv", x, layer=i, weight=f"{blk}_conv1d")
    sizes = (0, n_rank), (n_rank, n_state), (n_rank + n_state, n_state)
    made = g.linears(f"{at}.x", x, [TensorSlice(f"{blk}_x", *size) for size in sizes])
    if state.normed or g.has(f"{blk}_dt_norm.weight"):
        made = [_normed(g, i, name, rows) for name, rows in zip(NORMED, made, strict=True)]
    dt, b, c = made
    dt = g.linear(f"{at}.dt", dt, f"{blk}_dt")
    y = g.call("selective", f"{at}.scan", x, z, dt, b, c, layer=i, stem=blk)
    return g.linear(f"{at}.out", y, f"{blk}_out")


NORMED = "dt", "b", "c"


def _normed(g: Ops, i: int, name: str, rows: Rows) -> Rows:
    weight = f"blk.{i}.ssm_{name}_norm.weight"
    eps = state_of(g.config.layers[i]).norm_eps
    weight = weight if g.has(weight) else ""
    return g.call("columns_norm", f"L{i}.ssm.{name}_norm", rows, weight=weight, eps=eps)


def _sizes(layer: Layer) -> Sizes:
    state = state_of(layer)
    return {
        "n_conv": state.n_conv,
        "n_inner": state.n_inner,
        "n_ssm_in": 2 * state.n_inner,
        "n_ssm_x": state.n_rank + 2 * state.n_state,
        "n_ssm_rank": state.n_rank,
        "n_ssm_state": state.n_state,
    }


MAMBA1 = Sublayer(
    label="ssm",
    before="attn_norm",
    after="",
    after_sum="",
    build=build,
    rows=(
        *with_bias("attn_norm", "n_embd"),
        *with_bias("ssm_in", "n_ssm_in", "n_embd"),
        TensorRow("ssm_conv1d.weight", ("n_inner", "n_conv")),
        TensorRow("ssm_conv1d.bias", ("n_inner",), optional=True),
        TensorRow("ssm_x.weight", ("n_ssm_x", "n_inner")),
        TensorRow("ssm_dt.weight", ("n_inner", "n_ssm_rank")),
        TensorRow("ssm_dt.bias", ("n_inner",)),
        TensorRow("ssm_dt_norm.weight", ("n_ssm_rank",), optional=True),
        TensorRow("ssm_b_norm.weight", ("n_ssm_state",), optional=True),
        TensorRow("ssm_c_norm.weight", ("n_ssm_state",), optional=True),
        TensorRow("ssm_a", ("n_inner", "n_ssm_state")),
        TensorRow("ssm_d", ("n_inner",)),
        *with_bias("ssm_out", "n_embd", "n_inner"),
    ),
    sizes=_sizes,
    memory=lambda layer: (StateSpec("mamba1", (), state_of(layer).n_values),),
)
