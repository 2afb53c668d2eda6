"""Falcon's tokenizer as it is shipped: words are cut around digits, which GGUF's name for it does
not say.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from tests.convert.hf_tokenizers import byte_level, byte_level_tokenizer, save, split
from tests.convert.test_hf_tokenizer import read
from tests.models.hf_tiny import require_transformers
from treadle.errors import UnsupportedError

TEXTS = (
    "abc 123456 def",
    "price: 12,345.67",
    "a  12\n 3 33 333 3333",
    "12\u00bd3456 \u00bd6789 x\u00b2",
    "\u043c and \u043c\u0438\u0440 999 \u0667\u0668\u0669\u0660",
    "1234567 v1.20 0x1F",
)


def shipped() -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            byte_level(use_regex=True),
            pre_tokenizers.Digits(individual_digits=False),
            split("[0-9][0-9][0-9]"),
        ]
    )


@pytest.fixture(autouse=True)
def library() -> None:
    require_transformers()


def test_no_merge_of_falcon_joins_digits_with_others(data: Path, tmp_path: Path) -> None:
    theirs = byte_level_tokenizer(data, "falcon", tmp_path, whole=True)
    theirs.pre_tokenizer = shipped()
    save(theirs, tmp_path / "hf")
    ours = read(tmp_path / "hf", theirs.get_vocab_size())
    assert ours.pre == "falcon"
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids, text


def test_merges_that_do_are_refused(data: Path, tmp_path: Path) -> None:
    theirs = byte_level_tokenizer(data, "gpt-2", tmp_path, whole=True)
    theirs.pre_tokenizer = shipped()
    save(theirs, tmp_path / "hf")
    with pytest.raises(UnsupportedError, match="no GGUF pre-tokenizer"):
        read(tmp_path / "hf", theirs.get_vocab_size())
