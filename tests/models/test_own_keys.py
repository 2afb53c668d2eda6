"""The keys of our own that files out there have: a rename in the sources must not reach them."""

from __future__ import annotations

from treadle.models import rope, sentence
from treadle.tokenizer import vocab


def test_names_of_keys() -> None:
    assert rope.DYNAMIC == "treadle.rope.dynamic"
    assert sentence.PROMPT == "treadle.embedding.default_prompt"
    assert sentence.MAX_TOKENS == "treadle.embedding.max_seq_length"
    assert sentence.HEAD_ACTIVATION == "treadle.classifier.activation"
    assert vocab.SPACES == "treadle.tokens.spaces"
    assert vocab.LSTRIP == "treadle.tokens.lstrip"
    assert vocab.RSTRIP == "treadle.tokens.rstrip"
    assert vocab.BEFORE == "treadle.tokens.before"
