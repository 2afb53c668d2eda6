"""Mamba-1: against the reference in every way, sessions as ``test_hybrids`` has them, and files."""

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
from treadle.errors import FileError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

FILES: dict[str, dict[str, Any]] = {
    "mamba": {},
    "jamba": {"n_expert": 4, "n_ff_exp": 96},
}
EVERY = (1, 3, 64)


@pytest.fixture(scope="module", params=FILES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[treadle.Model]:
    """Deterministic: then bits depend on nothing but the text."""
    path = tmp_path_factory.mktemp("mamba1") / "tiny.gguf"
    write_model(path, request.param, **FILES[request.param])
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
@pytest.mark.parametrize("arch", FILES)
def test_all_ways_agree_with_the_reference(arch: str, tmp_path: Path) -> None:
    """And bits are the same for any number of threads."""
    path = tmp_path / "tiny.gguf"
    ids = text(70)
    write_model(path, arch, **FILES[arch])
    found: dict[str, np.ndarray] = {}
    for threads in (1, 2, 3):
        with treadle.load(path, threads=threads, kv="f32") as model:
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


def test_layers_with_a_router_have_experts(tmp_path: Path) -> None:
    """No key of Jamba's says which."""
    path = tmp_path / "tiny.gguf"
    write_model(path, "jamba", **FILES["jamba"])
    with open_gguf(path) as file:
        config = load_config(file)
        assert [layer.ffn for layer in config.layers] == ["gated", "experts", "gated"]
        assert [layer.mixer for layer in config.layers] == ["mamba1", "attention", "mamba1"]
        del file.tensors["blk.1.ffn_gate_inp.weight"]
        with pytest.raises(FileError, match=r"blk\.1\.ffn_(gate|up|down)"):
            load_config(file)


@pytest.mark.parametrize("name", ["ssm_dt_norm.weight", "ssm_b_norm.weight", "ssm_c_norm.weight"])
def test_jamba_has_all_three_norms(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, "jamba")
    with open_gguf(path) as file:
        del file.tensors[f"blk.0.{name}"]
        with pytest.raises(FileError, match=rf"blk\.0\.{name}: the tensor is missing"):
            load_config(file)


@pytest.mark.slow
@pytest.mark.parametrize("arch", FILES)
def test_written_texts_beside_others(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts that are taken back."""
    test_hybrids.test_written_texts_are_the_same_beside_others(arch, tmp_path, monkeypatch)
