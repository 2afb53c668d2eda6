"""Llama 3's ``tokenizer.model``, lines of "base64 rank", as GGUF's byte-level vocabulary."""

from __future__ import annotations

import binascii
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from treadle.errors import FileError
from treadle.files.reader import read_head
from treadle.tokenizer.bpe import BYTE_OF_LETTER
from treadle.tokenizer.vocab import TokenType

MAX_BYTES = 64 << 20
N_SPECIAL = 256
LETTER = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}

# Special tokens, named in Meta's code, not in the file. They follow the ranks; the others of the
# 256 are reserved_special_token_N. Keys are positions after the last rank.
LLAMA3 = {
    0: "begin_of_text",
    1: "end_of_text",
    6: "start_header_id",
    7: "end_header_id",
    9: "eot_id",
}
LLAMA31 = LLAMA3 | {4: "finetune_right_pad_id", 8: "eom_id", 10: "python_tag"}


def is_tiktoken(head: bytes) -> bool:
    """Return whether ``head``, a file's first bytes, begins a list of "base64 rank" lines."""
    word, _, rank = head.split(b"\n", 1)[0].partition(b" ")
    return bool(word) and rank.strip() == b"0"


def read_tiktoken(path: Path, special: dict[int, str]) -> dict[str, Any]:
    """Return the ``tokenizer.ggml.*`` keys; ``special`` are the special tokens by id, LLAMA3 or
    LLAMA31. Raises FileError.
    """
    letters, merges = read_ranks(path)
    names = []
    n_reserved = 0
    for place in range(N_SPECIAL):
        if place in special:
            names.append(f"<|{special[place]}|>")
        else:
            names.append(f"<|reserved_special_token_{n_reserved}|>")
            n_reserved += 1
    n = len(letters)
    types = np.full(n + N_SPECIAL, TokenType.NORMAL, np.int32)
    types[n:] = TokenType.CONTROL
    keys = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": [*letters, *names],
        "token_type": types,
        "merges": merges,
        "bos_token_id": n,
        "eos_token_id": n + 1,
        "eot_token_id": n + 9,
        "add_bos_token": True,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def read_ranks(path: Path) -> tuple[list[str], list[str]]:
    """Return the pieces by rank, in GPT-2's letters for bytes, and the merges that make them.
    Raises FileError.
    """
    tokens = _read(path)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    pairs = (halves_of(token, ranks) for token in tokens)
    merges = [" ".join(map(_letters, pair)) for pair in pairs if pair is not None]
    return [_letters(token) for token in tokens], merges


def _read(path: Path) -> list[bytes]:
    raw = read_head(path, MAX_BYTES + 1, "a tokenizer")
    tokens: list[bytes] = []
    for line in raw.split(b"\n"):
        if not line.strip():
            continue
        word, _, rank = line.strip().partition(b" ")
        try:
            token = binascii.a2b_base64(word)
        except binascii.Error:
            token = b""
        if not token or not rank.isdigit() or int(rank) != len(tokens) or len(raw) > MAX_BYTES:
            what = f"is {line[:60]!r}"
            expected = f"a token in base64 and its rank, {len(tokens)}"
            raise FileError(what, path=path, where=f"line {len(tokens) + 1}", expected=expected)
        tokens.append(token)
    if len(set(tokens)) != len(tokens) or len({t for t in tokens if len(t) == 1}) != 256:
        raise FileError("a token appears twice, or a byte has no token", path=path)
    return tokens


def _letters(token: bytes) -> str:
    return "".join(LETTER[byte] for byte in token)


def halves_of(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """Return the two tokens of lower rank that merge to ``token``; None for a byte.

    tiktoken has no list of merges: ranks are the merge order. So the bytes are merged by all lower
    ranks, and the last two parts are the pair.
    """
    own = ranks[token]
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, own) for a, b in pairwise(parts)]
        best = min(pairs)
        if best >= own:
            return None  # never made by merging: it matches only as a whole word
        at = pairs.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None
