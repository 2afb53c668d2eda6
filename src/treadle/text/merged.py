"""Byte-pair vocabularies over characters (``gemma4``): SentencePiece's pieces, in which U+2581
stands for a space, merged by a list of pairs in place of scores, by ``tokenizers``.
"""

from __future__ import annotations

import re
from typing import Any

from treadle.text.spm import SpmTokenizer
from treadle.text.tokenizer import Tokenizer
from treadle.text.vocab import Vocab, texts

_LINES = re.compile(r"(\n+)")
NUL = "\0"  # in no piece, where some have newlines


class MergedTokenizer(SpmTokenizer):
    """Lines, merged pair by pair; a character without a piece is its bytes' pieces. Of ends of
    lines that follow each other a piece is taken whole.
    """

    pre = "gemma4"

    def __init__(self, vocab: Vocab) -> None:
        Tokenizer.__init__(self, vocab, add_bos=True)
        self.adds_space = False
        self._byte_of = self._byte_pieces(vocab.types)
        if set(self._byte_of.values()) != set(range(256)):
            what = f"has pieces for {len(self._byte_of)} bytes"
            vocab.fail("tokenizer.ggml.tokens", what, "<0x00> to <0xFF>")
        self._unk = self.unk
        self._tokenizer = _build(vocab)

    def encode_plain(self, text: str, *, start: bool) -> list[int]:
        """Ids through tokenizers; where a text starts makes no difference here."""
        ids: list[int] = []
        # llama.cpp cuts so too: ends of lines would else be merged with what stands around them.
        for part in filter(None, _LINES.split(text.replace(" ", "\u2581"))):
            whole = self._tokenizer.token_to_id(part) if part[0] == "\n" else None
            made = self._tokenizer.encode(part, add_special_tokens=False).ids
            ids += made if whole is None else [whole]
        return ids


def _build(vocab: Vocab) -> Any:
    from tokenizers import Tokenizer as Merger
    from tokenizers.models import BPE

    pieces = texts(vocab.tokens, NUL)
    ids = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
    if len(ids) != len(pieces):
        vocab.warnings.append(f"{len(pieces) - len(ids)} pieces are duplicates: the first ones win")
    try:
        return Merger(BPE(ids, _pairs(vocab), byte_fallback=True))
    except Exception as e:  # tokenizers raises Exception itself
        what = "merges of and into pieces"
        raise vocab.error("tokenizer.ggml.merges", str(e), what) from None


def _pairs(vocab: Vocab) -> list[tuple[str, str]]:
    """The merges, "left right", in order of rank."""
    lines = texts(vocab.merges(), NUL)
    return [(line[:cut], line[cut + 1 :]) for line in lines if (cut := line.find(" ", 1)) > 0]
