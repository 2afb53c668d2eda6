"""RWKV's vocabularies (``rwkv``): the longest piece that stands there, and escapes in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tokenizer.vocabularies import CONTROL, NORMAL, UNKNOWN, UNUSED, Piece, write_vocab
from treadle.chat.template.template import load_template
from treadle.files.gguf import open_gguf
from treadle.tokenizer.tokenizer import Tokenizer, load_tokenizer

WORDS = [
    b"\n\n",
    b"ab",
    b"abcd",
    b"b\\",
    b"'",
    b"\r\t",
    "é漢".encode(),
    "漢".encode()[1:],
    b"x" * 9,
]
SPELT = [repr(bytes([b]))[2:-1] for b in range(256)] + [repr(word)[2:-1] for word in WORDS]
# As llama.cpp's converter writes them: all bytes, then longer ones, then rows without a piece.
PIECES: list[Piece] = [("<s>", CONTROL), *((piece, NORMAL) for piece in SPELT)]
PIECES.append((f"[PAD{len(PIECES)}]", UNUSED))
NEWLINES = 257


def load(path: Path, pieces: list[Piece] = PIECES, **keys: Any) -> Tokenizer:
    keys = {"bos_token_id": 0, "eos_token_id": 0, "eot_token_id": NEWLINES} | keys
    return load_tokenizer(open_gguf(write_vocab(path, "rwkv", pieces, arch="rwkv7", **keys)))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abcd", [b"abcd"]),
        ("abcab", [b"ab", b"c", b"ab"]),  # abc begins abcd
        ("b\\'", [b"b\\", b"'"]),
        ("\n\n\n\r\t", [b"\n\n", b"\n", b"\r\t"]),
        ("é漢漢", ["é漢".encode(), "漢".encode()[:1], "漢".encode()[1:]]),
        ("x" * 10, [b"x" * 9, b"x"]),
        ("\0\x7f", [b"\0", b"\x7f"]),
        ("", []),
    ],
)
def test_pieces(text: str, pieces: list[bytes], tmp_path: Path) -> None:
    tokenizer = load(tmp_path / "v.gguf")
    ids = tokenizer.encode(text)
    assert [tokenizer.token_bytes(token) for token in ids] == pieces
    assert tokenizer.decode(ids) == text


def test_what_is_special(tmp_path: Path) -> None:
    """Text does not become control tokens, nor rows without a piece; two newlines end a turn."""
    tokenizer = load(tmp_path / "v.gguf")
    assert (tokenizer.bos, tokenizer.add_bos, sorted(tokenizer.eog)) == (0, False, [0, NEWLINES])
    padding = PIECES[-1][0]
    assert isinstance(padding, str)
    for name in ("<s>", padding):
        assert len(tokenizer.encode(name)) == len(name)
    assert tokenizer.encode("<s>a\n\n", special=True) == [0, ord("a") + 1, NEWLINES]
    assert tokenizer.all_token_bytes()[: NEWLINES + 1] == [
        *(b"<s>", *(bytes([b]) for b in range(256)), b"\n\n")
    ]


def test_the_last_of_two_that_are_alike(tmp_path: Path) -> None:
    pieces: list[Piece] = [*PIECES, ("\\x61b", NORMAL), ("\\x4A", NORMAL)]
    tokenizer = load(tmp_path / "v.gguf", pieces)
    assert tokenizer.encode("abJ") == [len(pieces) - 2, len(pieces) - 1]


def test_a_byte_without_a_piece(tmp_path: Path) -> None:
    pieces: list[Piece] = [("<s>", CONTROL), ("<unk>", UNKNOWN), ("a", NORMAL)]
    tokenizer = load(tmp_path / "v.gguf", pieces, eot_token_id=None)
    with pytest.warns(UserWarning, match="no token for 'b': dropped"):
        assert tokenizer.encode("bab") == [2]
    # The byte that "é" shares with another piece goes with the rest of it.
    pieces += [("b\\xc3", NORMAL), ("\\xc3", NORMAL), ("漢", NORMAL)]
    tokenizer = load(tmp_path / "w.gguf", pieces, eot_token_id=None)
    with pytest.warns(UserWarning, match=r"no token for '\\xe9'"):
        assert tokenizer.encode("aéa漢") == [2, 2, 5]
    known = load(tmp_path / "u.gguf", pieces, eot_token_id=None, unknown_token_id=1)
    assert known.encode("ba") == [1, 2]


@pytest.mark.parametrize("named", [None, "rwkv-world"])
def test_templates(named: str | None, tmp_path: Path) -> None:
    """The converter writes the name of one where it does not find its own."""
    path = write_vocab(tmp_path / "v.gguf", "rwkv", PIECES, arch="rwkv7", bos_token_id=0)
    if named is not None:
        path = write_vocab(
            tmp_path / "n.gguf", "rwkv", PIECES, bos_token_id=0, tokenizer__chat_template=named
        )
    template = load_template(open_gguf(path))
    assert template.builtin == "rwkv-world"
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": " Hello "},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Bye"},
    ]
    assert template.render(messages) == (
        "<s>System: Be short.\n\nUser: Hello\n\nAssistant: Hi\n\nUser: Bye\n\nAssistant:"
    )
