"""Family rows of models whose layers differ in size or lack a sublayer, and of some similar to
GPT-2. Code in folders of families that transformers lacks is not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from treadle.convert.hf.families.gpt_like import GPT_WORDS
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import GPT2, LLAMA, Names
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, lower, upper
from treadle.files.keys import MetadataReader
from treadle.models.archs import ALIBI

# -- DeciLM and Nemotron NAS: layers without attention, or without an FFN ---------------------

_BLOCKS = "block_configs"
_STEP = 256  # widths of FFNs are multiples of it
_KNOWN = {  # keys allowed in a sublayer
    "attention": ("n_heads_in_group", "no_op", "replace_with_linear"),
    "ffn": ("ffn_mult", "no_op"),
}


def _blocks(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return heads and FFN width of each layer, 0 for a missing sublayer. Query heads without key
    heads mean one matrix in place of attention.
    """
    given = keys.get(_BLOCKS)
    if not isinstance(given, list) or len(given) != n_layer:
        keys.fail(_BLOCKS, f"is {given!r:.60}", f"a list of {n_layer}")
    heads = list[int]()
    heads_kv = list[int]()
    widths = list[int]()
    for i, block in enumerate(given):
        if not isinstance(block, dict):
            keys.fail(f"{_BLOCKS}[{i}]", f"is {block!r:.60}", "an object")
        halves = MetadataReader(block, keys.path, prefix=f"{keys.prefix}{_BLOCKS}[{i}].")
        n, n_kv = _heads(_half(halves, "attention"), keys.integer("num_attention_heads"))
        heads.append(n)
        heads_kv.append(n_kv)
        widths.append(_width(_half(halves, "ffn"), keys.integer("hidden_size")))
    return {
        "attention.head_count": heads,
        "attention.head_count_kv": heads_kv,
        "feed_forward_length": widths,
    }


def _half(halves: MetadataReader, name: str) -> MetadataReader:
    half = halves.within(name)
    if half is None:
        halves.fail(name, "is missing", "an object")
    for key, value in half.values.items():
        if key not in _KNOWN[name] and value not in (None, False):
            half.refuse(key, f"is {value!r:.60}: not supported in this architecture")
    return half


def _heads(half: MetadataReader, n_head: int) -> tuple[int, int]:
    if half.flag("replace_with_linear", False):
        return n_head, 0
    if half.flag("no_op", False) or half.get("n_heads_in_group") is None:
        return 0, 0
    group = half.integer("n_heads_in_group")
    if n_head % group:
        half.fail("n_heads_in_group", f"is {group}", f"a divisor of {n_head} heads")
    return n_head, n_head // group


def _width(half: MetadataReader, n_embd: int) -> int:
    if half.flag("no_op", False) or half.get("ffn_mult") is None:
        return 0
    width = int(2 * half.number("ffn_mult", lo=1e-3, hi=1e3) * n_embd / 3)
    return -(-width // _STEP) * _STEP


_DECI: Names = {**LLAMA, "self_attn.linear_attn": "attn_output"}

# -- OpenELM: heads and widths that grow from layer to layer -----------------------------------

_MULTIPLIERS = "ffn_multipliers"


def _growing(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return FFN widths, each a multiple of ``ffn_dim_divisor``: the nearest, or the next if that
    is less than nine tenths.
    """
    given = keys.get(_MULTIPLIERS)
    step = keys.integer("ffn_dim_divisor")
    each = given if isinstance(given, list) else [given] * n_layer
    if len(each) != n_layer:
        keys.fail(_MULTIPLIERS, f"has {len(each)} entries", f"{n_layer}, one per layer")
    widths = list[int]()
    for i, factor in enumerate(each):
        one = MetadataReader({f"{_MULTIPLIERS}[{i}]": factor}, keys.path, prefix=keys.prefix)
        width = one.number(f"{_MULTIPLIERS}[{i}]", lo=1e-3, hi=1e3) * keys.integer("model_dim")
        near = max(step, int(width + step / 2) // step * step)
        widths.append(near + step if near < 0.9 * width else near)
    return {"feed_forward_length": widths}


def _gate_and_up(keys: MetadataReader) -> Sequence[DerivationRule]:
    gives = {"ffn.gate.weight": upper, "ffn.up.weight": lower}
    return (DerivationRule(("ffn.proj_1.weight",), gives, side="B"),)


_OPENELM: Names = {
    "token_embeddings": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "attn_norm": "attn_norm",
    "attn.qkv_proj": "attn_qkv",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn.out_proj": "attn_output",
    "ffn_norm": "ffn_norm",
    "ffn.gate": "ffn_gate",
    "ffn.up": "ffn_up",
    "ffn.proj_2": "ffn_down",
}

# -- Jais: GPT-2 with a gate, ALiBi, and scales of maximal update parametrisation --------------


def _scales(keys: MetadataReader) -> tuple[float, float]:
    """Return the scales of embeddings and of logits."""
    into = keys.number(
        "mup_embeddings_scale", keys.number("embeddings_scale", 1.0, lo=1e-6), lo=1e-6
    )
    usual = keys.number("width_scale", 1.0, lo=1e-6)
    out = keys.number("mup_output_alpha", 1.0, lo=1e-6)
    return into, out * keys.number("mup_width_scale", usual, lo=1e-6)


def _times(rows: Rows, factor: np.float32) -> Rows:
    return np.asarray(rows * factor, np.float32)


def _with_scales(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules that multiply scales into the weights, as in GGUF. A tied output gets its own
    copy.
    """
    into, out = (partial(_times, factor=np.float32(scale)) for scale in _scales(keys))
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
    """Return the keys; if ALiBi slopes are stretched beyond the training length, that length is the
    context.
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

# -- GPT-J and CodeGen -------------------------------------------------------------------------

_SHARDS = 4  # CodeGen's training shards: each has its queries, values and keys together


def _turning(keys: MetadataReader) -> None:
    """Refuse null, which is not the default here: frequencies then follow the whole hidden
    width.
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
    GPT_WORDS,
    activation="gelu_new",
    paired=True,
    n_ff_default=4,
    variant=_turning,
)

# -- the rows ---------------------------------------------------------------------------------

_LLAMA = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}

OLDER: dict[str, Family] = {
    "nemotron-nas": Family(
        "deci",
        {**_LLAMA, "vocab_size": 32000, "max_position_embeddings": 2048},
        _DECI,
        n_ff_default=4,  # each layer gives its own
        more=_blocks,
    ),
    "deci": Family(
        "deci",
        {**_LLAMA, "vocab_size": 32000, "max_position_embeddings": 2048},
        older_words={"num_key_value_heads": "num_key_value_heads_per_layer"},
    ),
    "openelm": Family(
        "openelm",
        {
            "rms_norm_eps": 1e-6,  # no key gives it
            "rope_freq_constant": 10000,
            "tie_word_embeddings": True,
            "vocab_size": 32000,
            "max_context_length": 2048,
            "model_dim": 2048,
            "num_transformer_layers": 12,
            "head_dim": 128,
            _MULTIPLIERS: 4.0,
            "ffn_dim_divisor": 256,
        },
        _OPENELM,
        {
            "hidden_size": "model_dim",
            "num_hidden_layers": "num_transformer_layers",
            "num_attention_heads": "num_query_heads",
            "num_key_value_heads": "num_kv_heads",
            "intermediate_size": "no key says it",
            "max_position_embeddings": "max_context_length",
            "rope_theta": "rope_freq_constant",
            "hidden_act": "activation_fn_name",
        },
        older_activation="swish",
        only={
            "ffn_with_glu": True,
            "normalization_layer_name": "rms_norm",
            "normalize_qk_projections": True,
            "share_input_output_layers": True,
        },
        n_ff_default=4,
        derived=_gate_and_up,
        more=_growing,
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
        GPT_WORDS,
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
    "maincoder": Family(
        "maincoder",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
            "hidden_size": 1536,
            "head_dim": 96,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "num_hidden_layers": 32,
            "intermediate_size": 4096,
            "max_position_embeddings": 2048,
        },
        {**LLAMA, **{f"feed_forward.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}},
        older_words={"intermediate_size": "intermediate_size_mlp"},
        only={"use_qk_norm": True},
        paired=True,
    ),
}
