"""Family rows of models whose experts are routed or stored differently."""

from __future__ import annotations

from typing import Any

from treadle.convert.hf.family import Family, Windowed
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA, LLAMA_EXPERTS, Names, experts_123
from treadle.convert.hf.windows import every_layer
from treadle.convert.sources.derived_tensors import DerivationRule
from treadle.files.keys import MetadataReader
from treadle.models.archs import EXPERTS_GATING, EXPERTS_JITTER, EXPERTS_NORM
from treadle.models.graphs.experts import SIGMOID
from treadle.models.graphs.grove import PER, SCALE, WIDTH
from treadle.models.graphs.positions import by_period

# -- Phi --------------------------------------------------------------------------------------

_LONG = ("longrope", "su")  # two names of one method


def _phimoe_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys; LayerNorm's epsilon is named RMS norm's in these files, as llama.cpp reads
    it.
    """
    eps = f32(keys.number("rms_norm_eps", lo=0.0, hi=1.0))
    result: dict[str, Any] = {
        "attention.layer_norm_epsilon": None,
        "attention.layer_norm_rms_epsilon": eps,
        EXPERTS_JITTER: f32(keys.number(EXPERTS_JITTER, lo=1e-6, hi=1.0)),
    }
    rope = keys.within("rope_parameters") or keys.within("rope_scaling")
    kind = rope.text("rope_type", rope.text("type", "default")) if rope else "default"
    if rope is None or kind == "default":
        return result
    if kind not in _LONG:
        rope.refuse(
            "rope_type", f"{kind!r:.60}: treadle supports only longrope in this architecture"
        )
    short, long = (rope.number(f"{one}_mscale", lo=1e-6, hi=1e6) for one in ("short", "long"))
    if short != long:
        rope.refuse(
            "long_mscale", f"is {long:g}, and short_mscale is {short:g}: expected equal values"
        )
    return {**result, "rope.scaling.attn_factor": f32(long)}


# -- SmallThinker -----------------------------------------------------------------------------

_SOFTMAX = 1  # llama.cpp's number
_EARLY: Names = {
    **LLAMA,
    "block_sparse_moe.primary_router": "ffn_gate_inp",
    **{f"block_sparse_moe.experts.{one}": f"ffn_{one}_exps" for one in ("gate", "up", "down")},
}


def _layout(keys: MetadataReader, key: str, n_layer: int, usual: bool) -> list[bool]:
    flags = keys.get(key)
    if flags is None:
        return [usual] * n_layer
    if not isinstance(flags, list) or len(flags) != n_layer or any(f not in (0, 1) for f in flags):
        keys.fail(key, f"is {flags!r:.60}", f"{n_layer} flags")
    return [bool(flag) for flag in flags]


def _early_windows(keys: MetadataReader, n_layer: int) -> Windowed:
    """Check the layout: no windows, or windows in all but the first of each four layers. Layers
    with a window have RoPE, or all layers if none has one: GGUF has no key for this.
    """
    flags = _layout(keys, "sliding_window_layout", n_layer, False)
    if any(flags) and flags != by_period(-4, n_layer):
        keys.refuse(
            "sliding_window_layout",
            "treadle supports windows only in all but the first of each 4 layers",
        )
    if _layout(keys, "rope_layout", n_layer, True) != (flags if any(flags) else [True] * n_layer):
        keys.refuse(
            "rope_layout",
            "treadle supports RoPE only in layers with a window, or in all layers if none has one",
        )
    return flags if any(flags) else None


def _early_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    softmax = keys.flag("moe_primary_router_apply_softmax", False)
    return {
        "expert_count": keys.integer("moe_num_primary_experts"),
        "expert_used_count": keys.integer("moe_num_active_primary_experts"),
        "expert_feed_forward_length": keys.integer("moe_ffn_hidden_size"),
        EXPERTS_GATING: _SOFTMAX if softmax else SIGMOID,
        EXPERTS_NORM: True,
    }


# -- GroveMoE ---------------------------------------------------------------------------------

_GROVE: Names = {
    **LLAMA_EXPERTS,
    **{f"mlp.chunk_experts.{one}_proj": f"ffn_{one}_chexps" for one in ("gate", "up", "down")},
}
_UNUSED = DerivationRule(("mlp.expert_bias",), {})  # a buffer of zeros


def _grove_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return constants of the family's code that config.json does not have."""
    return {EXPERTS_NORM: True, PER: 2, WIDTH: 128, SCALE: f32(0.05)}


MIXERS: dict[str, Family] = {
    "phimoe": Family(
        "phimoe",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "vocab_size": 32064,
            "num_key_value_heads": 8,
            "intermediate_size": 6400,
            "max_position_embeddings": 131072,
            "num_local_experts": 16,
            "num_experts_per_tok": 2,
            EXPERTS_JITTER: 0.01,
        },
        {**LLAMA, **experts_123("block_sparse_moe.")},
        windowed=every_layer,
        only={"num_experts_per_tok": 2},
        experts=True,
        more=_phimoe_keys,
    ),
    "smallthinker": Family(
        "smallthinker",
        {
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
            "num_hidden_layers": 32,
            "hidden_size": 1536,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "sliding_window_size": 4096,
            "moe_ffn_hidden_size": 768,
            "moe_num_primary_experts": 32,
            "moe_num_active_primary_experts": 4,
        },
        _EARLY,
        {"intermediate_size": "moe_ffn_hidden_size", "sliding_window": "sliding_window_size"},
        activation="relu",
        windowed=_early_windows,
        only={"norm_topk_prob": True},
        experts=True,
        more=_early_keys,
    ),
    "grove_moe": Family(
        "grovemoe",
        {
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 151936,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        _GROVE,
        only={
            **{"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
            "norm_topk_prob": True,
        },
        experts=True,
        derived=lambda keys: (_UNUSED,),
        more=_grove_keys,
    ),
}
