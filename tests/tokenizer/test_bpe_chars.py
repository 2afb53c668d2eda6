"""Gemma 4's vocabulary: pieces with merges, spaces as U+2581, bytes for what has no piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tokenizer.vocabularies import CONTROL, NORMAL, Piece, spm_pieces, write_vocab
from treadle.errors import FileError
from treadle.files.gguf import open_gguf
from treadle.tokenizer.tokenizer import Tokenizer, load_tokenizer

SPACE = "\u2581"
MERGES = [
    f"{SPACE} a",
    "a b",
    f"{SPACE}a b",
    "n d",
    f"{SPACE}a nd",
    f"{SPACE} {SPACE}",
    f"{SPACE}{SPACE} {SPACE}{SPACE}",
    "\n \n",
    "é e",
]
LETTERS = [*"abden\né", SPACE, "\n\n\n"]


def load(path: Path, pieces: list[Piece] | None = None, merges: list[str] = MERGES) -> Tokenizer:
    made = ["".join(merge.rsplit(" ", 1)) for merge in MERGES]
    words = [(piece, NORMAL) for piece in [*LETTERS, *made]]
    pieces = spm_pieces([*words, ("<|turn>", CONTROL)]) if pieces is None else pieces
    keys: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return load_tokenizer(open_gguf(write_vocab(path, "gemma4", pieces, merges=merges, **keys)))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (" ab and", [f"{SPACE}ab", f"{SPACE}and"]),
        ("ab  b", ["ab", f"{SPACE}{SPACE}", "b"]),
        ("a" + 5 * " " + "b", ["a", 4 * SPACE, SPACE, "b"]),
        ("a\nb", ["a", "\n", "b"]),
        ("a\n\nb", ["a", "\n\n", "b"]),
        ("\n\n\n", ["\n\n\n"]),  # a piece that no merge makes
        (4 * "\n", ["\n\n", "\n\n"]),
        ("éez", ["ée", "<0x7A>"]),
        ("日", ["<0xE6>", "<0x97>", "<0xA5>"]),
        ("", []),
    ],
)
def test_pieces(text: str, pieces: list[str], tmp_path: Path) -> None:
    """And back: no space is put before a text, and bytes become characters again."""
    tokenizer = load(tmp_path / "v.gguf")
    ids = tokenizer.encode(text, bos=False)
    assert [tokenizer.vocab.raw(token).decode() for token in ids] == pieces
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == [1, *ids]


def test_specials_are_cut_first(tmp_path: Path) -> None:
    tokenizer = load(tmp_path / "v.gguf")
    turn = tokenizer.token_id("<|turn>")
    assert tokenizer.encode("<|turn>ab", bos=False, special=True)[0] == turn
    assert turn not in tokenizer.encode("<|turn>ab", bos=False)


def test_vocabularies_that_are_not_whole(tmp_path: Path) -> None:
    pieces = [piece for piece in spm_pieces() if piece[0] != "<0x41>"]
    with pytest.raises(FileError, match="has pieces for 255 bytes"):
        load(tmp_path / "bytes.gguf", pieces, [])
    with pytest.raises(FileError, match="merges"):
        load(tmp_path / "merges.gguf", merges=["q z"])


@pytest.mark.parametrize(
    ("pre", "text", "pieces", "bos"),
    [
        ("sarvam-moe", " ab\n\n\nb日", [f"{SPACE}ab", "\n\n", "\n", "b", "<0xE6>"], False),
        ("granite-embed-multi-311m", " ab\n\n\nb日", [f"{SPACE}ab", "\n\n\n", "b", "<0xE6>"], True),
        ("gemma4", "ab  b\n\n", ["ab", 2 * SPACE, "b", "\n\n"], True),
    ],
)
def test_named_by_the_pre_tokenizer(
    pre: str, text: str, pieces: list[str], bos: bool, tmp_path: Path
) -> None:
    """llama.cpp's converter calls the vocabulary gpt2 there, and its bytes ordinary pieces."""
    words = [*LETTERS, *("".join(merge.rsplit(" ", 1)) for merge in MERGES)]
    plain = [(text, NORMAL if i > 2 else kind) for i, (text, kind) in enumerate(spm_pieces())]
    made = [*plain, *((piece, NORMAL) for piece in words)]
    keys: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    path = write_vocab(tmp_path / "v.gguf", "gpt2", made, merges=MERGES, pre=pre, **keys)
    tokenizer = load_tokenizer(open_gguf(path))
    ids = tokenizer.encode(text, bos=False)
    assert [tokenizer.vocab.raw(token).decode() for token in ids][: len(pieces)] == pieces
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == [1] * bos + ids
    assert tokenizer.pre == pre
