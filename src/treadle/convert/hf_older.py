"""Families whose layers differ in size, or lack a half; transformers has none of them, and the code
that comes with their folders is not run: further rows of ``hf_families``.
"""

from __future__ import annotations

from typing import Any

from treadle.convert.hf_family import Family
from treadle.convert.hf_names import LLAMA, Names
from treadle.files.keys import Keys

# -- DeciLM and Nemotron NAS: layers without attention, or without an FFN ---------------------

_BLOCKS = "block_configs"
_STEP = 256  # widths of FFNs are multiples of it
_KNOWN = {  # what a half of a layer may say
    "attention": ("n_heads_in_group", "no_op", "replace_with_linear"),
    "ffn": ("ffn_mult", "no_op"),
}


def _blocks(keys: Keys, n_layer: int) -> dict[str, Any]:
    """Heads and widths of each layer, 0 where it has no such half. Heads of queries without heads
    of keys are those of one matrix in place of attention.
    """
    given = keys.get(_BLOCKS)
    if not isinstance(given, list) or len(given) != n_layer:
        keys.fail(_BLOCKS, f"is {given!r:.60}", f"a list of {n_layer}")
    heads, heads_kv, widths = list[int](), list[int](), list[int]()
    for i, block in enumerate(given):
        if not isinstance(block, dict):
            keys.fail(f"{_BLOCKS}[{i}]", f"is {block!r:.60}", "an object")
        halves = Keys(block, keys.path, prefix=f"{keys.prefix}{_BLOCKS}[{i}].")
        n, n_kv = _heads(_half(halves, "attention"), keys.integer("num_attention_heads"))
        heads.append(n)
        heads_kv.append(n_kv)
        widths.append(_width(_half(halves, "ffn"), keys.integer("hidden_size")))
    return {
        "attention.head_count": heads,
        "attention.head_count_kv": heads_kv,
        "feed_forward_length": widths,
    }


def _half(halves: Keys, name: str) -> Keys:
    half = halves.within(name)
    if half is None:
        halves.fail(name, "is missing", "an object")
    for key, value in half.values.items():
        if key not in _KNOWN[name] and value not in (None, False):
            half.refuse(key, f"is {value!r:.60}: treadle has no such layer in this architecture")
    return half


def _heads(half: Keys, n_head: int) -> tuple[int, int]:
    if half.flag("replace_with_linear", False):
        return n_head, 0
    if half.flag("no_op", False) or half.get("n_heads_in_group") is None:
        return 0, 0
    group = half.integer("n_heads_in_group")
    if n_head % group:
        half.fail("n_heads_in_group", f"is {group}", f"a divisor of {n_head} heads")
    return n_head, n_head // group


def _width(half: Keys, n_embd: int) -> int:
    if half.flag("no_op", False) or half.get("ffn_mult") is None:
        return 0
    width = int(2 * half.number("ffn_mult", lo=1e-3, hi=1e3) * n_embd / 3)
    return -(-width // _STEP) * _STEP


_DECI: Names = {**LLAMA, "self_attn.linear_attn": "attn_output"}
_LLAMA = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}

OLDER: dict[str, Family] = {
    "nemotron-nas": Family(
        "deci",
        {**_LLAMA, "vocab_size": 32000, "max_position_embeddings": 2048},
        _DECI,
        n_ff_default=4,  # each layer says its own
        more=_blocks,
    ),
    "deci": Family(
        "deci",
        {**_LLAMA, "vocab_size": 32000, "max_position_embeddings": 2048},
        older_words={"num_key_value_heads": "num_key_value_heads_per_layer"},
    ),
}
