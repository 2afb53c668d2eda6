"""Family row of DeepGrove's Maple. transformers lacks it; its code is in the model's folder.

The folder counts a window's tokens without the current one: 512 earlier ones, as FlashAttention
does. llama.cpp's converter writes that number, and its graph then sees 512 with the current one;
treadle writes one more, so that both programs see the window used in training.
"""

from __future__ import annotations

from typing import Any

from treadle.convert.hf.families.experts import PACKED_EXPERTS, always
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import LLAMA_EXPERTS
from treadle.convert.hf.windows import all_but_every
from treadle.files.metadata import POSITION_MAX, MetadataReader
from treadle.models.archs import WINDOW
from treadle.models.graphs.limits import LIMIT

GATE_LIMIT = 7.0  # of experts' gates, before SiLU, and of what they gate; no key has it


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys of the window's size, which counts the current token, and of the limit of the
    experts' gates. Raises UnsupportedError for a null window: GGUF has one list for layers with a
    window and with RoPE.
    """
    if keys.values.get("sliding_window", 0) is None:
        keys.refuse("sliding_window", "is null, but only layers with a window have RoPE")
    window = keys.integer("sliding_window", lo=1, hi=POSITION_MAX - 1) + 1
    return {WINDOW: window, LIMIT: [GATE_LIMIT] * n_layer}


MAPLE_FAMILIES: dict[str, Family] = {
    "maple": Family(
        "maple",
        {
            "tie_word_embeddings": False,
            "head_dim": None,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "sliding_window": 512,
            "num_experts_per_tok": None,
            "norm_topk_prob": True,
            "nope_on_global_attention": False,
        },
        LLAMA_EXPERTS,
        words={"intermediate_size": "moe_intermediate_size"},
        windowed=all_but_every(4),
        only={"nope_on_global_attention": True, "norm_topk_prob": True, "num_shared_experts": 0},
        experts=True,
        derived=always(*PACKED_EXPERTS),
        more=_keys,
    ),
}
