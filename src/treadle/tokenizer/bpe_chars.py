"""Byte-pair vocabularies over characters: SentencePiece's pieces, in which U+2581 stands for a
space, merged by a list of pairs in place of scores, by ``tokenizers``.

GGUF says so by the model ``gemma4``, or by the model ``gpt2`` and one of a few pre-tokenizers; the
converter then writes pieces of bytes as ordinary ones.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from treadle.tokenizer.bpe import merge_model
from treadle.tokenizer.spm import SpmTokenizer
from treadle.tokenizer.tokenizer import PRE, Tokenizer
from treadle.tokenizer.vocab import TokenType, Vocab, texts

_LINES = re.compile(r"(\n+)")
_BYTES = {b"<0x%02X>" % byte for byte in range(256)}
NUL = "\0"  # in no piece, where some have newlines


class MergedTokenizer(SpmTokenizer):
    """Lines, merged pair by pair; a character without a piece is its bytes' pieces. Of ends of
    lines that follow each other a piece is taken whole.
    """

    pre = "gemma4"
    whole_ends = True
    adds = True  # BOS, if the file does not say

    def __init__(self, vocab: Vocab) -> None:
        Tokenizer.__init__(self, vocab, add_bos=self.adds)
        self.pre = vocab.text(PRE, self.pre)
        self.adds_space = False
        if not (vocab.types == TokenType.BYTE).any():
            self._name_bytes(vocab)
        self._byte_of = self._byte_pieces(vocab.types)
        if set(self._byte_of.values()) != set(range(256)):
            what = f"has pieces for {len(self._byte_of)} bytes"
            vocab.fail("tokenizer.ggml.tokens", what, "<0x00> to <0xFF>")
        self._unk = self.unk
        self._tokenizer = _build(vocab)

    def _name_bytes(self, vocab: Vocab) -> None:
        vocab.types[np.array([*vocab.find(_BYTES).values()], np.intp)] = TokenType.BYTE
        self._kinds = vocab.types.astype("u1").tobytes()

    def encode_plain(self, text: str, *, start: bool) -> list[int]:
        """Ids through tokenizers; where a text starts makes no difference here."""
        ids: list[int] = []
        # llama.cpp cuts so too: ends of lines would else be merged with what stands around them.
        for part in filter(None, _LINES.split(text.replace(" ", "\u2581"))):
            ends = self.whole_ends and part[0] == "\n"
            whole = self._tokenizer.token_to_id(part) if ends else None
            made = self._tokenizer.encode(part, add_special_tokens=False).ids
            ids += made if whole is None else [whole]
        return ids


class PlainMergedTokenizer(MergedTokenizer):
    """The same with all ends of lines merged (Sarvam)."""

    whole_ends = False
    adds = False


def _build(vocab: Vocab) -> Any:
    from tokenizers import Tokenizer as Merger

    try:
        return Merger(merge_model(vocab, _pairs(vocab), NUL, byte_fallback=True))
    except Exception as e:  # tokenizers raises Exception itself
        what = "merges of and into pieces"
        raise vocab.error("tokenizer.ggml.merges", str(e), what) from None


def _pairs(vocab: Vocab) -> list[tuple[str, str]]:
    """The merges, "left right", in order of rank."""
    lines = texts(vocab.merges(), NUL)
    return [(line[:cut], line[cut + 1 :]) for line in lines if (cut := line.find(" ", 1)) > 0]
