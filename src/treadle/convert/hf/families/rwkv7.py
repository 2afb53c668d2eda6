"""Family row and vocabulary of RWKV-7. transformers lacks it: names are those of
flash-linear-attention, whose folders bring their own code.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import Names
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, flat, same
from treadle.errors import FileError
from treadle.files.metadata import MetadataReader, ValueType, number_array, string_array
from treadle.models.graphs.wkv import DECAY, GATE, HEAD, RATE, VALUE
from treadle.tokenizer.vocab import TokenType

WORLD = "rwkv_vocab_v20230424.txt"
RWKV = ("rwkv7",)  # model types with this vocabulary
_END = b"\n\n"  # end of a turn
_MIXED = "rwkvag"  # token shift targets, in GGUF's order
# A rank's key; without it the rank is width ** (first number) * (second number).
_RANKS: dict[str, tuple[str, float, float]] = {
    DECAY: ("decay_low_rank_dim", 0.5, 1.8),
    RATE: ("a_low_rank_dim", 0.5, 1.8),
    VALUE: ("v_low_rank_dim", 0.5, 1.3),
    GATE: ("gate_low_rank_dim", 0.8, 0.6),
}


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    n_embd = keys.integer("hidden_size")
    none = ("attention.head_count_kv", "attention.key_length", "attention.value_length")
    # In llama.cpp a context of 2^20 tokens means any length; the folder's value is unused.
    made: dict[str, Any] = {**dict.fromkeys(none), "context_length": 1 << 20}
    made["attention.head_count"] = 0
    made[HEAD] = keys.integer("head_dim")
    for key, (word, power, times) in _RANKS.items():
        usual = max(1, round(n_embd**power * times / 32)) * 32
        made[key] = usual if keys.values.get(word) is None else keys.integer(word)
    return made


def _side_by_side(*rows: Rows) -> Rows:
    return np.concatenate([each.reshape(-1) for each in rows]).reshape(len(rows), 1, 1, -1)


def _lora(name: str, *parts: str) -> tuple[str, ...]:
    return tuple(f"attn.{name}_lora.lora.{part}" for part in parts)


_PARTS = "0.weight", "2.weight", "2.bias"


def _first_of(*rows: Rows) -> Rows:
    return rows[0]


def _second_of(*rows: Rows) -> Rows:
    return rows[1]


def _third_of(*rows: Rows) -> Rows:
    return rows[2]


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return the rules for tensors that GGUF names or stores differently. Layer 0 does not mix its
    values, but llama.cpp requires the tensors for it: as in its converter, they are copies of the
    in-context learning rates' (``a``).
    """
    made = (_first_of, _second_of, _third_of)
    mixed = "attn.mixed.weight"
    rates = dict(zip((*_lora("a", *_PARTS[:2]), "attn.a0.weight"), made, strict=True))
    values = dict(zip((f"attn.unread.v{i}.weight" for i in (1, 2, 0)), made, strict=True))
    return (
        *(
            DerivationRule((f"pre_norm.{kind}",), {f"/pre_norm.{kind}": same})
            for kind in ("weight", "bias")
        ),
        DerivationRule(tuple(f"attn.x_{name}" for name in _MIXED), {mixed: _side_by_side}),
        DerivationRule(("attn.x_x",), {mixed: same}),
        *(
            DerivationRule((f"attn.{n}",), {f"attn.{n}.weight": flat})
            for n in ("r_k", "k_k", "k_a")
        ),
        DerivationRule(("ffn.x_k",), {"ffn.x_k.weight": flat}),
        DerivationRule(_lora("w", "2.bias"), {"attn.w0.weight": same}),
        DerivationRule(_lora("a", "2.bias"), {"attn.a0.weight": same}, first_layer=1),
        DerivationRule(_lora("v", "2.bias"), {"attn.v0.weight": same}, first_layer=1),
        DerivationRule(_lora("a", *_PARTS), rates | values, last_layer=0),
        DerivationRule(_lora("v", *_PARTS), {}, last_layer=0),  # some folders have them
    )


_NAMES: Names = {
    "embeddings": "token_embd",
    "pre_norm": "token_embd_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "attn_norm": "attn_norm",
    "ffn_norm": "attn_norm_2",
    "attn.mixed": "time_mix_lerp_fused",
    "attn.r_proj": "time_mix_receptance",
    "attn.k_proj": "time_mix_key",
    "attn.v_proj": "time_mix_value",
    "attn.o_proj": "time_mix_output",
    "attn.g_norm": "time_mix_ln",
    **{f"attn.{name}": f"time_mix_{name}" for name in ("w0", "a0", "v0", "k_k", "k_a", "r_k")},
    **{f"attn.unread.v{i}": f"time_mix_v{i}" for i in range(3)},
    **{f"attn.{name}_lora.lora.0": f"time_mix_{name}1" for name in "wavg"},
    **{f"attn.{name}_lora.lora.2": f"time_mix_{name}2" for name in "wavg"},
    "ffn.x_k": "channel_mix_lerp_k",
    "ffn.key": "channel_mix_key",
    "ffn.value": "channel_mix_value",
}


def read_world(path: Path, n_vocab: int) -> dict[str, Any]:
    """Return the tokenizer's keys for RWKV's list of pieces. Raises FileError for an invalid line.

    Each line has an id from 1 on, the piece as a Python literal, and its length in bytes. Id 0
    begins and ends texts. ``n_vocab``: rows of the embeddings, which may exceed the pieces.
    """
    pieces = [b"<s>"]
    lines = path.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n").split("\n")
    for line in lines if lines[-1] else lines[:-1]:
        pieces.append(_piece(line, len(pieces), path))
    if len(pieces) > n_vocab:
        what = f"has {len(pieces)} pieces"
        raise FileError(what, path=path, expected=f"at most {n_vocab}, the rows of the embeddings")
    kinds = [TokenType.CONTROL, *[TokenType.NORMAL] * (len(pieces) - 1)]
    kinds += [TokenType.UNUSED] * (n_vocab - len(pieces))
    spelt = [pieces[0], *(repr(piece)[2:-1].encode() for piece in pieces[1:])]
    spelt += [b"[PAD%d]" % i for i in range(len(pieces), n_vocab)]
    made: dict[str, Any] = {
        "model": "rwkv",
        "tokens": string_array(spelt),
        "token_type": number_array(ValueType.INT32, [int(kind) for kind in kinds]),
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if _END in pieces:
        made["eot_token_id"] = pieces.index(_END)
    return {f"tokenizer.ggml.{key}": value for key, value in made.items()}


def _piece(line: str, i: int, path: Path) -> bytes:
    number, _, rest = line.partition(" ")
    literal, _, size = rest.rpartition(" ")
    try:
        piece = ast.literal_eval(literal)
        piece = piece.encode() if isinstance(piece, str) else piece
        if isinstance(piece, bytes) and (int(number), int(size)) == (i, len(piece)):
            return piece
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # last two: too deep
        pass
    expected = f"{i}, a Python string or bytes literal, and its length in bytes"
    raise FileError(f"is {line!r:.60}", path=path, where=f"line {i}", expected=expected)


# -- the rows -------------------------------------------------------------------------------------

RWKV7_FAMILIES: dict[str, Family] = {
    "rwkv7": Family(
        "rwkv7",
        {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "head_dim": 64,
            "norm_eps": 1e-5,
            "tie_word_embeddings": False,
            # It has no such heads, and no maximum context.
            "num_attention_heads": 1,
            "max_position_embeddings": 1 << 20,
        },
        _NAMES,
        {"rms_norm_eps": "norm_eps"},
        activation="sqrelu",
        only={"norm_first": True, "norm_bias": True, "attn": None},
        n_ff_default=4,
        derived=_rules,
        more=_keys,
    ),
}
