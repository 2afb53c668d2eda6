"""Architectures against transformers' own logits, of the shared files that llama.cpp's converter
wrote: in one go, in chunks, by decode, and the same bits for every number of threads.

Both sides compute in float32, each within ``rounding`` of the exact logits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import ALONE, own
from tests.lowered import lowered
from tests.models.hf_cases import ENCODER_CASES
from tests.models.hf_tiny import compute_logits, write_tiny
from tests.reference import forward
from tests.tiny import rounding
from treadle.errors import TreadleError, UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf

NAMES = (
    "gemma2",
    "smollm3",
    "granite",
    "olmo2",
    "olmo3",
    "seedoss",
    "arcee",
    "phi3",
    "phi4mini-partial",
    "glm4",
    "ernie45",
    "hunyuan",
    "cohere",
    "cohere2",
    "stablelm",
    "starcoder2",
    "nemotron",
    "mixtral",
    "qwen2moe",
    "qwen3moe",
    "olmoe",
    "granitemoe",
    "ernie45moe",
    "glm4moe",
    "minimaxm2",
    "gpt-oss",
    "lfm2",
    "mamba2",
    "falconh1",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "lfm2moe",
    "granitehybrid",
    "nemotronh",
    "deepseek3",
    "glm4moelite",
    "gemma4-dense",
    "gemma4-e",
    "gemma4-moe",
)
CHUNKS = (1, 3, 64)


def ids_of(n: int = 40) -> list[int]:
    ids: list[int] = np.random.default_rng(7).integers(3, 300, n).tolist()
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_transformers(name: str, data: Path) -> None:
    check_truth(data / "arch" / f"{name}.gguf", np.load(data / "arch" / f"{name}.npy"))


def test_agrees_without_a_shared_file(tmp_path: Path) -> None:
    """Hunyuan's experts, as treadle converts them; the logits are in float64."""
    model = save(own(ALONE["hunyuan-moe"]), tmp_path / "hf")
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, compute_logits(model, ids_of()))


def check_truth(
    path: Path,
    truth: np.ndarray,
    moved: np.ndarray | float = 0.0,
    threads_of: tuple[int, ...] = (1, 2, 3),
) -> None:
    """The logits of ``ids_of()``, made in every way. ``moved``: what roundings of the weights alone
    make of each token's logits ``[n_tokens]``, where it is not far below ``rounding``.
    ``threads_of``: numbers of threads, whose logits have the same bits.
    """
    ids = ids_of()
    found: dict[str, np.ndarray] = {}
    for threads in threads_of:
        with treadle.load(path, threads=threads, kv="f32") as model:
            allowed = rounding(model.config)
            if not found:  # the file's: threads change neither
                assert model.config.ignored == ()
                for n in (1, model.engine.max_tokens):
                    lowered(model.engine, n).check()
                exact = forward(model.gguf, model.config, ids)
                error = np.abs(exact - truth).max() / np.abs(truth).max()
                assert error <= allowed, ("the reference in float64", error / allowed)
            ways = {"one go": model.logits(ids)}
            for chunk in CHUNKS:
                model.engine.cache.forget()
                session = model.session()
                rows = [session.logits(ids[at : at + chunk]) for at in range(0, len(ids), chunk)]
                ways[f"chunks of {chunk}"] = np.concatenate(rows)
                session.close()
        for way, logits in ways.items():
            errors = np.abs(logits - truth).max(1) / np.abs(truth).max()
            assert (errors <= 2 * (allowed + moved)).all(), (way, threads, errors / allowed)
            assert np.array_equal(found.setdefault(way, logits), logits), (way, threads)


ENCODERS = ("bert", "modernbert", "embeddinggemma")


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODERS)
def test_states_of_encoders_agree_with_transformers(name: str, data: Path) -> None:
    """Alone and beside others in one run, and the vectors that are pooled of them."""
    path = data / "arch" / f"{name}.gguf"
    ids = ids_of()
    truth = np.load(data / "arch" / f"{name}.npy")
    bits = []
    for threads in (1, 2, 3):
        with treadle.load(path, threads=threads, kv="f32") as model:
            assert model.config.ignored == ()
            for output in ("states", "embedding"):
                for n in (1, 512):
                    lowered(model.engine, n, 1, output).check()
            states = model.states(ids)
            allowed = 2 * rounding(model.config)
            error = np.abs(states - truth).max() / np.abs(truth).max()
            assert error <= allowed, (threads, error / allowed)
            vectors = model.engine.embed([ids_of(7)[::-1], ids, ids_of(3)])
            pooled = {"mean": truth.mean(0), "first": truth[0], "last": truth[-1]}
            exact = pooled[model.config.pooling]
            exact = exact / np.linalg.norm(exact)
            assert np.abs(vectors[1] - exact).max() <= allowed
            given = [ids_of(7)[::-1], ids, ids_of(3)]  # no texts: no vocabulary
            assert np.array_equal(model.embed(given), vectors)
            bits.append(np.concatenate([states, vectors]))
            with pytest.raises(UnsupportedError, match=r"no logits: .* does not generate text"):
                model.logits(ids)
    assert all(np.array_equal(each, bits[0]) for each in bits)


@pytest.mark.parametrize("name", ENCODER_CASES)
def test_encoders_of_transformers(name: str, tmp_path: Path) -> None:
    """Of which there is no shared file; theirs are in float64."""
    ids, truth = write_tiny(name, tmp_path / "tiny.gguf")
    with treadle.load(tmp_path / "tiny.gguf", threads=2, kv="f32") as model:
        assert model.config.ignored == ()
        error = np.abs(model.states(ids) - truth).max() / np.abs(truth).max()
        assert error <= rounding(model.config)


def test_states_of_a_decoder(data: Path) -> None:
    """They are what its logits are made of."""
    with treadle.load(data / "arch" / "cohere.gguf", threads=2, kv="f32") as model:
        states = model.states(ids_of())
        logits = model.logits(ids_of())
        weight = model.gguf.tensors["token_embd.weight"].dequantize().astype(np.float64)
        exact = states @ weight.T * model.config.logit_scale
        assert np.abs(logits - exact).max() <= rounding(model.config) * np.abs(exact).max()
        with pytest.raises(TreadleError, match="no tokens"):
            model.states([])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_gate_and_up_of_experts_in_one_matrix(name: str, data: Path, tmp_path: Path) -> None:
    """The same bits as of two, by many tokens and by few; layers behind the last are ignored."""
    source = data / "arch" / f"{name}.gguf"
    fused = tmp_path / "fused.gguf"
    ids = ids_of()
    with open_gguf(source) as gguf:
        arch = gguf.metadata["general.architecture"]
        writer = GGUFWriter(fused)
        n_layer = gguf.metadata[f"{arch}.block_count"]
        assert isinstance(n_layer, int)
        changes = {f"{arch}.block_count": n_layer + 1, f"{arch}.nextn_predict_layers": 1}
        for key, value in {**gguf.metadata, **changes}.items():
            writer.add(key, value)
        for each, tensor in gguf.tensors.items():
            values = tensor.dequantize()
            if "ffn_gate_exps" in each:
                up = gguf.tensors[each.replace("gate", "up")].dequantize()
                values = np.concatenate([values, up], axis=1)
                each = each.replace("gate", "gate_up")
            if "ffn_up_exps" not in each:
                writer.add_tensor(each, values.shape, "F32", values)
        more = f"blk.{n_layer}.nextn.eh_proj.weight"
        writer.add_tensor(more, (64, 128), "F32", np.zeros((64, 128), np.float32))
        writer.write()
    found = []
    for path in (source, fused):
        with treadle.load(path, threads=2, kv="f32") as model:
            for n in (1, model.engine.max_tokens):
                model.plan(n).check()
            session = model.session()
            found.append([model.logits(ids), *(session.logits([i]) for i in ids[:3])])
            session.close()
    assert model.config.ignored == (more,)
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
