"""Family row of dots.llm1."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.convert.hf.families.defaults import COMMON
from treadle.convert.hf.families.experts import scores
from treadle.convert.hf.family import Family, Windowed
from treadle.convert.hf.tensor_names import LLAMA_EXPERTS
from treadle.convert.sources.derived_tensors import DerivationRule
from treadle.files.metadata import MetadataReader


def _upper(keys: MetadataReader, n_layer: int) -> Windowed:
    """Return the layers with a window, bool [n_layer]: those from ``max_window_layers`` on. No key
    disables the window.
    """
    first = keys.integer("max_window_layers", lo=0)
    return [i >= first for i in range(n_layer)]


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    return (scores("mlp.gate.e_score_correction_bias", "mlp.score"),)


DOTS_FAMILIES: dict[str, Family] = {
    "dots1": Family(
        "dots1",
        {
            **COMMON,
            "vocab_size": 152064,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_shared_experts": None,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": False,
        },
        LLAMA_EXPERTS,
        windowed=_upper,
        experts=True,
        derived=_rules,
    ),
}
