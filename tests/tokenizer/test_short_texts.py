"""Texts that are encoded without a library's tables, against the library."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenizer.vocabularies import (
    CONTROL,
    LETTER_OF_BYTE,
    NORMAL,
    USER_DEFINED,
    Piece,
    load_bpe,
    load_spm,
    write_vocab,
)
from treadle.errors import FileError
from treadle.files.gguf import open_gguf
from treadle.files.metadata import string_array
from treadle.tokenizer import bpe, short_texts
from treadle.tokenizer.bpe import BpeTokenizer
from treadle.tokenizer.pretokenizers import PRE_TOKENIZERS
from treadle.tokenizer.short_texts import (
    AsciiSplitter,
    LibraryNeeded,
    ShortTexts,
    StringIndex,
    merge,
)
from treadle.tokenizer.spm import SpmTokenizer
from treadle.tokenizer.tokenizer import load_tokenizer
from treadle.tokenizer.vocab import TokenType

MERGES = ("a b", "ab c", "b c", "a bc", "Ġ a", "Ġa b", "c c", "cc cc", "c a", "x y", "xy z")
WORDS = ["▁", *"abcé", "ab", "bc", "▁a", "abc", "cc", "cab", "▁ab", "cccc"]


@pytest.fixture(autouse=True)
def _every_vocabulary_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_texts, "MIN_PIECES", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("short")


def short_bpe(folder: Path, **keys: Any) -> BpeTokenizer:
    """A byte-level vocabulary in which ``xyz`` is a control token, so no text is merged into it."""
    pieces: list[Piece] = [(LETTER_OF_BYTE[b], NORMAL) for b in range(256)]
    pieces += [(merge.replace(" ", ""), NORMAL) for merge in dict.fromkeys(MERGES[:-1])]
    pieces = list(dict.fromkeys(pieces))
    pieces.append(("xyz", CONTROL))
    path = write_vocab(folder / "bpe.gguf", "gpt2", pieces, merges=MERGES, pre="gpt-2", **keys)
    tokenizer = load_tokenizer(open_gguf(path))
    assert isinstance(tokenizer, BpeTokenizer)
    assert tokenizer._merger is not None
    return tokenizer


def short_spm(folder: Path) -> SpmTokenizer:
    words: list[Piece] = [(word, NORMAL) for word in WORDS]
    words += [("aa", USER_DEFINED), ("▁▁", USER_DEFINED), ("bb", TokenType.UNUSED)]
    tokenizer = load_spm(folder / "spm.gguf", words)
    assert isinstance(tokenizer, SpmTokenizer)
    assert tokenizer._merger is not None
    return tokenizer


TEXTS = st.text("abcxyz é\n", max_size=40)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_byte_level(folder: Path, text: str) -> None:
    short = short_bpe(folder)
    whole = short_bpe(folder)
    whole.prepare()
    assert short.encode(text) == whole.encode(text)
    assert short._merger is not None, "the library was used"


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_scored_pieces(folder: Path, text: str) -> None:
    short = short_spm(folder)
    whole = short_spm(folder)
    whole.prepare()
    assert short.encode(text) == whole.encode(text)
    if not set(text) - set("ab "):
        assert (short._merger is None) == ("bb" in text.replace("aa", "|"))


def test_characters_without_a_piece_are_the_librarys(folder: Path) -> None:
    tokenizer = short_spm(folder)
    assert tokenizer.encode_plain("aq", start=False)[1:] == [3 + ord("q")]
    assert tokenizer._merger is None


def test_long_texts_are_the_librarys(folder: Path) -> None:
    tokenizer = short_bpe(folder)
    once = tokenizer.encode("abc " * 250)
    assert tokenizer._merger is not None
    assert tokenizer.encode("abc " * 251)[: len(once)] == once
    assert tokenizer._merger is None


def test_many_short_texts_are_the_librarys(folder: Path) -> None:
    tokenizer = short_bpe(folder)
    for _ in range(short_texts.MAX_TEXTS // 1000):
        assert tokenizer._merger is not None
        tokenizer.encode("abc " * 250)
    assert tokenizer._merger is None


def test_a_merge_into_no_piece(folder: Path) -> None:
    pieces: list[Piece] = [(LETTER_OF_BYTE[b], NORMAL) for b in range(256)]
    pieces.append(("long", NORMAL))
    path = write_vocab(folder / "bad.gguf", "gpt2", pieces, merges=["a b"], pre="gpt-2")
    tokenizer = load_tokenizer(open_gguf(path))
    assert tokenizer.encode("ba") == [98, 97]
    with pytest.raises(FileError, match=r"tokenizer\.ggml\.merges: has b'a b'"):
        tokenizer.encode("ab")
    with pytest.raises(FileError, match=r"tokenizer\.ggml\.merges"):
        tokenizer.prepare()


def test_duplicates_are_the_librarys(folder: Path) -> None:
    tokenizer = load_bpe(folder / "twice.gguf", ["a b"], [("ab", NORMAL)])
    assert isinstance(tokenizer, BpeTokenizer)
    assert tokenizer.encode("ab") == [256]
    assert tokenizer._merger is None
    assert any("duplicates" in warning for warning in tokenizer.warnings)


@pytest.mark.parametrize("n_scans", [0, 3, 64])
def test_index_of_strings(monkeypatch: pytest.MonkeyPatch, n_scans: int) -> None:
    monkeypatch.setattr(short_texts, "MAX_SCANS", n_scans)
    strings = [b"", b"a", b"ab", b"abcdefgh", b"abcdefghi", b"12345678 a 12345678"]
    strings += [b"12345678 b 12345678", b"\0", b"\0\0"]
    padded = [*strings, b"not the last eight bytes"]
    index = StringIndex(string_array(padded))
    assert [index.get(string) for string in strings] == list(range(len(strings)))
    assert index.get(b"12345678 c 12345678") is None
    assert index.get(b"b") is None
    twice = StringIndex(string_array([*padded, b"ab", b"not the last eight bytes again"]))
    with pytest.raises(LibraryNeeded):
        twice.get(b"ab")
    with pytest.raises(LibraryNeeded):
        StringIndex(string_array([]))


ASCII_TEXTS = st.text(st.characters(max_codepoint=127), max_size=40)
ASCII_WORDS = st.text("aBsL1 '/-_.$(\t\r\n", max_size=40)
LIBRARYS = {"deepseek-llm", "kimi-k2", "superbpe"}  # anchors, sets within sets
FAMILIES = {family.patterns: name for name, family in PRE_TOKENIZERS.items()}


@settings(max_examples=60, deadline=None)
@given(text=ASCII_TEXTS | ASCII_WORDS)
def test_words_of_ascii_text(text: str) -> None:
    for name, split, librarys in splitters():
        words = [word.translate(bpe.LETTER_OF_BYTE) for word in split(text)]
        assert words == [word for word, _ in librarys.pre_tokenize_str(text)], name


@lru_cache
def splitters() -> list[tuple[str, Callable[[str], list[str]], Any]]:
    """Each family that Python's expressions split, with both splitters."""
    found: list[tuple[str, Callable[[str], list[str]], Any]] = []
    for patterns, name in FAMILIES.items():
        with suppress(LibraryNeeded):  # before Python 3.11 also for possessive repetition
            split = AsciiSplitter(patterns).split
            found.append((name, split, bpe._splitter(PRE_TOKENIZERS[name])))
    assert len(found) >= 16
    return found


def test_expressions_that_only_the_library_reads() -> None:
    for name in LIBRARYS:
        with pytest.raises(LibraryNeeded):
            AsciiSplitter(PRE_TOKENIZERS[name].patterns)
    for pattern in (r"\p{Greek}", r"\P{L}", r"[a[b]]", r"[a&&b]", "a$", "^a", "("):
        with pytest.raises(LibraryNeeded):
            AsciiSplitter([pattern])
    assert AsciiSplitter([r"[\p{Han}]+|\p{M}|[^\p{L}\p{M}]"]).split("ab1") == ["ab", "1"]


def test_ascii_text_needs_no_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = short_bpe(folder)
    expected = tokenizer.encode("abc cc\n")

    def refuse(family: object) -> None:
        raise AssertionError("the library was asked")

    monkeypatch.setattr(bpe, "_splitter", refuse)
    assert short_bpe(folder).encode("abc cc\n") == expected
    with pytest.raises(AssertionError):
        short_bpe(folder).encode("abc é")


def test_the_leftmost_of_equal_pairs_comes_first() -> None:
    assert merge([b"a"] * 5, lambda a, b: 0 if len(a + b) == 2 else None) == [b"aa", b"aa", b"a"]
    ranks = {b"bc": 0, b"ab": 1}
    assert merge([b"a", b"b", b"c"], lambda a, b: ranks.get(a + b)) == [b"a", b"bc"]


def test_another_thread_prepares_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server does, while it tokenizes its first requests."""
    for tokenizer in (short_bpe(folder), short_spm(folder)):
        expected = tokenizer.encode("abc cc")
        take = ShortTexts.take

        def prepare_between(short: ShortTexts, text: str) -> bool:
            tokenizer.prepare()  # noqa: B023
            return take(short, text)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(ShortTexts, "take", prepare_between)
            assert tokenizer.encode("abc cc") == expected
        assert tokenizer._merger is None
