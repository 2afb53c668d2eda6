"""Unigram vocabularies of sentencepiece (``t5``), run by ``tokenizers``."""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.errors import UnsupportedError
from treadle.files.metadata import GGUFArray
from treadle.tokenizer.normalizer import CHARSMAP, is_sound, normalizer, pre_tokenizer, usual_steps
from treadle.tokenizer.tokenizer import Tokenizer
from treadle.tokenizer.vocab import SPACES, TokenType, Vocab, texts

_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
_FLAGS = ("remove_extra_whitespaces", "add_space_prefix")
_SPACE = "▁"


class UnigramTokenizer(Tokenizer):
    """Unigram tokenizer: splits a text into the pieces with the highest sum of scores."""

    adds_space = True
    pre = "default"

    def __init__(self, vocab: Vocab) -> None:
        super().__init__(vocab, add_bos=False, add_eos=True)
        if self.unk is None:
            vocab.fail("tokenizer.ggml.unknown_token_id", "is missing", "a token id")
        if vocab.scores is None:
            vocab.fail("tokenizer.ggml.scores", "is missing", "a score for each piece")
        self._steps = _steps(vocab)
        self.adds_space = self._steps[-1] != "never"
        self.space_after_special = self._steps[-1] != "first"
        self._tokenizer = _build(vocab, self.unk, self._steps)

    def encode_plain(self, text: str, *, start: bool) -> list[int]:
        """Return the ids of ``text``; characters that no piece has become the unknown token."""
        if not text:
            return []
        if not start and not self.space_after_special:
            return self._behind(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _behind(self, text: str) -> list[int]:
        """Return the ids of a part of a text that follows a special token, and gets no space
        mark.
        """
        plain: Any = self._tokenizer.normalizer.normalize_str(text)
        words = pre_tokenizer(self._steps, "never").pre_tokenize_str(plain)
        return [piece.id for word, _ in words for piece in self._tokenizer.model.tokenize(word)]

    def _bytes_of(self, token: int, raw: bytes) -> bytes:
        """Return the piece with spaces for U+2581; of a byte piece, the byte."""
        if self._kinds[token] == TokenType.BYTE:
            return bytes([int(raw[3:5], 16)])
        control = self._kinds[token] == TokenType.CONTROL
        return raw if control else raw.replace(_SPACE.encode(), b" ")


def _build(vocab: Vocab, unk: int, steps: list[str]) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import Unigram

    assert vocab.scores is not None
    # Text cannot spell control, unknown and unused pieces: their names have a space, and all spaces
    # of a text are marks before it is split.
    pieces = texts(vocab.tokens)
    for token in vocab.unspellable():
        pieces[token] = f" {token}"
    has_bytes = bool((vocab.types == TokenType.BYTE).any())
    scored = list(zip(pieces, vocab.scores.tolist(), strict=True))
    try:
        tokenizer = Tokenizer(Unigram(scored, unk, has_bytes))
    except Exception as e:  # tokenizers raises plain Exception
        raise vocab.error("tokenizer.ggml.tokens", str(e), "a Unigram vocabulary") from None
    try:
        tokenizer.normalizer = normalizer(steps, _charsmap(vocab))
    except Exception as e:
        raise UnsupportedError(f"{vocab.path}: {_CHARSMAP}: {e}") from None
    tokenizer.pre_tokenizer = pre_tokenizer(steps, steps[-1])
    return tokenizer


def _steps(vocab: Vocab) -> list[str]:
    """Return the names of the file's normalization steps (``normalizer.py``). Raises FileError for
    unknown steps.
    """
    flags = [vocab.flag(f"tokenizer.ggml.{key}", True) for key in _FLAGS]
    steps = usual_steps(_CHARSMAP in vocab.values, *flags)
    if not vocab.has(SPACES):
        return steps
    steps = vocab.text(SPACES).split(" ")
    if not is_sound(steps) or (CHARSMAP in steps) > (_CHARSMAP in vocab.values):
        vocab.fail(SPACES, f"is {' '.join(steps)!r:.80}", "supported steps, in order")
    return steps


def _charsmap(vocab: Vocab) -> bytes:
    given = vocab.values.get(_CHARSMAP)
    if given is None:
        return b""
    if not isinstance(given, GGUFArray):
        vocab.fail(_CHARSMAP, f"is {given!r:.60}", "an array of bytes")
    return np.asarray(list(given)).astype(np.uint8).tobytes()
