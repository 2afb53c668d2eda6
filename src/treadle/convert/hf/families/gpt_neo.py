"""GPT-Neo: GPT-2 with unscaled attention scores, and a window in some layers."""

from __future__ import annotations

from typing import Any

from treadle.convert.hf.family import Family, Windowed
from treadle.convert.hf.tensor_names import GPT2, Names
from treadle.files.keys import MetadataReader

_TYPES = "attention_types"
_AT = "attn.attention."
_NAMES: Names = {
    **{name: stem for name, stem in GPT2.items() if not name.startswith("attn.")},
    **{f"{_AT}{one}_proj": f"attn_{one}" for one in "qkv"},
    f"{_AT}out_proj": "attn_output",
}


def _local(keys: MetadataReader, n_layer: int) -> Windowed:
    """Return the layers with a window; each entry is a list of kinds and a repeat count."""
    given = keys.get(_TYPES)
    found = list[str]()
    for each in given if isinstance(given, list) else ():
        fits = isinstance(each, list) and len(each) == 2 and isinstance(each[0], list)
        if not fits or not isinstance(each[1], int) or not 0 <= each[1] <= n_layer:
            keys.fail(_TYPES, f"holds {each!r:.60}", "pairs of a list of words and a repeat count")
        found += each[0] * each[1]
    if len(found) != n_layer or not {"global", "local"}.issuperset(found):
        expected = f"global or local for each of {n_layer} layers"
        keys.fail(_TYPES, f"is {given!r:.60}", expected)
    return [word == "local" for word in found]


def _scale(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    return {"attention.scale": 1.0}


GPT_NEO: dict[str, Family] = {
    "gpt_neo": Family(
        "gptneo",
        {
            "tie_word_embeddings": True,
            "vocab_size": 50257,
            "max_position_embeddings": 2048,
            "hidden_size": 2048,
            "num_layers": 24,
            "num_heads": 16,
            "window_size": 256,
            "layer_norm_epsilon": 1e-5,
            _TYPES: [[["global", "local"], 12]],
        },
        _NAMES,
        {
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "sliding_window": "window_size",
        },
        activation="gelu_new",
        n_ff_default=4,
        windowed=_local,
        more=_scale,
    ),
}
