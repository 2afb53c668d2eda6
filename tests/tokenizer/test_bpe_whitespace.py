"""Vocabularies without spaces (``whitespace``): merges between white space, which is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tokenizer.vocabularies import CONTROL, NORMAL, UNKNOWN, Piece, write_vocab
from treadle.errors import FileError
from treadle.files.gguf import open_gguf
from treadle.tokenizer.tokenizer import Tokenizer, load_tokenizer

MERGES = ["a b", "漢 字", "漢字 a"]
PIECES: list[Piece] = [("<s>", CONTROL), ("</s>", CONTROL), ("<unk>", UNKNOWN)]
PIECES += [(piece, NORMAL) for piece in (*"ab漢字Z", "ab", "漢字", "漢字a")]


def load(path: Path, merges: list[str] = MERGES, **keys: Any) -> Tokenizer:
    keys = {"bos_token_id": 0, "eos_token_id": 1} | keys
    path = write_vocab(path, "whitespace", PIECES, merges=merges, pre="whitespace", **keys)
    return load_tokenizer(open_gguf(path))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (" ab  a\u3000b\n", ["ab", "a", "b"]),
        ("漢字a 漢字 漢字ab", ["漢字a", "漢字", "漢字", "ab"]),
        ("aé\u00a0bZ", ["a", "b", "Z"]),  # no piece, and no unknown token in the file
        ("", []),
        (" \n", []),
    ],
)
def test_pieces(text: str, pieces: list[str], tmp_path: Path) -> None:
    tokenizer = load(tmp_path / "v.gguf")
    assert [tokenizer.piece(token) for token in tokenizer.encode(text, bos=False)] == pieces


def test_the_unknown_token_and_lower_case(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"unknown_token_id": 2, "tokenizer__ggml__normalizer__lowercase": True}
    tokenizer = load(tmp_path / "v.gguf", add_bos_token=True, add_eos_token=True, **keys)
    assert tokenizer.encode("ÉAB") == [0, 2, tokenizer.token_id("ab"), 1]


def test_merges_into_no_piece(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="merges"):
        load(tmp_path / "v.gguf", ["q z"])
