"""Prompts for filling in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tokenizer.vocabularies import CONTROL, NORMAL, write_vocab
from treadle.errors import UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.tokenizer.fill_in_middle import fim_token, infill_ids
from treadle.tokenizer.tokenizer import Tokenizer, load_tokenizer

LETTERS = "abcdef.Ċprojct"  # what the texts are made of
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")


def tokenizer(folder: Path, marks: Any = MARKS, **keys: Any) -> Tokenizer:
    pieces: Any = [(letter, NORMAL) for letter in LETTERS] + [(mark, CONTROL) for mark in marks]
    path = write_vocab(folder / "v.gguf", "gpt2", pieces, merges=[], pre="gpt-2", **keys)
    return load_tokenizer(open_gguf(path))


def test_by_the_names_of_tokens(tmp_path: Path) -> None:
    own = tokenizer(tmp_path)
    pre, suf, mid = (own.token_id(mark) for mark in MARKS[:3])
    assert infill_ids(own, "ab", "c") == [pre, 0, 1, suf, 2, mid]
    assert infill_ids(own, "", "", begun="d") == [pre, suf, mid, 3]


def test_by_keys(tmp_path: Path) -> None:
    """A key of the file counts before any name; the older keys too."""
    own = tokenizer(tmp_path, fim_pre_token_id=5, suffix_token_id=4)
    assert fim_token(own, "fim_pre") == 5
    assert fim_token(own, "fim_suf") == 4
    assert infill_ids(own, "a", "b")[0] == 5


def test_other_files(tmp_path: Path) -> None:
    own = tokenizer(tmp_path)
    repository, separator = (own.token_id(mark) for mark in MARKS[3:])
    ids = infill_ids(own, "a", "b", files=[("c", "d"), ("e", "f")])
    assert separator is not None
    at = ids.index(separator)
    assert ids[0] == repository
    line = LETTERS.index("Ċ")
    assert ids[at:-5] == [separator, 2, line, 3, separator, 4, line, 5]
    plain = tokenizer(tmp_path, MARKS[:3])
    assert infill_ids(plain, "a", "b", files=[("c", "d")])[:2] == [3, line]


def test_without_the_tokens(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no tokens for filling in"):
        infill_ids(tokenizer(tmp_path, MARKS[:2]), "a", "b")
