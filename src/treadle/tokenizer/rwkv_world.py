"""Vocabularies of RWKV's World models (``rwkv``): byte pieces, of which the longest match is taken.
Files spell the pieces as Python spells bytes, with escapes.
"""

from __future__ import annotations

import re

from treadle.base.fast_classes import cached_property
from treadle.tokenizer.tokenizer import Tokenizer
from treadle.tokenizer.vocab import TokenType, Vocab

_ESCAPE = re.compile(rb"\\(x[0-9A-Fa-f]{2}|.)", re.DOTALL)
_BYTES = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}
_HEAD = 2  # bytes by which pieces are indexed


class LongestTokenizer(Tokenizer):
    """Greedy tokenizer: takes the longest piece that matches, from the left of the text on."""

    pre = "default"

    def __init__(self, vocab: Vocab) -> None:
        super().__init__(vocab, add_bos=False)

    @cached_property
    def _pieces(self) -> tuple[dict[bytes, int], dict[bytes, list[int]]]:
        """Two maps: ids by piece; and, by the first two bytes of pieces, the pieces' lengths in
        bytes, the longest first.
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
        """Return the ids of the longest pieces. A byte that begins no piece becomes the unknown
        token; if there is none, the byte's character is dropped, with a warning.
        """
        pieces, sizes = self._pieces
        data = text.encode()
        ids = list[int]()
        at = 0
        begun = 0  # last character where a piece began
        n_before = 0  # number of ids before it
        lost: list[str] = []
        while at < len(data):
            if not _goes_on(data[at]):
                begun = at
                n_before = len(ids)
            head = data[at : at + _HEAD]
            for size in (*sizes.get(head, ()), 1):
                token = pieces.get(data[at : at + size])
                if token is not None:
                    break
            else:
                size = 1
                token = self.unk
            if token is None:
                first = at
                end = at + 1
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
    """Return whether ``byte`` is a UTF-8 continuation byte: not the first of its character."""
    return byte & 0xC0 == 0x80


def _unescaped(found: re.Match[bytes]) -> bytes:
    name = found[1]
    return bytes([int(name[1:], 16)]) if len(name) > 1 else _BYTES.get(name, name)
