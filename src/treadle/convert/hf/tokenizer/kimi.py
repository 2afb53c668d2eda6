"""Kimi's vocabulary, ``tiktoken.model``: a list of ranks, which in transformers is read by code in
the folder.

Special tokens follow the last rank, up to the last row of the embeddings. tokenizer_config.json
names a few of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle.convert.hf.tokenizer.tiktoken import read_ranks
from treadle.files.metadata import string_array
from treadle.tokenizer.vocab import TokenType

KIMI = ("kimi_linear", "kimi_k3")
RANKS = "tiktoken.model"


def read_kimi(path: Path, n_vocab: int) -> dict[str, Any]:
    """Return the constructor arguments of ``Pieces``. ``n_vocab``: rows of the embeddings. Raises
    FileError.
    """
    letters, merges = read_ranks(path)
    n = len(letters)
    names = [f"<|reserved_token_{i}|>" for i in range(len(letters), n_vocab)]
    return {
        "model": "gpt2",
        "texts": [text.encode() for text in (*letters, *names)],
        "types": [int(TokenType.NORMAL)] * n + [int(TokenType.CONTROL)] * len(names),
        "keys": {"pre": "kimi-k2", "merges": string_array([m.encode() for m in merges])},
    }
