"""The vocabulary of a tokenizer for ``llguidance``: the bytes of each token."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from treadle.base.fast_classes import cached_property
from treadle.tokenizer.vocab import TokenType

if TYPE_CHECKING:
    from treadle.tokenizer.tokenizer import Tokenizer

# Building one takes 60 ms for 32,000 tokens and 300 ms for 128,000: once per tokenizer.
_VOCABULARIES: weakref.WeakKeyDictionary[Tokenizer, Any] = weakref.WeakKeyDictionary()


def vocabulary_of(tokenizer: Tokenizer) -> Any:
    """Return the ``LLTokenizer`` for a tokenizer; built at the first call."""
    found = _VOCABULARIES.get(tokenizer)
    if found is None:
        from llguidance import LLTokenizer, TokenizerWrapper

        vocabulary = TokenizerWrapper(_Bytes(tokenizer))
        found = LLTokenizer(vocabulary, eos_token=sorted(tokenizer.eog) or None)
        _VOCABULARIES[tokenizer] = found
    return found


class _Bytes:
    """Vocabulary object for llguidance's TokenizerWrapper. It refers to the tokenizer weakly,
    because llguidance keeps this object.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        n = tokenizer.n_vocab
        self._tokenizer = weakref.ref(tokenizer)
        self.tokens = tokenizer.all_token_bytes()
        hidden = tokenizer.vocab.of_type(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED)
        self.special_token_ids = sorted(tokenizer.eog.union(hidden))
        self.bos_token_id = tokenizer.bos
        if tokenizer.eog:
            self.eos_token_id = min(tokenizer.eog)
        else:  # the model has no end token, but llguidance needs one
            self.eos_token_id = n
            self.tokens.append(b"<treadle:end>")
            self.special_token_ids.append(n)

    def __call__(self, text: bytes | str) -> list[int]:
        tokenizer = self._tokenizer()
        if tokenizer is None:
            return []
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._spelling(text.encode(), tokenizer.encode_plain(text, start=False))

    def _spelling(self, text: bytes, ids: list[int]) -> list[int]:
        """Return ``ids`` if they spell ``text``. Otherwise keep those up to the first one that
        spells something else, and spell the rest in single bytes: an SPM vocabulary reads U+2581 as
        a space. llguidance allows only the first token of the result, which must therefore spell
        the text.
        """
        if b"".join(map(self.tokens.__getitem__, ids)) == text:
            return ids
        at = n = 0
        while n < len(ids) and text.startswith(own := self.tokens[ids[n]], at):
            at = at + len(own)
            n = n + 1
        rest = [self._of_byte.get(byte) for byte in text[at:]]
        return ids if None in rest else ids[:n] + [id for id in rest if id is not None]

    @cached_property
    def _of_byte(self) -> dict[int, int]:
        special = set(self.special_token_ids)
        pairs = ((id, raw) for id, raw in enumerate(self.tokens) if id not in special)
        return {raw[0]: id for id, raw in pairs if len(raw) == 1}
