"""Cutting text at special tokens, against the plain definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from treadle.tokenizer.tokenizer import SpecialTokenSplitter


def split_ref(ids: dict[str, int], text: str) -> list[str | int]:
    """Character by character: the longest piece that stands here, else one more of the text."""
    parts: list[str | int] = []
    at = 0
    while at < len(text):
        here = [piece for piece in ids if piece and text.startswith(piece, at)]
        if here:
            piece = max(here, key=len)
            parts.append(ids[piece])
            at += len(piece)
        else:
            before = parts.pop() if parts and isinstance(parts[-1], str) else ""
            parts.append(f"{before}{text[at]}")
            at += 1
    return parts


@given(pieces=st.sets(st.text("ab<^]-\\\n", max_size=4), max_size=8), text=st.text("ab<^]-\\\nc"))
def test_as_defined(pieces: set[str], text: str) -> None:
    ids = {piece: i for i, piece in enumerate(sorted(pieces))}
    assert list(SpecialTokenSplitter(ids).split(text)) == split_ref(ids, text)


def test_thousands_of_pieces() -> None:
    ids = {f"<unused{i}>": i for i in range(6000)}
    assert list(SpecialTokenSplitter(ids).split("a<unused17><unused5999>b<unused")) == [
        "a",
        17,
        5999,
        "b<unused",
    ]
