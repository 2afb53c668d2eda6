"""Vocabularies of RWKV's World models (``rwkv``): pieces of bytes, the longest one that fits each
time. Files spell them as Python does bytes, with escapes.
"""

from __future__ import annotations

import re

from treadle.base.cached_property import cached_property
from treadle.tokenizer.tokenizer import Tokenizer
from treadle.tokenizer.vocab import TokenType, Vocab

_ESCAPE = re.compile(rb"\\(x[0-9A-Fa-f]{2}|.)", re.DOTALL)
_BYTES = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}
_HEAD = 2  # bytes by which pieces are found


class LongestTokenizer(Tokenizer):
    """From the left of a text on, the longest piece that stands there."""

    pre = "default"

    def __init__(self, vocab: Vocab) -> None:
        super().__init__(vocab, add_bos=False)

    @cached_property
    def _pieces(self) -> tuple[dict[bytes, int], dict[bytes, list[int]]]:
        """The ids of pieces; and by the bytes that these begin with how long they are, the longest
        first.
        """
        never = frozenset(self.vocab.unspellable())
        pieces = {
            self._bytes_of(token, raw): token
            for token, raw in enumerate(self.vocab.raws())
            if raw and token not in never
        }
        sizes: dict[bytes, set[int]] = {}
        for piece in pieces:
            sizes.setdefault(piece[:_HEAD], set()).add(len(piece))
        return pieces, {head: sorted(each, reverse=True) for head, each in sizes.items()}

    def encode_plain(self, text: str, *, start: bool) -> list[int]:
        """Ids of the pieces; the unknown token, if there is one, for a byte that begins none, else
        the byte's character is left out.
        """
        (pieces, sizes), data, ids, at = self._pieces, text.encode(), list[int](), 0
        begun, n_before = 0, 0  # the last character that a piece began at, and the ids before it
        lost: list[str] = []
        while at < len(data):
            if not _goes_on(data[at]):
                begun, n_before = at, len(ids)
            head = data[at : at + _HEAD]
            for size in (*sizes.get(head, ()), 1):
                token = pieces.get(data[at : at + size])
                if token is not None:
                    break
            else:
                size, token = 1, self.unk
            if token is None:
                first, end = at, at + 1
                while _goes_on(data[first]):
                    first -= 1
                while end < len(data) and _goes_on(data[end]):
                    end += 1
                lost.append(data[first:end].decode())
                del ids[n_before if begun == first else len(ids) :]
                at = end
                continue
            ids.append(token)
            at += size
        self.warn_dropped(lost)
        return ids

    def _bytes_of(self, token: int, raw: bytes) -> bytes:
        if self._kinds[token] == TokenType.CONTROL or b"\\" not in raw:
            return raw
        return _ESCAPE.sub(_unescaped, raw)


def _goes_on(byte: int) -> bool:
    """Whether a byte of UTF-8 is one that goes on with a character."""
    return byte & 0xC0 == 0x80


def _unescaped(found: re.Match[bytes]) -> bytes:
    name = found[1]
    return bytes([int(name[1:], 16)]) if len(name) > 1 else _BYTES.get(name, name)
