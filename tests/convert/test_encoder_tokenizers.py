"""tokenizer.json of encoders: the ids are those of the library that made the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Theirs
from tokenizers import models, normalizers, pre_tokenizers, trainers

from tests.convert.hf_tokenizers import save_files
from tests.convert.test_hf_tokenizer import edit, read
from treadle.convert.hf.tokenizer.tokenizer import read_tokenizer
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.tokenizer.vocab import TokenType

CORPUS = [
    "The quick brown fox jumps over the lazy dog; 12 foxes jumped over 345 dogs.",
    "Él niño comió una piñata, naïve café — déjà vu!",
    "unbelievable believers believe in believing",
    "日本語 text with 漢字 in it",
]
TEXTS = [*CORPUS, "", " ", "  two  spaces ", "BELIEVE", "unknown ☃ sign", "a\tb\nc", "x" * 120]


def wordpiece(**normalizer: Any) -> Theirs:
    made = Theirs(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    made.normalizer = normalizers.BertNormalizer(**normalizer)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer: Any = trainers.WordPieceTrainer(
        vocab_size=160, special_tokens=special, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def unigram(pre: Any, normalizer: Any = None) -> Theirs:
    made = Theirs(models.Unigram())
    made.pre_tokenizer = pre
    if normalizer is not None:
        made.normalizer = normalizer
    trainer: Any = trainers.UnigramTrainer(
        vocab_size=120,
        special_tokens=["<s>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


@pytest.mark.parametrize(
    "settings",
    [{"lowercase": True}, {"lowercase": False}, {"lowercase": True, "strip_accents": False}],
    ids=str,
)
def test_words_in_pieces(settings: dict[str, Any], tmp_path: Path) -> None:
    theirs = wordpiece(**settings)
    save_files(theirs, tmp_path, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")
    ours = read(tmp_path, theirs.get_vocab_size())
    assert ours.model == "bert"
    for text in TEXTS:
        assert ours.encode(text, bos=False) == theirs.encode(text).ids, text


def test_what_transformers_class_says_instead(tmp_path: Path) -> None:
    """Its settings go before those of tokenizer.json, and so do its defaults."""
    theirs = wordpiece(lowercase=False)
    n = theirs.get_vocab_size()
    save_files(theirs, tmp_path, tokenizer_class="BertTokenizer")
    keys = read_tokenizer(tmp_path, {}, n)
    assert keys["tokenizer.ggml.normalizer.lowercase"] is True
    assert keys["tokenizer.ggml.normalizer.strip_accents"] is True
    edit(tmp_path / "tokenizer_config.json", do_lower_case=False)
    keys = read_tokenizer(tmp_path, {}, n)
    assert keys["tokenizer.ggml.normalizer.lowercase"] is False
    edit(tmp_path / "tokenizer_config.json", tokenize_chinese_chars=False)
    with pytest.raises(UnsupportedError, match="handle_chinese_chars is False"):
        read_tokenizer(tmp_path, {}, n)


def test_lower_case_before_berts_own(tmp_path: Path) -> None:
    theirs = wordpiece(lowercase=False)
    theirs.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.BertNormalizer(lowercase=False)]
    )
    save_files(theirs, tmp_path)
    ours = read(tmp_path, theirs.get_vocab_size())
    for text in TEXTS:
        assert ours.encode(text, bos=False) == theirs.encode(text).ids, text


@pytest.mark.parametrize(
    ("pre", "normalizer"),
    [
        (pre_tokenizers.Metaspace(), None),
        (pre_tokenizers.Metaspace(prepend_scheme="never"), None),
        (
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
            None,
        ),
        (pre_tokenizers.Metaspace(), normalizers.NFKC()),
    ],
    ids=["always", "never", "words", "nfkc"],
)
def test_the_likeliest_pieces(pre: Any, normalizer: Any, tmp_path: Path) -> None:
    theirs = unigram(pre, normalizer)
    save_files(theirs, tmp_path, eos_token="</s>", unk_token="<unk>")
    keys = read_tokenizer(tmp_path, {}, theirs.get_vocab_size())
    assert keys["tokenizer.ggml.unknown_token_id"] == theirs.token_to_id("<unk>")
    assert keys["tokenizer.ggml.token_type"][theirs.token_to_id("<unk>")] in (
        TokenType.UNKNOWN,
        TokenType.CONTROL,
    )
    ours = read(tmp_path, theirs.get_vocab_size())
    assert ours.model == "t5"
    for text in CORPUS:
        ids = ours.encode(text, bos=False)
        assert [i for i in ids if i != ours.eos] == theirs.encode(text).ids, text


BAD_WORDS: list[tuple[dict[str, Any], str]] = [
    ({"model__continuing_subword_prefix": "@@"}, "supports only '##'"),
    ({"model__vocab": {}}, "model.vocab"),
    ({"model__vocab": {"a": 0, "b": 0}}, "a unique id"),
    ({"normalizer": {"type": "NFC"}}, "only BertNormalizer"),
    ({"normalizer__clean_text": False}, "clean_text is False"),
    ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer.type is 'Whitespace'"),
    ({"model__max_input_chars_per_word": 7}, "max_input_chars_per_word is 7"),
]
BAD_UNIGRAM: list[tuple[dict[str, Any], str]] = [
    ({"model__vocab": []}, "pieces with scores"),
    ({"model__vocab": [["a", "x"]]}, "pieces with scores"),
    ({"model__unk_id": None}, "model.unk_id"),
    ({"model__unk_id": 1 << 20}, "model.unk_id"),
    ({"normalizer": {"type": "Prepend", "prepend": "x"}}, "unsupported rule"),
    ({"pre_tokenizer": {"type": "Metaspace", "replacement": "x"}}, "unsupported rule"),
    (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "!"}},
        "precompiled_charsmap",
    ),
    ({"pre_tokenizer": None}, "only Metaspace"),
]


def test_files_that_are_damaged_or_other(tmp_path: Path) -> None:
    kinds = ((wordpiece(), BAD_WORDS), (unigram(pre_tokenizers.Metaspace()), BAD_UNIGRAM))
    for theirs, bad in kinds:
        save_files(theirs, tmp_path)
        whole = (tmp_path / "tokenizer.json").read_text("utf-8")
        n = theirs.get_vocab_size()
        for changes, message in bad:
            (tmp_path / "tokenizer.json").write_text(whole, "utf-8")
            edit(tmp_path / "tokenizer.json", **changes)
            with pytest.raises((FileError, UnsupportedError), match=message):
                read(tmp_path, n)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel"}}))
    with pytest.raises(TreadleError, match="WordLevel"):
        read(tmp_path, 10)
