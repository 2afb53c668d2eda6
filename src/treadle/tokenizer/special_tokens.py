"""Search in text for tokens that it may spell as a whole: control tokens and user-defined
pieces.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping


class SpecialTokenSplitter:
    """Splits text at every occurrence of the pieces in ``ids``, a map to their ids, leftmost first;
    of several, at the longest.

    Thousands of pieces (Gemma has over 6,000) make a slow regular expression. So the expression
    only finds the first two characters of any piece, and a dict does the rest.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = {piece: token for piece, token in ids.items() if piece}
        sizes: dict[str, set[int]] = defaultdict(set)
        for piece in self._ids:
            sizes[piece[:2]].add(len(piece))
        self._sizes = {head: sorted(of, reverse=True) for head, of in sizes.items()}
        seconds: dict[str, str] = defaultdict(str)
        for head in self._sizes:
            seconds[head[0]] += head[1:]
        alternatives = [
            re.escape(first) + (f"[{re.escape(more)}]" if more and first not in self._sizes else "")
            for first, more in sorted(seconds.items())
        ]
        self._heads = re.compile("|".join(alternatives)) if alternatives else None

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the parts of ``text`` in order: text between pieces (never empty), and the pieces'
        ids.
        """
        done = at = 0
        while self._heads and (near := self._heads.search(text, at)):
            at = near.start()
            piece = self._piece_at(text, at)
            if piece is None:
                at += 1
                continue
            if done < at:
                yield text[done:at]
            yield self._ids[piece]
            done = at = at + len(piece)
        if done < len(text):
            yield text[done:]

    def _piece_at(self, text: str, at: int) -> str | None:
        for head in (text[at : at + 2], text[at]):
            for size in self._sizes.get(head, ()):
                piece = text[at : at + size]
                if piece in self._ids:
                    return piece
        return None
