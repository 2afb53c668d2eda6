"""Settings of sentence-transformers that concern the tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

from treadle.convert.hf.tokenizer.special_tokens import read_optional
from treadle.files.splits import SENTENCES


def sentences_file(folder: Path) -> Path:
    """Return the path of sentence_bert_config.json, or of its counterpart for another model; the
    file may not exist.
    """
    found = [folder / name for name in SENTENCES if os.path.lexists(folder / name)]
    return found[0] if found else folder / SENTENCES[0]


def lower_case(folder: Path) -> bool:
    """Return whether sentence-transformers lower-cases texts before tokenization."""
    return read_optional(sentences_file(folder)).get("do_lower_case") is True
