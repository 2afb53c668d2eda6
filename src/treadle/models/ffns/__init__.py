"""FFNs: sublayers that transform each token by itself, one file each.

A file's ``build(g, i, h)`` adds the steps of layer ``i`` to the plan of ``g``; ``h``: the layer's
states after its norm (``x``: before it), f32 ``[N, n_embd]``. In formulas, names such as ``gate``,
``up`` and ``down`` stand for products with the layer's matrices of these names, and ``act`` for its
activation.

::

    gated.py             gate, up, down
    plain.py             without a gate
    sparse.py            with a sparse gate (Gemma 3n)
    xielu.py             without a gate, activation xIELU (Apertus)
    channel_mix.py       RWKV's, on a mix with the previous token
    post_norm.py         gated, with a norm after it and none before (OLMo Hybrid)
    layer_embeddings.py  Gemma's per-layer embeddings
    streams.py           Gemma 3n's AltUp and LAuReL
    block_convolved.py   gated, between convolutions within a drafted block (DFlash 2)
    convolved.py         gated or experts, then a short convolution (Inkling)

    experts.py         mixture of experts, and shared experts
    routed.py          experts of a smaller width (Kimi K3)
    capped.py          softcap of the router's scores (Grok)
    llama4_experts.py  the score scales an expert's input (Llama 4)
    by_token.py        a table chooses the experts by token (DeepSeek V4)
    grove.py           small experts that neighbours share (GroveMoE)
    norm_gated.py      gates of norms (A.X K2, GigaChat 3.5)
    parallel.py        experts in parallel to a dense FFN (Gemma 4)
"""

from __future__ import annotations

from treadle.models.ffns.gated import FUSED, FUSED_UP_FIRST, GATED, GATED_FUSED
from treadle.models.ffns.plain import PLAIN
from treadle.models.structure import LazyConstants, Sublayer

FUSED_EXPERTS = "experts_gate_up"  # gate and up of each expert are one matrix
PLAIN_EXPERTS = "experts_plain"  # without gates
LATENT_EXPERTS = "experts_latent"  # without gates, in a space of smaller width
ROUTED_EXPERTS = "experts_routed"  # in a space of smaller width, with gates
WEIGHED_EXPERTS = "experts_weighed"  # one expert per token, whose input is scaled by its score
CAPPED_EXPERTS = "experts_capped"  # router scores may have a softcap
DENSE_EXPERTS = "experts_dense"  # like CAPPED_EXPERTS, in parallel to a dense FFN
POST_NORM = "gated_post_norm"  # a norm after it, and none before
TOKEN_EXPERTS = "experts_by_token"  # a table has each token's experts
INPUT_NORM_GATED_EXPERTS = "experts_input_norm_gated"  # a gate of their input norm
BOTH_NORMS_GATED = "gated_both_norms_gated"  # of its input norm and of its post norm
BOTH_NORMS_GATED_EXPERTS = "experts_both_norms_gated"  # the same
CONVOLVED = "gated_convolved"  # then a short convolution
CONVOLVED_EXPERTS = "experts_convolved"  # with scored shared experts, then a convolution
BLOCK_CONVOLVED = "gated_block_convolved"  # between convolutions within a drafted block
GROVE_EXPERTS = "experts_grove"  # neighbours share an additional small expert

FFNS = LazyConstants[Sublayer](
    __name__,
    {"gated": GATED, FUSED: GATED_FUSED, FUSED_UP_FIRST: GATED_FUSED, "plain": PLAIN},
    lazy={
        "experts": "experts.EXPERTS",
        FUSED_EXPERTS: "experts.EXPERTS_FUSED",
        PLAIN_EXPERTS: "experts.EXPERTS_PLAIN",
        LATENT_EXPERTS: "experts.EXPERTS_LATENT",
        ROUTED_EXPERTS: "routed.EXPERTS_ROUTED",
        TOKEN_EXPERTS: "by_token.EXPERTS_BY_TOKEN",
        GROVE_EXPERTS: "grove.EXPERTS_GROVE",
        CAPPED_EXPERTS: "capped.EXPERTS_CAPPED",
        DENSE_EXPERTS: "capped.EXPERTS_DENSE",
        WEIGHED_EXPERTS: "llama4_experts.EXPERTS_WEIGHED",
        "xielu": "xielu.XIELU",
        "experts_beside": "parallel.EXPERTS_BESIDE",
        "experts_gate_up_beside": "parallel.EXPERTS_FUSED_BESIDE",
        "gated_sparse": "sparse.GATED_SPARSE",
        "channel_mix": "channel_mix.CHANNEL_MIX",
        POST_NORM: "post_norm.GATED_POST_NORM",
        INPUT_NORM_GATED_EXPERTS: "norm_gated.EXPERTS_INPUT_NORM_GATED",
        BOTH_NORMS_GATED: "norm_gated.GATED_BOTH_NORMS_GATED",
        BOTH_NORMS_GATED_EXPERTS: "norm_gated.EXPERTS_BOTH_NORMS_GATED",
        BLOCK_CONVOLVED: "block_convolved.GATED_BLOCK_CONVOLVED",
        CONVOLVED: "convolved.GATED_CONVOLVED",
        CONVOLVED_EXPERTS: "convolved.EXPERTS_CONVOLVED",
    },
)
