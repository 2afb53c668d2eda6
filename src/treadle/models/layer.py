"""Layer structure: residual sums of a layer's sublayers, with norms before and after them.

::

    x = x + after(mixer(before(x)))
    x = x + after(ffn(before(x)))               or, in parallel, both of the same x:
    x = x + mixer(before(x)) + ffn(before(x))

Some layers have only one sublayer, others have three. Norms that the file lacks are skipped. A norm
after the sum, as in BERT, replaces the residual stream. In Jina's BERT for code the sublayer's
input is then added once more, and that sum has a norm too. The last sum of a layer may be scaled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows
    from treadle.models.structure import Sublayer


# Suffixes of the matrices that make a gate of a norm's result, by a rank: down, then up in A.X K2
# (2026); up, then down in GigaChat 3.5 (2026).
GATE_DOWN = "_gate_down"
GATE_UP = "_gate_up"


def build_layer(g: Ops, i: int, x: Rows, *halves: Sublayer) -> Rows:
    """Build layer ``i``, made of the sublayers ``halves``, on the hidden states ``x``, f32
    ``[N, n_embd]``; return the states after it.
    """
    if not g.config.parallel:
        gain = f"blk.{i}.layer_output_scale"
        for half in halves:
            h = half.build(g, i, normed_for(g, i, x, half))
            if half.after != g.config.ffn_norm and g.has(f"blk.{i}.{half.after}.weight"):
                eps = g.config.post_norm_eps or None
                h = _norm_after(g, f"{h.label}.post_norm", h, f"blk.{i}.{half.after}", eps)
            last = half is halves[-1] and g.has(f"{gain}.weight")
            before = x
            x = g.add(x, h, gain=gain if last else "")
            if g.has(f"blk.{i}.{half.after_sum}.weight"):
                x = _norm(g, f"L{i}.{half.label}.sum_norm", x, f"blk.{i}.{half.after_sum}")
            if half.after_second_sum and g.has(f"blk.{i}.{half.after_second_sum}.weight"):
                x = g.add(before, x)
                x = _norm(g, f"L{i}.{half.label}.again_norm", x, f"blk.{i}.{half.after_second_sum}")
        return x
    mixer, ffn = halves
    h = normed_for(g, i, x, mixer)
    mixed = mixer.build(g, i, h)
    fed = ffn.build(g, i, normed_for(g, i, x, ffn) if _stem(g, ffn) else h)
    return g.add(g.add(x, mixed), fed)


def _stem(g: Ops, half: Sublayer) -> str:
    """Return the stem of the norm before a sublayer, as the file names it; "" if there is none."""
    config = g.config
    return {"attn_norm": config.attn_norm, "ffn_norm": config.ffn_norm}.get(
        half.before, half.before
    )


def normed_for(g: Ops, i: int, x: Rows, half: Sublayer) -> Rows:
    """Return the states that a sublayer of layer ``i`` reads: ``x``, after the sublayer's norm and
    that norm's gate if it has these.
    """
    stem = _stem(g, half)
    weight = f"blk.{i}.{stem}" if g.has(f"blk.{i}.{stem}.weight") else ""
    if not stem or not (weight or g.config.has_bare_norms):
        return x
    label = f"L{i}.{half.label}.norm"
    return gated_norm(g, label, _norm(g, label, x, weight), weight)


def gated_norm(g: Ops, label: str, h: Rows, weight: str, gate_scale: float = 1.0) -> Rows:
    """Return ``h``, a norm's result, times the norm's gate, in place; ``h`` unchanged if the norm
    has no gate. ``weight``: stem of the norm, "" for one without weights; ``label``: of the norm's
    step; ``gate_scale``: factor of the gate, besides the model's ``norm_gate_gain``.
    """
    if not weight or not g.has(f"{weight}{GATE_DOWN}.weight"):
        return h
    first, second = GATE_DOWN, GATE_UP
    if g.config.norm_gate_up_first:
        first, second = second, first
    rank = g.linear(f"{label}{first.replace('_', '.', 1)}", h, f"{weight}{first}")
    rank = g.activate(f"{label}.gate_silu", rank, "silu")
    gate = g.linear(f"{label}{second.replace('_', '.', 1)}", rank, f"{weight}{second}")
    gain = g.config.norm_gate_gain * gate_scale
    return g.call("sigmoid_gate", f"{label}.gate", h, gate, gain=gain)


def _norm_after(g: Ops, label: str, h: Rows, weight: str, eps: float | None) -> Rows:
    """Return the norm ``weight`` (a stem) of a sublayer's result ``h``. If the norm has a gate, the
    result is multiplied by it, and ``h`` is overwritten. ``eps``: None for the model's.
    """
    if not g.has(f"{weight}{GATE_DOWN}.weight"):
        return _norm(g, label, h, weight, eps)
    given = {"weight": f"{weight}.weight", "eps": eps or g.config.norm_eps}
    return gated_norm(g, label, g.call("columns_norm", label, h, **given), weight)


def _norm(g: Ops, label: str, x: Rows, weight: str, eps: float | None = None) -> Rows:
    return g.norm(label, x, weight, centred=g.config.centred, eps=eps)
