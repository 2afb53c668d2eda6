"""Settings of sentence-transformers that concern the tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

from treadle.convert.hf.tokenizer.special_tokens import read_optional
from treadle.files.splits import SENTENCES


def sentences_file(folder: Path) -> Path:
    """Return sentence-transformers' settings file for texts, which may not exist."""
    found = [folder / name for name in SENTENCES if os.path.lexists(folder / name)]
    return found[0] if found else folder / SENTENCES[0]


def lower_case(folder: Path) -> bool:
    """Whether texts are lower-cased before tokenization."""
    return read_optional(sentences_file(folder)).get("do_lower_case") is True
