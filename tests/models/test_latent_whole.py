"""Latent attention whose keys and values one matrix makes (``attn_kv_b``): MiniCPM 3, PLM, and
DeepSeek's files of the old kind.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.changed_gguf import write_changed
from tests.conftest import WriteTiny
from tests.models.test_arch_truth import ids_of
from tests.reference import forward
from tests.tiny import rounding
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.formats import by_name
from treadle.kernels.attention.records import PAGE
from treadle.models.load import load_config
from treadle.plan.lowering.latent import F16_MOST
from treadle.quantize.plan import find_mix, make_recipe
from treadle.quantize.write import write

ARCHS = (("minicpm3", 0), ("minicpm3", 32), ("plm", 0))
IDS = ids_of(70)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "n_q_rank"), ARCHS)
def test_is_what_the_reference_computes(arch: str, n_q_rank: int, tiny: WriteTiny) -> None:
    """In one go and by decode, the same bits for every number of threads."""
    path = tiny(arch, n_q_rank=n_q_rank, n_head=3)
    bits = []
    for threads in (1, 2, 3):
        with treadle.load(path, threads=threads, kv="f32") as model:
            kind = "latent_kv_b" if n_q_rank else "latent_q_kv_b"
            assert {layer.mixer for layer in model.config.layers} == {kind}
            for n in (1, model.engine.max_tokens):
                model.plan(n).check()
            exact = forward(model.gguf, model.config, IDS)
            with closing(model.session()) as session:
                rows = np.concatenate([session.logits([i]) for i in IDS])
            bits.append([model.logits(IDS), rows])
            for logits in bits[-1]:
                error = np.abs(logits - exact).max() / np.abs(exact).max()
                assert error <= rounding(model.config)
    assert all(np.array_equal(each, bits[0]) for each in bits)


@pytest.mark.parametrize("fmt", ["F16", "Q4_0"])
def test_formats(fmt: str, tiny: WriteTiny) -> None:
    """Numbers are turned as they are. Blocks become F16 there: what F16 has of them, they lose
    nothing of 1 part in 2048.
    """
    whole = tiny("minicpm3", formats=(("attn_kv_b", fmt),))
    with open_gguf(whole) as gguf:
        tensors = {
            name: tensor.dequantize() for name, tensor in gguf.tensors.items() if "kv_b" in name
        }
    with treadle.load(whole, threads=1, kv="f32") as model:
        found = model.logits(IDS)
        made = model.engine._weights.derived
        turned, kept = (made[f"blk.1.attn_{x}_b.weight"] for x in "kv")
        assert turned.type_name == ("F16" if by_name(fmt).block > 1 else fmt)
        assert kept.type_name == fmt
        heads = tensors["blk.1.attn_kv_b.weight"].reshape(4, 96 + 32, 64)
        np.testing.assert_array_equal(kept.dequantize(), heads[:, 96:])
        keys = heads[:, :96].swapaxes(1, 2)
        np.testing.assert_allclose(turned.dequantize(), keys, rtol=2.0**-11, atol=2.0**-24)
        exact = forward(model.gguf, model.config, IDS)
    assert np.abs(found - exact).max() <= 0.05 * np.abs(exact).max()


def test_numbers_that_f16_does_not_reach(tiny: WriteTiny, tmp_path: Path) -> None:
    """Q8_0's scale can be F16's largest number, and its codes go to 127."""
    path = tiny("minicpm3", formats=(("attn_kv_b", "Q8_0"),), n_layer=1)
    with open_gguf(path) as gguf:
        tensor = gguf.tensors["blk.0.attn_kv_b.weight"]
        rows = tensor.dequantize()
    rows[0, 0] = 8 * F16_MOST
    q8 = by_name("Q8_0")
    writer = GGUFWriter(tmp_path / "large.gguf")
    with open_gguf(path) as gguf:
        for key, value in gguf.metadata.items():
            writer.add(key, value)
        for name, each in gguf.tensors.items():
            data = q8.quantize_rows(rows) if name == tensor.name else each.data
            writer.add_tensor(name, each.shape, each.type_name, data)
        writer.write()
    with treadle.load(tmp_path / "large.gguf", threads=1) as model:
        model.plan(1)
        made = model.engine._weights.derived["blk.0.attn_k_b.weight"]
        assert made.type_name == "F32"
        assert made.dequantize()[0, 0, 0] > 7 * F16_MOST


def old_kind(source: Path, target: Path, **more: Any) -> Path:
    """DeepSeek's file as converters wrote it until the spring of 2025."""
    maps: dict[str, Any] = {}
    with open_gguf(source) as gguf:
        arch = gguf.metadata["general.architecture"]
        sizes = {n: gguf.metadata[f"{arch}.attention.{n}_length_mla"] for n in ("key", "value")}
        n_head = gguf.metadata[f"{arch}.attention.head_count"]
        for name in [name for name in gguf.tensors if "attn_k_b" in name]:
            k_b = gguf.tensors[name].dequantize()
            v_b = gguf.tensors[name.replace("k_b", "v_b")].dequantize()
            both = np.concatenate([k_b.swapaxes(1, 2), v_b], 1)
            maps[name.replace("k_b", "kv_b")] = both.reshape(-1, both.shape[2])
            maps |= {name: None, name.replace("k_b", "v_b"): None}
    keys: dict[str, Any] = {f"{arch}.attention.head_count_kv": n_head}
    for n, size in sizes.items():
        keys |= {f"{arch}.attention.{n}_length": size, f"{arch}.attention.{n}_length_mla": None}
    return write_changed(source, target, keys, maps | more)


def test_files_of_the_old_kind(data: Path, tmp_path: Path) -> None:
    """The same bits as of a new one; what ik_llama.cpp writes beside the matrix is not read."""
    new = data / "arch" / "glm4moelite.gguf"
    beside = {"blk.0.attn_k_b.weight": np.ones((64, 8), np.float32)}
    files = [
        new,
        old_kind(new, tmp_path / "old.gguf"),
        old_kind(new, tmp_path / "b.gguf", **beside),
    ]
    found = []
    for path in files:
        with treadle.load(path, threads=2, kv="f32") as model:
            found.append(model.logits(IDS))
            assert model.config.layers[0].head_dim == 48
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_as_the_converter_of_llama_cpp_writes_it(tiny: WriteTiny, tmp_path: Path) -> None:
    """MiniCPM 3's files have no scales, nor how wide a value is."""
    path = tiny("minicpm3", n_embd=128)
    keys = {"minicpm3.attention.value_length": None}
    less = write_changed(path, tmp_path / "less.gguf", keys)
    with treadle.load(path, threads=1) as whole, treadle.load(less, threads=1) as model:
        residual = 1.4 / 3**0.5
        assert model.config.embd_scale == pytest.approx(12.0 / residual)
        assert model.config.logit_scale == pytest.approx(256 / 128)
        assert np.array_equal(model.logits(IDS), whole.logits(IDS))


def test_texts_that_share_pages(tiny: WriteTiny) -> None:
    """A token keeps one row; found again, forked and cut off, the bits are those of one go."""
    with treadle.load(tiny("minicpm3"), threads=2, deterministic=True, n_sequences=3) as model:
        (pool,) = model.engine.cache.pools
        assert pool.cell_bytes == PAGE * 3 * 96 * 2
        truth = model.logits(IDS)
        model.engine.cache.forget()
        with closing(model.session()) as first, closing(model.session()) as second:
            assert np.array_equal(first.prefill(IDS), truth[-1])
            assert second.match(IDS) == 2 * PAGE
            assert np.array_equal(second.prefill(IDS), truth[-1])
            for n in (len(IDS) - 1, PAGE, 5):
                first.truncate(n)
                assert np.array_equal(first.feed(IDS[n : n + 1]), truth[n])


def test_quantised(tiny: WriteTiny, tmp_path: Path) -> None:
    """The matrix stays one, as llama.cpp wants it."""
    source = tiny("minicpm3")
    target = tmp_path / "small.gguf"
    with open_gguf(source) as gguf:
        write(gguf, make_recipe(gguf, find_mix("Q8_0")), target, n_threads=2)
    with open_gguf(target) as gguf:
        assert gguf.tensors["blk.0.attn_kv_b.weight"].type_name == "Q8_0"
        assert "blk.0.attn_k_b.weight" not in gguf.tensors
    with treadle.load(source, threads=2) as whole, treadle.load(target, threads=2) as small:
        exact = whole.logits(IDS)
        logits = small.logits(IDS)
    assert 0 < np.abs(logits - exact).max() < 0.1 * np.abs(exact).max()


def test_what_is_refused(tiny: WriteTiny, tmp_path: Path) -> None:
    path = tiny("minicpm3")
    name = "blk.0.attn_kv_b.weight"
    rows = np.ones((4 * 128, 64), np.float32)
    for tensors, keys, error, says in (
        ({name: None}, {}, FileError, rf"{name}: the tensor is missing"),
        ({name: rows[1:]}, {}, FileError, rf"{name}: shape \[511, 64\]"),
        ({"blk.0.attn_kv_b.scale": rows[:1, 0]}, {}, UnsupportedError, "not supported"),
        ({}, {"minicpm3.attention.value_length": 24}, UnsupportedError, "multiple of 16"),
    ):
        made = write_changed(path, tmp_path / "x.gguf", keys, dict(tensors))
        with open_gguf(made) as gguf, pytest.raises(error, match=says):
            load_config(gguf)


def test_an_adapter_of_the_matrix_is_refused(tiny: WriteTiny, tmp_path: Path) -> None:
    """No product has it whole."""
    writer = GGUFWriter(tmp_path / "adapter.gguf")
    rng = np.random.default_rng(1)
    said = {"general.type": "adapter", "general.architecture": "minicpm3", "adapter.type": "lora"}
    for key, value in {**said, "adapter.lora.alpha": 4.0}.items():
        writer.add(key, value)
    for half, shape in (("a", (2, 64)), ("b", (4 * 128, 2))):
        value = rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(f"blk.0.attn_kv_b.weight.lora_{half}", shape, "F32", value)
    writer.write()
    with pytest.raises(TreadleError, match=r"attn_kv_b\.weight is not used in a matrix product"):
        treadle.load(tiny("minicpm3"), lora=[tmp_path / "adapter.gguf"])
