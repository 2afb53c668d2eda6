"""Meta's shards: put together as its layers are split, and the same model as its GGUF."""

from __future__ import annotations

import base64
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.meta_files import params_of, weights_of, write_meta
from tests.tokenizer.vocabularies import LLAMA3_SPECIALS, read_pairs
from treadle.convert.detect import find_kind, open_source
from treadle.convert.hf.tokenizer import tiktoken
from treadle.convert.hf.tokenizer.tiktoken import LLAMA3, LLAMA31, read_tiktoken
from treadle.convert.legacy.meta_llama import open_meta
from treadle.convert.recipe import Options
from treadle.convert.writer import convert
from treadle.errors import FileError
from treadle.files.gguf import GGUF, GGUFWriter, open_gguf
from treadle.files.metadata import ValueType
from treadle.tokenizer.tokenizer import load_tokenizer

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def stories(data: Path) -> GGUF:
    return open_gguf(data / "models" / "stories260K.gguf")


def make(
    stories: GGUF, data: Path, folder: Path, n: int, said: dict[str, Any] | None = None, **how: Any
) -> Path:
    """The stories' weights as Meta would ship them."""
    params = params_of(stories, **(said or {}))
    write_meta(folder, weights_of(stories), params, n, **how)
    shutil.copy(data / "models" / "tok512.model", folder / "tokenizer.model")
    return folder


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("llama3", [False, True])
def test_shards_become_the_same_model(
    stories: GGUF, data: Path, tmp_path: Path, n: int, llama3: bool
) -> None:
    """Every tensor, the vocabulary, the text and the logits of the GGUF that they were made of."""
    folder = make(stories, data, tmp_path / "stories", n, llama3=llama3, rope__freqs=1)
    out = tmp_path / "out.gguf"
    source = open_source(folder)
    assert source.metadata["llama.context_length"] == 4096
    convert(source, out, Options())
    source.close()
    made = open_gguf(out)
    assert made.tensors.keys() == stories.tensors.keys()
    for name, tensor in made.tensors.items():
        assert tensor.shape == stories.tensors[name].shape
        assert tensor.data.tobytes() == stories.tensors[name].data.tobytes(), name
    for key in ("tokens", "scores", "token_type"):
        theirs: Any = stories.metadata[f"tokenizer.ggml.{key}"]
        assert list(made.metadata[f"tokenizer.ggml.{key}"]) == list(theirs), key  # type: ignore[arg-type]
    with treadle.load(out, threads=1) as a, treadle.load(stories.path, threads=1) as b:
        ids = b.tokenize("Once upon a time, Lily said: é")
        assert a.tokenize("Once upon a time, Lily said: é") == ids
        assert np.array_equal(a.logits(ids), b.logits(ids))


def test_half_precision_stays_and_vectors_become_f32(
    stories: GGUF, data: Path, tmp_path: Path
) -> None:
    source = open_meta(make(stories, data, tmp_path / "m", 2, dtype="bfloat16"))
    convert(source, tmp_path / "out.gguf", Options())
    made = open_gguf(tmp_path / "out.gguf")
    assert made.metadata["general.file_type"] == 32
    for name, tensor in made.tensors.items():
        assert tensor.type_name == ("F32" if "norm" in name else "BF16")
        exact = torch.tensor(stories.tensors[name].dequantize()).bfloat16().float().numpy()
        assert np.array_equal(tensor.dequantize(), exact), name


def test_more_ranks_than_key_heads(stories: GGUF, data: Path, tmp_path: Path) -> None:
    """Llama's runs of many ranks hold each key head several times, in a row."""
    folder = tmp_path / "m"
    weights = weights_of(stories)
    for name in [name for name in weights if name.endswith(("wk.weight", "wv.weight"))]:
        heads = weights[name].reshape(4, 8, 64)
        weights[name] = np.repeat(heads, 2, axis=0).reshape(64, 64)
    for name in list(weights):  # a width that eight ranks divide
        if "feed_forward.w2" in name:
            weights[name] = np.pad(weights[name], ((0, 0), (0, 4)))
        elif "feed_forward.w" in name:
            weights[name] = np.pad(weights[name], ((0, 4), (0, 0)))
    write_meta(folder, weights, params_of(stories), 8)
    shutil.copy(data / "models" / "tok512.model", folder / "tokenizer.model")
    source = open_meta(folder)
    for part in ("attn_k", "attn_v"):
        made = source.tensors[f"blk.2.{part}.weight"]
        assert made.shape == (32, 64)
        assert made.read().tobytes() == stories.tensors[made.name].data.tobytes()
    state = torch.load(folder / "consolidated.03.pth", weights_only=True)
    state["layers.2.attention.wk.weight"][0, 0] += 1
    torch.save(state, folder / "consolidated.03.pth")
    with pytest.raises(FileError, match=r"03\.pth.*layers\.2\.attention\.wk\.weight: differs"):
        open_meta(folder).tensors["blk.2.attn_k.weight"].read()


def test_llama_3_1(stories: GGUF, data: Path, tmp_path: Path) -> None:
    """The rope's factors, as transformers computes them, and the context of the release."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    said = {"rope_theta": 500000.0, "use_scaled_rope": True}
    folder = make(stories, data, tmp_path / "m", 2, said, llama3=True)
    source = open_meta(folder)
    assert source.metadata["llama.rope.freq_base"] == 500000.0
    assert source.metadata["llama.context_length"] == 131072
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=64, num_attention_heads=8, rope_parameters=scaling)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** -(np.arange(0, 8, 2) / 8)
    factors = source.tensors["rope_freqs.weight"].read().view("<f4")
    np.testing.assert_allclose(plain / factors, theirs.numpy(), rtol=1e-6)
    assert factors.max() == 8.0
    convert(source, tmp_path / "out.gguf", Options())
    with treadle.load(tmp_path / "out.gguf", threads=1) as model:
        assert np.isfinite(model.logits([1, 2, 3])).all()


@pytest.mark.parametrize(
    ("said", "n_ctx"),
    [
        ({"norm_eps": 1e-6}, 2048),
        ({}, 4096),
        ({"rope_theta": 1e6}, 16384),
        ({"rope_theta": 5e5}, 8192),
        ({"max_seq_len": 777}, 777),
    ],
)
def test_the_context_of_each_release(
    stories: GGUF, data: Path, tmp_path: Path, said: dict[str, Any], n_ctx: int
) -> None:
    source = open_meta(make(stories, data, tmp_path / "m", 1, said))
    assert source.metadata["llama.context_length"] == n_ctx
    assert bool(source.notes) == ("max_seq_len" not in said)


# -- tokenizers ----------------------------------------------------------------------------------


read_ranks_once = functools.cache(tiktoken.read_ranks)  # of 128,000 it takes seconds


@pytest.mark.parametrize("special", [LLAMA3, LLAMA31])
def test_llama_3s_vocabulary(
    data: Path, tmp_path: Path, special: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's own 47 pairs, through keys made from the list of ranks alone."""
    monkeypatch.setattr(tiktoken, "read_ranks", read_ranks_once)
    keys = read_tiktoken(data / "tokenizers" / "llama3.tiktoken", special)
    names = keys["tokenizer.ggml.tokens"][128000:]
    assert len(names) == len(set(names)) == 256
    if special is LLAMA3:
        assert tuple(names[:10]) == LLAMA3_SPECIALS
        assert names[-1] == "<|reserved_special_token_250|>"
    else:  # as in the tokenizer.json of Llama 3.1
        assert (names[2], names[4], names[5]) == (
            "<|reserved_special_token_0|>",
            "<|finetune_right_pad_id|>",
            "<|reserved_special_token_2|>",
        )
        assert (names[8], names[10], names[255]) == (
            "<|eom_id|>",
            "<|python_tag|>",
            "<|reserved_special_token_247|>",
        )
    writer = GGUFWriter(tmp_path / "v.gguf")
    writer.add("general.architecture", "llama")
    for key, value in keys.items():
        writer.add(key, value, ValueType.STRING if key.endswith("merges") else None)
    writer.write()
    tokenizer = load_tokenizer(open_gguf(tmp_path / "v.gguf"))
    assert tokenizer.eot == 128009
    assert tokenizer.bos == 128000
    pairs = read_pairs(data, "llama-bpe")
    assert len(pairs) == 47
    for text, ids in pairs:
        assert tokenizer.encode(text, bos=False) == ids, text


def test_damaged_lists_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    lines = [base64.b64encode(bytes([b])).decode() + f" {b}" for b in range(256)]
    for bad, match in (
        (lines[:255], "a byte has no token"),
        ([*lines, lines[3].split()[0] + " 256"], "appears twice"),
        ([*lines[:7], "!!!! 7"], "line 8"),
        ([*lines[:7], "AAEC 8"], "line 8: is b'AAEC 8'"),
    ):
        path.write_text("\n".join(bad))
        with pytest.raises(FileError, match=match):
            read_tiktoken(path, LLAMA3)


# -- what is wrong with a checkpoint -----------------------------------------------------------


def test_checkpoints_that_are_not_whole(stories: GGUF, data: Path, tmp_path: Path) -> None:
    weights = weights_of(stories)
    folder = make(stories, data, tmp_path / "m", 2)
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}

    def refused(match: str) -> None:
        with pytest.raises(FileError, match=match):
            open_source(folder)
        for name, raw in kept.items():
            (folder / name).write_bytes(raw)

    def change(rank: int, **tensors: Any) -> None:
        path = folder / f"consolidated.{rank:02d}.pth"
        state = torch.load(path, weights_only=True)
        for key, value in tensors.items():
            name = key.replace("__", ".")
            if value is None:
                del state[name]
            else:
                state[name] = value
        torch.save(state, path)

    change(1, layers__3__attention__wq__weight=None)
    refused(r"01\.pth: layers\.3\.attention\.wq\.weight: is missing")
    change(1, layers__9__attention__wq__weight=torch.ones(2, 2))
    refused(r"00\.pth: layers\.9\.attention\.wq\.weight: is missing")
    for rank in (0, 1):
        change(rank, layers__9__attention__wq__weight=torch.ones(32, 64))
    refused(r"blk\.9\.attn_q\.weight: .*wq\.weight: surplus")
    for rank in (0, 1):
        change(rank, lora__a=torch.ones(2, 2))
    refused(r"lora\.a: surplus")
    for rank in (0, 1):
        change(rank, norm__weight=None)
    refused(r"output_norm\.weight: is missing")
    change(1, layers__0__feed_forward__w1__weight=torch.ones(3, 64))
    refused(r"01\.pth: layers\.0\.feed_forward\.w1\.weight: shape \[3, 64\]")
    for rank in (0, 1):
        change(rank, layers__0__feed_forward__w2__weight=torch.ones(64, 80))
    refused(r"blk\.0\.ffn_down\.weight: .* \[64, 160\] \(expected \[64, 172\]\)")
    change(1, norm__weight=torch.ones(64, dtype=torch.int32))
    refused(r"01\.pth: norm\.weight: shape \[64\] of Int")
    (folder / "consolidated.00.pth").rename(folder / "consolidated.02.pth")
    refused(r"consolidated\.00\.pth is missing")
    (folder / "consolidated.02.pth").unlink()
    (folder / "params.json").write_text(json.dumps(params_of(stories, n_heads="8")))
    refused(r"params\.json: n_heads: is '8'")
    (folder / "params.json").write_text(json.dumps(params_of(stories, vocab_size=513)))
    refused(r"params\.json: vocab_size: is 513")
    (folder / "tokenizer.model").unlink()
    refused(r"tokenizer\.model: cannot be opened")
    (folder / "tokenizer.model").unlink()
    (folder / "tokenizer.model").symlink_to("tokenizer.model")
    with pytest.raises(FileError, match=r"tokenizer\.model: cannot be opened.*symbolic links"):
        open_source(folder)
    assert len(weights) == 48


def test_a_norm_that_differs_between_ranks(stories: GGUF, data: Path, tmp_path: Path) -> None:
    """Shards of two checkpoints: nothing else would tell."""
    folder = make(stories, data, tmp_path / "m", 2)
    state = torch.load(folder / "consolidated.01.pth", weights_only=True)
    state["norm.weight"] += 1
    torch.save(state, folder / "consolidated.01.pth")
    with pytest.raises(FileError, match=r"01\.pth .*norm\.weight: differs from consolidated\.00"):
        convert(open_meta(folder), tmp_path / "out.gguf", Options())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


def test_kinds_by_content(stories: GGUF, data: Path, tmp_path: Path) -> None:
    folder = make(stories, data, tmp_path / "m", 1)
    assert find_kind(folder).name == find_kind(folder / "consolidated.00.pth").name
    assert "Meta" in find_kind(folder).name
    (folder / "params.json").unlink()
    with pytest.raises(FileError, match=r"params\.json"):
        open_source(folder)
    with pytest.raises(FileError, match="is a folder that contains no model"):
        find_kind(tmp_path)
