"""Unigram vocabularies of sentencepiece (``t5``), run by ``tokenizers``."""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.errors import UnsupportedError
from treadle.files.gguf_array import GGUFArray
from treadle.text.tokenizer import Tokenizer
from treadle.text.vocab import TokenType, Vocab, texts

_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
_SPACE = "▁"


class UnigramTokenizer(Tokenizer):
    """Of all ways to cut a text into pieces, the one whose scores sum up highest."""

    adds_space = True
    pre = "default"

    def __init__(self, vocab: Vocab) -> None:
        super().__init__(vocab, add_bos=False)
        if self.unk is None:
            vocab.fail("tokenizer.ggml.unknown_token_id", "is missing", "a token id")
        if vocab.scores is None:
            vocab.fail("tokenizer.ggml.scores", "is missing", "a score for each piece")
        self.adds_space = vocab.flag("tokenizer.ggml.add_space_prefix", True)
        self._tokenizer = _build(vocab, self.unk, self.adds_space)

    def encode_plain(self, text: str, *, start: bool) -> list[int]:
        """Ids through tokenizers; characters that no piece has are the unknown token."""
        if not text:
            return []
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _bytes_of(self, token: int, raw: bytes) -> bytes:
        """The piece with spaces for their marks; the byte of a byte piece."""
        if self._kinds[token] == TokenType.BYTE:
            return bytes([int(raw[3:5], 16)])
        control = self._kinds[token] == TokenType.CONTROL
        return raw if control else raw.replace(_SPACE.encode(), b" ")


def _build(vocab: Vocab, unk: int, adds_space: bool) -> Any:
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import Unigram
    from tokenizers.normalizers import Precompiled, Replace, Sequence, Strip
    from tokenizers.pre_tokenizers import Metaspace

    assert vocab.scores is not None
    # No text spells what is no text: these pieces have names that nothing can be cut into.
    spelt = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.BYTE)
    pieces = [
        text if kind in spelt else f"\0{i}"
        for i, (text, kind) in enumerate(zip(texts(vocab.tokens), vocab.types, strict=True))
    ]
    has_bytes = bool((vocab.types == TokenType.BYTE).any())
    scored = list(zip(pieces, vocab.scores.tolist(), strict=True))
    try:
        tokenizer = Tokenizer(Unigram(scored, unk, has_bytes))
    except Exception as e:  # tokenizers raises Exception itself
        raise vocab.error("tokenizer.ggml.tokens", str(e), "a Unigram vocabulary") from None
    steps: list[Any] = []
    given = vocab.values.get(_CHARSMAP)
    if given is not None:
        if not isinstance(given, GGUFArray):
            vocab.fail(_CHARSMAP, f"is {given!r:.60}", "an array of bytes")
        data = np.asarray(list(given)).astype(np.uint8).tobytes()
        try:
            steps.append(Precompiled(data))
        except Exception as e:
            raise UnsupportedError(f"{vocab.path}: {_CHARSMAP}: {e}") from None
    if vocab.flag("tokenizer.ggml.remove_extra_whitespaces", True):
        steps += [Strip(), Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = Sequence(steps)
    tokenizer.pre_tokenizer = Metaspace(_SPACE, "always" if adds_space else "never", split=False)
    return tokenizer
