"""ChatGLM's vocabularies: two tokens before each text, and files that its own code reads."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, processors

from tests.convert.hf_tokenizers import byte_level_tokenizer, save
from tests.convert.test_hf_tokenizer import read
from treadle.convert.hf.tokenizer.tokenizer import read_tokenizer
from treadle.tokenizer.vocab import BEFORE

MASK = "[gMASK]"
SOP = "<sop>"


def test_two_tokens_before_a_text(data: Path, tmp_path: Path) -> None:
    """GLM-4-9B as transformers has it: tokenizer.json puts both before each text."""
    tokenizer = byte_level_tokenizer(data, "qwen2", tmp_path)
    tokenizer.add_tokens([AddedToken(text, special=True) for text in (MASK, SOP)])
    ids = [(text, tokenizer.token_to_id(text)) for text in (MASK, SOP)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{MASK} {SOP} $A", special_tokens=ids
    )
    save(tokenizer, tmp_path)
    ours = read(tmp_path, tokenizer.get_vocab_size())
    expected = tokenizer.encode("some text").ids
    assert expected[:2] == [i for _, i in ids]
    assert ours.encode("some text") == expected
    assert ours.encode_prompt(f"{MASK}{SOP}some text") == expected  # as its chat template has it
    assert ours.encode("some text", bos=False) == expected[2:]
    assert (ours.bos, ours.add_bos) == (None, False)


def ranks(*more: bytes) -> bytes:
    """A list of the bytes and ``more``, as tiktoken writes it."""
    tokens = [*(bytes([i]) for i in range(256)), *more]
    lines = (b"%s %d" % (base64.b64encode(token), i) for i, token in enumerate(tokens))
    return b"\n".join(lines)


def test_ranks_of_a_folder_with_code_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(ranks(b"ab", b"abc", b" a"))
    added = {str(259 + i): {"content": text} for i, text in enumerate((MASK, SOP, "<|user|>"))}
    settings = {"added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = read(tmp_path, 264, model_type="chatglm")
    assert (ours.model, ours.pre) == ("gpt2", "chatglm-bpe")
    assert ours.encode("abc a") == [259, 260, 257, 258]
    assert ours.encode("<|user|>abab12", bos=False) == [261, 256, 256, ord("1"), ord("2")]
    assert ours.decode([257, 258]) == "abc a"


def test_names_that_only_its_code_has(data: Path, tmp_path: Path) -> None:
    """ChatGLM 3: nine tokens stand behind the pieces of the file."""
    shutil.copy(data / "models" / "tok512.model", tmp_path / "tokenizer.model")
    ours = read(tmp_path, 528, model_type="chatglm")
    assert [ours.piece(i) for i in (512, 513, 515, 520)] == [
        *("[MASK]", MASK, "sop", "<|observation|>")
    ]
    ids = ours.encode("some text")
    assert ids[:2] == [513, 515]
    assert ours.decode(ids) == "some text"
    assert ours.encode("<|user|>", bos=False, special=True) == [518]
    assert {518, 520} <= ours.eog


@pytest.mark.parametrize("kind", ["llama", "chatglm"])
def test_of_no_other_family(kind: str, data: Path, tmp_path: Path) -> None:
    shutil.copy(data / "models" / "tok512.model", tmp_path / "tokenizer.model")
    keys = read_tokenizer(tmp_path, {"model_type": kind}, 528)
    assert (BEFORE in keys) == (kind == "chatglm")
