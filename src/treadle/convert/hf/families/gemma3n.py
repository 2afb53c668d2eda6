"""Family row and keys of Gemma 3n."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

from treadle.convert.hf.family import GELU_TANH, Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import POST_NORMS, Names
from treadle.convert.hf.windows import all_but_every
from treadle.convert.sources.derived_tensors import DerivationRule, same, stacked
from treadle.files.metadata import MetadataReader
from treadle.models.archs import N_OWN
from treadle.models.graphs.gemma3n import ACTIVE, CUTS, N_STREAMS, N_STREAMS_MAX, TABLE
from treadle.models.graphs.gemma4 import N_SHARED

_PATTERN = "activation_sparsity_pattern"
_N_SPARSE = 10  # default: layers with sparse gates, of larger models
_SHARE = 0.95  # default: share of gate values zeroed


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    return {
        N_OWN: keys.integer("hidden_size_per_layer_input"),
        N_SHARED: keys.integer("num_kv_shared_layers", lo=0, hi=n_layer),
        N_STREAMS: keys.integer("altup_num_inputs", lo=2, hi=N_STREAMS_MAX),
        ACTIVE: keys.integer("altup_active_idx", lo=0),
        CUTS: [_normal_quantile(share) for share in _shares(keys, n_layer)],
    }


def _shares(keys: MetadataReader, n_layer: int) -> list[float]:
    """Return for each layer the share of gate values that are set to zero; 0: a dense FFN."""
    given = keys.get(_PATTERN)
    if given is None:
        n = _N_SPARSE if n_layer > _N_SPARSE else 0
        return [_SHARE] * n + [0.0] * (n_layer - n)
    sound = isinstance(given, list) and len(given) == n_layer
    if not sound or not all(type(share) in (int, float) and 0 <= share < 1 for share in given):
        keys.fail(_PATTERN, f"is {given!r:.60}", f"{n_layer} numbers from 0, below 1")
    return list(given)


def _normal_quantile(share: float) -> float:
    """Return the quantile ``share`` of a normal distribution, in standard deviations above the
    mean; -inf for 0. Computed by the error function in float32, as in transformers and llama.cpp's
    converter.
    """
    if not share:
        return -math.inf
    x = f32(2 * f32(share) - 1)
    return f32(f32(NormalDist().inv_cdf((x + 1) / 2) / math.sqrt(2)) * f32(math.sqrt(2)))


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules that stack the matrices of all streams but the first to one tensor, as in GGUF,
    and that rename a scale named without "weight".
    """
    n = keys.integer("altup_num_inputs", lo=2, hi=N_STREAMS_MAX)
    scale = "altup.correct_output_scale"
    return (
        DerivationRule(tuple(f"{i}.weight" for i in range(n - 1)), {"weight": stacked}),
        DerivationRule((scale,), {f"{scale}.weight": same}),
    )


_NAMES: Names = {
    **POST_NORMS,
    "altup_projections": "altup_proj",
    "altup_unembed_projections": "altup_unembd_proj",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.correct_output_scale": "altup_correct_scale",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}

# -- the rows -------------------------------------------------------------------------------------

GEMMA3N_FAMILIES: dict[str, Family] = {
    "gemma3n_text": Family(
        "gemma3n",
        {
            "vocab_size": 262400,
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_hidden_layers": 35,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "sliding_window": 512,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
            "hidden_size_per_layer_input": 256,
            "num_kv_shared_layers": 15,
            "altup_num_inputs": 4,
            "altup_active_idx": 0,
            "altup_correct_scale": True,
        },
        _NAMES,
        activation=GELU_TANH,
        windowed=all_but_every(5),
        own_local_rope=True,
        only={"attention_bias": False, "altup_correct_scale": True},
        derived=_rules,
        more=_keys,
        tables=(TABLE.name,),
    ),
}
