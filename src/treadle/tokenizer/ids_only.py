"""Tokenizer of files without a vocabulary: no id has text, and none is known to end generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.errors import UnsupportedError
from treadle.tokenizer.tokenizer import Tokenizer
from treadle.tokenizer.vocab import NONE

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF


def has_vocabulary(gguf: GGUF) -> bool:
    """Return whether a file states that it has a vocabulary, of any kind."""
    return gguf.metadata.get("tokenizer.ggml.model", NONE[0]) not in NONE


class NoVocabulary(Tokenizer):
    """Tokenizer of a model without a vocabulary, for requests of ids: no token has text, and
    ``encode_plain`` raises UnsupportedError. Methods that look at pieces (``encode``, ``piece``) do
    not work.
    """

    of_text = None

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab, self.eog = n_vocab, frozenset()
        self.bos = self.eos = self.eot = self.unk = self.pad = self.sep = None
        self.add_bos = self.add_eos = self.add_sep = False

    def encode_plain(self, text: str, *, start: bool) -> list[int]:
        raise UnsupportedError("the model has no vocabulary: pass token ids instead of text")

    def _bytes_of(self, token: int, raw: bytes) -> bytes:
        return b""

    def token_bytes(self, token: int) -> bytes:
        return b""

    def is_control(self, token: int) -> bool:
        return False

    def is_special(self, token: int) -> bool:
        return False
