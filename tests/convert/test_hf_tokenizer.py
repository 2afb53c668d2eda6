"""Tokenizer files to GGUF's keys: the same ids as the library that wrote the files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.models import BPE

from tests.convert.hf_tokenizers import (
    CHATML,
    FEW,
    LLAMA3,
    MARK,
    QWEN_SPECIALS,
    byte_level,
    byte_level_tokenizer,
    save,
    save_files,
    split,
    spm_tokenizer,
)
from tests.models.hf_tiny import require_transformers
from tests.tokenizer.vocabularies import read_pairs
from treadle.chat.template.template import load_template
from treadle.convert.hf.tokenizer.sentencepiece_model import parse_sentencepiece, read_sentencepiece
from treadle.convert.hf.tokenizer.tokenizer import read_tokenizer
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import GGUF, GGUFWriter, open_gguf
from treadle.files.metadata import ValueType, number_array
from treadle.tokenizer.bpe import BYTE_OF_LETTER
from treadle.tokenizer.tokenizer import Tokenizer, load_tokenizer
from treadle.tokenizer.vocab import LSTRIP, RSTRIP, SPACES, TokenType


def model(keys: dict[str, Any]) -> GGUF:
    """A model file of these keys, as far as a tokenizer looks."""
    return cast(GGUF, SimpleNamespace(path=Path("dir"), metadata=keys))


def read(folder: Path, n_vocab: int, **config: Any) -> Tokenizer:
    return load_tokenizer(model(read_tokenizer(folder, config, n_vocab)))


def edit(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text("utf-8"))
    for key, value in changes.items():
        inner = values
        *outer, last = key.split("__")
        for word in outer:
            inner = inner[word]
        inner[last] = value
    path.write_text(json.dumps(values), "utf-8")


# -- byte-level BPE -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "gpt-2", "starcoder", "falcon"])
def test_byte_level_gives_the_same_ids(name: str, data: Path, tmp_path: Path) -> None:
    """And llama.cpp's, on its own 47 texts; the pre-tokenizer is found by its structure."""
    theirs = byte_level_tokenizer(data, name, tmp_path, whole=True)
    save(theirs, tmp_path / "hf")
    ours = read(tmp_path / "hf", theirs.get_vocab_size() + 7)  # rows beyond the vocabulary
    assert ours.pre == {"starcoder": "smollm"}.get(name, name)  # the same under another name
    assert ours.n_vocab == theirs.get_vocab_size() + 7
    for text, ids in read_pairs(data, name):
        assert ours.encode(text, bos=False) == ids
        if name != "qwen2":  # NFC
            assert ours.encode(text) == theirs.encode(text).ids
        assert theirs.encode(text, add_special_tokens=False).ids == ids


def test_qwen_as_it_is_shipped(data: Path, tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(data, "qwen2", tmp_path)
    n = tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    whole = save(tokenizer, tmp_path, CHATML, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    edit(tmp_path / "tokenizer_config.json", bos_token=None, add_bos_token=False)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"bos_token_id": n - 3, "eos_token_id": [n - 1, n - 3], "pad_token_id": n - 3})
    )
    keys = read_tokenizer(tmp_path, {"bos_token_id": n - 3}, n + 100)
    ours = load_tokenizer(model(keys))
    assert (ours.bos, ours.eos, ours.pad) == (None, n - 1, n - 3)
    assert {n - 1, n - 3} <= ours.eog
    assert not ours.add_bos
    assert not ours.add_eos
    assert [ours.is_control(n + i) for i in (-3, -2, -1, 0)] == [True] * 3 + [False]
    assert ours.vocab.types[n] == TokenType.USER_DEFINED
    assert set(ours.vocab.types[n + 1 :].tolist()) == {TokenType.UNUSED}
    said = [{"role": "user", "content": "Hi <think> 123"}]
    text = load_template(model(keys)).render(said, add_generation_prompt=False)
    assert text == whole.apply_chat_template(said, tokenize=False)
    assert ours.encode(text, special=True) == whole(text)["input_ids"]
    assert ours.encode("a<think>b") == whole("a<think>b")["input_ids"]


def test_tokens_that_drop_white_space(data: Path, tmp_path: Path) -> None:
    """GGUF has no keys for it; treadle's own go into converted files, too."""
    tokenizer = byte_level_tokenizer(data, "gpt-2", tmp_path)
    n = tokenizer.get_vocab_size()
    whole = AddedToken("<keeps>", special=True)
    left = AddedToken("<left>", special=True, lstrip=True)
    right = AddedToken("<right>", special=False, rstrip=True, normalized=False)
    tokenizer.add_tokens([left, right, whole])
    save(tokenizer, tmp_path)
    keys = read_tokenizer(tmp_path, {}, n + 3)
    assert [keys[key].numpy().tolist() for key in (LSTRIP, RSTRIP)] == [[n], [n + 1]]
    ours = load_tokenizer(model(keys))
    for text in (
        "a \n<left> b <right>\t\u3000 c <keeps> d",
        " <left> <right> <left><keeps> <left>\x1c<right>\x1c ",
        "<right>\n\n<right> ",
    ):
        assert ours.encode(text, bos=False, special=True) == tokenizer.encode(text).ids, text
    keys[RSTRIP] = number_array(ValueType.INT32, [n + 3])
    with pytest.raises(FileError, match=f"{RSTRIP}.* has {n + 3}"):
        load_tokenizer(model(keys))
    assert not {LSTRIP, RSTRIP} & read_tokenizer(tmp_path, {}, n).keys()


def test_llama3_bos_comes_from_the_template(data: Path, tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(data, "llama-bpe", tmp_path)
    n = tokenizer.get_vocab_size()
    save(tokenizer, tmp_path, eos_token="<|eot_id|>")
    ours = read(tmp_path, n, eos_token_id=[n - 9, n - 1])
    special = tokenizer.token_to_id
    assert (ours.bos, ours.eos) == (special("<|begin_of_text|>"), special("<|eot_id|>"))
    assert (ours.add_bos, ours.add_eos) == (True, False)
    edit(tmp_path / "tokenizer_config.json", add_bos_token=False)
    assert not read(tmp_path, n).add_bos


@pytest.mark.parametrize("end", ["<|im_end|>", "<stop>"])
def test_a_token_behind_a_text_that_ends_no_answer(end: str, data: Path, tmp_path: Path) -> None:
    """Qwen3's embedders: what stands behind a text is GGUF's EOS, and both end an answer."""
    tokenizer = byte_level_tokenizer(data, "qwen2", tmp_path)
    tokenizer.add_tokens([AddedToken("<stop>", special=True)])
    behind = "<|endoftext|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {behind}", special_tokens=[(behind, tokenizer.token_to_id(behind))]
    )
    save(tokenizer, tmp_path, eos_token=end)
    ours = read(tmp_path, tokenizer.get_vocab_size(), eos_token_id=tokenizer.token_to_id(behind))
    assert ours.encode("some text") == tokenizer.encode("some text").ids
    assert ours.eos == tokenizer.token_to_id(behind)
    assert {tokenizer.token_to_id(end), ours.eos} <= ours.eog


def test_further_ends_of_text_are_kept(data: Path, tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(data, "qwen2", tmp_path)
    tokenizer.add_tokens([AddedToken(f"<stop{i}>", special=True) for i in range(2)])
    n = tokenizer.get_vocab_size()
    save(tokenizer, tmp_path, eos_token="<|im_end|>")
    ours = read(tmp_path, n, eos_token_id=[n - 3, n - 2, n - 1, 1 << 30])
    assert ours.eos == n - 3
    assert {n - 1, n - 2, n - 3} <= ours.eog


@pytest.mark.parametrize(
    ("pre", "ignore_merges", "name"),
    [
        (byte_level(split(LLAMA3)), True, "llama-bpe"),
        (byte_level(split(LLAMA3, "removed", invert=True)), True, "llama-bpe"),
        (byte_level(split(LLAMA3)), False, "smaug-bpe"),
        (byte_level(split(LLAMA3.replace("{1,3}", ""))), False, "qwen2"),
        # a row that takes whole pieces does as well where merges make all of them
        (byte_level(split(LLAMA3.replace("{1,3}", ""))), True, "qwen2"),
    ],
)
def test_pre_tokenizers(pre: Any, ignore_merges: bool, name: str, tmp_path: Path) -> None:
    tokenizer = tiny_byte_level()
    tokenizer.pre_tokenizer = pre
    save_files(tokenizer, tmp_path)
    edit(tmp_path / "tokenizer.json", model__ignore_merges=ignore_merges)
    assert read(tmp_path, tokenizer.get_vocab_size()).pre == name


@pytest.mark.parametrize(
    "pre",
    [
        byte_level(split(LLAMA3.replace("{1,3}", "{1,4}"))),
        byte_level(split(LLAMA3, "merged_with_previous")),
        pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), byte_level()]),
        pre_tokenizers.Sequence([split(LLAMA3), pre_tokenizers.ByteLevel(use_regex=False)]),
    ],
)
def test_unknown_pre_tokenizers_are_refused(pre: Any, tmp_path: Path) -> None:
    tokenizer = tiny_byte_level()
    tokenizer.pre_tokenizer = pre
    save_files(tokenizer, tmp_path)
    with pytest.raises(UnsupportedError, match=r"tokenizer\.json: pre_tokenizer"):
        read(tmp_path, tokenizer.get_vocab_size())


@pytest.mark.parametrize("prefix", [True, False])
def test_a_space_before_the_bytes_of_a_text(prefix: bool, data: Path, tmp_path: Path) -> None:
    theirs = byte_level_tokenizer(data, "gpt-2", tmp_path)
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    save(theirs, tmp_path / "hf", bos_token="<|endoftext|>")
    n = theirs.get_vocab_size()
    keys = read_tokenizer(tmp_path / "hf", {}, n)
    assert (SPACES in keys) == prefix
    ours = load_tokenizer(model(keys))
    end = "<|endoftext|>"
    for text in ("hello", " hello", "\nhello", "", f"x{end}hello", f"a {end} b", f"{end}é"):
        ids = ours.encode(text, special=True, bos=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
    for text in ("hello", "\nhello", f"x{end}hello", "é"):
        assert ours.decode(ours.encode(text, special=True)) == text.replace(end, "")


def test_ignored_merges_that_matter_are_refused(tmp_path: Path) -> None:
    """A piece that no merge makes: with ``ignore_merges`` it is found, without it never."""
    tokenizer = tiny_byte_level()
    tokenizer.pre_tokenizer = byte_level(split(LLAMA3.replace("{1,3}", "")))
    save_files(tokenizer, tmp_path)
    n = tokenizer.get_vocab_size()
    edit(tmp_path / "tokenizer.json", model__ignore_merges=True, model__merges=[])
    with pytest.raises(UnsupportedError, match="whole tokens first"):
        read(tmp_path, n)


def test_other_rules_for_text_are_refused(tmp_path: Path) -> None:
    tokenizer = tiny_byte_level()
    n = tokenizer.get_vocab_size()
    tokenizer.normalizer = normalizers.Lowercase()
    save_files(tokenizer, tmp_path / "lower")
    with pytest.raises(UnsupportedError, match="Lowercase"):
        read(tmp_path / "lower", n)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="ab $A", special_tokens=[("ab", 256)]
    )
    save_files(tokenizer, tmp_path / "post", bos_token="a")
    with pytest.raises(UnsupportedError, match="post_processor puts"):
        read(tmp_path / "post", n)


# -- SentencePiece --------------------------------------------------------------------------


def spm_arrays(data: Path, *, whole: bool = False) -> tuple[list[str], list[float]]:
    """Llama 2's pieces: the first and all single characters, or the whole, which takes seconds."""
    with open_gguf(data / "vocab" / "ggml-vocab-llama-spm.gguf") as gguf:
        pieces = [str(p) for p in gguf.metadata["tokenizer.ggml.tokens"]]  # type: ignore[union-attr]
        scores: list[float] = list(gguf.metadata["tokenizer.ggml.scores"])  # type: ignore[arg-type]
    kept = [i for i, piece in enumerate(pieces) if whole or i < FEW or len(piece) == 1]
    return [pieces[i] for i in kept], [scores[i] for i in kept]


@pytest.fixture(scope="module")
def llama2(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    require_transformers()
    folder = tmp_path_factory.mktemp("llama2")
    pieces, scores = spm_arrays(data, whole=True)
    theirs = spm_tokenizer(pieces, scores)
    save(theirs, folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return theirs, read(folder, len(pieces))


def test_scores_are_found_again_in_merges(llama2: tuple[Any, Tokenizer], data: Path) -> None:
    theirs, ours = llama2
    assert ours.model == "llama"
    assert (ours.bos, ours.eos, ours.unk) == (1, 2, 0)
    for text, ids in read_pairs(data, "llama-spm"):
        assert ours.encode(text, bos=False) == ids
        assert ours.encode(text) == theirs.encode(text).ids


@settings(max_examples=100, deadline=None)
@given(text=st.text(min_size=1) | st.text("ab the\n.é漢", min_size=1))
def test_any_text(llama2: tuple[Any, Tokenizer], text: str) -> None:
    theirs, ours = llama2
    if MARK in text:
        return  # which stands for a space in one of them and for itself in none
    assert ours.encode(text) == theirs.encode(text).ids


def test_merges_left_out_are_refused(data: Path, tmp_path: Path) -> None:
    pieces, scores = spm_arrays(data)
    save_files(spm_tokenizer(pieces, scores), tmp_path)
    merges = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))["model"]["merges"]
    edit(tmp_path / "tokenizer.json", model__merges=merges[:100] + merges[101:])
    with pytest.raises(UnsupportedError, match="as SentencePiece would"):
        read(tmp_path, len(pieces))


def test_gemma4_keeps_its_merges(data: Path, tmp_path: Path) -> None:
    """The same vocabulary with a merge left out, which no scores can say."""
    pieces, scores = spm_arrays(data)
    save_files(
        spm_tokenizer(pieces, scores, prefix=False), tmp_path, bos_token="<s>", unk_token="<unk>"
    )
    merges = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))["model"]["merges"]
    edit(tmp_path / "tokenizer.json", model__merges=merges[:100] + merges[101:])
    theirs = HFTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ours = read(tmp_path, len(pieces), model_type="gemma4")
    assert (ours.model, ours.bos, ours.unk) == ("gemma4", 1, 0)
    for text, _ in read_pairs(data, "llama-spm"):
        if text:
            assert ours.encode(text) == theirs.encode(text).ids, text
    left, right = merges[100]
    assert len(ours.encode(left + right, bos=False)) > 1
    save_files(spm_tokenizer(pieces, scores), tmp_path)
    with pytest.raises(UnsupportedError, match="a space before text"):
        read(tmp_path, len(pieces), model_type="gemma4_text")


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_and_prefix(scheme: str, data: Path, tmp_path: Path) -> None:
    """Unlike Prepend it puts no space before one; "first" puts none behind special tokens."""
    pieces, scores = spm_arrays(data)
    prefix = scheme != "never"
    tokenizer = spm_tokenizer(pieces, scores, prefix=prefix)
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    save_files(tokenizer, tmp_path)
    ours = read(tmp_path, len(pieces))
    for text in ("Once upon a time", "two  spaces", "x", " x", "  x", "▁x", "x</s>x", "</s> x"):
        ids = ours.encode(text, special=True, bos=False)
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids, text
    whole = ours.decode(ours.encode("one</s> two</s>three", special=True))
    assert whole == ("onetwothree" if scheme == "always" else "one twothree")
    edit(tmp_path / "tokenizer_config.json", add_prefix_space=not prefix)
    assert read(tmp_path, len(pieces)).adds_space is not prefix
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    save_files(tokenizer, tmp_path)
    with pytest.raises(UnsupportedError, match="unsupported rule"):
        read(tmp_path, len(pieces))


ORIGINALS = {
    "tok512.model": "stories260K.gguf",
    "babyllama105/tok105.model": "babyllama105/babyllama105-F32.gguf",
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_tokenizer_model(name: str, data: Path, tmp_path: Path) -> None:
    """Trained by sentencepiece itself; the GGUF beside it was converted by others."""
    original = data / "models" / name
    (tmp_path / "tokenizer.model").write_bytes(original.read_bytes())
    processor = SentencePieceProcessor(model_file=str(original))
    ours = read(tmp_path, processor.vocab_size())
    assert (ours.bos, ours.eos, ours.unk, ours.add_bos) == (1, 2, 0, True)
    for text in ("Once upon a time, Lily", "one two", "a\n\nb", "\u00e9\U0001f999", "x"):
        assert ours.encode(text, bos=False) == processor.encode(text)
    with open_gguf(data / "models" / ORIGINALS[name]) as gguf:
        theirs = load_tokenizer(gguf)
        same = [i for i in range(ours.n_vocab) if ours.piece(i) == theirs.piece(i)]
        assert len(same) >= ours.n_vocab - 3  # llama2.c writes its control pieces otherwise
        assert ours.vocab.scores is not None
        assert theirs.vocab.scores is not None
        assert np.array_equal(ours.vocab.scores[same], theirs.vocab.scores[same])


@pytest.mark.parametrize("legacy", [None, True, False])
@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast"])
def test_legacy_puts_a_space_behind_special_tokens(
    name: str, legacy: bool | None, data: Path, tmp_path: Path
) -> None:
    """As transformers 5 reads such folders: in files of Llama 2 and Phi 3 it is False."""
    require_transformers()
    from transformers import AutoTokenizer

    original = data / "models" / "babyllama105" / "tok105.model"
    (tmp_path / "tokenizer.model").write_bytes(original.read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config: dict[str, Any] = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>"}
    config |= {"unk_token": "<unk>"} | ({} if legacy is None else {"legacy": legacy})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = read(tmp_path, SentencePieceProcessor(model_file=str(original)).vocab_size())
    for text in ("one day", " one", "<s>one day</s>one", "</s> one", "<s><s>one</s>"):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, special=True, bos=False) == ids, text


def test_added_tokens_beside_a_tokenizer_model(data: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((data / "models" / "tok512.model").read_bytes())
    (tmp_path / "added_tokens.json").write_text('{"<tool>": 512, "<far>": 9000}')
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "added_tokens_decoder": {
                    "0": {"content": "<unk>", "special": True},
                    "2": {"content": "</s>", "special": True},
                    "513": {"content": "<|end|>", "special": True},
                },
                "eos_token": {"content": "<|end|>"},
                "add_eos_token": True,
            }
        )
    )
    ours = read(tmp_path, 520)
    assert ours.n_vocab == 520
    assert ours.eos == 513
    assert ours.add_eos
    kinds = ours.vocab.types
    assert [int(kinds[i]) for i in (0, 2, 512, 513, 514)] == [
        TokenType.UNKNOWN,
        TokenType.CONTROL,
        TokenType.USER_DEFINED,
        TokenType.CONTROL,
        TokenType.UNUSED,
    ]
    assert 512 in ours.encode("a<tool>b")
    assert 513 not in ours.encode("<|end|>")[:-1]
    with pytest.raises(FileError, match="at most 511"):
        read(tmp_path, 511)


def test_an_end_that_has_no_row_is_told(data: Path, tmp_path: Path) -> None:
    """``vocab_size`` is one less than the tokenizer's tokens: texts never end."""
    (tmp_path / "tokenizer.model").write_bytes((data / "models" / "tok512.model").read_bytes())
    entries: dict[str, Any] = {
        "512": {"content": "<pic>"},
        "513": {"content": "<over>", "special": True},
    }
    settings: dict[str, Any] = {"added_tokens_decoder": entries, "eos_token": "<over>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    told = r"tokenizer has 514 tokens and the model 513 \(vocab_size\): .*'<over>' \(513\)"
    with pytest.warns(UserWarning, match=told):
        read(tmp_path, 513)
    read(tmp_path, 514)  # no word of it
    entries["513"]["content"] = "<|im_end|>"  # by its name alone
    del settings["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.warns(UserWarning, match=r"'<\|im_end\|>' \(513\)"):
        read(tmp_path, 513)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "added_tokens.json").write_text('{"<over>": 600}')
    with pytest.warns(UserWarning, match=r"has 601 tokens and the model 512 .*'<over>' \(600\)"):
        read(tmp_path, 512, eos_token_id=[2, 600])
    (tmp_path / "added_tokens.json").write_text('{"<picture>": 512}')
    read(tmp_path, 512)  # what a model of text alone leaves out is no loss


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(raw=st.binary(max_size=64), at=st.integers(0, 6000), cut=st.integers(0, 6000))
def test_damaged_tokenizer_models(raw: bytes, at: int, cut: int, data: Path) -> None:
    whole = (data / "models" / "tok512.model").read_bytes()
    for damaged in (raw, whole[:at] + raw + whole[at + len(raw) :], whole[:cut]):
        try:
            found = parse_sentencepiece(damaged, Path("tokenizer.model"))
        except TreadleError:
            continue
        else:
            assert len(found.pieces) == len(found.scores) == len(found.types) > 0


def test_unigram_and_tables_are_refused(data: Path, tmp_path: Path) -> None:
    whole = (data / "models" / "tok512.model").read_bytes()
    head, tail = whole.split(b"\x0bdata/tok512\x18\x02")
    for changed, why in (
        (head + b"\x0bdata/tok512\x18\x01" + tail, "unigram"),
        (whole.replace(b"\x0a\x08identity\x12\x00", b"\x0a\x07nmt_xyz\x12\x01x"), "table"),
    ):
        (tmp_path / "tokenizer.model").write_bytes(changed)
        with pytest.raises(UnsupportedError, match=why):
            read_sentencepiece(tmp_path / "tokenizer.model")


# -- chat templates -------------------------------------------------------------------------


def test_templates_of_every_place(data: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((data / "models" / "tok512.model").read_bytes())
    settings_path = tmp_path / "tokenizer_config.json"
    key = "tokenizer.chat_template"

    def found() -> dict[str, Any]:
        keys = read_tokenizer(tmp_path, {}, 512)
        return {k: v for k, v in keys.items() if "chat_template" in k}

    assert found() == {}
    (tmp_path / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert found() == {key: "from json"}
    settings_path.write_text('{"chat_template": "from settings"}')
    assert found() == {key: "from settings"}
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "tools"}]
    settings_path.write_text(json.dumps({"chat_template": named}))
    assert found() == {
        key: "one",
        "tokenizer.chat_templates": ["tool_use"],
        f"{key}.tool_use": "tools",
    }
    (tmp_path / "chat_template.jinja").write_text("a file\u2026", "utf-8")
    assert found()[key] == "a file\u2026"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert found()[f"{key}.rag"] == "rag"
    settings_path.write_text('{"chat_template": [1]}')
    with pytest.raises(FileError, match="chat_template"):
        found()


# -- bad files ------------------------------------------------------------------------------


def tiny_byte_level() -> Any:
    """256 bytes and one merge."""
    letters = [*BYTE_OF_LETTER, "ab"]
    tokenizer = HFTokenizer(BPE({letter: i for i, letter in enumerate(letters)}, [("a", "b")]))
    tokenizer.pre_tokenizer = byte_level(use_regex=True)
    return tokenizer


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model__type": "Unigram"}, "Unigram"),
    ({"model__vocab": []}, "model.vocab"),
    ({"model__vocab": {"a": 0, "b": 0}}, "model.vocab"),
    ({"model__vocab": {"a": 1 << 40}}, "model.vocab"),
    ({"model__vocab": {"a": -1}}, "model.vocab"),
    ({"model__vocab": {"a": True}}, "model.vocab"),
    ({"model__merges": None}, "model.merges"),
    ({"model__merges": ["a"]}, "model.merges"),
    ({"model__merges": [["zz", "never there"]]}, "model.merges"),
    ({"model__merges": [[1, 2]]}, "model.merges"),
    ({"model__continuing_subword_prefix": "##"}, "continuing_subword_prefix"),
    ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, 3]}}, "pre_"),
    ({"added_tokens": 3}, "added_tokens"),
    ({"added_tokens": [{"id": "x", "content": "y"}]}, "added_tokens"),
    ({"added_tokens": [{"id": 1 << 60, "content": "y"}]}, "added_tokens"),
    ({"post_processor": {"type": "BertProcessing"}}, "post_processor"),
    ({"post_processor": {"type": "TemplateProcessing", "single": [4]}}, "post_processor"),
]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("changes", "where"), BAD, ids=[f"{w}-{i}" for i, (_, w) in enumerate(BAD)]
)
def test_bad_tokenizer_json(changes: dict[str, Any], where: str, tmp_path: Path) -> None:
    tokenizer = tiny_byte_level()
    save_files(tokenizer, tmp_path)
    n = tokenizer.get_vocab_size()
    assert read(tmp_path, n).n_vocab == n
    edit(tmp_path / "tokenizer.json", **changes)
    with pytest.raises(TreadleError) as caught:
        read(tmp_path, n)
    assert "tokenizer.json" in str(caught.value)
    assert where in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", '{"eos_token": 3}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
        ("generation_config.json", '{"eos_token_id": ["x"]}'),
        ("generation_config.json", "[]"),
        ("added_tokens.json", '{"x": "y"}'),
        ("special_tokens_map.json", '{"bos_token": []}'),
    ],
)
def test_bad_files_are_named(name: str, text: str, data: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((data / "models" / "tok512.model").read_bytes())
    (tmp_path / name).write_text(text)
    with pytest.raises(FileError) as caught:
        read(tmp_path, 512)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "chat_template.jinja"])
def test_symlink_loops_are_errors(name: str, data: Path, tmp_path: Path) -> None:
    if name != "tokenizer.model":
        (tmp_path / "tokenizer.model").write_bytes((data / "models" / "tok512.model").read_bytes())
    (tmp_path / name).symlink_to(name)
    with pytest.raises(FileError, match=name):
        read(tmp_path, 512)


def test_written_as_gguf_and_read_again(data: Path, tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(data, "qwen2", tmp_path)
    save(tokenizer, tmp_path, CHATML, eos_token=QWEN_SPECIALS[2])
    keys = read_tokenizer(tmp_path, {}, tokenizer.get_vocab_size() + 5)
    writer = GGUFWriter(tmp_path / "made.gguf")
    for key, value in keys.items():
        writer.add(key, value)
    writer.write()
    with open_gguf(tmp_path / "made.gguf") as gguf:
        again = load_tokenizer(gguf)
        ours = load_tokenizer(model(keys))
        for text, _ in read_pairs(data, "qwen2"):
            assert again.encode(text) == ours.encode(text) == tokenizer.encode(text).ids
        assert load_template(gguf).source == CHATML
