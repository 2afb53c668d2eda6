"""GGUF's keys of a sentencepiece vocabulary, from any kind of file that has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treadle.convert.hf.tokenizer.sentencepiece_model import read_sentencepiece
from treadle.errors import FileError
from treadle.tokenizer.vocab import TokenType

IDS = {"unk": "unknown", "bos": "bos", "eos": "eos", "pad": "padding"}
USUAL_IDS = {"unk": 0, "bos": 1, "eos": 2}
NO_SCORE = -1000.0  # score of padding


def read_spm_keys(path: Path) -> dict[str, Any]:
    """Return the ``tokenizer.ggml.*`` keys of a ``tokenizer.model``. Raises FileError,
    UnsupportedError.
    """
    model = read_sentencepiece(path)
    return spm_keys(model.pieces, model.scores, model.types, model.ids, model.add_dummy_prefix)


def spm_keys(
    pieces: Sequence[bytes],
    scores: Sequence[float],
    types: Sequence[int],
    ids: Mapping[str, int],
    prefix: bool = True,
) -> dict[str, Any]:
    """Return the ``tokenizer.ggml.*`` keys of a vocabulary; ``pieces``, ``scores``, ``types``: by
    token id. ``ids``: those of unk, bos, eos and pad; ``prefix``: a space goes before a text.
    """
    keys: dict[str, Any] = {
        "model": "llama",
        "pre": "default",
        "tokens": list(pieces),
        "scores": np.array(scores, np.float32),
        "token_type": np.array(types, np.int32),
    }
    keys |= {f"{IDS[name]}_token_id": i for name, i in ids.items() if 0 <= i < len(pieces)}
    keys |= {"add_bos_token": True, "add_eos_token": False, "add_space_prefix": prefix}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def spelt_with_spaces(texts: Sequence[bytes], scores: Sequence[float]) -> dict[str, Any]:
    """Return the ``tokenizer.ggml.*`` keys of a vocabulary (``texts``, ``scores``: by id) spelt as
    in llama2.c and old GGML files.

    There spaces are plain, ids 0 to 2 have no usable names, and the 256 byte pieces are single
    bytes or names such as ``<0x0A>``.
    """
    control = TokenType.CONTROL
    heads = ((b"<unk>", TokenType.UNKNOWN), (b"<s>", control), (b"</s>", control))
    names = [b"<0x%02X>" % byte for byte in range(256)]
    after = texts[3:259]
    bare = len(after) == 256 and all(t in (bytes([b]), names[b]) for b, t in enumerate(after))
    pieces = []
    types = []
    for i, text in enumerate(texts):
        if i < len(heads):
            text, kind = heads[i]
        elif bare and i < 259:
            text = names[i - 3]
            kind = TokenType.BYTE
        elif not text:
            text = b"<dummy%05d>" % i
            kind = control
        else:
            text = text.replace(b" ", "▁".encode())
            kind = TokenType.NORMAL
        pieces.append(text)
        types.append(int(kind))
    return spm_keys(pieces, scores, types, USUAL_IDS)


def fit_vocabulary(keys: dict[str, Any], n_vocab: int, path: Path) -> None:
    """Pad the vocabulary in ``keys`` to ``n_vocab`` pieces, the rows of the embeddings, which some
    models pad.

    Raises FileError if it has more pieces than that.
    """
    tokens = keys["tokenizer.ggml.tokens"]
    n = len(tokens)
    if n > n_vocab:
        what = f"has {n} tokens"
        raise FileError(what, path=path, expected=f"{n_vocab}, the rows of the embeddings")
    keys["tokenizer.ggml.tokens"] = [*tokens, *(f"[PAD{i}]" for i in range(n, n_vocab))]
    for name, filler in (("scores", NO_SCORE), ("token_type", TokenType.UNUSED)):
        column = keys.get(f"tokenizer.ggml.{name}")
        if column is not None:
            more = np.full(n_vocab - n, filler, column.dtype)
            keys[f"tokenizer.ggml.{name}"] = np.concatenate([column, more])
