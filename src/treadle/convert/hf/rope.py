"""RoPE settings in config.json's old and new spelling.

Old: ``rope_theta`` and ``rope_scaling``; new: ``rope_parameters``, one for all layers or one for
each kind of layer.

A function for one kind of scaling takes ``rope`` (the scaling's settings), ``keys`` (config.json),
the RoPE base, and the number of rotated dims of a head. It returns GGUF's keys, and by GGUF name
tensors of factors by which frequencies are divided, f32, one for each pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.convert.hf.family import Family
from treadle.files.metadata import POSITION_MAX, MetadataReader
from treadle.models.archs import ARCHS, ROPE_HALVED, YARN_TRUNCATE
from treadle.models.graphs.positions import NOPE_PERIOD, by_period
from treadle.models.rope import DYNAMIC, FACTORS, LONG, SHORT

# transformers' defaults for folders of these families without RoPE settings.
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

Factors = dict[str, npt.NDArray[np.float32]]  # RoPE factor tensors by name


def read_rope(
    keys: MetadataReader, family: Family, head_dim: int
) -> tuple[dict[str, Any], Factors]:
    """Return GGUF's keys of RoPE's base, dims and scaling, and RoPE factor tensors by GGUF name.
    ``head_dim``: elements of a head.

    They come from ``rope_theta`` and ``rope_scaling``, or from ``rope_parameters``. Raises
    FileError for invalid values, UnsupportedError for scaling that treadle lacks.
    """
    older = keys.within("rope_scaling")
    local = None
    older = older if older and older.values else None
    # A family's default parameters apply only to files that have neither.
    newer = older is None or keys.values.get("rope_parameters") is not None
    full = keys.within("rope_parameters") if newer else None
    if full is not None and "full_attention" in full.values:
        local = full.within("sliding_attention")
        full = full.within("full_attention")
    if (
        full
        and older
        and any(_given_keys(full).get(key) != it for key, it in _given_keys(older).items())
    ):
        keys.refuse("rope_scaling", "differs from rope_parameters: remove one of the two")
    full = full or older or MetadataReader({}, keys.path, prefix=keys.prefix)
    theta = full.number("rope_theta", keys.number(family.word("rope_theta"), lo=1.001), lo=1.001)
    share_key = family.word("partial_rotary_factor")
    turned = keys.integer("rotary_dim", head_dim, hi=head_dim)  # MiniMax's word
    share = keys.number(share_key, turned / head_dim, lo=0.0, hi=1.0)
    share = full.number("partial_rotary_factor", share, lo=0.0, hi=1.0)
    dims = int(head_dim * share)
    if share != 1.0 and share_key not in keys.defaults:
        keys.refuse(share_key, "partial RoPE is not supported in this architecture")
    if dims < 2 or dims % 2:
        keys.fail(
            share_key, f"rotates {dims} of {head_dim} elements", "an even number of at least 2"
        )
    made: dict[str, Any] = {"rope.freq_base": f32(theta), "rope.dimension_count": dims}
    if family.own_local_rope:
        base = keys.number(family.word("rope_local_base_freq"), theta, lo=1.001, hi=1e12)
        base = local.number("rope_theta", base, lo=1.001, hi=1e12) if local else base
        made["rope.freq_base_swa"] = f32(base)
        if local and _kind(local) != "default":
            local.refuse(
                "rope_type", f"{_kind(local)!r:.60}, where treadle does not support RoPE scaling"
            )
    if not family.turns(keys):  # llama.cpp's key for no RoPE; scaling is unused
        return {**made, "rope.scaling.finetuned": False}, {}
    kind = _kind(full)
    if kind not in _SCALINGS:
        full.refuse("rope_type", f"{kind!r:.60}: treadle supports {', '.join(_SCALINGS)}")
    whole = bool(dict(ARCHS[family.arch].keys).get(YARN_TRUNCATE, True))
    if kind == "yarn" and full.flag("truncate", True) != whole:
        rounds = "rounds" if whole else "does not round"
        full.refuse("truncate", f"treadle {rounds} YaRN's range to whole pairs in {family.arch}")
    scaling, factors = _SCALINGS[kind](full, keys, made["rope.freq_base"], dims)
    if temperature := full.number("llama_4_scaling_beta", 0.0, lo=0.0, hi=1e6):
        scaling["attention.temperature_scale"] = f32(temperature)
        scaling[_N_CTX] = _n_ctx_orig(full, keys)
    if dict(ARCHS[family.arch].keys).get(ROPE_HALVED):
        own = local.number("partial_rotary_factor", 1.0, lo=0.0, hi=1.0) if local else 1.0
        if (share, own) != (0.5, 1.0):
            what = f"is {share:g}, and {own:g} in window layers: treadle supports only 0.5 and 1"
            full.refuse("partial_rotary_factor", what)
        made["rope.dimension_count"] = head_dim
        factors = {name: _neutral(each, head_dim // 2) for name, each in factors.items()}
    return {**made, **scaling}, factors


def _neutral(factors: npt.NDArray[np.float32], n: int) -> npt.NDArray[np.float32]:
    """Pad factors, f32 [pairs], with ones to ``n`` pairs."""
    return np.concatenate([factors, np.ones(n - len(factors), np.float32)])


def _kind(rope: MetadataReader) -> str:
    kind = rope.text("rope_type", rope.text("type", "default"))
    # Phi 3 has several names for longrope; the factors identify it.
    kind = "yarn" if kind == "deepseek_yarn" else kind  # Sarvam's name for it
    return "longrope" if kind == "yarn" and rope.get("short_factor") is not None else kind


def _given_keys(rope: MetadataReader) -> dict[str, Any]:
    """Return all settings in ``rope`` that are not null; the kind of scaling is always under
    ``rope_type``, never ``type``.
    """
    said = {key: it for key, it in rope.values.items() if it is not None and key != "type"}
    return {**said, "rope_type": _kind(rope)}


Scaled = tuple[dict[str, Any], Factors]
_STRETCHED = "max_position_embeddings"
_ORIGINAL = "original_max_position_embeddings"
_N_CTX = "rope.scaling.original_context_length"
_WIDE = "global_head_dim"
_STILL = 1e30  # factor of pairs that do not rotate, as llama.cpp's converter writes it


def _n_ctx_orig(rope: MetadataReader, keys: MetadataReader, lo: int = 1) -> int:
    """Return the context length before scaling, in tokens. As in transformers, the model's key
    takes precedence over the one in ``rope``. Raises FileError if it is below ``lo``.
    """
    for said in (keys, rope):
        if said.get(_ORIGINAL) is not None:
            return said.integer(_ORIGINAL, lo=lo, hi=POSITION_MAX)
    return keys.integer(_STRETCHED, lo=lo, hi=POSITION_MAX)


def _unscaled(rope: MetadataReader, keys: MetadataReader, base: float, dims: int) -> Scaled:
    return {}, {}


def _linear(rope: MetadataReader, keys: MetadataReader, base: float, dims: int) -> Scaled:
    factor = f32(rope.number("factor", lo=1e-3, hi=1e6))
    return {"rope.scaling.type": "linear", "rope.scaling.factor": factor}, {}


def _llama3(rope: MetadataReader, keys: MetadataReader, base: float, dims: int) -> Scaled:
    """Return the factors of Llama 3's scaling: ``factor`` for low frequencies, 1 for high ones,
    interpolated in between.

    A frequency is measured in rotations per context length before scaling. If both bounds are equal
    (Llama 4 Scout) there is no interpolation.
    """
    factor = rope.number("factor", lo=1e-3, hi=1e6)
    low = rope.number("low_freq_factor", lo=1e-3, hi=1e6)
    high = rope.number("high_freq_factor", lo=1e-3, hi=1e6)
    if high < low:
        rope.fail("high_freq_factor", f"is {high:g}", f"at least low_freq_factor, {low:g}")
    n_ctx = _n_ctx_orig(rope, keys)
    wave = 2.0 * np.pi * base ** (np.arange(0, dims, 2, dtype=np.float64) / dims)
    turns = n_ctx / wave
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else 1.0 * (turns > low)
    return {}, {FACTORS: (1.0 / ((1.0 - kept) / factor + kept)).astype(np.float32)}


def _yarn(rope: MetadataReader, keys: MetadataReader, base: float, dims: int) -> Scaled:
    n_ctx = _n_ctx_orig(rope, keys)
    stretched = keys.integer(_STRETCHED, hi=POSITION_MAX) / n_ctx
    factor = rope.number("factor", stretched, lo=1e-3, hi=1e6)

    def usual(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    mscale, over = (rope.number(k, 0.0, lo=0.0, hi=1e6) for k in ("mscale", "mscale_all_dim"))
    attention = usual(mscale) / usual(over) if mscale and over else usual(1.0)
    attention = rope.number("attention_factor", attention, lo=1e-6, hi=1e6)
    result: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": f32(factor),
        _N_CTX: n_ctx,
        "rope.scaling.yarn_beta_fast": f32(rope.number("beta_fast", 32.0, lo=1e-3, hi=1e6)),
        "rope.scaling.yarn_beta_slow": f32(rope.number("beta_slow", 1.0, lo=1e-3, hi=1e6)),
    }
    if mscale == 1.0 and over and rope.get("llama_4_scaling_beta") is not None:
        result["rope.scaling.yarn_log_multiplier"] = f32(over)  # Ministral 3's word for the same
    elif not math.isclose(attention, usual(1.0)):  # GGUF's factor is relative to the default
        result["rope.scaling.attn_factor"] = f32(attention / usual(1.0))
    return result, {}


def _longrope(rope: MetadataReader, keys: MetadataReader, base: float, dims: int) -> Scaled:
    """Return the keys of LongRoPE and its two factor tensors: for prompts within the context length
    before scaling, and for longer ones.
    """
    n_ctx = keys.integer(_STRETCHED, hi=POSITION_MAX)
    original = _n_ctx_orig(rope, keys, lo=2)
    factor = rope.number("factor", n_ctx / original, lo=1e-6, hi=1e6)
    usual = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    result = {
        "rope.scaling.type": "longrope",
        _N_CTX: original,
        "rope.scaling.attn_factor": f32(rope.number("attention_factor", usual, lo=1e-6, hi=1e6)),
    }
    factors = {}
    for name, key in ((SHORT, "short_factor"), (LONG, "long_factor")):
        given = rope.get(key)
        sound = isinstance(given, list) and len(given) == dims // 2
        if not sound or not all(type(x) in (int, float) and 0.0 < x < 1e6 for x in given):
            rope.fail(key, f"is {given!r:.60}", f"{dims // 2} positive numbers")
        factors[name] = np.array(given, np.float32)
    return result, factors


def _dynamic(rope: MetadataReader, keys: MetadataReader, base: float, dims: int) -> Scaled:
    """Return the key that marks dynamic scaling, which equals plain RoPE within the model's
    context. With ``alpha`` (Hunyuan) return a larger base instead, which applies at any length.
    """
    if not (alpha := rope.number("alpha", 0.0, lo=0.0, hi=1e9)):
        rope.number("factor", lo=1e-3, hi=1e6)
        return {DYNAMIC: True}, {}
    return {"rope.freq_base": f32(base * alpha ** (dims / (dims - 2)))}, {}


def _proportional(rope: MetadataReader, keys: MetadataReader, base: float, dims: int) -> Scaled:
    """Return the keys and factors of Gemma 4's scaling: frequencies are computed over the whole
    head, but only the first pairs rotate.
    """
    if keys.get(_WIDE) is not None:
        head_dim, _ = wide_heads(keys)
    elif keys.get("head_dim") is not None:
        head_dim = keys.integer("head_dim")
    else:
        rope.refuse("rope_type", f"'proportional' without {_WIDE} or head_dim")
    n_turned = int(rope.number("partial_rotary_factor", 1.0, lo=0.0, hi=1.0) * head_dim // 2)
    factors = np.full(head_dim // 2, _STILL, np.float32)
    factors[:n_turned] = rope.number("factor", 1.0, lo=1e-3, hi=1e6)
    return {"rope.dimension_count": head_dim}, {FACTORS: factors}


def wide_heads(keys: MetadataReader) -> tuple[int, int]:
    """Return head size and number of key heads of layers without a window (Gemma 4). They are two
    keys, or per-layer values in files that transformers wrote. Raises UnsupportedError if these
    layers differ from each other.
    """
    n_kv = keys.integer("num_key_value_heads")
    if (layers := keys.within("per_layer_config")) is not None:
        each = [layers.within(i) for i in layers.values]
        sizes = {
            (
                of.integer("head_dim", keys.integer("head_dim")),
                of.integer("num_key_value_heads", n_kv),
            )
            for of in each
            if of is not None
        }
        if not sizes:  # no layer differs
            return keys.integer("head_dim"), n_kv
        if len(sizes) != 1:
            keys.refuse(
                "per_layer_config",
                "treadle supports at most two kinds of layers in this architecture",
            )
        return sizes.pop()
    head_dim = keys.integer(_WIDE)
    if keys.flag("attention_k_eq_v", False):
        n_kv = keys.integer("num_global_key_value_heads", n_kv)
    return head_dim, n_kv


def _ntk(rope: MetadataReader, keys: MetadataReader, base: float, dims: int) -> Scaled:
    """Return the keys and factors of Alibaba's NTK scaling, which applies at all lengths: a larger
    base, and one factor for all frequencies.
    """
    if "rope_scaling" not in keys.defaults or rope.get("mixed_b") is not None:
        rope.refuse("type", "'ntk': treadle supports it only in GTE, without mixed_b")
    factor = rope.number("factor", lo=1e-3, hi=1e6)
    longer = np.full(dims // 2, factor ** (2.0 / dims), np.float32)
    return {"rope.freq_base": f32(base * factor)}, {FACTORS: longer}


_SCALINGS: dict[str, Callable[[MetadataReader, MetadataReader, float, int], Scaled]] = {
    "default": _unscaled,
    "mrope": _unscaled,  # plain for text: see convert/hf/families/multimodal.py
    "xdrope": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # Phi 3's first name for it
    "dynamic": _dynamic,
    "proportional": _proportional,
    "ntk": _ntk,
}


def f32(value: float) -> float:
    """Round ``value`` to float32, as GGUF stores it: a folder run in place and its GGUF file then
    agree.
    """
    return float(np.float32(value))


def check_nope_layers(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Check that every fourth layer has no RoPE (SmolLM 3), and return {}. Raises UnsupportedError
    for another pattern, which GGUF has no key for.
    """
    key = "no_rope_layers"
    every = f"every {NOPE_PERIOD}th layer without RoPE"
    flags = keys.get(key)  # 1 means RoPE, despite the key's name
    if flags is None:
        key = "no_rope_layer_interval"
        found = by_period(keys.integer(key, NOPE_PERIOD), n_layer)
    elif (
        isinstance(flags, list) and len(flags) == n_layer and all(flag in (0, 1) for flag in flags)
    ):
        found = [bool(flag) for flag in flags]
    else:
        keys.fail(key, f"is {flags!r:.60}", f"{n_layer} flags")
    if found != by_period(NOPE_PERIOD, n_layer):
        keys.refuse(
            key, f"is {keys.get(key)!r:.60}: treadle supports only {every} in this architecture"
        )
    return {}
