"""Names of Whisper's tensors: those of treadle's GGUF files, and how other programs name them.

Encoder and decoder are named as llama.cpp names those of T5: ``enc.blk.N.attn_q``,
``dec.blk.N.attn_q``, ``dec.blk.N.cross_attn_q``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from treadle.base.fast_classes import dataclass

ARCH = "whisper"  # general.architecture
ENC, DEC = "enc.", "dec."
SIDES = {"encoder": ENC, "decoder": DEC}
EMBEDDINGS = "token_embd"
CONVOLUTIONS = "enc.conv1d.1", "enc.conv1d.2"
POSITIONS = "position_embd.weight"
_LAYER = re.compile(r"\.(\d+)[./]")


@dataclass(frozen=True, eq=False)
class Spelling:
    """One program's names of tensors, mapped to treadle's. Suffixes (``weight``, ``bias``) are left
    out.

    root: beginning of all names. layers: the word before a layer's number.
    outside: treadle's name for each after ``encoder.`` or ``decoder.``, outside layers.
    inside: treadle's name for each after a layer's number.
    """

    root: str
    layers: str
    outside: Mapping[str, str]
    inside: Mapping[str, str]

    def name_of(self, theirs: str) -> str:
        """Return treadle's name for the program's name ``theirs``, both without suffix; "" if
        unknown.
        """
        side, dot, rest = theirs.removeprefix(self.root).partition(".")
        if not dot or side not in SIDES:
            return ""
        prefix = SIDES[side]
        layer = re.match(rf"{self.layers}\.(\d+)\.", rest)
        if layer is None:
            ours = self.outside.get(rest, "")
            return ours if ours in ("", EMBEDDINGS) else prefix + ours
        ours = self.inside.get(rest[layer.end() :], "")
        return f"{prefix}blk.{layer[1]}.{ours}" if ours else ""


HF = Spelling(
    "model.",
    "layers",
    {
        "conv1": "conv1d.1",
        "conv2": "conv1d.2",
        "embed_positions": "position_embd",
        "embed_tokens": EMBEDDINGS,
        "layer_norm": "output_norm",
    },
    {
        "self_attn_layer_norm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.out_proj": "attn_o",
        "encoder_attn_layer_norm": "cross_attn_norm",
        "encoder_attn.q_proj": "cross_attn_q",
        "encoder_attn.k_proj": "cross_attn_k",
        "encoder_attn.v_proj": "cross_attn_v",
        "encoder_attn.out_proj": "cross_attn_o",
        "final_layer_norm": "ffn_norm",
        "fc1": "ffn_up",
        "fc2": "ffn_down",
    },
)
GGML = Spelling(
    "",
    "blocks",
    {
        "conv1": "conv1d.1",
        "conv2": "conv1d.2",
        "positional_embedding": "position_embd",
        "token_embedding": EMBEDDINGS,
        "ln_post": "output_norm",
        "ln": "output_norm",
    },
    {
        "attn_ln": "attn_norm",
        "attn.query": "attn_q",
        "attn.key": "attn_k",
        "attn.value": "attn_v",
        "attn.out": "attn_o",
        "cross_attn_ln": "cross_attn_norm",
        "cross_attn.query": "cross_attn_q",
        "cross_attn.key": "cross_attn_k",
        "cross_attn.value": "cross_attn_v",
        "cross_attn.out": "cross_attn_o",
        "mlp_ln": "ffn_norm",
        "mlp.0": "ffn_up",
        "mlp.2": "ffn_down",
    },
)
# CTranslate2's names have slashes and ``layer_N``; fused matrices have several of treadle's.
CT2 = Spelling(
    "",
    "layer",
    {
        "conv1": "conv1d.1",
        "conv2": "conv1d.2",
        "position_encodings": "position_embd",
        "embeddings": EMBEDDINGS,
        "layer_norm": "output_norm",
    },
    {
        "self_attention.layer_norm": "attn_norm",
        "self_attention.linear_0": "attn_q attn_k attn_v",
        "self_attention.linear_1": "attn_o",
        "attention.layer_norm": "cross_attn_norm",
        "attention.linear_0": "cross_attn_q",
        "attention.linear_1": "cross_attn_k cross_attn_v",
        "attention.linear_2": "cross_attn_o",
        "ffn.layer_norm": "ffn_norm",
        "ffn.linear_0": "ffn_up",
        "ffn.linear_1": "ffn_down",
    },
)
