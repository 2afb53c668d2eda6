"""Architectures: a graph's name and a row of named traits each.

A trait says how the data flow differs from Llama's; what a tensor's presence can say is no trait
(biases, q/k norms, post norms, tied output, rope factors: optional rows of ``models/mixers`` and
``models/ffns``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

QK_NORM = frozenset({"attn_q_norm.weight", "attn_k_norm.weight"})
POST_NORM = frozenset({"post_attention_norm.weight", "post_ffw_norm.weight"})
QKV_BIAS = frozenset({"attn_q.bias", "attn_k.bias", "attn_v.bias"})

RopePairs = Literal["norm", "neox"]
ROPES: tuple[RopePairs, ...] = ("norm", "neox")


@dataclass(frozen=True)
class Arch:
    """The traits of one architecture, named as GGUF's ``general.architecture`` names it.

    graph: how data flows, a name in ``models.graphs.GRAPHS``.
    rope: which elements of a head turn together: ``norm`` is (2i, 2i+1), ``neox`` (i, i + dims/2).
    activation: on the gate: ``silu``, or ``gelu`` (the tanh approximation).
    needs: optional layer tensors that every sound file of this architecture has.
    embd_scale: token embeddings are multiplied by sqrt(n_embd).
    window_period: of every ``window_period`` layers the last sees everything and the others see
        ``attention.sliding_window`` tokens; 0: all see everything and that key means nothing, as in
        llama.cpp (Qwen2 files carry a window that the model does not use).
    rope_base_local: default rope base of the layers with a window; such layers ignore rope scaling.
    width_scaled: layer counts of the sizes whose attention scale is 1/sqrt(n_embd / n_head)
        where the others have 1/sqrt(head_dim): Gemma 3 27B says so in no key.
    """

    name: str
    graph: str = "decoder"
    rope: RopePairs = "neox"
    activation: Literal["silu", "gelu"] = "silu"
    needs: frozenset[str] = frozenset()
    embd_scale: bool = False
    window_period: int = 0
    rope_base_local: float = 10000.0
    width_scaled: frozenset[int] = frozenset()


ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("llama", rope="norm"),  # Llama 1 to 3, Mistral, TinyLlama
        Arch("qwen2", needs=QKV_BIAS),
        Arch("qwen3", needs=QK_NORM),
        Arch(
            "gemma3",
            activation="gelu",
            needs=QK_NORM | POST_NORM,
            embd_scale=True,
            window_period=6,
            width_scaled=frozenset({62}),
        ),
    )
}
