"""Tokenizer of files without a vocabulary: no id has text, and none is known to end generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from treadle.errors import UnsupportedError
from treadle.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")


REFUSAL = "the model has no vocabulary: pass token ids instead of text"


class NoVocabulary(Tokenizer):
    """Tokenizer of a model without a vocabulary, for requests of ids: no token has text, and
    methods that need ids for a text raise UnsupportedError.
    """

    of_text = None

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        self.eog = frozenset()
        self.bos = self.eos = self.eot = self.unk = self.pad = self.sep = None
        self.add_bos = self.add_eos = self.add_sep = False

    def encode_plain(self, text: str, *, start: bool) -> list[int]:
        raise UnsupportedError(REFUSAL)

    def encode(self, text: str, *, bos: bool | None = None, special: bool = False) -> list[int]:
        raise UnsupportedError(REFUSAL)

    def encode_prompt_pieces(self, pieces: Sequence[tuple[str, bool] | T]) -> list[int | T]:
        raise UnsupportedError(REFUSAL)

    def cut(self, text: str) -> list[str | int]:
        raise UnsupportedError(REFUSAL)

    def token_id(self, piece: str) -> int | None:
        return None

    def piece(self, token: int) -> str:
        return ""

    def _bytes_of(self, token: int, raw: bytes) -> bytes:
        return b""

    def token_bytes(self, token: int) -> bytes:
        return b""

    def all_token_bytes(self) -> list[bytes]:
        return [b""] * self.n_vocab

    def is_control(self, token: int) -> bool:
        return False

    def is_special(self, token: int) -> bool:
        return False
