"""What every kind of tokenizer must do, on llama.cpp's own pairs of texts and ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenizer.conftest import Load
from tests.tokenizer.vocabularies import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    load_bpe,
    load_spm,
    read_pairs,
    spm_pieces,
    write_vocab,
)
from treadle.base.caller_warnings import warnings_to
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.files.gguf_writer import GGUFWriter
from treadle.tokenizer.tokenizer import load_tokenizer
from treadle.tokenizer.vocab import TokenType

EXACT = ("llama-spm", "phi-3", "gpt-2", "starcoder", "falcon", "llama-bpe", "qwen2")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EXACT, "bert-bge"])
def test_pairs(data: Path, load: Load, name: str) -> None:
    tokenizer = load(name)
    pairs = read_pairs(data, name)
    assert len(pairs) == 47
    wrong = [(text, ids) for text, ids in pairs if tokenizer.encode(text, bos=False) != ids]
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_decoding_is_the_inverse(data: Path, load: Load, name: str) -> None:
    tokenizer = load(name)
    wrong = [text for text, ids in read_pairs(data, name) if tokenizer.decode(ids) != text]
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-spm", "gpt-2", "qwen2", "llama-bpe"])
@settings(max_examples=60, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(load: Load, name: str, text: str) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode(text)
    # Lone surrogates are no text, and SentencePiece's own sign for a space is a space.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    expected = text.replace("▁", " ") if name == "llama-spm" else text
    assert tokenizer.decode(ids) == expected


@pytest.mark.parametrize("name", ["llama-spm", "phi-3", "gpt-2", "falcon"])
def test_control_tokens_only_where_asked_for(load: Load, name: str) -> None:
    tokenizer = load(name)
    assert tokenizer.bos is not None
    bos = tokenizer.piece(tokenizer.bos)
    plain = tokenizer.encode(f"a{bos}b", bos=False)
    assert tokenizer.bos not in plain
    assert tokenizer.decode(plain) == f"a{bos}b"
    parsed = tokenizer.encode(f"a{bos}b", bos=False, special=True)
    assert parsed.count(tokenizer.bos) == 1
    assert tokenizer.decode(parsed) == "ab"
    assert tokenizer.decode(parsed, special=True) == f"a{bos}b"
    assert tokenizer.is_control(tokenizer.bos)


def test_spaces_begin_anew_after_special_tokens(load: Load) -> None:
    tokenizer = load("llama-spm")
    hello = tokenizer.token_id("▁hello")
    assert hello is not None
    assert tokenizer.encode("hello") == [1, hello]
    assert tokenizer.encode("hello</s>hello", special=True) == [1, hello, 2, hello]
    assert tokenizer.encode("</s>", special=True) == [1, 2]
    assert tokenizer.encode("") == [1]
    assert tokenizer.decode([1, hello, 2, hello], special=True) == "<s>hello</s>hello"
    assert tokenizer.decode([hello], start=False) == " hello"


def test_bos_and_eos(tmp_path: Path, load: Load) -> None:
    spm = load("llama-spm")
    assert spm.encode("x")[0] == 1
    assert 1 not in spm.encode("x", bos=False)
    assert spm.encode("<s>x", special=True) == spm.encode("x")  # never twice by itself
    assert spm.encode("<s>x", special=True, bos=True)[:2] == [1, 1]
    gpt2 = load("gpt-2")
    assert gpt2.encode("x") == gpt2.encode("x", bos=False)
    assert gpt2.encode("x", bos=True) == [50256, *gpt2.encode("x")]
    bert = load("bert-bge")
    assert bert.encode("x")[0] == 101
    assert bert.encode("x")[-1] == 102
    tokenizer = load_spm(tmp_path / "eos.gguf", add_bos_token=False, add_eos_token=True)
    assert tokenizer.encode("x", bos=False) == tokenizer.encode("x")[:-1]
    assert tokenizer.encode("x")[-1] == 2


def test_phi_3_drops_white_space_behind_control_tokens(load: Load) -> None:
    """Its tokens are so in transformers; GGUF has no key for it."""
    phi = load("phi-3")
    (system, end, user) = (32006, 32007, 32010)
    hello = phi.encode_plain("Hello", start=True)
    talk = "<|system|>\n \u3000Hello<|end|>\n<|user|>\n\n"
    assert phi.encode(talk, bos=False, special=True) == [system, *hello, end, user]
    kept = phi.encode("<|endoftext|>\nHello<s>\x1c", bos=False, special=True)
    assert phi.decode(kept, special=True) == "<|endoftext|>\nHello<s>\x1c"
    assert user not in phi.encode(talk)  # as plain text it keeps all its white space
    assert phi.decode(phi.encode(talk, bos=False)) == talk


def test_ends_of_generation(tmp_path: Path, load: Load) -> None:
    assert load("llama-spm").eog == {2}
    assert load("phi-3").eog == {32000, 32007}  # <|endoftext|> by key, <|end|> by name
    llama3 = load("llama-bpe")
    assert llama3.eog == {128001, 128009}
    assert llama3.eot == 128009
    # A name that ends turns is a control token even when the file calls it plain text ...
    more = [("<|im_end|>", NORMAL), ("</s>", USER_DEFINED)]
    tokenizer = load_bpe(tmp_path / "eog.gguf", more=more)
    assert tokenizer.eog == {256}
    assert tokenizer.is_control(256)
    assert 256 not in tokenizer.encode("<|im_end|>")
    # ... but in Gemma </s> is a tag of HTML.
    assert not tokenizer.is_control(257)


def test_user_defined_pieces_are_found_in_any_text(tmp_path: Path) -> None:
    words = [(piece, USER_DEFINED) for piece in ("\n\n", "  ", "<tag>")] + [("<a>", CONTROL)]
    tokenizer = load_spm(tmp_path / "v.gguf", words, add_space_prefix=False)
    assert tokenizer.encode("\n\n  <tag>", bos=False) == [259, 260, 261]
    assert tokenizer.encode("\n\n\n", bos=False) == [259, 3 + 10]
    assert tokenizer.encode("<a>", bos=False) == [3 + byte for byte in b"<a>"]
    assert tokenizer.encode("<a>", bos=False, special=True) == [262]
    assert tokenizer.decode([259, 260, 261, 262]) == "\n\n  <tag>"


def test_pieces_and_bytes(load: Load) -> None:
    spm = load("llama-spm")
    gpt2 = load("gpt-2")
    bert = load("bert-bge")
    assert spm.piece(13) == "<0x0A>"
    assert spm.token_bytes(13) == b"\n"
    assert spm.token_bytes(spm.encode("hello")[1]) == b" hello"
    hello = gpt2.encode(" hello")[0]
    assert gpt2.piece(hello) == "Ġhello"
    assert gpt2.token_bytes(hello) == b" hello"
    assert gpt2.token_id("Ġhello") == hello
    assert gpt2.token_id("no such piece") is None
    assert bert.decode(bert.encode("Hello, World!")) == "hello , world !"
    for tokenizer in (spm, gpt2, bert):
        assert tokenizer.all_token_bytes()[:300] == [tokenizer.token_bytes(i) for i in range(300)]
        for id in (-1, tokenizer.n_vocab):
            with pytest.raises(IndexError, match=str(tokenizer.n_vocab)):
                tokenizer.token_bytes(id)
            with pytest.raises(IndexError):
                tokenizer.is_control(id)


def test_odd_models(data: Path) -> None:
    other = data / "models/other"
    with pytest.raises(UnsupportedError, match=r"tokenizer\.ggml\.model"):
        load_tokenizer(open_gguf(other / "superpoint.gguf"))
    tokenizer = load_tokenizer(open_gguf(other / "gridcore_test.gguf"))
    assert tokenizer.n_vocab == 259
    assert tokenizer.encode("é", bos=False)[-2:] == [3 + 0xC3, 3 + 0xA9]
    tiny = load_tokenizer(open_gguf(other / "llama-2-tiny-random.gguf"))
    assert tiny.encode("Hello") == [1, 15043]
    stories = load_tokenizer(open_gguf(data / "models/stories260K.gguf"))
    assert (stories.bos, stories.eos, stories.pad) == (1, 2, None)  # its padding id is 2**32 - 1
    assert stories.warnings == []


@pytest.mark.parametrize("model", ["plamo2", "none", "no_vocab"])
def test_other_kinds_are_refused_by_name(tmp_path: Path, model: str) -> None:
    path = write_vocab(tmp_path / "v.gguf", model, spm_pieces())
    with pytest.raises(UnsupportedError, match=model):
        load_tokenizer(open_gguf(path))


def test_damaged_vocabularies(tmp_path: Path) -> None:
    def write(name: str, **keys: object) -> Path:
        writer = GGUFWriter(tmp_path / f"{name}.gguf")
        for key, value in keys.items():
            writer.add(f"tokenizer.ggml.{key}", value)
        writer.write()
        return writer.path

    pieces = ["<unk>", "a"]
    scores = [0.0, -1.0]
    cases = {
        "no_tokens": ("tokens", write("no_tokens", model="llama")),
        "not_text": ("tokens", write("not_text", model="llama", tokens=[1, 2])),
        "not_array": ("tokens", write("not_array", model="llama", tokens="ab")),
        "no_scores": ("scores", write("no_scores", model="llama", tokens=pieces)),
        "few_scores": ("scores", write("few", model="llama", tokens=pieces, scores=[1.0])),
        "nan": ("scores", write("nan", model="llama", tokens=pieces, scores=[0.0, float("nan")])),
        "few_types": (
            "token_type",
            write("types", model="llama", tokens=pieces, scores=scores, token_type=[1]),
        ),
        "not_byte": (
            "tokens",
            write("byte", model="llama", tokens=pieces, scores=scores, token_type=[2, 6]),
        ),
        "text_id": (
            "bos_token_id",
            write("id", model="llama", tokens=pieces, scores=scores, bos_token_id="a"),
        ),
        "no_merges": ("merges", write("merges", model="gpt2", tokens=pieces, pre="gpt-2")),
        "bad_merge": (
            "merges",
            write("merge", model="gpt2", tokens=pieces, pre="gpt-2", merges=["x y"]),
        ),
        "no_unknown": ("unknown", write("unknown", model="bert", tokens=["a"])),
    }
    for name, (key, path) in cases.items():
        with pytest.raises(FileError) as caught:
            load_tokenizer(open_gguf(path))
        assert key in (caught.value.where or ""), name


def test_ids_outside_the_vocabulary_are_told(tmp_path: Path) -> None:
    tokenizer = load_spm(tmp_path / "v.gguf", eot_token_id=9999, padding_token_id=0xFFFFFFFF)
    assert tokenizer.eot is None
    assert len(tokenizer.warnings) == 1
    assert "eot_token_id is 9999" in tokenizer.warnings[0]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(draw=st.data())
def test_any_vocabulary_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject
) -> None:
    """Pieces need not be UTF-8, nor different, nor of the types that they should be."""
    model = draw.draw(st.sampled_from(["llama", "gpt2", "bert"]))
    words = st.binary(max_size=4) | st.sampled_from(["a", "▁", "Ġ", "<0x41>", "ab"]).map(str.encode)
    pieces = draw.draw(st.lists(st.tuples(words, st.sampled_from(TokenType)), max_size=20))
    keys: dict[str, Any] = {
        f"{name}_token_id": draw.draw(st.none() | st.integers(0, 25))
        for name in ("bos", "eos", "unknown", "seperator")
    }
    scores = draw.draw(
        st.lists(st.floats(width=32), min_size=len(pieces), max_size=len(pieces)) | st.none()
    )
    merges = draw.draw(st.lists(st.sampled_from(["a b", "b", "Ġ a", " a", "a  b", ""]), max_size=3))
    path = tmp_path_factory.mktemp("any") / "v.gguf"
    write_vocab(path, model, pieces, scores=scores, merges=merges, pre="gpt-2", **keys)
    try:
        tokenizer = load_tokenizer(open_gguf(path))
        text = draw.draw(st.text(max_size=20))
        with warnings_to(str):  # of characters that it has no token for
            ids = tokenizer.encode(text, special=draw.draw(st.booleans()))
    except TreadleError:
        return
    assert all(0 <= id < tokenizer.n_vocab for id in ids)
    tokenizer.decode(ids, special=True)
    tokenizer.all_token_bytes()


def test_a_vocabulary_longer_than_the_model(tmp_path: Path) -> None:
    tokenizer = load_spm(tmp_path / "v.gguf", [("a", NORMAL), ("<|im_end|>", CONTROL)])
    tokenizer.warn_of_extra_tokens(tokenizer.n_vocab)
    n = tokenizer.n_vocab
    told = rf"v.gguf: .* {n} tokens but the model only {n - 1}: .*im_end"
    with pytest.warns(UserWarning, match=told):
        tokenizer.warn_of_extra_tokens(tokenizer.n_vocab - 1)
    other = load_spm(tmp_path / "w.gguf", [("a", NORMAL), ("b", NORMAL)])
    with pytest.warns(UserWarning, match="cannot generate the last of them"):
        other.warn_of_extra_tokens(other.n_vocab - 1)
