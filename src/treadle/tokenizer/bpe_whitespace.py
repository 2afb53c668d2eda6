"""Character-level BPE vocabularies without spaces (``whitespace``), run by ``tokenizers``.

White space ends a word and is dropped, as in jina-embeddings-v2-base-zh.
"""

from __future__ import annotations

from typing import Any

from treadle.tokenizer.bpe import merge_model, merge_pairs
from treadle.tokenizer.tokenizer import WHITE, Tokenizer
from treadle.tokenizer.vocab import Vocab

_NO_SPACE = str.maketrans(dict.fromkeys(WHITE, " "))


class UnspacedTokenizer(Tokenizer):
    """Character-level BPE of the words between white space. A character without a piece becomes
    byte pieces, else the unknown token, or nothing if the file has none. Decoding cannot restore
    the white space.
    """

    pre = "whitespace"

    def __init__(self, vocab: Vocab) -> None:
        super().__init__(vocab, add_bos=False)
        self._lowers = vocab.flag("tokenizer.ggml.normalizer.lowercase", False)
        self._tokenizer = _build(vocab, self.unk)

    def encode_plain(self, text: str, *, start: bool) -> list[int]:
        """Return the ids of ``text``; ``start`` makes no difference here."""
        words = text.translate(_NO_SPACE).split(" ")
        if self._lowers:
            words = [word.lower() for word in words]
        made = self._tokenizer.encode(words, is_pretokenized=True, add_special_tokens=False)
        ids: list[int] = made.ids
        return ids

    def _bytes_of(self, token: int, raw: bytes) -> bytes:
        return raw


def _build(vocab: Vocab, unk: int | None) -> Any:
    from tokenizers import Tokenizer

    merges = merge_pairs(vocab.merges())
    try:
        return Tokenizer(merge_model(vocab, merges, unk=unk, byte_fallback=True))
    except Exception as e:  # tokenizers raises plain Exception
        what = "merges of known pieces into known pieces"
        raise vocab.error("tokenizer.ggml.merges", str(e), what) from None
