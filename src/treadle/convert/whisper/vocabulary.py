"""Vocabularies without merges: their tokens in rank order, as tiktoken has them."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.convert.hf.tokenizer.tiktoken import LETTER, halves_of
from treadle.tokenizer.bpe import BYTE_OF_LETTER


def letters(token: bytes) -> str:
    """Return a token's bytes in GPT-2's letters."""
    return "".join(LETTER[byte] for byte in token)


def bytes_of(text: str) -> bytes:
    """Return the bytes of a token in GPT-2's letters; b"" for one with others."""
    try:
        return bytes(BYTE_OF_LETTER[letter] for letter in text)
    except KeyError:
        return b""


def merges_of(tokens: Sequence[bytes]) -> list[str]:
    """Return the merges that make the tokens, which stand in rank order. Bytes have none."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    pairs = (halves_of(token, ranks) for token in tokens if token)
    return [f"{letters(left)} {letters(right)}" for left, right in filter(None, pairs)]
