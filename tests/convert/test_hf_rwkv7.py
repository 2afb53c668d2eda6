"""Folders of RWKV-7: the names of flash-linear-attention, for transformers has none, and the list
of pieces.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, keys_of
from tests.convert.test_hf_tokenizer import read
from tests.models.test_hybrids import text
from tests.tiny import write_model
from treadle.convert.hf.folder import open_hf, open_hf_source
from treadle.convert.recipe import plan_entries
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.formats import by_name

LAYERS = 3
WIDTH = 64
HEAD = 32
PIECES = 320
CONFIG: dict[str, Any] = {
    "model_type": "rwkv7",
    "architectures": ["RWKV7ForCausalLM"],
    "vocab_size": PIECES,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 96,
    "head_dim": HEAD,
    "num_heads": 2,
    "norm_eps": 1e-5,
    "norm_first": True,
    "norm_bias": True,
    "hidden_act": "sqrelu",
    "attn": None,
    "decay_low_rank_dim": 20,
    "a_low_rank_dim": 16,
    "v_low_rank_dim": 12,
    "gate_low_rank_dim": 24,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
STEMS = {
    "token_embd": "model.embeddings",
    "token_embd_norm": "model.layers.0.pre_norm",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "attn_norm",
    "attn_norm_2": "ffn_norm",
    "time_mix_receptance": "attn.r_proj",
    "time_mix_key": "attn.k_proj",
    "time_mix_value": "attn.v_proj",
    "time_mix_output": "attn.o_proj",
    "time_mix_ln": "attn.g_norm",
    "channel_mix_key": "ffn.key",
    "channel_mix_value": "ffn.value",
}
BARE = {"channel_mix_lerp_k": "ffn.x_k"} | {f"time_mix_{n}": f"attn.{n}" for n in ("k_k", "k_a")}


def spelt(name: str, rows: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor of a GGUF file as the folder has it."""
    layer, stem, kind = "", *name.rsplit(".", 1)
    if stem.startswith("blk."):
        i, stem = stem.split(".")[1:]
        layer = f"model.layers.{i}."
    if stem in STEMS:
        return {f"{layer}{STEMS[stem]}.{kind}": rows}
    if stem in BARE:
        return {layer + BARE[stem]: rows.reshape(1, 1, -1)}
    own = stem.removeprefix("time_mix_")
    if own == "r_k":
        return {f"{layer}attn.r_k": rows.reshape(-1, HEAD)}
    if own == "lerp_fused":
        return {f"{layer}attn.x_{n}": rows[j] for j, n in enumerate("rwkvag")}
    part = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}[own[1]]
    return {f"{layer}attn.{own[0]}_lora.lora.{part}": rows}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A GGUF file, and the folder of the same model."""
    path = tmp_path_factory.mktemp("rwkv7")
    write_model(path / "tiny.gguf", "rwkv7", n_layer=LAYERS, tied=0, n_vocab=PIECES)
    save(path / "tiny.gguf", path / "hf")
    return path / "tiny.gguf", path / "hf"


def save(source: Path, folder: Path, **more: np.ndarray) -> None:
    from safetensors.numpy import save_file

    folder.mkdir()
    tensors: dict[str, np.ndarray] = {}
    with open_gguf(source) as file:
        for name, tensor in file.tensors.items():
            rows = tensor.dequantize().reshape(tensor.shape)
            tensors |= {n: np.ascontiguousarray(x) for n, x in spelt(name, rows).items()}
    save_file(tensors | more, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))


def test_in_place_and_converted(files: tuple[Path, Path], tmp_path: Path) -> None:
    """The same bits; and in the file what llama.cpp wants of the first layer, though nobody reads
    it: what makes its rates once more, as llama.cpp's converter has it.
    """
    source, folder = files
    made = convert(folder, tmp_path / "made.gguf")
    ids = text(40)
    logits = []
    for path in (source, folder, made):
        with treadle.load(path, threads=1, kv="f32") as model:
            logits.append(model.logits(ids))
    assert np.array_equal(logits[0], logits[1])
    assert np.array_equal(logits[0], logits[2])
    with open_gguf(source) as ours, open_gguf(made) as file:
        unread = {f"blk.0.time_mix_v{i}.weight" for i in range(3)}
        assert set(file.tensors) == set(ours.tensors) | unread
        for i in range(3):
            rates = file.tensors[f"blk.0.time_mix_a{i}.weight"]
            values = file.tensors[f"blk.0.time_mix_v{i}.weight"]
            assert rates.shape == values.shape
            assert np.array_equal(rates.data, values.data)
        lerp = file.tensors["blk.1.time_mix_lerp_fused.weight"]
        assert (lerp.shape, lerp.type_name) == ((6, 1, 1, WIDTH), "F32")


@pytest.mark.slow
def test_other_layouts(files: tuple[Path, Path], tmp_path: Path) -> None:
    """What tokens are mixed to in one tensor; and mixed values of the first layer, which has
    nothing to mix them with.
    """
    from safetensors.numpy import load_file, save_file

    source, folder = files
    surplus = {
        f"model.layers.0.attn.v_lora.lora.{name}": np.ones(shape, np.float32)
        for name, shape in (("0.weight", (12, 64)), ("2.weight", (64, 12)), ("2.bias", (64,)))
    }
    save(source, tmp_path / "hf", **surplus)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    for i in range(LAYERS):
        at = f"model.layers.{i}.attn.x_"
        tensors[f"{at}x"] = np.stack([tensors.pop(at + name) for name in "rwkvag"])
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    logits = []
    for path in (folder, tmp_path / "hf"):
        with treadle.load(path, threads=1, kv="f32") as model:
            logits.append(model.logits(text(40)))
    assert np.array_equal(logits[0], logits[1])


def test_narrow_floats(files: tuple[Path, Path]) -> None:
    """What is small is F32 in a file of F16."""
    source = open_hf_source(files[1])
    entries = plan_entries(source, by_name("F16"))
    source.close()
    kinds = {entry.tensor.name: entry.type.name for entry in entries}
    assert kinds["blk.1.time_mix_key.weight"] == kinds["blk.0.channel_mix_value.weight"] == "F16"
    small = [n for n in kinds if "time_mix" in n and (n[-8] in "012" or "lerp" in n)]
    assert len(small) == LAYERS * (3 + 3 + 3 + 2 + 1)
    assert {kinds[name] for name in small} == {"F32"}


def test_keys() -> None:
    """Ranks that are left out follow from the width, as llama.cpp's converter has them."""
    told = keys_of(CONFIG)
    assert told["rwkv7.wkv.head_size"] == HEAD
    assert told["rwkv7.attention.head_count"] == 0
    assert told["rwkv7.context_length"] == 1 << 20
    assert told["rwkv7.attention.layer_norm_epsilon"] == np.float32(1e-5)
    named = ("decay", "iclr", "value_residual_mix", "gate")
    ranks = [f"rwkv7.attention.{name}_lora_rank" for name in named]
    assert [told[key] for key in ranks] == [20, 16, 12, 24]
    few = {"model_type": "rwkv7", "hidden_size": 768, "intermediate_size": None}
    usual = keys_of({**few, "gate_low_rank_dim": None})
    assert [usual[key] for key in ranks] == [64, 64, 32, 128]
    assert usual["rwkv7.feed_forward_length"] == 3072
    wide = keys_of({**few, "hidden_size": 4096})
    assert [wide[key] for key in ranks] == [128, 128, 96, 480]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"attn": {"layers": [1]}}, "attn: is .*layers"),
        ({"norm_first": False}, "norm_first: is False"),
        ({"hidden_act": "silu"}, "hidden_act: 'silu'"),
        ({"head_dim": 48}, "head_size: 48 does not divide"),
        ({"a_low_rank_dim": 8}, r"layers\.0\.attn\.a_lora\.lora\.0\.weight: shape \[16, 64\]"),
    ],
)
def test_what_is_at_odds(
    change: dict[str, Any], why: str, files: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").symlink_to(files[1] / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises((FileError, UnsupportedError), match=why):
        open_hf(tmp_path)


# -- the list of pieces ---------------------------------------------------------------------------

WORLD = "rwkv_vocab_v20230424.txt"
SPELT = [*(bytes([i]) for i in range(256)), b"\n\n", "ab", "é\u2028", "é".encode()[:1] + b"'\""]


def listed(pieces: list[Any]) -> str:
    """Texts as texts, and what is none as bytes."""
    lines = []
    for i, piece in enumerate(pieces, 1):
        raw = piece.encode() if isinstance(piece, str) else piece
        shown = f"'{piece}'" if isinstance(piece, str) else repr(piece)
        if max(raw) < 128:
            shown = repr(raw.decode())
        lines.append(f"{i} {shown} {len(raw)}\n")
    return "".join(lines)


def test_the_list_of_pieces(tmp_path: Path) -> None:
    (tmp_path / WORLD).write_bytes(listed(SPELT).encode())
    ours = read(tmp_path, 264, model_type="rwkv7")
    assert (ours.model, ours.n_vocab, ours.bos, ours.eos, ours.eot) == ("rwkv", 264, 0, 0, 257)
    assert ours.encode("ab\n\né\u2028é") == [258, 257, 259, 0xC3 + 1, 0xA9 + 1]
    assert [ours.token_bytes(i) for i in range(1, 261)] == [
        piece.encode() if isinstance(piece, str) else piece for piece in SPELT
    ]
    assert ours.piece(263) == "[PAD263]"


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("1 'a' 1\n3 'b' 1\n", r"line 2: is \"3 'b' 1\" \(expected 2, a Python string"),
        ("1 'a' 2\n", "line 1: is"),
        ("1 a 1\n", "line 1: is"),
        ("1 5 1\n", "line 1: is"),
        pytest.param(f"1 {'-' * 3000}1 1\n", "line 1: is", id="recursion"),
        pytest.param(f"1 {'-' * 30000}1 1\n", "line 1: is", id="memory"),
        ("1 'a' 1\n2 'b' 1\n3 'c' 1", r"has 4 pieces \(expected at most 3"),
    ],
)
def test_lists_that_are_damaged(lines: str, why: str, tmp_path: Path) -> None:
    (tmp_path / WORLD).write_text(lines)
    with pytest.raises(FileError, match=why):
        read(tmp_path, 3, model_type="rwkv7")
