"""WordPiece vocabularies (``bert``), run by ``tokenizers``."""

from __future__ import annotations

from typing import Any

from treadle.tokenizer.tokenizer import Tokenizer
from treadle.tokenizer.vocab import TokenType, Vocab, texts

_WORD_START = "▁"
_UNKNOWN = " "  # internal name of the unknown token: no word has a space


class WordPieceTokenizer(Tokenizer):
    """WordPiece tokenizer: each word is split into the longest pieces from its left; [CLS] before,
    [SEP] after. Words are in lower case, unless the file says otherwise.

    Much of a text is lost by design (case, accents, spaces): ``decode`` returns readable text.
    """

    adds_space = True  # the first piece of every word includes the space before it
    tells_second = True
    pre = "bert"

    def __init__(self, vocab: Vocab) -> None:
        super().__init__(vocab, add_bos=True, add_sep=True)
        if self.unk is None:
            vocab.fail("tokenizer.ggml.unknown_token_id", "is missing", "a token id")
        self._tokenizer = _build(vocab, self.unk)

    def encode_plain(self, text: str, *, start: bool) -> list[int]:
        """Return the ids of ``text``; words that no pieces form become the unknown token."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _bytes_of(self, token: int, raw: bytes) -> bytes:
        """Return the bytes of the piece, with a space in front if it begins a word."""
        control = self._kinds[token] == TokenType.CONTROL
        return raw if control else raw.replace(_WORD_START.encode(), b" ", 1)


def _build(vocab: Vocab, unk: int) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    # GGUF marks the pieces that begin a word; WordPiece marks the others.
    ids = {_UNKNOWN: unk}
    never = frozenset(vocab.unspellable())
    for token, piece in enumerate(texts(vocab.tokens)):
        if token not in never:
            begins = piece.startswith(_WORD_START)
            ids.setdefault(piece.removeprefix(_WORD_START) if begins else f"##{piece}", token)
    lowercase = vocab.flag("tokenizer.ggml.normalizer.lowercase", True)
    strip = vocab.flag("tokenizer.ggml.normalizer.strip_accents", lowercase)
    tokenizer = Tokenizer(WordPiece(ids, unk_token=_UNKNOWN))
    tokenizer.normalizer = BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=strip, lowercase=lowercase
    )
    tokenizer.pre_tokenizer = BertPreTokenizer()
    return tokenizer
