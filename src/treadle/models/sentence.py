"""What sentence-transformers' folders say of texts to embed. GGUF has no keys for it; these are
treadle's own, and ``treadle convert`` writes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.files.keys import POSITION_MAX, MetadataReader

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF

PROMPT = "treadle.api.embedding.default_prompt"  # put before each text
HEAD_ACTIVATION = "treadle.classifier.activation"  # between the matrices of a head that scores
MAX_TOKENS = "treadle.api.embedding.max_seq_length"  # of a text, its special tokens included


def default_prompt(gguf: GGUF) -> str:
    """What goes before each text; "" where the file names nothing. Raises FileError."""
    return MetadataReader(gguf.metadata, gguf.path).text(PROMPT, "")


def max_seq_length(gguf: GGUF) -> int | None:
    """The longest text in tokens; None where the file has no such limit. Raises FileError."""
    keys = MetadataReader(gguf.metadata, gguf.path)
    return keys.integer(MAX_TOKENS, hi=POSITION_MAX) if keys.has(MAX_TOKENS) else None
