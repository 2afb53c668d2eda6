"""Tokens of real vocabularies are those of ``tokenizers``, over many scripts and planes of Unicode.

The references are built of the files' own pieces and merges; MiniLM's comes as a file.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

import treadle
from tests.real.conftest import Fetched
from tests.real.truth import texts
from treadle.files.gguf import open_gguf
from treadle.tokenizer.vocab import TokenType

N_TEXTS = 300  # of random runs; texts.txt comes on top
RANGES = (  # first and last code point of what is drawn
    *((0x20, 0x7E), (0x30, 0x39), (0xA1, 0xFF), (0x100, 0x24F), (0x250, 0x2AF), (0x300, 0x36F)),
    *((0x370, 0x3FF), (0x400, 0x52F), (0x531, 0x58F), (0x591, 0x5F4), (0x600, 0x6FF)),
    *((0x710, 0x74A), (0x780, 0x7B1), (0x7C0, 0x7FA), (0x900, 0x97F), (0x980, 0x9FE)),
    *((0xA01, 0xA76), (0xB82, 0xBFA), (0xC00, 0xC7F), (0xD02, 0xD7F), (0xE01, 0xE5B)),
    *((0xE81, 0xEDF), (0xF00, 0xFDA), (0x1000, 0x109F), (0x10A0, 0x10FF), (0x1100, 0x11FF)),
    *((0x1200, 0x139F), (0x13A0, 0x13FF), (0x1401, 0x167F), (0x1680, 0x16F8), (0x1780, 0x17F9)),
    *((0x1800, 0x18AA), (0x1D00, 0x1DBF), (0x1E00, 0x1FFE), (0x2000, 0x206F), (0x20A0, 0x20C0)),
    *((0x2100, 0x214F), (0x2190, 0x23FF), (0x2460, 0x24FF), (0x2500, 0x27BF), (0x2800, 0x28FF)),
    *((0x2C00, 0x2DFF), (0x2E80, 0x2FD5), (0x3000, 0x30FF), (0x3105, 0x31BF), (0x3400, 0x4DBF)),
    *((0x4E00, 0x9FFF), (0xA000, 0xA4C6), (0xA640, 0xA6F7), (0xAC00, 0xD7A3), (0xE000, 0xF8FF)),
    *((0xF900, 0xFAD9), (0xFB00, 0xFDFF), (0xFE00, 0xFE6F), (0xFF01, 0xFFEE)),
    *((0x10000, 0x100FA), (0x10280, 0x105FF), (0x10800, 0x10FFF), (0x11000, 0x11FFF)),
    *((0x12000, 0x12399), (0x13000, 0x1342F), (0x16800, 0x16FFF), (0x17000, 0x18AFF)),
    *((0x1B000, 0x1B2FF), (0x1D100, 0x1D1FF), (0x1D400, 0x1D7FF), (0x1E800, 0x1E95F)),
    *((0x1F000, 0x1F2FF), (0x1F300, 0x1F6FF), (0x1F900, 0x1FAFF), (0x20000, 0x2A6DF)),
    *((0x2F800, 0x2FA1D), (0x30000, 0x3134A), (0xE0020, 0xE007F), (0xF0000, 0xF00FF)),
    (0x100000, 0x1000FF),
)
JOINTS = (
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "",
    "",
    "",
    ", ",
    ". ",
    "'s ",
    " (",
    ")",
    "-",
    "\u00a0",
    "\r\n",
)
FIXED = (
    "",
    " ",
    "   ",
    "\n\n\n",
    "a  b",
    " leading",
    "trailing ",
    "don't I'll we've they're",
    "1234567890 12,345.67 ½ ² ٣",
    "x=1;y+=2//3",
    "https://example.com/a?b=c&d=%20#e",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇫🇷",
    "e\u0301 é ﬁ Ⅷ ㍿",
    "İstanbul ı ß ẞ ǅ",
    "ＡＢＣ １２３",
    "\ufeffbom",
    "ﷺ",
)


def corpus() -> Iterator[str]:
    """The same texts in each run: runs of a script, and of several side by side."""
    drawn = random.Random(5)
    yield from FIXED
    yield from texts().values()
    for first, last in RANGES:
        yield "".join(chr(drawn.randint(first, last)) for _ in range(40))
    for _ in range(N_TEXTS):
        made = []
        for _ in range(drawn.randint(1, 12)):
            first, last = drawn.choice(RANGES)
            made += [chr(drawn.randint(first, last)) for _ in range(drawn.randint(1, 8))]
            made.append(drawn.choice(JOINTS))
        yield "".join(made)


def same(model: treadle.Model, reference: Tokenizer) -> None:
    """Every text has the same ids, and its bytes come back."""
    wrong = []
    for text in corpus():
        expected = reference.encode(text, add_special_tokens=False).ids
        found = model.tokenize(text, bos=False, special=False)
        if found != expected:
            wrong.append((text, found, expected))
    assert not wrong, (len(wrong), wrong[0])


def comes_back(model: treadle.Model) -> None:
    """Tokens of a text spell it."""
    for text in corpus():
        assert model.detokenize(model.tokenize(text, bos=False, special=False)) == text


def test_smollm2(smollm2: treadle.Model) -> None:
    """Byte-level BPE behind the regex of GPT-2, digits alone."""
    stored: Any = open_gguf(smollm2.path).metadata
    pieces = {piece: i for i, piece in enumerate(stored["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in stored["tokenizer.ggml.merges"]]
    reference = Tokenizer(models.BPE(vocab=pieces, merges=merges))
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    same(smollm2, reference)
    comes_back(smollm2)


def merges_of(pieces: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, as transformers finds them in a vocabulary of scores:
    the best score first, then the ids of the two.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for piece, i in pieces.items():
        for at in range(1, len(piece)):
            left = pieces.get(piece[:at])
            right = pieces.get(piece[at:])
            if left is not None and right is not None:
                found.append((-scores[i], left, right, piece[:at], piece[at:]))
    return [(left, right) for *_, left, right in sorted(found)]


def test_gemma3(gemma3: treadle.Model) -> None:
    """SentencePiece's BPE of 262144 pieces, bytes where there is no piece."""
    stored: Any = open_gguf(gemma3.path).metadata
    pieces = {piece: i for i, piece in enumerate(stored["tokenizer.ggml.tokens"])}
    types = list(stored["tokenizer.ggml.token_type"])
    merges = merges_of(pieces, list(stored["tokenizer.ggml.scores"]))
    reference = Tokenizer(models.BPE(vocab=pieces, merges=merges, byte_fallback=True))
    reference.normalizer = normalizers.Replace(" ", "▁")
    own = [piece for piece, i in pieces.items() if types[i] == TokenType.USER_DEFINED]
    reference.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in own])
    same(gemma3, reference)
    comes_back(gemma3)


def test_minilm(fetched: Fetched) -> None:
    """WordPiece of its tokenizer.json."""
    folder = fetched("minilm")
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference.no_truncation()
    reference.no_padding()
    with treadle.load(folder, threads=1) as model:
        same(model, reference)
