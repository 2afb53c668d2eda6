"""SentencePiece vocabularies, against sentencepiece on the original models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

from tests.tokenizer.conftest import Load
from tests.tokenizer.vocabularies import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    load_spm,
    spm_pieces,
    write_vocab,
)
from treadle.files.gguf import open_gguf
from treadle.tokenizer.spm import SpmTokenizer, model_proto
from treadle.tokenizer.tokenizer import Tokenizer, load_tokenizer
from treadle.tokenizer.vocab import TokenType

ORIGINALS = {
    "tok512.model": "stories260K.gguf",
    "tok105.model": "babyllama105/babyllama105-F32.gguf",
}


@pytest.fixture(scope="session", params=ORIGINALS)
def pair(data: Path, request: pytest.FixtureRequest) -> tuple[SentencePieceProcessor, Tokenizer]:
    gguf = data / "models" / ORIGINALS[request.param]
    original = data / "models" / request.param
    if not original.exists():
        original = gguf.parent / request.param
    return SentencePieceProcessor(model_file=str(original)), load_tokenizer(open_gguf(gguf))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.text("ab Lily\n.🦙é▁<s>/"))
def test_as_the_original_model(pair: tuple[SentencePieceProcessor, Tokenizer], text: str) -> None:
    original, tokenizer = pair
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    # tok512's own normaliser (nmt_nfkc) is not in the GGUF; texts that it leaves alone agree.
    if original.normalize(text).replace("▁", " ") != f" {text}".replace("▁", " "):
        return
    assert tokenizer.encode(text, bos=False) == original.encode(text)


@pytest.fixture(scope="session")
def bare(load: Load, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    """Llama's pieces without a space before texts, as Gemma's file has it, and pieces of a user."""
    own = load("llama-spm").vocab
    more = [
        ("<tab>", USER_DEFINED),
        ("\n\n", USER_DEFINED),
        ("▁" * 17, USER_DEFINED),
        ("<t>", CONTROL),
    ]
    pieces = [(own.raw(i).decode(), TokenType(int(own.types[i]))) for i in range(own.n)] + more
    assert own.scores is not None
    scores = [*own.scores.tolist(), *[-1e4] * len(more)]
    messages: Any = sentencepiece_model_pb2
    model = messages.ModelProto()
    for (piece, kind), score in zip(pieces, scores, strict=True):
        model.pieces.add(piece=piece, type=int(kind), score=score)
    model.trainer_spec.model_type = 2
    model.trainer_spec.byte_fallback = True
    rule = model.normalizer_spec
    rule.name = "identity"
    rule.add_dummy_prefix = False
    rule.remove_extra_whitespaces = False
    path = tmp_path_factory.mktemp("bare") / "v.gguf"
    write_vocab(path, "llama", pieces, scores=scores, add_space_prefix=False)
    processor = SentencePieceProcessor(model_proto=model.SerializeToString())
    return processor, load_tokenizer(open_gguf(path))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    text=st.text() | st.text(" \n▁<tab>é\u0301\0\ud800😀") | st.text("a ▁").map("{} <tab>".format)
)
def test_as_sentencepiece_without_a_space(bare: tuple[Any, Tokenizer], text: str) -> None:
    original, tokenizer = bare
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    ids = tokenizer.encode(text, bos=False)
    assert ids == original.encode(whole)
    assert tokenizer.decode(ids) == original.decode(ids) == whole.replace("▁", " ")


def test_message_has_one_record_for_each_piece(load: Load) -> None:
    tokenizer = load("llama-spm")
    assert isinstance(tokenizer, SpmTokenizer)
    vocab = tokenizer.vocab
    proto = model_proto(vocab, vocab.tokens, vocab.types, fallback=True)
    processor = SentencePieceProcessor(model_proto=proto)
    assert processor.get_piece_size() == vocab.n
    assert vocab.scores is not None
    for token in range(0, vocab.n, 97):
        assert processor.id_to_piece(token).encode() == vocab.raw(token)
        assert processor.get_score(token) == vocab.scores[token]


def test_long_pieces(tmp_path: Path) -> None:
    """Lengths around those where a varint grows by a byte."""
    words = ["x" * n for n in (1, 116, 117, 118, 127, 128, 129, 500)]
    tokenizer = load_spm(
        tmp_path / "v.gguf", [(word, USER_DEFINED) for word in words], add_space_prefix=False
    )
    for i, word in enumerate(words):
        assert tokenizer.encode(word, bos=False) == [259 + i]


def test_space_prefix(tmp_path: Path) -> None:
    words = [("▁", NORMAL), ("a", NORMAL), ("▁a", NORMAL)]
    with_space = load_spm(tmp_path / "with.gguf", words)
    without = load_spm(tmp_path / "without.gguf", words, add_space_prefix=False)
    assert with_space.encode("a a", bos=False) == [261, 261]
    assert without.encode("a a", bos=False) == [260, 261]
    assert with_space.decode([261, 261]) == "a a"
    assert without.decode([261, 261]) == " a a"
    assert with_space.encode(" a", bos=False) == [259, 261]
    assert with_space.decode([259, 261]) == " a"


def test_space_runs_belong_to_their_text(tmp_path: Path) -> None:
    words = [("▁", NORMAL), ("a", NORMAL), ("▁a", NORMAL), ("▁▁", USER_DEFINED)]
    tokenizer = load_spm(tmp_path / "v.gguf", words)
    assert tokenizer.encode("a   a", bos=False) == [261, 262, 261]
    assert tokenizer.decode([261, 262, 261]) == "a   a"


def test_many_unknown_pieces(load: Load) -> None:
    tokenizer = load("phi-3")  # 53 are typed so, and the unknown token itself is not
    assert (tokenizer.vocab.types == UNKNOWN).sum() == 53
    assert tokenizer.unk == 0
    assert tokenizer.decode([0]) == "\ufffd" or tokenizer.is_control(0)


def test_without_byte_pieces(data: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(open_gguf(data / "models/babyllama105/babyllama105-F32.gguf"))
    ids = tokenizer.encode("a漢b", bos=False)
    assert tokenizer.unk in ids
    assert tokenizer.decode(ids) == "a\ufffdb"
    pieces = [("<s>", CONTROL), ("▁", NORMAL), ("a", NORMAL)]
    path = write_vocab(tmp_path / "v.gguf", "llama", pieces, scores=[0.0, -1.0, -2.0])
    no_unknown = load_tokenizer(open_gguf(path))
    assert no_unknown.encode("aa", bos=False) == [1, 2, 2]
    with pytest.warns(UserWarning, match=r"no token for 'b', '\\u6f22': dropped"):
        assert no_unknown.encode("ab漢a", bos=False) == [1, 2, 2]


def test_some_byte_pieces_are_no_fallback(tmp_path: Path) -> None:
    pieces = [*spm_pieces()[:100], ("▁", NORMAL)]
    scores = [-float(i) for i in range(len(pieces))]
    path = write_vocab(tmp_path / "v.gguf", "llama", pieces, scores=scores)
    tokenizer = load_tokenizer(open_gguf(path))
    assert tokenizer.encode("\n", bos=False) == [100, 0]
    assert tokenizer.token_bytes(13) == b"\n"


def test_empty_and_duplicate_pieces(tmp_path: Path) -> None:
    words = [("", NORMAL), ("a", NORMAL), ("a", NORMAL), ("b", NORMAL)]
    tokenizer = load_spm(tmp_path / "v.gguf", words, add_space_prefix=False)
    assert tokenizer.encode("ab", bos=False) == [260, 262]
    assert tokenizer.decode([259, 260, 261, 262]) == "aab"
    assert len(tokenizer.warnings) == 2


@pytest.mark.parametrize("size", [4097, 1 << 21])
def test_huge_pieces(tmp_path: Path, size: int) -> None:
    """sentencepiece would refuse the vocabulary: text never becomes such a piece, ids do."""
    words = [("x" * size, NORMAL), ("x", NORMAL)]
    tokenizer = load_spm(tmp_path / "v.gguf", words, add_space_prefix=False)
    assert tokenizer.encode("xx", bos=False) == [260, 260]
    assert tokenizer.decode([259]) == "x" * size
    assert "token 259" in tokenizer.warnings[0]


def test_scores_may_be_integers(tmp_path: Path) -> None:
    pieces = spm_pieces([("a", NORMAL)])
    keys: dict[str, Any] = {"scores": np.arange(len(pieces), dtype=np.int32)}
    path = write_vocab(tmp_path / "w.gguf", "llama", pieces, **keys)
    tokenizer = load_tokenizer(open_gguf(path))
    assert tokenizer.vocab.scores is not None
    assert tokenizer.vocab.scores.dtype == np.float32


@pytest.mark.slow
def test_a_vocabulary_of_gemmas_size(tmp_path: Path) -> None:
    # A pair is a piece only if its halves are: the letters come first, then all of two and three.
    parts = ["▁", *map(chr, range(0x4E00, 0x4E00 + 600))]
    words = [(part, NORMAL) for part in parts]
    words += [(a + b, NORMAL) for a in parts for b in parts][: 262_144 - 259 - len(parts)]
    tokenizer = load_spm(tmp_path / "v.gguf", words)
    assert tokenizer.n_vocab == 262_144
    ids = tokenizer.encode("一丁丂七 é", bos=False)
    assert [tokenizer.piece(id) for id in ids] == ["▁一", "丁丂", "七▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "一丁丂七 é"
    assert len(tokenizer.all_token_bytes()) == 262_144
