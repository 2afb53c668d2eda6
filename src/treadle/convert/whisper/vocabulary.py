"""Vocabularies that list only tokens in rank order, as tiktoken's do: their merges are computed."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.convert.hf.tokenizer.tiktoken import LETTER, halves_of
from treadle.tokenizer.bpe import BYTE_OF_LETTER


def letters(token: bytes) -> str:
    """Return a token's bytes in GPT-2's letters, one printable character per byte."""
    return "".join(LETTER[byte] for byte in token)


def bytes_of(text: str) -> bytes:
    """Return the bytes of a token in GPT-2's letters; b"" if it has other characters."""
    try:
        return bytes(BYTE_OF_LETTER[letter] for letter in text)
    except KeyError:
        return b""


def merges_of(tokens: Sequence[bytes]) -> list[str]:
    """Return the merges, "left right" in GPT-2's letters, that make the tokens, given in rank
    order; single bytes have none.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    pairs = (halves_of(token, ranks) for token in tokens if token)
    return [f"{letters(left)} {letters(right)}" for left, right in filter(None, pairs)]
