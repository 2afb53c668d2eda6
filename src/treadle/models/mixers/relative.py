"""Attention without rope, whose queries make a bias of their scores for each distance (Inkling).

::

    q, k, v, r = W h                     then k = k + convolution(k), and v likewise
    score = q . k / head_dim + (r rel_proj)[distance]       r: values for the biases
    y = output(attention)                y + convolution(y) is the layer's result

The convolutions are short, causal and by channel. The inputs that they keep, and those of the
convolution after the FFN (``ffns/convolved.py``), are one state of the layer, in the order of
CONVOLVED.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.config import StateSpec
from treadle.models.mixers.attention import ATTENTION
from treadle.models.structure import Sizes, TensorRow

if TYPE_CHECKING:
    from treadle.models.config import Layer, PoolSpec
    from treadle.models.ops import Ops, Rows

CONVOLVED = ("k", "v", "attn", "mlp")


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``y + convolution(y)``, where y is attention's output in layer ``i`` for ``h``."""
    layer = g.config.layers[i]
    at = f"L{i}.attn"
    blk = f"blk.{i}.attn"
    q, k, v, r = g.linears(f"{at}.qkv_r", h, [f"{blk}_{name}" for name in "qkvr"])
    k = convolved(g, i, at, k, "k")
    v = convolved(g, i, at, v, "v")
    q = g.norm(f"{at}.q_norm", q, f"{blk}_q_norm", heads=layer.n_head)
    k = g.norm(f"{at}.k_norm", k, f"{blk}_k_norm", heads=layer.n_head_kv)
    if layer.q_rope is not None:
        q = g.columns(q, 0, q.width)  # normed in place, before the factor
        k = g.columns(k, 0, k.width)
        q = g.call("tempered", f"{at}.q_temper", q, table=layer.q_rope)
        r = g.call("tempered", f"{at}.r_temper", r, table=layer.q_rope)
    weight = f"{blk}_rel_proj.weight"
    rows = g.call("relative_logits", f"{at}.rel_logits", r, layer=i, weight=weight)
    y = g.attend(at, i, q, k, v, rel_logits=rows)
    return convolved(g, i, at, g.linear(f"{at}.output", y, f"{blk}_output"), "attn")


def convolved(g: Ops, i: int, at: str, x: Rows, which: str, gain: str = "") -> Rows:
    """Return ``x + convolution(x)``. ``which``: the convolution of layer ``i``, a name in
    CONVOLVED; ``at``: prefix of the step's label; ``gain``: name of a tensor of one value by which
    ``x`` is first multiplied, or "".
    """
    weight = f"blk.{i}.shortconv_{which}.weight"
    before = sum(_channels(g, i)[: CONVOLVED.index(which)])
    label = f"{at}.{which}_conv"
    given = {"layer": i, "weight": weight, "before": before, "gain": gain}
    return g.call("residual_convolution", label, x, **given)


def _channels(g: Ops, i: int) -> tuple[int, ...]:
    layer = g.config.layers[i]
    n_k = layer.n_head_kv * layer.head_dim
    return n_k, layer.n_head_kv * layer.head_dim_v, g.config.n_embd, g.config.n_embd


def _sizes(layer: Layer) -> Sizes:
    assert layer.relative is not None
    assert layer.state is not None
    return {
        **ATTENTION.sizes(layer),
        "n_r": layer.n_head * layer.relative.rank,
        "rank": layer.relative.rank,
        "reach": layer.relative.reach,
        "n_conv": layer.state.n_conv,
    }


def _memory(layer: Layer) -> tuple[PoolSpec | StateSpec, ...]:
    assert layer.state is not None
    return (*ATTENTION.memory(layer), StateSpec("shortconv", (), layer.state.n_values))


RELATIVE = replace(
    ATTENTION,
    build=build,
    after="",
    after_sum="",
    after_second_sum="",
    rows=(
        TensorRow("attn_norm.weight", ("n_embd",)),
        TensorRow("attn_q.weight", ("n_q", "n_embd")),
        TensorRow("attn_k.weight", ("n_k", "n_embd")),
        TensorRow("attn_v.weight", ("n_v", "n_embd")),
        TensorRow("attn_r.weight", ("n_r", "n_embd")),
        TensorRow("attn_q_norm.weight", ("head_dim",)),
        TensorRow("attn_k_norm.weight", ("head_dim",)),
        TensorRow("attn_rel_proj.weight", ("rank", "reach")),
        TensorRow("shortconv_k.weight", ("n_k", "n_conv")),
        TensorRow("shortconv_v.weight", ("n_v", "n_conv")),
        TensorRow("shortconv_attn.weight", ("n_embd", "n_conv")),
        TensorRow("attn_output.weight", ("n_embd", "n_attn")),
    ),
    sizes=_sizes,
    memory=_memory,
)
