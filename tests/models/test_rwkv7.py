"""RWKV-7: against the reference in every way, sessions as ``test_hybrids`` has them, and files as
llama.cpp's converter writes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.models import test_hybrids
from tests.models.test_hybrids import LONG, text
from tests.reference import forward
from tests.tiny import rounding, write_model
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config
from treadle.models.stages import staged
from treadle.quantize.plan import find_mix, make_recipe
from treadle.quantize.write import write

ARCHS = ("rwkv7", "arwkv7")
EVERY = (1, 3, 64)
# What the converter writes of the first layer, so that there is something: nothing reads it.
NOT_READ = {f"blk.0.time_mix_v{i}.weight": s for i, s in enumerate([(64,), (16, 64), (64, 16)])}


@pytest.fixture(scope="module", params=ARCHS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[treadle.Model]:
    """Deterministic: then bits depend on nothing but the text."""
    path = tmp_path_factory.mktemp("rwkv7") / "tiny.gguf"
    write_model(path, request.param, n_layer=2)
    with treadle.load(path, threads=2, context=512, deterministic=True, n_sequences=3) as made:
        yield made


@pytest.fixture(scope="module")
def truth(model: treadle.Model) -> np.ndarray:
    """Logits of each token of the long text, read in one go."""
    logits = model.logits(text(LONG))
    model.engine.cache.forget()
    return logits


# The same of these two models.
test_bits_do_not_depend_on_the_cut = test_hybrids.test_bits_do_not_depend_on_the_cut
test_a_prompt_is_found = test_hybrids.test_a_prompt_is_found_up_to_its_last_page
test_a_text_is_taken_back = test_hybrids.test_a_text_is_taken_back
test_forks_go_their_own_ways = test_hybrids.test_forks_go_their_own_ways
test_a_run_that_fails = test_hybrids.test_a_run_that_fails_has_changed_nothing
test_a_session_is_saved = test_hybrids.test_a_session_is_saved_with_its_state


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_all_ways_agree_with_the_reference(arch: str, tmp_path: Path) -> None:
    """And bits are the same for any number of threads."""
    path = tmp_path / "tiny.gguf"
    ids = text(70)
    write_model(path, arch, others=NOT_READ)
    found: dict[str, np.ndarray] = {}
    for threads in (1, 3):
        with treadle.load(path, threads=threads, kv="f32") as model:
            assert set(model.config.ignored) == NOT_READ.keys()
            exact = forward(model.gguf, model.config, ids)
            allowed = rounding(model.config)
            ways = {"one go": model.logits(ids)}
            for chunk in EVERY:
                model.engine.cache.forget()
                session = model.session()
                rows = [session.logits(ids[at : at + chunk]) for at in range(0, len(ids), chunk)]
                ways[f"chunks of {chunk}"] = np.concatenate(rows)
                session.close()
        for way, logits in ways.items():
            error = np.abs(logits - exact).max() / np.abs(exact).max()
            assert error <= allowed, (way, threads, error / allowed)
            assert np.array_equal(found.setdefault(way, logits), logits), (way, threads)


def test_written_texts_beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts that are taken back."""
    test_hybrids.test_written_texts_are_the_same_beside_others("rwkv7", tmp_path, monkeypatch)


def test_narrow_formats(tmp_path: Path) -> None:
    """What is small stays f32. Eight bits of activations and of weights are both within 1/256 of
    the largest: some 9 products of a layer one after the other.
    """
    write_model(tmp_path / "f32.gguf", "rwkv7", n_layer=2)
    ids = text(40)
    with open_gguf(tmp_path / "f32.gguf") as source:
        exact = forward(source, load_config(source), ids)
        write(source, make_recipe(source, find_mix("Q8_0")), tmp_path / "q.gguf", n_threads=2)
    with treadle.load(tmp_path / "q.gguf", threads=2) as model:
        kinds = {name: tensor.type_name for name, tensor in model.gguf.tensors.items()}
        assert {kinds[f"blk.1.time_mix_{name}.weight"] for name in ("w1", "v2", "lerp_fused")} == {
            "F32"
        }
        assert {kinds[f"blk.1.{name}.weight"] for name in ("time_mix_key", "channel_mix_key")} == {
            "Q8_0"
        }
        logits = model.logits(ids)
        error = np.sqrt(np.mean((logits - exact) ** 2) / np.mean(exact**2))
        assert 1e-4 < error < 2 / 256 * np.sqrt(2 * 9)


@pytest.mark.parametrize(
    ("arch", "change", "why"),
    [
        ("rwkv7", {"wkv.head_size": 48}, r"rwkv7\.wkv\.head_size: 48 does not divide"),
        ("rwkv7", {"token_shift_count": 1}, r"rwkv7\.token_shift_count: is 1"),
        ("arwkv7", {"token_shift_count": 2}, r"arwkv7\.token_shift_count: is 2"),
        ("rwkv7", {"attention.decay_lora_rank": None}, "decay_lora_rank: the key is missing"),
        ("rwkv7", {"attention.iclr_lora_rank": 8}, r"time_mix_a1\.weight: shape \[16, 64\]"),
        ("rwkv7", {"attention.gate_lora_rank": 0}, r"time_mix_(lerp_fused|g1)\.weight: shape \["),
    ],
)
def test_keys_that_are_refused(arch: str, change: dict[str, Any], why: str, tmp_path: Path) -> None:
    write_model(tmp_path / "r.gguf", arch, n_layer=2)
    with open_gguf(tmp_path / "r.gguf") as file:
        keys = {**file.metadata, **{f"{arch}.{key}": value for key, value in change.items()}}
        file.metadata = {key: value for key, value in keys.items() if value is not None}
        with pytest.raises(FileError, match=why):
            load_config(file)


@pytest.mark.parametrize(
    "name",
    [
        *("token_embd_norm.bias", "blk.1.attn_norm_2.bias", "blk.0.attn_norm.bias"),
        *("blk.1.time_mix_g2.weight", "blk.0.time_mix_ln.bias", "blk.1.time_mix_v0.weight"),
        *("output.weight", "blk.0.channel_mix_lerp_k.weight"),
    ],
)
def test_tensors_that_must_be_there(name: str, tmp_path: Path) -> None:
    write_model(tmp_path / "r.gguf", "rwkv7", n_layer=2)
    with open_gguf(tmp_path / "r.gguf") as file:
        del file.tensors[name]
        with pytest.raises(FileError, match=f"{name}: the tensor is missing"):
            load_config(file)


def test_no_stages(tmp_path: Path) -> None:
    """They would need the first layer's values."""
    write_model(tmp_path / "r.gguf", "rwkv7", n_layer=2)
    with open_gguf(tmp_path / "r.gguf") as file:
        config = load_config(file)
    with pytest.raises(UnsupportedError, match="models of the graph 'wkv' cannot be split"):
        staged(config, range(1))
