"""Families whose experts are chosen, or stand, otherwise: further rows of ``hf_families``."""

from __future__ import annotations

from typing import Any

from treadle.convert.hf_family import Family
from treadle.convert.hf_names import LLAMA, experts_123
from treadle.convert.hf_rope import f32
from treadle.convert.hf_windows import every_layer
from treadle.files.keys import Keys
from treadle.models.archs import EXPERTS_JITTER

# -- Phi --------------------------------------------------------------------------------------

_LONG = ("longrope", "su")  # two names of one thing


def _phimoe_keys(keys: Keys, n_layer: int) -> dict[str, Any]:
    """LayerNorm's epsilon is called RMS norm's in these files, as llama.cpp reads it."""
    eps = f32(keys.number("rms_norm_eps", lo=0.0, hi=1.0))
    made: dict[str, Any] = {
        "attention.layer_norm_epsilon": None,
        "attention.layer_norm_rms_epsilon": eps,
        EXPERTS_JITTER: f32(keys.number(EXPERTS_JITTER, lo=1e-6, hi=1.0)),
    }
    rope = keys.within("rope_parameters") or keys.within("rope_scaling")
    kind = rope.text("rope_type", rope.text("type", "default")) if rope else "default"
    if rope is None or kind == "default":
        return made
    if kind not in _LONG:
        rope.refuse("rope_type", f"{kind!r:.60}: treadle has longrope in this architecture")
    short, long = (rope.number(f"{one}_mscale", lo=1e-6, hi=1e6) for one in ("short", "long"))
    if short != long:
        rope.refuse("long_mscale", f"is {long:g}, and short_mscale {short:g}: treadle has one")
    return {**made, "rope.scaling.attn_factor": f32(long)}


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
}
