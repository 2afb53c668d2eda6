"""WordPiece vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tokenizer.conftest import Load
from tests.tokenizer.vocabularies import CONTROL, NORMAL, write_vocab
from treadle.files.gguf import open_gguf
from treadle.tokenizer.tokenizer import Tokenizer, load_tokenizer

PIECES = [("[UNK]", CONTROL), ("[CLS]", CONTROL), ("[SEP]", CONTROL), ("▁un", NORMAL)]
PIECES += [("do", NORMAL), ("▁do", NORMAL), ("▁É", NORMAL), ("▁é", NORMAL), ("▁e", NORMAL)]


def load_bert(path: Path, **keys: Any) -> Tokenizer:
    keys = {"normalizer.lowercase": None} | keys
    keys = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return load_tokenizer(open_gguf(write_vocab(path, "bert", PIECES, arch="bert", **keys)))


def test_words_and_their_parts(tmp_path: Path) -> None:
    tokenizer = load_bert(tmp_path / "v.gguf")
    assert tokenizer.encode("undo do Un x") == [1, 3, 4, 5, 3, 0, 2]
    assert tokenizer.decode([1, 3, 4, 5, 2]) == "undo do"
    assert tokenizer.encode("do", bos=False) == [5]
    assert tokenizer.encode("[SEP] do", bos=False, special=True) == [2, 5]


def test_normaliser_is_the_files(tmp_path: Path) -> None:
    assert load_bert(tmp_path / "a.gguf").encode("É", bos=False) == [8]
    cased = load_bert(tmp_path / "b.gguf", **{"normalizer.lowercase": False})
    assert cased.encode("É", bos=False) == [6]
    accents = load_bert(tmp_path / "c.gguf", **{"normalizer.strip_accents": False})
    assert accents.encode("É", bos=False) == [7]


def test_unknown_words(load: Load) -> None:
    tokenizer = load("bert-bge")
    assert tokenizer.unk == 100
    assert tokenizer.encode("\U0001f9ff\U0001f9ff", bos=False) == [100]
