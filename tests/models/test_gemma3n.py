"""Gemma 3n: its logits against transformers', in place and converted; texts that go back and share
a beginning, every step against its twin, files of older and newer converters, and what is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert
from tests.models.hf_tiny import EPS, compute_logits, float64_only, require_transformers
from tests.models.test_arch_truth import check_truth, ids_of
from tests.reference import forward
from tests.stepwise import walk
from tests.tiny import rounding
from treadle.convert.hf.config import read_config
from treadle.convert.hf.folder import open_hf_source
from treadle.convert.llamacpp_differences import reading_differences
from treadle.engine.batch import BatchItem
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import GGUF, GGUFWriter, Tensor, open_gguf
from treadle.formats import by_name
from treadle.kernels.run_state import PAGE
from treadle.models.config import PoolSpec
from treadle.models.graphs import GRAPHS
from treadle.models.load import load_config

N_VOCAB = 320
N_ROWS = 300
N_LAYER = 8
N_SPARSE = 3
OPTIONS: dict[str, Any] = {
    "vocab_size": N_VOCAB,
    "vocab_size_per_layer_input": N_ROWS,
    "hidden_size": 64,
    "intermediate_size": [96] * (N_LAYER - 1) + [64],
    "num_hidden_layers": N_LAYER,  # layer 4 is global; those from 5 on have no keys
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 3,
    "layer_types": [*["sliding_attention"] * 4, *["full_attention", "sliding_attention"] * 2],
    "laurel_rank": 16,
    "activation_sparsity_pattern": [0.95, 0.5, 0.3] + [0.0] * (N_LAYER - N_SPARSE),
    "rms_norm_eps": EPS,
    "attn_implementation": "eager",
}


@dataclass(frozen=True)
class Made:
    """A folder as transformers writes it, what is converted of it, and its logits."""

    folder: Path
    path: Path
    logits: Callable[[list[int]], np.ndarray]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    require_transformers()
    import torch
    import transformers

    config = transformers.Gemma3nTextConfig(**OPTIONS)
    kind = transformers.Gemma3nForCausalLM
    with float64_only():
        model = kind(config).eval()
    rng = np.random.default_rng(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = _draw(rng, name, tuple(parameter.shape)).astype(np.float32)
            parameter.copy_(torch.from_numpy(value.astype(np.float64)))
    folder = tmp_path_factory.mktemp("gemma3n") / "hf"
    model.to(torch.float32).save_pretrained(folder)
    model.to(torch.float64)
    path = convert(folder, folder.parent / "made.gguf")
    return Made(folder, path, lambda ids: compute_logits(model, ids))


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The router says numbers of about 0.6, so that streams are told apart."""
    x = rng.standard_normal(shape)
    if "norm" in name or name.endswith("correct_output_scale"):
        return 1 + 0.25 * x
    if "embed_tokens" in name:
        return 0.35 * x
    if "modality_router" in name:
        return 0.6 * math.sqrt(shape[1]) * x
    return 0.4 * x if "coefs" in name else 1.4 * x / math.sqrt(shape[1])


def test_agrees_with_transformers(made: Made) -> None:
    """One of the tokens is sixteen times as sensitive to rounding as most."""
    ids = ids_of()
    truth = made.logits(ids)
    moved = []
    with open_gguf(made.path) as gguf:
        config = load_config(gguf)
        for seed in range(8):
            rounded = RoundedFile(gguf, np.random.default_rng(seed))
            found = forward(cast(GGUF, rounded), config, ids)
            moved.append(np.abs(found - truth).max(1) / np.abs(truth).max())
    typical = np.sqrt(np.mean(np.square(moved), 0))
    assert np.median(typical) < rounding(config) / 4  # the limit of most tokens stays sharp
    for path in (made.folder, made.path):
        check_truth(path, truth, typical)


class RoundedFile:
    """A file whose weights are off by as much as f32 sums of 96 products: sqrt(96 / 2) roundings of
    2**-24.
    """

    def __init__(self, gguf: GGUF, rng: np.random.Generator) -> None:
        self.metadata = gguf.metadata
        self.tensors = {name: RoundedTensor(each, rng) for name, each in gguf.tensors.items()}


class RoundedTensor:
    type_name = "F64"

    def __init__(self, tensor: Tensor, rng: np.random.Generator) -> None:
        exact = tensor.dequantize().astype(np.float64)
        self.shape = tensor.shape
        self.values = exact * (1 + rng.uniform(-1, 1, exact.shape) * math.sqrt(96 / 2) * 2.0**-24)

    def dequantize(self) -> np.ndarray:
        return self.values


def test_tokens_behind_the_table(made: Made) -> None:
    """transformers gives them the first row's values; a converted file has these as rows."""
    ids = [*ids_of(7), 310, 5, N_ROWS, N_ROWS - 1, N_VOCAB - 1]
    truth = made.logits(ids)
    for path in (made.folder, made.path):
        with treadle.load(path, threads=2, kv="f32") as model:
            error = np.abs(model.logits(ids) - truth).max() / np.abs(truth).max()
            assert error <= 2 * rounding(model.config), path
            exact = forward(model.gguf, model.config, ids)
            assert np.abs(exact - truth).max() <= rounding(model.config) * np.abs(truth).max()
    with open_gguf(made.path) as gguf:
        table = gguf.tensors["per_layer_token_embd.weight"].dequantize()
    assert table.shape[0] == N_VOCAB
    assert (table[N_ROWS:] == table[0]).all()


def test_the_folder_as_it_is_published(made: Made, tmp_path: Path) -> None:
    """Within a model of images and sound, whose tensors are left out; keys of layers that read
    others' are not, for llama.cpp wants them. The bits are the same.
    """
    from safetensors.numpy import load_file, save_file

    tensors = load_file(made.folder / "model.safetensors")
    tensors = {n.replace("model.", "model.language_model.", 1): v for n, v in tensors.items()}
    more = {"self_attn.k_proj": (64, 64), "self_attn.v_proj": (64, 64), "self_attn.k_norm": (32,)}
    for i in range(N_LAYER - 3, N_LAYER):
        for name, shape in more.items():
            full = f"model.language_model.layers.{i}.{name}.weight"
            tensors[full] = np.ones(shape, np.float32)
    for name in ("vision_tower.timm_model.conv_stem.conv", "audio_tower.conformer.0.ffw"):
        tensors[f"model.{name}.weight"] = np.ones((4, 3), np.float32)
    for name in ("embed_vision.embedding", "embed_audio.embedding"):
        tensors[f"model.{name}.weight"] = np.ones((4, 64), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    inner = json.loads((made.folder / "config.json").read_text())
    outer = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"]}
    config = {**outer, "text_config": inner, "vision_config": {}, "audio_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with treadle.load(made.folder, threads=2) as model:
        expected = model.logits(ids_of())
    for path in (tmp_path, convert(tmp_path, tmp_path / "made.gguf")):
        with treadle.load(path, threads=2) as model:
            unread = {
                f"blk.{i}.attn_{one}.weight" for i in (5, 6, 7) for one in ("k", "v", "k_norm")
            }
            assert set(model.config.ignored) == unread
            assert np.array_equal(model.logits(ids_of()), expected)


def test_keys(made: Made) -> None:
    config = json.loads((made.folder / "config.json").read_text())
    keys = read_config(config, Path("config.json")).metadata
    cuts = keys["gemma3n.activation_sparsity_scale"]
    # As torch's normal distribution has them, in f32.
    assert cuts[:N_SPARSE] == [1.6448535919189453, 0.0, -0.5244004726409912]
    assert cuts[N_SPARSE:] == [-math.inf] * (N_LAYER - N_SPARSE)
    assert keys["gemma3n.feed_forward_length"] == [96] * 7 + [64]
    del config["activation_sparsity_pattern"]
    cuts = read_config(config, Path("config.json")).metadata["gemma3n.activation_sparsity_scale"]
    assert cuts == [-math.inf] * N_LAYER  # of more than ten layers, ten are sparse
    for key, value, match in (
        ("altup_correct_scale", False, "altup_correct_scale: is False"),
        ("activation_sparsity_pattern", [1.0] * N_LAYER, "numbers from 0, below 1"),
        ("intermediate_size", [96] * 3, "an integer, or 8 of them"),
    ):
        with pytest.raises(TreadleError, match=match):
            read_config({**config, key: value}, Path("config.json"))


def test_what_llama_cpp_reads_otherwise(made: Made) -> None:
    """It wants keys in all layers, which a folder that transformers 5 wrote has not; and takes the
    published sizes for those of all files.
    """
    source = open_hf_source(made.folder)
    *_, lost = reading_differences(source.metadata, source.tensors)  # behind one of windows
    assert lost.endswith("it refuses gemma3n whose last 3 layers have no attn_k and attn_v")
    whole = {*source.tensors, *(f"blk.{i}.attn_k.weight" for i in range(N_LAYER))}
    *_, sizes = reading_differences(source.metadata, whole)
    assert "the first 20 layers have keys and values and the first 10 gates are sparse" in sizes
    published: dict[str, Any] = {"block_count": 25, "attention.shared_kv_layers": 5}
    published["attention.sliding_window"] = 0
    published["activation_sparsity_scale"] = [1.6448535919189453] * 10 + [-math.inf] * 15
    keys = source.metadata | {f"gemma3n.{key}": value for key, value in published.items()}
    assert not reading_differences(keys, {f"blk.{i}.attn_k.weight" for i in range(25)})
    source.close()


def test_who_keeps_keys_and_values(made: Made) -> None:
    with treadle.load(made.path, threads=1) as model:
        layers = model.config.layers
        assert [layer.kv_from for layer in layers] == [0, 1, 2, 3, 4, 3, 4, 3]
        assert [layer.ffn for layer in layers] == ["gated_sparse"] * 3 + ["gated"] * 5
        pools = GRAPHS["gemma3n"].pools(model.config)
        found = [(p.layers, p.window) for p in pools if isinstance(p, PoolSpec)]
        assert found == [((4,), 0), ((0, 1, 2, 3), 16)]


@pytest.fixture(scope="module")
def model(made: Made) -> Iterator[treadle.Model]:
    """Deterministic: then bits depend on nothing but the text."""
    with treadle.load(made.path, threads=2, deterministic=True, n_sequences=3) as loaded:
        yield loaded


def text(n: int, seed: int = 7) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, N_VOCAB, n).tolist()
    return ids


def test_texts_that_begin_alike(model: treadle.Model) -> None:
    """Found in pages, taken back, forked: the bits are those of one go."""
    engine = model.engine
    ids = text(3 * PAGE + 12)
    other = [*text(2 * PAGE), *text(30, 8)]
    truth = model.logits(ids)
    others = model.logits(other)
    engine.cache.forget()
    with closing(model.session()) as first, closing(model.session()) as second:
        assert np.array_equal(first.prefill(ids), truth[-1])
        assert second.match(other) == 2 * PAGE
        assert np.array_equal(second.prefill(other), others[-1])
        first.truncate(len(ids) - 5)
        assert np.array_equal(first.feed(ids[-5:]), truth[-1])
        with closing(engine.cache.fork(second.seq)) as fork:
            rows = [engine.run([BatchItem(seq, [5], 1)])[0].copy() for seq in (second.seq, fork)]
        assert np.array_equal(*rows)


@pytest.mark.parametrize("fmt", ["F32", "Q8_0"])
def test_every_step_agrees_with_its_twin(fmt: str, made: Made, tmp_path: Path) -> None:
    """In batches of several texts, and of few tokens and of many."""
    rewrite(made.path, tmp_path / "made.gguf", {}, fmt=fmt)
    with treadle.load(
        tmp_path / "made.gguf", threads=2, kv="f32", n_sequences=2, context=256
    ) as model:
        engine = model.engine
        ids = text(100)
        with closing(engine.cache.sequence()) as long, closing(engine.cache.sequence()) as one:
            engine.run([BatchItem(long, ids[:60], 0)])
            for batch in (
                [BatchItem(long, ids[60:]), BatchItem(one, ids[:3])],
                [BatchItem(long, [6])],
            ):
                found = list(walk(engine, batch))
                worst = max(found, key=lambda compared: compared.error)
                assert worst.error <= 1, (worst.label, worst.kind, worst.error)
                labels = {compared.label for compared in found}
                assert {"altup.spread", "L0.altup.predict", "L7.altup.correct"} <= labels
                assert {"L2.laurel.sum", "L2.ffn.gelu", "L7.own.post_norm", "altup.join3"} <= labels


def test_first_files_say_layers_as_a_number(made: Made, tmp_path: Path) -> None:
    """llama.cpp's converter wrote 10.0 at first, and no base of the local rope."""
    changes = {"attention.shared_kv_layers": 3.0, "rope.freq_base_swa": None}
    rewrite(made.path, tmp_path / "old.gguf", changes)
    with treadle.load(tmp_path / "old.gguf", threads=1) as old:
        logits = old.logits(ids_of())
        config = old.config
    with treadle.load(made.path, threads=1) as new:
        assert config.layers == new.config.layers
        assert np.array_equal(new.logits(ids_of()), logits)


@pytest.mark.parametrize(
    ("changes", "lost", "kind", "message"),
    [
        ({}, "altup_proj.weight", FileError, r"altup_proj\.weight: the tensor is missing"),
        ({}, "blk.3.laurel_r.weight", FileError, r"laurel_r\.weight: the tensor is missing"),
        (
            {"altup.active_idx": 1},
            "",
            UnsupportedError,
            "active_idx: is 1: treadle supports only 0",
        ),
        ({"altup.num_inputs": 3}, "", FileError, r"shape \[3, 64, 64\]|n_streams"),
        ({"activation_sparsity_scale": None}, "", FileError, "the key is missing"),
        ({"activation_sparsity_scale": [1.0]}, "", FileError, "8, one per layer"),
        ({"activation_sparsity_scale": [math.nan] * 8}, "", FileError, "holds nan"),
        ({"attention.shared_kv_layers": 2.5}, "", FileError, "a whole number"),
        ({"attention.shared_kv_layers": 5}, "", FileError, "without keys and values"),
    ],
)
def test_files_that_are_not_whole(
    changes: dict[str, Any],
    lost: str,
    kind: type[Exception],
    message: str,
    made: Made,
    tmp_path: Path,
) -> None:
    rewrite(made.path, tmp_path / "bad.gguf", changes, lost=lost)
    with pytest.raises(kind, match=message):
        treadle.load(tmp_path / "bad.gguf")


def rewrite(
    source: Path, to: Path, changes: dict[str, Any], *, lost: str = "", fmt: str = "F32"
) -> None:
    """The file with other keys, without a tensor, or with matrices of layers in another format."""
    with open_gguf(source) as gguf:
        writer = GGUFWriter(to)
        keys = {f"gemma3n.{key}": value for key, value in changes.items()}
        for key, value in {**gguf.metadata, **keys}.items():
            if value is not None:
                writer.add(key, value)
        for name, tensor in gguf.tensors.items():
            plain = "altup" in name or "laurel" in name or len(tensor.shape) < 2
            if name != lost:
                kind = by_name("F32" if plain or not name.startswith("blk.") else fmt)
                blocks = kind.quantize_rows(tensor.dequantize())
                writer.add_tensor(name, tensor.shape, kind, blocks.reshape(-1).view(np.uint8))
        writer.write()
