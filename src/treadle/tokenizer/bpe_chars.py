"""Character-level BPE vocabularies: SentencePiece's pieces, with U+2581 for a space, merged by a
list of pairs in place of scores, by ``tokenizers``.

GGUF marks them by the model ``gemma4``, or by the model ``gpt2`` and one of a few pre-tokenizers;
the converter then writes byte pieces as ordinary ones.
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
NUL = "\0"  # occurs in no piece, while some have newlines


class MergedTokenizer(SpmTokenizer):
    """Character-level BPE of lines; a character without a piece becomes byte pieces. A run of
    newlines is encoded apart from the text around it; if it is a piece, as that piece.
    """

    pre = "gemma4"
    whole_ends = True
    adds = True  # adds BOS, if the file does not say

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
        """Return the ids of ``text``; ``start`` makes no difference here."""
        ids: list[int] = []
        # As in llama.cpp: otherwise newlines would be merged with the text around them.
        for part in filter(None, _LINES.split(text.replace(" ", "\u2581"))):
            ends = self.whole_ends and part[0] == "\n"
            whole = self._tokenizer.token_to_id(part) if ends else None
            made = self._tokenizer.encode(part, add_special_tokens=False).ids
            ids += made if whole is None else [whole]
        return ids


class PlainMergedTokenizer(MergedTokenizer):
    """Character-level BPE of lines, where a run of newlines, too, is encoded by merges, even if it
    is a piece (Sarvam).
    """

    whole_ends = False
    adds = False


def _build(vocab: Vocab) -> Any:
    from tokenizers import Tokenizer as Merger

    try:
        return Merger(merge_model(vocab, _pairs(vocab), NUL, byte_fallback=True))
    except Exception as e:  # tokenizers raises plain Exception
        what = "merges of known pieces into known pieces"
        raise vocab.error("tokenizer.ggml.merges", str(e), what) from None


def _pairs(vocab: Vocab) -> list[tuple[str, str]]:
    """Return the merges "left right" as pairs, in order of rank, without those that have no
    space.
    """
    lines = texts(vocab.merges(), NUL)
    return [(line[:cut], line[cut + 1 :]) for line in lines if (cut := line.find(" ", 1)) > 0]
