"""Family rows of the lineage of GPT-2: GPT-J, GPT-Neo, CodeGen, StarCoder, BLOOM, MPT, Jais."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from treadle.convert.hf.families.defaults import LAYER_NORM
from treadle.convert.hf.families.falcon import FALCON_NAMES
from treadle.convert.hf.families.olmo import clamp_keys
from treadle.convert.hf.family import GELU_TANH, Family, Windowed
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import GPT2, NEOX, STARCODER2, Names
from treadle.convert.hf.windows import every_layer
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, times
from treadle.files.metadata import MetadataReader
from treadle.models.archs import ALIBI

# -- GPT-2, StarCoder, BLOOM, MPT -----------------------------------------------------------------

_BLOOM_NAMES: Names = {
    **FALCON_NAMES,
    "word_embeddings_layernorm": "token_embd_norm",
    "post_attention_layernorm": "ffn_norm",
}
_MPT: Names = {
    "wte": "token_embd",
    "norm_f": "output_norm",
    "lm_head": "output",
    "norm_1": "attn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.q_ln": "attn_q_norm",
    "attn.k_ln": "attn_k_norm",
    "attn.out_proj": "attn_output",
    "norm_2": "ffn_norm",
    "ffn.up_proj": "ffn_up",
    "ffn.down_proj": "ffn_down",
}
_WORDS = {
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
}
_KV_HEADS = "num_key_value_heads"

_GPT2 = Family(
    "gpt2",
    {
        "tie_word_embeddings": True,
        "vocab_size": 50257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
    },
    GPT2,
    _WORDS,
    activation="gelu_new",
    only={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    transposed=True,
    n_ff_default=4,
)


def _starcoder(keys: MetadataReader) -> Family | None:
    if not keys.flag("multi_query", True):
        return None
    return replace(_STARCODER, defaults={**_STARCODER.defaults, _KV_HEADS: 1})


_STARCODER = replace(
    _GPT2,
    arch="starcoder",
    activation=GELU_TANH,
    only={"scale_attn_weights": True, "add_cross_attention": False},
    by_head=True,
    transposed=False,
    variant=_starcoder,
)


def _bloom(keys: MetadataReader) -> Family:
    """Return BLOOM's family with config.json's names of sizes: those of its first files
    (``n_embed`` ..) for sizes that are missing under the later names.
    """
    words = {
        "hidden_size": "n_embed",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    }
    own = {word: older for word, older in words.items() if keys.get(word) is None}
    return replace(_BLOOM, words={**_BLOOM.words, **own})


_BLOOM = Family(
    "bloom",
    {
        "tie_word_embeddings": True,
        "vocab_size": 250880,
        "seq_length": 2048,
        "layer_norm_epsilon": 1e-5,
    },
    _BLOOM_NAMES,
    {
        "rms_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "seq_length",
        "intermediate_size": "n_inner",
    },
    activation=GELU_TANH,
    only={"apply_residual_connection_post_layernorm": False},
    by_head=True,
    n_ff_default=4,
    variant=_bloom,
)
# Required values in attn_config, if given: treadle, and mostly transformers, supports no others.
_MPT_ONLY = {
    "alibi": True,
    "attn_type": "multihead_attention",
    "prefix_lm": False,
    "softmax_scale": None,
}


def _mpt_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    attention = keys.within("attn_config") or MetadataReader({}, keys.path, prefix="attn_config.")
    for key, value in _MPT_ONLY.items():
        if (given := attention.get(key)) is not None and given != value:
            attention.refuse(
                key, f"is {given!r:.60}: treadle supports only {value!r} in this architecture"
            )
    if "layernorm" not in keys.text("norm_type", "layernorm"):
        keys.refuse(
            "norm_type", f"is {keys.get('norm_type')!r:.60}: treadle supports only layernorm"
        )
    bias = attention.number("alibi_bias_max", 8.0, lo=0.0, hi=64.0)
    return {ALIBI: f32(bias), **clamp_keys(attention.number("clip_qkv", 0.0, lo=0.0))}


# -- GPT-Neo --------------------------------------------------------------------------------------

_TYPES = "attention_types"
_AT = "attn.attention."
_NAMES: Names = {
    **{name: stem for name, stem in GPT2.items() if not name.startswith("attn.")},
    **{f"{_AT}{one}_proj": f"attn_{one}" for one in "qkv"},
    f"{_AT}out_proj": "attn_output",
}


def _local(keys: MetadataReader, n_layer: int) -> Windowed:
    """Return a flag per layer: whether it has a window. The key ``attention_types`` is a list of
    pairs: kinds ("global" or "local"), and how often they repeat.
    """
    given = keys.get(_TYPES)
    found = list[str]()
    for each in given if isinstance(given, list) else ():
        fits = isinstance(each, list) and len(each) == 2 and isinstance(each[0], list)
        if not fits or not isinstance(each[1], int) or not 0 <= each[1] <= n_layer:
            keys.fail(_TYPES, f"holds {each!r:.60}", "pairs of a list of words and a repeat count")
        found += each[0] * each[1]
    if len(found) != n_layer or not all(word in ("global", "local") for word in found):
        expected = f"global or local for each of {n_layer} layers"
        keys.fail(_TYPES, f"is {given!r:.60}", expected)
    return [word == "local" for word in found]


def _scale(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    return {"attention.scale": 1.0}


# -- Jais, GPT-J, CodeGen -------------------------------------------------------------------------


def _scales(keys: MetadataReader) -> tuple[float, float]:
    """Return Jais' factors (of the embeddings, of the logits), 1 by default."""
    into = keys.number(
        "mup_embeddings_scale", keys.number("embeddings_scale", 1.0, lo=1e-6), lo=1e-6
    )
    usual = keys.number("width_scale", 1.0, lo=1e-6)
    out = keys.number("mup_output_alpha", 1.0, lo=1e-6)
    return into, out * keys.number("mup_width_scale", usual, lo=1e-6)


def _with_scales(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules that multiply the scales of embeddings and logits into the weights, as in GGUF.
    A tied output becomes a matrix of its own, because its scale differs.
    """
    into, out = (partial(times, factor=np.float32(scale)) for scale in _scales(keys))
    scaled = {"wte.weight": into}
    head = {_HEAD: out}
    if not keys.flag("tie_word_embeddings", True):
        return DerivationRule(("wte.weight",), scaled, floats=True), DerivationRule(
            ("lm_head.weight",), head, floats=True
        )
    return DerivationRule(("wte.weight",), scaled | head, floats=True), DerivationRule(
        ("lm_head.weight",), {}
    )


def _distances(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return Jais' keys of ALiBi and of the context length. If ``alibi_scaling`` stretches slopes
    beyond the training length, the context is that length. Raises UnsupportedError for other
    position embeddings, and for scores not divided by the head size.
    """
    kind = keys.text("position_embedding_type", "learned")
    if kind != "alibi":
        keys.refuse(
            "position_embedding_type",
            f"{kind!r:.40}: treadle supports only alibi in this architecture",
        )
    by_size = keys.flag("mup_scale_qk_dot_by_d", keys.flag("scale_qk_dot_by_d", False))
    if not by_size:
        what = "is not true: this architecture needs scores divided by the head size"
        keys.refuse("mup_scale_qk_dot_by_d", what)
    longest = keys.integer("n_positions")
    if (stretched := keys.within("alibi_scaling")) is not None:
        longest = min(longest, stretched.integer("train_seq_len", longest))
    return {"context_length": longest, ALIBI: 8.0}


_HEAD = "scaled_head.weight"
_JAIS: Names = {**GPT2, "scaled_head": "output", "mlp.c_fc2": "ffn_gate"}

_SHARDS = 4  # CodeGen's training shards: each has its queries, values and keys together


def _refuse_null_rotary_dim(keys: MetadataReader) -> None:
    """Raise UnsupportedError if ``rotary_dim`` is null. transformers does not use the default then,
    but computes frequencies from the whole hidden width.
    """
    if keys.values.get("rotary_dim", 0) is None:
        keys.refuse(
            "rotary_dim", "is null: set it to the number of elements per head that RoPE rotates"
        )


def _of_shards(rows: Rows, i: int) -> Rows:
    pieces = rows.reshape(_SHARDS, 3, -1, *rows.shape[1:])
    return pieces[:, i].reshape(-1, *rows.shape[1:])


def _sharded(keys: MetadataReader) -> Sequence[DerivationRule]:
    gives = {f"attn.{x}_proj.weight": partial(_of_shards, i=i) for i, x in enumerate("qvk")}
    return (DerivationRule(("attn.qkv_proj.weight",), gives, side="B"),)


_GPTJ_NAMES: Names = {
    **GPT2,
    **{f"attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    "attn.out_proj": "attn_output",
    "mlp.fc_in": "ffn_up",
    "mlp.fc_out": "ffn_down",
}
_GPTJ = Family(
    "gptj",
    {
        "tie_word_embeddings": False,
        "vocab_size": 50400,
        "n_embd": 4096,
        "n_layer": 28,
        "n_head": 16,
        "n_positions": 2048,
        "layer_norm_epsilon": 1e-5,
        "rope_theta": 10000.0,
        "rotary_dim": 64,
        "partial_rotary_factor": None,
    },
    _GPTJ_NAMES,
    _WORDS,
    activation="gelu_new",
    paired=True,
    n_ff_default=4,
    variant=_refuse_null_rotary_dim,
)

# -- the rows -------------------------------------------------------------------------------------

GPT2_FAMILIES: dict[str, Family] = {
    "starcoder2": Family(
        "starcoder2",
        {
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "vocab_size": 49152,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
        },
        STARCODER2,
        {"rms_norm_eps": "norm_epsilon"},
        activation=GELU_TANH,
        windowed=every_layer,
    ),
    "jais2": Family(
        "jais2",
        {
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 150272,
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
        },
        words=LAYER_NORM,
        activation="relu2",
    ),
    "gpt_neox": Family(
        "gptneox",
        {
            "rotary_emb_base": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 50432,
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "rotary_pct": 0.25,
            "use_parallel_residual": True,
        },
        NEOX,
        {**LAYER_NORM, "partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        activation="gelu",
        copied={"use_parallel_residual": "use_parallel_residual"},
        by_head=True,
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": _STARCODER,
    "bloom": _BLOOM,
    "mpt": Family(
        "mpt",
        {
            "tie_word_embeddings": True,
            "vocab_size": 50368,
            "d_model": 2048,
            "n_layers": 24,
            "n_heads": 16,
            "max_seq_len": 2048,
            "layer_norm_epsilon": 1e-5,
        },
        _MPT,
        {
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
            "intermediate_size": "no key says it",
        },
        activation="gelu",
        only={"expansion_ratio": 4, "logit_scale": None},
        n_ff_default=4,
        more=_mpt_keys,
    ),
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
    "jais": Family(
        "jais",
        {
            "tie_word_embeddings": True,
            "vocab_size": 50257,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
        },
        _JAIS,
        _WORDS,
        only={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        },
        transposed=True,
        n_ff_default=4,
        derived=_with_scales,
        more=_distances,
    ),
    "gptj": _GPTJ,
    "codegen": replace(_GPTJ, derived=_sharded),
}

GPT2_FAMILIES |= {
    "gpt-sw3": GPT2_FAMILIES["gpt2"],
}
