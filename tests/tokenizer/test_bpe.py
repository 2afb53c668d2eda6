"""Byte-level BPE: families of pre-tokenizers, merges, bytes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split

from tests.tokenizer.conftest import Load
from tests.tokenizer.vocabularies import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    Piece,
    letters,
    load_bpe,
    write_vocab,
)
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.files.metadata import string_array
from treadle.tokenizer.bpe import BYTE_OF_LETTER, merge_pairs
from treadle.tokenizer.pretokenizers import PRE_TOKENIZERS
from treadle.tokenizer.tokenizer import load_tokenizer
from treadle.tokenizer.vocab import texts


def words(pre: str, text: str) -> list[str]:
    splits = [Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre].patterns]
    return [word for word, _ in Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@settings(max_examples=30, deadline=None)
@given(text=st.text() | st.text("aB1 '.\r\n\t漢é"))
def test_every_family_keeps_every_character(pre: str, text: str) -> None:
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert "".join(words(pre, text)) == text


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "I've 1234 x!\n\nyY", "I|'ve| 1234| x|!|\n|\n|yY"),
        ("llama-bpe", "I'VE 1234 x!\n\nyY", "I|'VE| |123|4| x|!\n\n|yY"),
        ("smaug-bpe", "I'VE 1234 x!\n\nyY", "I|'VE| |123|4| x|!\n\n|yY"),
        ("qwen2", "I'VE 12 x!\n\nyY", "I|'VE| |1|2| x|!\n\n|yY"),
        ("starcoder", "I've 12 x!\n\nyY", "I|'ve| |1|2| x|!|\n|\n|yY"),
        ("tekken", "I've 12 x/\n\nyY", "I|'ve| |1|2| x|/\n\n|y|Y"),
        ("gpt-4o", "I've 1234 x/\n\nyY", "I've| |123|4| x|/\n\n|y|Y"),
        ("cohere2moe", "I've 1234567 x/\n\nyY", "I've| |1|234|567| x|/\n\n|y|Y"),
        ("minimax-m2", "I've 1234 x/\n\nyY", "I've| |123|4| x|/\n\n|y|Y"),
        ("seed-coder", "I'VE 12 x!\n\nyY", "I|'VE| |1|2| x|!|\n\n|yY"),
        ("minicpm5", "I'VE 1234 x!\n\nyY", "I|'VE| |123|4| x|!\n\n|yY"),
        ("joyai-llm", "I've 1234 x!\n\nyY", "I|'ve| |123|4| x|!\n\n|yY"),
        ("viking", "ab 12 x, y", "ab| |1|2| x|,| y"),
        ("laguna", "I'VE 12 x!\n\nyY", "I|'VE| |1|2| x|!|\n\n|yY"),
        ("jais-2", "I'VE 1234     x\n\nyY", "I|'VE| |123|4|    | x|\n\n|yY"),
        ("solar-open", "I'VE 12 x!\n\nyY", "I|'VE| |1|2| x|!\n\n|yY"),
        ("youtu", "I've 12 x/\nyY가漢カ、！ㄅ", "I've| |1|2| x|/\n|y|Y|가|漢カ|、！|ㄅ"),
        ("falcon", "I've 1234 x!`", "I|'|ve| |123|4| x|!`"),
        ("default", "I've 1234 x!`", "I|'|ve| |123|4| x|!|`"),
        ("deepseek-coder", "I've 12 x!\n\nyY", "I|'|ve| |1|2| x|!|\n|\n|yY"),
        ("deepseek-llm", "Ωa 12漢字 x!\n", "Ω|a| |12|漢字| x|!|\n"),  # its punctuation has a-z
        ("bailingmoe", "I'VE 12 x!\n\nyY", "I|'VE| |1|2| x|!\n\n|yY"),
        ("bailingmoe2", "don't x \n\ny", "don|'t| x| \n\n|y"),
        ("nanochat", "I'VE 1234 don't!\n\nyY", "I|'VE| |12|34| don|'t|!\n\n|yY"),
        ("kimi-k2", "I'VE 1234 don't漢字x 日本!/\n", "I'VE| |123|4| don't|漢字|x| |日本|!/\n"),
        ("afmoe", "#ab 1234567 12漢字x\n", "#ab| |1|234|567| |12|漢字|x|\n"),
        ("exaone-moe", "one two's 12 x/\n\ny", "one two|'s| |1|2| x|/\n|\n|y"),
        ("deepseek-v3", "#ab 1234漢字x", "#ab| |123|4|漢字|x"),
        ("bloom", "I've 12 x!\n\nyY (a) 。b", "I've| 12| x|!\n\n|yY| (|a|) 。|b"),
        ("qwen35", "e\u0301a 12", "e\u0301a| |1|2"),
        ("glm5", "I'VE 1234 x!\n\nyY", "I|'VE| |123|4| x|!\n\n|yY"),
        ("hy_v4", "#ab 1234漢字x", "#ab| |123|4|漢字|x"),
        ("grok-2", "I'VE 12 x!\n\nyY", "I|'VE| |1|2| x|!\n\n|yY"),
        ("talkie", "I've 1234 x/\n\nyY", "I've| |123|4| x|/\n\n|y|Y"),
        ("inkling", "e\u0301A 1234 x/\n\nyY", "e\u0301|A| |123|4| x|/\n\n|y|Y"),
        ("llada-moe", "don't 12 x \n\ny", "don|'t| |1|2| x| \n\n|y"),
        ("ufakzeka", "Ankara'da 12 x!\n\ny", "Ankara|'da| |1|2| x|!\n\n|y"),
        ("spark2_5", "#ab 1234漢字x!\n\n y", "#ab| |1|2|3|4|漢字|x|!|\n|\n| y"),
        ("chameleon", "I've 12 IMGIMGABZ!?\n    x", "I|'|ve| |1|2| |IMGIMGABZ|!|?|\n|    |x"),
        ("superbpe", "I've 1234567 x 123456", "I've |1|234|567| x |123|456"),
    ],
)
def test_words(pre: str, text: str, expected: str) -> None:
    assert "|".join(words(pre, text)) == expected


@settings(max_examples=300, deadline=None)
@given(text=st.text("1234567890\u0663\u00b2\u2167a ", max_size=40))
def test_superbpe_cuts_as_its_own_expression_does(text: str) -> None:
    """That one is quadratic: of 100,000 digits each looks to the end."""
    own = [Split(Regex(cut), "isolated") for cut in (r"\p{N}+", r"(?=(\d{3})+(?!\d))")]
    assert words("superbpe", text) == [word for word, _ in Sequence(own).pre_tokenize_str(text)]


OF_TINY_AYA = r"\d{1,3}(?=(?:\d{3})*\b)", *PRE_TOKENIZERS["gpt-4o"].patterns


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(text=st.text("1234567890\u0663\u00b2\u2167\u0301aB _,.\n漢", max_size=40))
def test_tiny_aya_cuts_as_its_own_expression_does(text: str) -> None:
    own = Sequence([Split(Regex(cut), "isolated") for cut in OF_TINY_AYA])
    assert words("tiny_aya", text) == [word for word, _ in own.pre_tokenize_str(text)]


@pytest.mark.parametrize("end", ["", "a"])
@pytest.mark.parametrize("pre", ["tiny_aya", "superbpe"])
def test_twice_the_digits_take_twice_the_time(pre: str, end: str) -> None:
    """Sixteen times: 16 of linear work, 256 where each looks to the end."""

    def time_s(n: int) -> float:
        text = "7" * n + end
        taken = []
        for _ in range(3):
            start = time.thread_time()
            words(pre, text)
            taken.append(time.thread_time() - start)
        return min(taken)

    assert time_s(16_000) < 64 * time_s(1000)


def test_unknown_family_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="from-the-future"):
        load_bpe(tmp_path / "v.gguf", pre="from-the-future")


@pytest.mark.parametrize(
    ("arch", "more", "expected"),
    [
        ("qwen2", [], "qwen2"),
        ("llama", [("<|begin_of_text|>", CONTROL)], "llama-bpe"),
        ("llama", [], "default"),
        ("falcon", [], "falcon"),
        ("phi2", [], "gpt-2"),
    ],
)
def test_missing_family_is_a_guess_with_a_warning(
    tmp_path: Path, arch: str, more: list[tuple[str, object]], expected: str
) -> None:
    tokenizer = load_bpe(tmp_path / "v.gguf", more=more, pre=None, arch=arch)  # type: ignore[arg-type]
    assert tokenizer.pre == expected
    assert "is a guess" in tokenizer.warnings[0]


def test_ignore_merges(tmp_path: Path) -> None:
    """Llama 3 takes a word that is a piece whole, even where no merge leads to it."""
    more = [("abc", NORMAL)]
    llama3 = load_bpe(tmp_path / "a.gguf", ["a b"], more, pre="llama-bpe", bos_token_id=0)
    assert llama3.encode("abc", bos=False) == [257]
    assert llama3.add_bos
    smaug = load_bpe(tmp_path / "b.gguf", ["a b"], more, pre="smaug-bpe", bos_token_id=0)
    assert smaug.encode("abc") == [256, ord("c")]


def test_added_pieces_are_text_as_it_stands(tmp_path: Path) -> None:
    more = [("  ", USER_DEFINED), ("<é>", CONTROL), (letters(b"\xff"), NORMAL), ("漢", NORMAL)]
    tokenizer = load_bpe(tmp_path / "v.gguf", more=more)
    assert tokenizer.encode("a  a") == [ord("a"), 256, ord("a")]
    assert tokenizer.decode([256, 257], special=True) == "  <é>"
    assert tokenizer.token_bytes(258) == b"\xff"
    assert tokenizer.token_bytes(259) == "漢".encode()  # not letters for bytes


def test_characters_without_pieces_are_left_out(load: Load) -> None:
    falcon = load("falcon")  # lacks 28 bytes, 0xF2 among them
    assert falcon.decode(falcon.encode("🦙")) == "🦙"
    with pytest.warns(UserWarning, match=r"no token for '\\U00080000': dropped"):
        assert falcon.decode(falcon.encode("a b\U00080000c🦙")) == "a bc🦙"
    with pytest.warns(UserWarning, match="dropped"):
        assert falcon.encode("\U00080000", bos=False) == []


def test_bytes_without_pieces_are_left_out_as_tokenizers_does(tmp_path: Path) -> None:
    """SmolLM2's vocabulary has no 0x16. Words are cut before it goes."""
    more: list[Piece] = [(letters(b"ab"), NORMAL), (letters(b"  "), NORMAL)]
    pieces: list[Piece] = [(letters(bytes([b])), NORMAL) for b in range(256) if b != 0x16]
    merges = [f"{letters(b'a')} {letters(b'b')}", f"{letters(b' ')} {letters(b' ')}"]
    path = write_vocab(tmp_path / "v.gguf", "gpt2", [*pieces, *more], merges=merges, pre="gpt-2")
    tokenizer = load_tokenizer(open_gguf(path))
    with pytest.warns(UserWarning, match=r"no token for '\\x16': dropped from the text"):
        ids = tokenizer.encode("a\x16b \x16 ab", bos=False)
    assert [tokenizer.piece(id) for id in ids] == ["a", "b", "Ġ", "Ġ", "ab"]


def test_letters() -> None:
    assert sorted(BYTE_OF_LETTER.values()) == list(range(256))
    assert letters(b" \n!a\xad") == "ĠĊ!aŃ"


def test_merges() -> None:
    assert merge_pairs(string_array([b"a b", "Ġ t".encode()])) == [("a", "b"), ("Ġ", "t")]
    assert merge_pairs(string_array([])) == []
    # A left side of one space, and lines that are no pair, go the slow way.
    assert merge_pairs(string_array([b"  b", b"ab", b"c d"])) == [(" ", "b"), ("c", "d")]
    assert merge_pairs(string_array([b"ab", b"c d e", b"f g"])) == [("c", "d e"), ("f", "g")]


def test_texts() -> None:
    pieces = [b"a", b"", "漢".encode(), b" \xff", b"b" * 40]
    assert texts(string_array(pieces)) == ["a", "", "漢", " \ufffd", "b" * 40]
    assert texts(string_array([*pieces, b"\n"]))[-1] == "\n"
    assert texts(string_array([])) == []


def test_merge_into_no_piece_is_told(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"tokenizer.ggml.merges": ["x yz"]}
    with pytest.raises(FileError, match="merges"):
        load_bpe(tmp_path / "v.gguf", **keys)


def test_duplicates_the_first_wins(tmp_path: Path) -> None:
    tokenizer = load_bpe(tmp_path / "v.gguf", more=[("a", NORMAL)])
    assert tokenizer.encode("a") == [ord("a")]
    assert "duplicates" in tokenizer.warnings[0]
