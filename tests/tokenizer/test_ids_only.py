"""Models without a vocabulary: ids go in and out, texts are refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from treadle.errors import UnsupportedError
from treadle.tokenizer.ids_only import NoVocabulary
from treadle.tokenizer.tokenizer import Tokenizer


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.encode("a"),
        lambda t: t.encode_plain("a", start=True),
        lambda t: t.encode_prompt("a"),
        lambda t: t.encode_prompt_pieces([("a", True)]),
        lambda t: t.cut("a"),
    ],
)
def test_texts_are_refused(read: Callable[[Tokenizer], object]) -> None:
    with pytest.raises(UnsupportedError, match="has no vocabulary: pass token ids"):
        read(NoVocabulary(5))


def test_no_token_has_text() -> None:
    tokenizer = NoVocabulary(5)
    assert tokenizer.decode([0, 4, 2]) == ""
    assert (tokenizer.piece(1), tokenizer.token_id("a"), tokenizer.of_text) == ("", None, None)
    assert tokenizer.all_token_bytes() == [b""] * 5
    assert not tokenizer.is_special(1)
