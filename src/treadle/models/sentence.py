"""Settings of sentence-transformers folders for texts to embed. Their GGUF keys are treadle's own;
``treadle convert`` writes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.files.metadata import POSITION_MAX, MetadataReader

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF

PROMPT = "treadle.embedding.default_prompt"  # prepended to each text
HEAD_ACTIVATION = "treadle.classifier.activation"  # between the matrices of a head that scores
MAX_TOKENS = "treadle.embedding.max_seq_length"  # of a text, its special tokens included


def default_prompt(gguf: GGUF) -> str:
    """Return the prompt to prepend to each text; "" if the file has none. Raises FileError if it is
    no text.
    """
    return MetadataReader(gguf.metadata, gguf.path).text(PROMPT, "")


def max_seq_length(gguf: GGUF) -> int | None:
    """Return the most tokens of a text to embed; None if the file states no limit. Raises FileError
    for a limit that is no such number.
    """
    keys = MetadataReader(gguf.metadata, gguf.path)
    return keys.integer(MAX_TOKENS, hi=POSITION_MAX) if keys.has(MAX_TOKENS) else None
