"""Family rows of Meta: Llama, Llama 4, and the Code World Model."""

from __future__ import annotations

from typing import Any

from treadle.convert.hf.families.defaults import COMMON, COMMON_EPS_5
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import check_nope_layers, f32
from treadle.convert.hf.tensor_names import LLAMA, Names
from treadle.convert.hf.windows import all_but_first_of_four
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, lower, transposed, upper
from treadle.files.metadata import POSITION_MAX, MetadataReader
from treadle.models.archs import ARCHS, TEMPERATURE, TEMPERATURE_LENGTH, WINDOW
from treadle.models.graphs.llama4 import has_norms
from treadle.models.graphs.positions import NOPE_PERIOD, by_period

# -- Llama 4 --------------------------------------------------------------------------------------

_LLAMA4 = "llama4"
_CHUNK = "attention_chunk_size"
_STEP = "interleave_moe_layer_step"
_FFN = "feed_forward."
_EXPERTS = f"{_FFN}experts."


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return Llama 4's keys of experts, of the chunk size and of the attention temperature. Values
    equal to the architecture's defaults are left out. Raises UnsupportedError for layouts that
    llama.cpp lacks.
    """
    _refuse_kinds(keys, n_layer)
    n_expert = keys.integer("num_local_experts")
    step = keys.integer(_STEP)
    layers = keys.get("moe_layers")
    if layers is not None and layers != list(range(step - 1, n_layer, step)):
        keys.refuse(
            "moe_layers", f"is {layers!r:.60}: treadle supports experts only in every n-th layer"
        )
    if keys.flag("use_qk_norm", True) != has_norms(n_expert):
        have = "true" if has_norms(n_expert) else "false"
        keys.refuse("use_qk_norm", f"must be {have} with {n_expert} experts, as in llama.cpp")
    found = {WINDOW: keys.integer(_CHUNK, hi=POSITION_MAX), TEMPERATURE: 0.0}
    if keys.get("attn_temperature_tuning"):  # true, or a number
        found[TEMPERATURE] = keys.number("attn_scale", lo=0.0, hi=1e6)
        found[TEMPERATURE_LENGTH] = keys.integer("floor_scale", hi=POSITION_MAX)
    usual = dict(ARCHS[_LLAMA4].keys)
    return {
        "expert_feed_forward_length": keys.integer("intermediate_size"),
        _STEP: step,
        **{name: None if it == usual[name] else _stored(it) for name, it in found.items()},
    }


def _stored(value: float) -> float:
    return value if isinstance(value, int) else f32(value)


def _refuse_kinds(keys: MetadataReader, n_layer: int) -> None:
    """Raise UnsupportedError unless the layers with RoPE and with chunked attention are those that
    llama.cpp fixes: GGUF has no key for others.
    """
    flags = "no_rope_layers"  # an empty list is none
    given = {key: it for key, it in keys.values.items() if key != flags or it != []}
    check_nope_layers(MetadataReader(given, keys.path, keys.defaults, keys.prefix), n_layer)
    if keys.values.get(_CHUNK, 0) is None:
        keys.refuse(_CHUNK, "is null, but chunked attention is required in this architecture")
    turned_ = by_period(NOPE_PERIOD, n_layer)
    kinds = ["chunked_attention" if here else "full_attention" for here in turned_]
    if (listed := keys.get("layer_types")) is not None and listed != kinds:
        keys.refuse(
            "layer_types", f"is {listed!r:.60}: treadle supports chunks only in layers with RoPE"
        )


def _gate(rows: Rows) -> Rows:
    return upper(transposed(rows))


def _up(rows: Rows) -> Rows:
    return lower(transposed(rows))


_RULES = (
    DerivationRule(
        (f"{_EXPERTS}gate_up_proj",),
        {f"{_EXPERTS}gate_proj.weight": _gate, f"{_EXPERTS}up_proj.weight": _up},
    ),
    DerivationRule((f"{_EXPERTS}down_proj",), {f"{_EXPERTS}down_proj.weight": transposed}),
)
_PROJECTIONS = ("gate", "up", "down")
_NAMES: Names = {
    **{name: stem for name, stem in LLAMA.items() if not name.startswith("mlp.")},
    f"{_FFN}router": "ffn_gate_inp",
    **{f"{_FFN}{one}_proj": f"ffn_{one}" for one in _PROJECTIONS},
    **{f"{_EXPERTS}{one}_proj": f"ffn_{one}_exps" for one in _PROJECTIONS},
    **{f"{_FFN}shared_expert.{one}_proj": f"ffn_{one}_shexp" for one in _PROJECTIONS},
}

# -- the Code World Model -------------------------------------------------------------------------

_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# -- the rows -------------------------------------------------------------------------------------

_DEFAULTS = {**COMMON, "vocab_size": 32000, "max_position_embeddings": 2048}
LLAMA_EMBED = Family("llama-embed", _DEFAULTS)


def _embeds(keys: MetadataReader) -> Family | None:
    """Return Llama's family of encoders if ``is_causal`` is false; else None."""
    return LLAMA_EMBED if keys.get("is_causal") is False else None


_LLAMA = Family("llama", _DEFAULTS, variant=_embeds)

LLAMA_FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "llama_bidirec": LLAMA_EMBED,  # Nemotron's embeddings, whose code is in their folder
    "llama4_text": Family(
        _LLAMA4,
        {
            "vocab_size": 202048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            _STEP: 1,
            _CHUNK: 8192,
            "attn_temperature_tuning": True,
            "attn_scale": 0.1,
            "floor_scale": 8192,
        },
        _NAMES,
        {"intermediate_size": "intermediate_size_mlp"},
        paired=True,
        experts=True,
        derived=lambda keys: _RULES,
        more=_keys,
    ),
    "cwm": Family(
        "llama",
        {
            **COMMON_EPS_5,
            "rope_theta": 1e6,
            "vocab_size": 128256,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "sliding_window": 8192,
            "rope_parameters": _CWM_ROPE,
        },
        windowed=all_but_first_of_four,
    ),
}
