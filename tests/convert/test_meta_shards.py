"""Meta's shards without torch: joined, refused where they do not fit, and Llama 3's list of tokens.
``test_meta.py`` has what torch saves, and the joined models run.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.convert.meta_files import meta_name, params_of, shard_of, weights_of
from tests.convert.pth_files import write_pth
from treadle.convert.hf.tokenizer.tiktoken import LLAMA3, LLAMA31, is_tiktoken, read_tiktoken
from treadle.convert.legacy.meta_llama import find_shards, open_meta
from treadle.errors import FileError
from treadle.files.gguf import GGUF, open_gguf
from treadle.kernels.activation_layout import from_bf16_bits, to_bf16_bits
from treadle.tokenizer.bpe import BYTE_OF_LETTER
from treadle.tokenizer.vocab import TokenType

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def stories(data: Path) -> GGUF:
    return open_gguf(data / "models" / "stories260K.gguf")


@pytest.fixture
def write(stories: GGUF, data: Path, tmp_path: Path) -> Write:
    """The stories in ``n`` shards; ``change(rank, name, rows)`` gives other rows, or none."""

    def make(
        n: int = 2,
        *,
        llama3: bool = False,
        shard: Any = shard_of,
        change: Any = lambda rank, name, x: x,
        **said: Any,
    ) -> Path:
        folder = tmp_path / "meta"
        folder.mkdir(exist_ok=True)
        (folder / "params.json").write_text(json.dumps(params_of(stories, **said)))
        for rank in range(n):
            parts = {
                name: change(rank, name, shard(name, x, rank, n, llama3=llama3))
                for name, x in weights_of(stories).items()
            }
            kept = {name: x for name, x in parts.items() if x is not None}
            kept["rope.freqs"] = np.ones(2, np.float32)
            write_pth(folder / f"consolidated.{rank:02d}.pth", kept)
        shutil.copy(data / "models" / "tok512.model", folder / "tokenizer.model")
        return folder

    return make


@pytest.mark.parametrize(("n", "llama3"), [(1, False), (2, False), (4, True)])
def test_shards_are_joined(n: int, llama3: bool, write: Write, stories: GGUF) -> None:
    source = open_meta(write(n, llama3=llama3))
    assert source.tensors.keys() == stories.tensors.keys()
    for name, tensor in source.tensors.items():
        assert tensor.shape == stories.tensors[name].shape
        assert bytes(tensor.read()) == stories.tensors[name].data.tobytes(), name
    keys = source.metadata
    assert keys["general.architecture"] == "llama"
    for key in ("embedding_length", "block_count", "feed_forward_length", "attention.head_count"):
        assert keys[f"llama.{key}"] == stories.metadata[f"llama.{key}"], key
    tokens: Any = keys["tokenizer.ggml.tokens"]
    theirs: Any = stories.metadata["tokenizer.ggml.tokens"]
    assert list(tokens) == [text.encode() for text in theirs]
    source.close()


@pytest.mark.parametrize(
    ("said", "n_ctx"),
    [
        ({}, 4096),
        ({"norm_eps": 1e-6}, 2048),
        ({"rope_theta": 500000.0}, 8192),
        ({"rope_theta": 1e6}, 16384),
        ({"rope_theta": 500000.0, "use_scaled_rope": True}, 131072),
        ({"max_seq_len": 777}, 777),
    ],
)
@pytest.mark.every_case
def test_the_context_is_that_of_the_release(said: dict[str, Any], n_ctx: int, write: Write) -> None:
    source = open_meta(write(1, **said))
    assert source.metadata["llama.context_length"] == n_ctx
    assert source.metadata["llama.rope.freq_base"] == pytest.approx(said.get("rope_theta", 1e4))
    assert bool(source.notes) == ("max_seq_len" not in said)
    assert ("rope_freqs.weight" in source.tensors) == ("use_scaled_rope" in said)
    source.close()


def test_types_of_weights(write: Write, stories: GGUF) -> None:
    """Matrices stay as they are, vectors become float32; so do numbers of 64 bits."""

    def of_rank(rank: int, name: str, x: np.ndarray) -> np.ndarray:
        if "attention.wq" in name:
            return x.astype(np.float64)
        return np.asarray(to_bf16_bits(x))

    source = open_meta(write(2, change=of_rank))
    for name, tensor in source.tensors.items():
        exact = stories.tensors[name].dequantize()
        raw = np.frombuffer(bytes(tensor.read()), np.uint8)
        if "attn_q." in name:
            assert np.array_equal(raw.view(np.float32), exact.reshape(-1)), name
            continue
        expected = from_bf16_bits(to_bf16_bits(exact)).reshape(-1)
        found = raw.view(np.float32) if exact.ndim == 1 else from_bf16_bits(raw.view(np.uint16))
        assert np.array_equal(found, expected), name
    source.close()


def test_ranks_that_hold_the_same_key_head(write: Write, stories: GGUF) -> None:
    """Of more ranks than key heads; copies that differ are found as they are read."""
    assert stories.metadata["llama.attention.head_count_kv"] == 4

    def shard(name: str, x: np.ndarray, rank: int, n: int, *, llama3: bool) -> np.ndarray:
        if name.endswith(("wk.weight", "wv.weight")):
            return np.asarray(x.reshape(4, -1, x.shape[1])[rank // 2])
        if "feed_forward" in name:  # a width that eight ranks divide
            axis = int("w2" in name)
            pad = [(0, 0), (0, 4)] if axis else [(0, 4), (0, 0)]
            return np.split(np.pad(x, pad), n, axis)[rank]
        return shard_of(name, x, rank, n, llama3=llama3)

    source = open_meta(write(8, shard=shard))
    for part in ("attn_k", "attn_v"):
        made = source.tensors[f"blk.2.{part}.weight"]
        assert bytes(made.read()) == stories.tensors[made.name].data.tobytes()
    source.close()
    source = open_meta(
        write(8, shard=shard, change=lambda rank, name, x: x + (rank == 3 and "wk" in name))
    )
    with pytest.raises(FileError, match=r"03\.pth.*attention\.wk\.weight: differs"):
        source.tensors["blk.2.attn_k.weight"].read()
    source.close()


def test_what_does_not_fit_is_refused(write: Write, tmp_path: Path) -> None:
    embeddings = "tok_embeddings.weight"
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (lambda r, name, x: None if name == embeddings else x, {}, "token_embd.weight: is missing"),
        (
            lambda r, name, x: None if (r, name) == (1, "output.weight") else x,
            {},
            "is missing, but another shard has it",
        ),
        (lambda r, name, x: x[:-1] if r and "wq" in name else x, {}, "as in consolidated.00.pth"),
        (lambda r, name, x: x[0] if "wq" in name else x, {}, "2 dimensions of floats"),
        (lambda r, name, x: x.astype(np.int64) if "wq" in name else x, {}, "2 dimensions of flo"),
        (lambda r, name, x: x, {"vocab_size": 5}, "vocab_size: is 5"),
    ]
    for change, said, message in refused:
        with pytest.raises(FileError, match=message):
            open_meta(write(2, change=change, **said))
    for name in ("consolidated.00.pth", "consolidated.01.pth"):
        (tmp_path / "meta" / name).unlink()
        with pytest.raises(FileError, match=r"no checkpoint|is missing"):
            find_shards(tmp_path / "meta")
    (tmp_path / "meta" / "consolidated.03.pth").touch()
    with pytest.raises(FileError, match=r"consolidated\.00\.pth is missing"):
        find_shards(tmp_path / "meta")


def test_names_are_metas() -> None:
    assert meta_name("blk.3.ffn_down.weight") == "layers.3.feed_forward.w2.weight"


# -- Llama 3's list --------------------------------------------------------------------------------

BYTES = [bytes([i]) for i in range(256)]
WORDS = [b"ab", b"cd", b"abc", b"abcd", b" x", b"xyz"]  # the last is never made by merging


def ranks(path: Path, tokens: list[bytes]) -> Path:
    lines = [b"%b %d\n" % (base64.b64encode(token), i) for i, token in enumerate(tokens)]
    path.write_bytes(b"".join(lines))
    return path


def test_a_list_of_ranks_becomes_merges(tmp_path: Path) -> None:
    path = ranks(tmp_path / "tokenizer.model", BYTES + WORDS)
    assert is_tiktoken(path.read_bytes()[:256])
    assert not is_tiktoken(b"\n\x0e\n\x05<unk>")
    keys = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in read_tiktoken(path, LLAMA31).items()
    }
    letter = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
    assert keys["merges"] == ["a b", "c d", "ab c", "ab cd", f"{letter[32]} x"]
    n = len(BYTES + WORDS)
    tokens = keys["tokens"]
    assert len(tokens) == n + 256
    assert tokens[n - 1] == "xyz"
    assert (keys["bos_token_id"], keys["eos_token_id"], keys["eot_token_id"]) == (n, n + 1, n + 9)
    assert tokens[n + 9] == "<|eot_id|>"
    assert tokens[n + 10] == "<|python_tag|>"
    assert tokens[n + 2] == "<|reserved_special_token_0|>"
    assert set(keys["token_type"][n:].tolist()) == {TokenType.CONTROL}
    older: Any = read_tiktoken(path, LLAMA3)["tokenizer.ggml.tokens"]
    assert older[n + 10].startswith("<|reserved")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"YQ== 1\n", "line 1: is b'YQ== 1'"),
        (b"YQ== 0\n!! 1\n", "line 2"),
        (b"YQ== 0\nYQ== 1\n", "a token appears twice, or a byte has no token"),
        (b"YQ== x\n", "line 1"),
    ],
)
def test_damaged_lists(raw: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(raw)
    with pytest.raises(FileError, match=message):
        read_tiktoken(path, LLAMA3)
