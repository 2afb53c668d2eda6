"""Family row of Qwen 3.8 Flash Next (``qwen4_exp``): Qwen 3.5's layers with several residual
streams, an indexer of blocks of keys, and embeddings of n-grams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isqrt
from typing import Any

import numpy as np

from treadle.convert.hf.families.qwen import QWEN_FAMILIES
from treadle.convert.hf.tensor_names import Names
from treadle.convert.hf.windows import has_attention
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, taps
from treadle.files.metadata import MetadataReader
from treadle.models.graphs.indexing import INDEX_DIM, INDEX_HEADS, INDEX_TOP
from treadle.models.graphs.ngrams import (
    LAYERS,
    MULTIPLIERS,
    NGRAM_CONV,
    NGRAM_END,
    NGRAM_HEADS,
    NGRAM_ROW,
    NGRAM_SIZE,
    OFFSETS,
    SIZES,
)
from treadle.models.graphs.streams.hyper import RANK, RATIOS
from treadle.models.graphs.streams.parts import N_STREAMS

_35 = QWEN_FAMILIES["qwen3_5_moe_text"]
_INDEXED = "indexed_attention"
_FULL = "full_attention"
_NGRAMS = "ple.ple_embedding."
_TABLE = f"{_NGRAMS}ngram_embedding"
MOST_PARTS = 4096


def _normalize_keys(keys: MetadataReader) -> Mapping[str, Any]:
    """Return the keys with all layers that have attention listed as "full_attention" in
    ``layer_types``, as published folders list them; transformers writes another word.
    """
    kinds = keys.get("layer_types")
    if not isinstance(kinds, list):
        return keys.values
    return {**keys.values, "layer_types": [_FULL if kind == _INDEXED else kind for kind in kinds]}


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    flags = has_attention(keys, n_layer)
    ratio = keys.integer("indexer_compress_ratio")
    made = {
        **_35.more(keys, n_layer),
        N_STREAMS: keys.integer("hc_count", 4),
        RANK: keys.integer("hc_lowrank", 320),
        INDEX_HEADS: keys.integer("indexer_n_heads"),
        INDEX_DIM: keys.integer("indexer_head_dim"),
        INDEX_TOP: keys.integer("indexer_budget"),
        RATIOS: [ratio if flag else 0 for flag in flags],
    }
    if keys.integer("indexer_kv_heads", 1) != 1:
        keys.refuse("indexer_kv_heads", "treadle supports 1")
    if keys.text("output_gate_type", "silu") != "silu":
        keys.refuse("output_gate_type", "treadle supports silu")
    places = keys.get("ple_layer_ids")
    return {**made, **_ngram_keys(keys, places)} if places else made


def _ngram_keys(keys: MetadataReader, places: Any) -> dict[str, Any]:
    """Return the keys of n-gram embeddings: sizes, and the constants of the hash functions,
    recomputed as in the model's code (checkpoints store them too). ``places``: numbers, from 1 on,
    of the layers that add the embeddings. Raises UnsupportedError unless there is one.
    """
    if not isinstance(places, list) or len(places) != 1:
        keys.refuse("ple_layer_ids", f"is {places!r:.60}: treadle supports one layer")
    n = keys.integer("ngram_size", 3, lo=2)
    heads = keys.integer("heads_per_ngram", 8, lo=1)
    n_heads = (n - 1) * heads
    end = keys.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if not isinstance(end, int):
        keys.fail("eos_token_id", f"is {end!r:.60}", "a token, at which n-grams begin")
    sizes: list[int] = []
    prime = keys.integer("ngram_vocab_size_base", 20_000_000, lo=2) - 1
    for _ in range(n_heads):
        prime = _next_prime(prime)
        sizes.append(prime)
    width = keys.integer("ple_embed_dim", keys.integer("hidden_size"), lo=n_heads)
    if width % n_heads:
        keys.fail("ple_embed_dim", f"is {width}", f"a multiple of {n_heads} heads")
    return {
        LAYERS: [places[0] - 1],
        NGRAM_SIZE: n,
        NGRAM_HEADS: heads,
        NGRAM_CONV: keys.integer("ple_conv_kernel_size", 4),
        NGRAM_END: end,
        NGRAM_ROW: width // n_heads,
        MULTIPLIERS: _multipliers(keys.integer("vocab_size"), n, keys.integer("seed", 1234)),
        SIZES: sizes,
        OFFSETS: [sum(sizes[:i]) for i in range(n_heads)],
    }


def _next_prime(n: int) -> int:
    """Return the first prime above ``n``."""
    while True:
        n += 1
        if n > 1 and all(n % d for d in (2, *range(3, isqrt(n) + 1, 2)) if d < n):
            return n


_MASK = (1 << 64) - 1


def _multipliers(n_vocab: int, n: int, seed: int) -> list[int]:
    """Return ``n`` odd multipliers of the hash, from SplitMix64 with ``seed``, so small that their
    product with a token id fits 63 bits.
    """
    step = 0x9E3779B97F4A7C15
    half = max(1, ((1 << 63) - 1) // n_vocab // 2)
    made = []
    for i in range(n):
        x = (seed + step * (i + 2)) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        made.append(2 * ((x ^ (x >> 31)) % half) + 1)
    return made


def _add_one(rows: Rows) -> Rows:
    return np.asarray(rows + 1)


def _joined(*rows: Rows) -> Rows:
    return np.concatenate(rows)


def _cut(rows: Rows, part: slice) -> Rows:
    return rows[part]


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    n_q = keys.integer("indexer_n_heads") * keys.integer("indexer_head_dim")
    at = "self_attn.indexer."
    cuts = {
        f"{at}q_proj.weight": partial(_cut, part=slice(n_q)),
        f"{at}k_proj.weight": partial(_cut, part=slice(n_q, None)),
    }
    n_parts = keys.integer("split_ngram_parts", 512, lo=1, hi=MOST_PARTS)
    shards = tuple(f"{_TABLE}.shard_{i}.weight" for i in range(n_parts))
    counted = tuple(f"{_TABLE}.shard_{i}" for i in range(n_parts))
    norms = ("norm_key", "norm_query", "norm_conv")
    return (
        *_35.derived(keys),
        DerivationRule((f"{at}index_qk_proj.weight",), cuts, side="B"),
        *(
            DerivationRule(names, {"/ngram_table.weight": _joined}, whole=True)
            for names in ((f"{_TABLE}.weight",), shards, counted)
        ),
        *(
            DerivationRule((f"ple.{name}.weight",), {f"ple.{name}_1.weight": _add_one}, floats=True)
            for name in norms
        ),
        DerivationRule(("ple.conv1d.weight",), {"ple.taps.weight": taps}),
        # The numbers of the hashes follow from the keys.
        *(
            DerivationRule((f"{_NGRAMS}{name}",), {})
            for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
        ),
    )


def _streams(theirs: str, ours: str) -> dict[str, str]:
    names = {
        "hc_norm": "norm",
        "input_mix_weight_down": "down",
        "input_mix_weight_up": "up",
        "block_inject_weight": "inject",
    }
    return {f"{theirs}.{name}": f"{ours}_{to}" for name, to in names.items()}


_NAMES: Names = {
    **_35.names,
    **_streams("attn_hyper_connection", "hc_attn"),
    **_streams("mlp_hyper_connection", "hc_ffn"),
    **_streams("hyper_connection_mixer", "output_hc"),
    **{f"self_attn.indexer.{x}_proj": f"indexer.{x}_proj" for x in "qk"},
    **{f"self_attn.indexer.{x}_layernorm": f"indexer.{x}_norm" for x in "qk"},
    **{f"ple.{x}_proj": f"ple_{x}" for x in ("key", "value")},
    **{f"ple.norm_{x}_1": f"ple_norm_{x}" for x in ("key", "query", "conv")},
    "ple.taps": "ple_conv1d",
    "ngram_table": "per_layer_token_embd",
}
QWEN4_FAMILIES = {
    "qwen4_exp_text": replace(
        _35,
        arch="qwen4exp",
        defaults={
            **_35.defaults,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "indexer_n_heads": None,
            "indexer_head_dim": None,
            "indexer_budget": None,
            "indexer_compress_ratio": None,
            "eos_token_id": None,
        },
        names=_NAMES,
        normalize_keys=_normalize_keys,
        derived=_rules,
        more=_keys,
    ),
}
