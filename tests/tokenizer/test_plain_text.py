"""Plain text never becomes a control token, in any kind of vocabulary.

A person's words are encoded without ``special``. Whatever they spell, by name or by what a library
calls a token inside, the ids are those of text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenizer.vocabularies import (
    BYTE,
    CONTROL,
    LETTER_OF_BYTE,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Piece,
    spm_pieces,
    write_vocab,
)
from treadle.base.caller_warnings import warnings_to
from treadle.files.gguf import open_gguf
from treadle.tokenizer.tokenizer import MODELS, Tokenizer, load_tokenizer

# Names that a text may well have: marks, plain words, what is merged of letters, one letter.
HIDDEN = ["<pad>", "</s>", "<|im_end|>", "[MASK]", "ab", "abc", "end", "the end", "b", "\n\n", "é"]
NEVER: list[Piece] = [(name, CONTROL) for name in HIDDEN]
NEVER += [("unused", UNUSED), ("abcd", UNUSED), ("unknown", UNKNOWN)]
LETTERS: list[Piece] = [(c, NORMAL) for c in "abcdehnkostuw<>[]|/_\n"]
WORDS: list[Piece] = [("he", NORMAL), ("cd", NORMAL), ("<mine>", USER_DEFINED)]
MERGES = ["a b", "ab c", "abc d", "e n", "en d", "h e", "c d", "Ġ a"]


def spelt(text: str) -> str:
    """As byte-level vocabularies write it."""
    return "".join(LETTER_OF_BYTE[byte] for byte in text.encode())


def marked(pieces: list[Piece]) -> list[Piece]:
    """With the mark that a space is written as, too."""
    return [*pieces, *(("▁" + str(text), kind) for text, kind in pieces if kind is NORMAL)]


def scores(pieces: list[Piece]) -> list[float]:
    """Long pieces, hidden ones above all, are the best."""
    return [float(len(text)) for text, _ in pieces]


def spm(path: Path) -> Path:
    pieces = [*spm_pieces(), *NEVER, ("▁", NORMAL), *marked([*LETTERS, *WORDS])]
    return write_vocab(path, "llama", pieces, scores=scores(pieces))


def bpe(path: Path, *, byte_names: bool = False, pre: str = "gpt-2") -> Path:
    pieces: list[Piece] = [(LETTER_OF_BYTE[byte], NORMAL) for byte in range(256)]
    pieces = [(text, kind) for text, kind in pieces if text != "b"]
    made = [("en", NORMAL), *WORDS, ("Ġa", NORMAL)]
    names = [(spelt(str(text)) if byte_names else text, kind) for text, kind in NEVER]
    return write_vocab(path, "gpt2", [*pieces, *names, *made], merges=MERGES, pre=pre)


def merged(path: Path) -> Path:
    pieces = [*spm_pieces(), *NEVER, ("en", NORMAL), *marked([*LETTERS, *WORDS]), ("▁", NORMAL)]
    return write_vocab(path, "gemma4", pieces, merges=MERGES[:-1])


def unspaced(path: Path) -> Path:
    pieces = [*NEVER, ("en", NORMAL), *LETTERS, *WORDS, ("<unk>", UNKNOWN)]
    keys: dict[str, Any] = {"unknown_token_id": len(pieces) - 1, "pre": "whitespace"}
    return write_vocab(path, "whitespace", pieces, merges=MERGES[:-1], **keys)


def wordpiece(path: Path) -> Path:
    pieces = [("[UNK]", UNKNOWN), *NEVER, *marked([*LETTERS, *WORDS])]
    return write_vocab(path, "bert", pieces, unknown_token_id=0)


def unigram(path: Path) -> Path:
    pieces = [("<unk>", UNKNOWN), *NEVER, ("▁", NORMAL), *marked([*LETTERS, *WORDS])]
    return write_vocab(path, "t5", pieces, scores=scores(pieces), unknown_token_id=0)


def unigram_of_bytes(path: Path) -> Path:
    pieces = [*spm_pieces(), *NEVER, ("▁", NORMAL), *marked([*LETTERS, *WORDS])]
    return write_vocab(path, "t5", pieces, scores=scores(pieces), unknown_token_id=0)


def longest(path: Path) -> Path:
    pieces: list[Piece] = [("<s>", CONTROL), *NEVER, *LETTERS, *WORDS]
    pieces += [(f"\\x{byte:02x}", NORMAL) for byte in range(256)]
    return write_vocab(path, "rwkv", pieces, arch="rwkv7")


KINDS: dict[str, Callable[[Path], Path]] = {
    "llama": spm,
    "gpt2": bpe,
    "gpt2, names in letters": lambda path: bpe(path, byte_names=True),
    "gpt2, words whole": lambda path: bpe(path, byte_names=True, pre="llama-bpe"),
    "gemma4": merged,
    "whitespace": unspaced,
    "bert": wordpiece,
    "t5": unigram,
    "t5, bytes": unigram_of_bytes,
    "rwkv": longest,
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("plain")
    made = enumerate(KINDS.items())
    return {
        name: load_tokenizer(open_gguf(write(folder / f"{i}.gguf"))) for i, (name, write) in made
    }


def check(tokenizer: Tokenizer, text: str) -> None:
    with warnings_to(str):  # of characters that it has no token for
        ids = tokenizer.encode(text, bos=False, special=False)
    kinds = tokenizer.vocab.types
    wrong = [id for id in ids if kinds[id] in (CONTROL, UNUSED)]
    wrong += [id for id in ids if kinds[id] == UNKNOWN and id != tokenizer.unk]
    assert not wrong, (text, [tokenizer.piece(id) for id in wrong])


def test_every_kind_is_here() -> None:
    assert {name.partition(",")[0] for name in KINDS} == set(MODELS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_names_of_control_tokens_are_text(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    n = tokenizer.n_vocab
    for name in (*HIDDEN, "unused", "abcd", "unknown", "<s>", "<unk>"):
        for text in (name, f"a {name}", f"{name}{name}", f"{name} c", spelt(name)):
            check(tokenizer, text)
    for token in range(n):  # what a token is, or once was, called inside
        for text in (f"\0{token}", f" {token}", f"▁{token}", f"<{token}>", f"\0{token}\0"):
            check(tokenizer, text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(draw=st.data())
def test_no_text_is_a_control_token(
    kind: str, tokenizers: dict[str, Tokenizer], draw: st.DataObject
) -> None:
    names = [str(name) for name, _ in NEVER]
    words = st.sampled_from([*names, *map(spelt, names), "\0", " ", "▁", "Ġ", "##", "a", "0", "1"])
    parts = draw.draw(st.lists(words | st.text(max_size=4), max_size=12))
    check(tokenizers[kind], "".join(parts))


def test_a_byte_that_only_a_control_token_is(tokenizers: dict[str, Tokenizer]) -> None:
    """It is left out, with a warning."""
    with pytest.warns(UserWarning, match="no token for 'b': dropped"):
        ids = tokenizers["gpt2"].encode("abc", special=False)
    assert tokenizers["gpt2"].decode(ids) == "ac"


def test_names_inside_unigram_vocabularies(tmp_path: Path) -> None:
    pieces: list[Piece] = [("<unk>", UNKNOWN), ("</s>", CONTROL), ("<pad>", CONTROL), ("▁", NORMAL)]
    pieces += [(c, NORMAL) for c in "\x0012a"] + [("<0x41>", BYTE)]
    path = write_vocab(tmp_path / "v.gguf", "t5", pieces, scores=scores(pieces), unknown_token_id=0)
    tokenizer = load_tokenizer(open_gguf(path))
    for text in ("\x001", "\x002", "a\x002a", "▁1", " 1", " 2"):
        ids = tokenizer.encode(text, bos=False, special=False)
        assert not {1, 2}.intersection(ids), text
    assert tokenizer.encode("</s>", bos=False, special=True) == [1]
