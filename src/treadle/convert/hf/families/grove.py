"""Family row of GroveMoE."""

from __future__ import annotations

from typing import Any

from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA_EXPERTS, Names
from treadle.convert.sources.derived_tensors import DerivationRule
from treadle.files.metadata import MetadataReader
from treadle.models.archs import EXPERTS_NORM
from treadle.models.graphs.grove import PER, SCALE, WIDTH

_NAMES: Names = {
    **LLAMA_EXPERTS,
    **{f"mlp.chunk_experts.{one}_proj": f"ffn_{one}_chexps" for one in ("gate", "up", "down")},
}
_UNUSED = DerivationRule(("mlp.expert_bias",), {})  # a buffer of zeros


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys whose values are constants in the model's code, not in config.json: those of
    the small experts, one for each group of experts, and of the normalisation of expert weights.
    """
    return {EXPERTS_NORM: True, PER: 2, WIDTH: 128, SCALE: f32(0.05)}


GROVE_FAMILIES: dict[str, Family] = {
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
        _NAMES,
        only={
            **{"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
            "norm_topk_prob": True,
        },
        experts=True,
        derived=lambda keys: (_UNUSED,),
        more=_keys,
    ),
}
