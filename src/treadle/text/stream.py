"""Text from tokens one at a time: a character comes out when it is whole."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.text.tokenizer import Tokenizer


class StreamDecoder:
    """Turns ids into text as they come; joined, it is what ``tokenizer.decode`` gives for all.

    A token may end inside a UTF-8 character (byte fallback, byte-level BPE); its bytes wait for
    the rest. Bytes that are no UTF-8 become U+FFFD as in ``bytes.decode(errors="replace")``.
    ``special`` shows control tokens by name; ``start`` says that a text begins here, so that the
    space that the tokenizer itself put there is left out (generated ids continue a text).
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False, start: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._strip = start and tokenizer.adds_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is complete with ``token``; often empty. IndexError for an absent id."""
        data = self._tokenizer.token_bytes(token)
        if self._tokenizer.adds_space:
            special = self._tokenizer.is_special(token)
            if self._strip and not special:
                data = data.removeprefix(b" ")
            self._strip = special
        if not self._special and self._tokenizer.is_control(token):
            return ""
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What an unfinished character leaves: U+FFFD, or nothing. The text may go on after it."""
        return self._utf8.decode(b"", final=True)
