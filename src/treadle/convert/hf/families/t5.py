"""Family rows of T5 and its kin: T5, v1.1, FLAN-T5, MADLAD-400, mT5, UMT5. Models with only the
encoder embed texts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import Names
from treadle.files.metadata import MetadataReader
from treadle.models.archs import BUCKETS, REACH
from treadle.models.graphs.encoder_decoder import LOGIT_SCALE, START
from treadle.models.keys import N_DECODER_LAYER, N_LAYER_MAX

_TIED = "tie_word_embeddings"
_EMBEDDINGS = "shared", "encoder.embed_tokens", "decoder.embed_tokens"  # all are one matrix


def _attention(at: str, theirs: str, ours: str) -> Names:
    """Return the name table of an attention's matrices and norm. ``at``: the prefix in the
    checkpoint's layer; ``theirs``: the attention's name in transformers; ``ours``: the beginning of
    the GGUF names.
    """
    return {
        f"{at}.layer_norm": f"{ours}_norm",
        **{f"{at}.{theirs}.{one}": f"{ours}_{one}" for one in "qkv"},
        f"{at}.{theirs}.o": f"{ours}_output",
        f"{at}.{theirs}.relative_attention_bias": f"{ours}_rel_b",
    }


def _ffn(at: str) -> Names:
    return {
        f"{at}.layer_norm": "ffn_norm",
        f"{at}.DenseReluDense.wi": "ffn_up",
        f"{at}.DenseReluDense.wi_0": "ffn_gate",
        f"{at}.DenseReluDense.wi_1": "ffn_up",
        f"{at}.DenseReluDense.wo": "ffn_down",
    }


_ENCODER: Names = {
    **dict.fromkeys(_EMBEDDINGS, "token_embd"),
    "encoder.final_layer_norm": "output_norm",
    **_attention("layer.0", "SelfAttention", "attn"),
    **_ffn("layer.1"),
}
_BOTH: Names = {
    **dict.fromkeys(_EMBEDDINGS, "token_embd"),
    "lm_head": "output",
    "encoder.final_layer_norm": "enc.output_norm",
    "decoder.final_layer_norm": "output_norm",
    **_attention("encoder.layer.0", "SelfAttention", "attn"),
    **_ffn("encoder.layer.1"),
    **_attention("decoder.layer.0", "SelfAttention", "attn"),
    **_attention("decoder.layer.1", "EncDecAttention", "cross_attn"),
    **_ffn("decoder.layer.2"),
}
_GATED_GELU = "gated-gelu"


def _n_buckets(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    return {BUCKETS: keys.integer("relative_attention_num_buckets")}


def _with_decoder(scales: bool) -> Callable[[MetadataReader, int], dict[str, Any]]:
    """Return a ``Family.more`` for models with a decoder.

    ``scales``: whether config.json may scale logits by ``d_model ** -0.5``: if
    ``scale_decoder_outputs`` is true, by default if output and embeddings are tied.
    """

    def more(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
        tied = keys.values.get(_TIED) is not False
        scaled = scales and keys.flag("scale_decoder_outputs", tied)
        scale = keys.integer("d_model") ** -0.5 if scaled else 1.0
        return {
            **_n_buckets(keys, n_layer),
            N_DECODER_LAYER: keys.integer("num_decoder_layers", n_layer, hi=N_LAYER_MAX),
            START: keys.integer(START, lo=0, hi=keys.integer("vocab_size") - 1),
            LOGIT_SCALE: f32(scale),
        }

    return more


def _gated(keys: MetadataReader, family: Family) -> Family | None:
    """Return T5 v1.1's family if ``feed_forward_proj`` says that the FFN has a gate, else None."""
    given = keys.get("feed_forward_proj")
    if (family.defaults["feed_forward_proj"] if given is None else given) != _GATED_GELU:
        return None
    return replace(family, activation=_GATED_GELU, variant=lambda keys: None)


def _family(arch: str, names: Names, **own: Any) -> Family:
    made = Family(
        arch,
        {
            "vocab_size": 32128,
            "d_model": 512,
            "d_kv": 64,
            "d_ff": 2048,
            "num_layers": 6,
            "num_heads": 8,
            "n_positions": 512,  # llama.cpp's: distances are unlimited; no key in transformers
            "layer_norm_epsilon": 1e-6,
            "relative_attention_num_buckets": 32,
            "feed_forward_proj": "relu",
            _TIED: True,
            **own.pop("defaults", {}),
        },
        names,
        {
            "hidden_size": "d_model",
            "head_dim": "d_kv",
            "intermediate_size": "d_ff",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "max_position_embeddings": "n_positions",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "feed_forward_proj",
        },
        activation="relu",
        only={"relative_attention_max_distance": REACH, "is_decoder": False},
        copies=tuple(f"{name}.weight" for name in _EMBEDDINGS),
        **own,
    )
    return replace(made, variant=lambda keys: _gated(keys, made))


# Multilingual: mT5, and UMT5, whose layers have biases of their own.
_MANY: dict[str, Any] = {
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": _GATED_GELU,
}
_WITH_START = {START: 0, "num_decoder_layers": None}
_T5_ENCODER = _family("t5encoder", _ENCODER, more=_n_buckets)
_MANY_ENCODER = _family("t5encoder", _ENCODER, more=_n_buckets, defaults=_MANY)

# model_type -> the one used if config.json says that the model is only the encoder.
ENCODERS_OF = {name: f"{name}encoder" for name in ("t5", "mt5", "umt5")}

T5_FAMILIES: dict[str, Family] = {
    "t5": _family("t5", _BOTH, more=_with_decoder(True), defaults=_WITH_START),
    # transformers scales no logits of it.
    "mt5": _family("t5", _BOTH, more=_with_decoder(False), defaults={**_MANY, **_WITH_START}),
    "umt5": _family("t5", _BOTH, more=_with_decoder(True), defaults={**_MANY, **_WITH_START}),
    "t5encoder": _T5_ENCODER,
    **dict.fromkeys(("mt5encoder", "umt5encoder"), _MANY_ENCODER),
}
