"""Streaming never splits a character, and gives what decoding the whole gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenizer.conftest import Load
from tests.tokenizer.vocabularies import NORMAL, letters, load_bpe
from treadle.tokenizer.tokenizer import StreamDecoder, Tokenizer

BYTES = st.binary(max_size=12) | st.lists(
    st.sampled_from([b"\xf0\x9f", b"\xa6\x99", b"\xe2\x96", b"\x81", b"\xc0", b"\xed\xa0", b"a"])
).map(b"".join)


@settings(deadline=None)
@given(data=BYTES)
def test_bytes_as_python_decodes_them(bytes_tokenizer: Tokenizer, data: bytes) -> None:
    ids = [3 + byte for byte in data]
    expected = data.decode("utf-8", "replace")
    assert bytes_tokenizer.decode(ids, start=False) == expected
    decoder = StreamDecoder(bytes_tokenizer)
    assert "".join([*map(decoder.push, ids), decoder.flush()]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-spm", "phi-3", "gpt-2", "qwen2", "bert-bge"])
@settings(max_examples=100, deadline=None)
@given(draw=st.data(), special=st.booleans(), start=st.booleans())
def test_streamed_is_whole(
    load: Load, name: str, draw: st.DataObject, special: bool, start: bool
) -> None:
    tokenizer = load(name)
    near = st.integers(0, 300) | st.integers(0, tokenizer.n_vocab - 1)
    ids = draw.draw(st.lists(near, max_size=20))
    decoder = StreamDecoder(tokenizer, special=special, start=start)
    streamed = "".join([*map(decoder.push, ids), decoder.flush()])
    assert streamed == tokenizer.decode(ids, special=special, start=start)
    if not start and not special:
        kept = [id for id in ids if not tokenizer.is_control(id)]
        cuts = any(tokenizer.is_special(id) for id in ids)
        whole = b"".join(map(tokenizer.token_bytes, kept)).decode("utf-8", "replace")
        assert streamed == whole or (cuts and tokenizer.adds_space)


def test_characters_come_whole(tmp_path: Path) -> None:
    tokenizer = load_bpe(tmp_path / "v.gguf", more=[(letters("🦙".encode()[:3]), NORMAL)])
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(i) for i in (256, 0x99, 0x61)] == ["", "🦙", "a"]
    assert decoder.push(256) == ""
    assert decoder.push(0x61) == "\ufffda"  # the rest never came
    assert decoder.push(256) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push(0x61) == "a"


def test_where_tokens_begin(tmp_path: Path) -> None:
    """Those of one character where it does; one that breaks a character off, behind its U+FFFD."""
    tokenizer = load_bpe(tmp_path / "v.gguf", more=[(letters("🦙".encode()[:3]), NORMAL)])
    ids = [0x61, 256, 0x99, 0x61, 256, 0x61, 256]
    decoder = StreamDecoder(tokenizer)
    found = []
    for id in ids:
        decoder.push(id)
        found.append(decoder.at)
    assert found == [0, 1, 1, 2, 3, 4, 5]
    assert tokenizer.decode(ids) == "a🦙a\ufffda\ufffd"


def test_generated_text_keeps_its_first_space(load: Load) -> None:
    tokenizer = load("llama-spm")
    ids = tokenizer.encode("hello world", bos=False)
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(id) for id in ids] == [" hello", " world"]
    decoder = StreamDecoder(tokenizer, start=True)
    assert [decoder.push(id) for id in ids] == ["hello", " world"]
