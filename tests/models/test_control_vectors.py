"""Control vectors against transformers with hooks behind its layers, and the vectors that are made
against its hidden states. Each architecture's graph adds them behind each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import treadle
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_granite_shared import CASE as GRANITE
from tests.convert.test_hf_mixtures import own
from tests.models.hf_cases import CASES
from tests.models.hf_tiny import N_VOCAB, build, compute_logits, write_gguf
from tests.tiny import rounding, write_model
from treadle.engine.batch import BatchItem
from treadle.files.gguf import open_gguf
from treadle.models.archs import ARCHS, STANDALONE
from treadle.models.config import Config
from treadle.models.control_vector import ControlVector
from treadle.models.load import load_config

IDS: list[int] = np.random.default_rng(7).integers(3, N_VOCAB, 40).tolist()
PAIRS = [(IDS[:9], IDS[20:32]), (IDS[3:12], IDS[8:15]), (IDS[30:], IDS[14:20])]
Floats = npt.NDArray[np.float64]
Hook = Callable[[int, Any], Any]  # the layer, its states -> the states that take their place


def layers_of(model: Any) -> Any:
    return model.model.layers


@contextmanager
def hooked(model: Any, hook: Hook) -> Iterator[None]:
    """``hook`` behind each layer of a transformers model."""

    def of(layer: int) -> Callable[..., Any]:
        def run(module: Any, given: Any, out: Any) -> Any:
            states = out[0] if isinstance(out, tuple) else out
            made = hook(layer, states)
            return (made, *out[1:]) if isinstance(out, tuple) else made

        return run

    handles = [each.register_forward_hook(of(i)) for i, each in enumerate(layers_of(model))]
    yield
    for handle in handles:
        handle.remove()


def steered_logits(model: Any, added: Mapping[int, Floats]) -> Floats:
    """Transformers' logits with rows added behind layers."""
    import torch

    def hook(layer: int, states: Any) -> Any:
        return states + torch.from_numpy(added[layer]) if layer in added else states

    with hooked(model, hook):
        return compute_logits(model, IDS)


def states_of(model: Any, ids: list[int]) -> Floats:
    """Transformers' states behind each layer ``[n_layer, n_tokens, n_embd]``."""
    found: dict[int, Floats] = {}

    def hook(layer: int, states: Any) -> Any:
        found[layer] = states[0].numpy()
        return states

    with hooked(model, hook):
        compute_logits(model, ids)
    return np.stack([found[layer] for layer in sorted(found)])


def draw(config: Config, seed: int) -> ControlVector:
    """Directions as long as tiny models' states, behind all layers but the first."""
    rng = np.random.default_rng(seed)
    rows = {i: rng.standard_normal(config.n_embd) for i in range(1, config.n_layer)}
    return ControlVector(f"v{seed}", {i: row.astype(np.float32) for i, row in rows.items()})


def made_of(name: str, folder: Path) -> tuple[Any, Path]:
    """A transformers model and its path: what Granite's layers add is scaled, Gemma has norms
    behind its halves.
    """
    if name == "granite":
        return save(own(GRANITE), folder / "hf"), folder / "hf"
    model = build(CASES[name])
    write_gguf(CASES[name], model, folder / "model.gguf")
    return model, folder / "model.gguf"


@pytest.mark.parametrize("name", ["llama", "gemma3", "granite"])
def test_equals_transformers_with_hooks(name: str, tmp_path: Path) -> None:
    """Two vectors at once, of two strengths; one of them behind some layers alone."""
    pytest.importorskip("transformers")
    theirs, path = made_of(name, tmp_path)
    with treadle.load(path, threads=2) as model:
        first, second = draw(model.config, 1), draw(model.config, 2).for_layers(2, 2)
    loaded: list[Any] = [(first, 0.5), second]
    with treadle.load(path, threads=2, kv="f32", control_vectors=loaded) as model:
        allowed = rounding(model.config)
        ways = {"usual": {"v1": 0.5, "v2": 1.0}, "other": {"v1": -2.0}, "none": {}}
        for way, strengths in ways.items():
            added: dict[int, Floats] = {}
            for vector in (first, second):
                for layer, row in vector.directions.items():
                    own_ = strengths.get(vector.name, 0.0) * row.astype(np.float64)
                    added[layer] = added.get(layer, 0.0) + own_
            expected = steered_logits(theirs, added)
            chosen = None if way == "usual" else strengths
            for chunk in (len(IDS), 7):
                session = model.session(control_vectors=chosen)
                rows = [session.logits(IDS[at : at + chunk]) for at in range(0, len(IDS), chunk)]
                error = np.abs(np.concatenate(rows) - expected).max() / np.abs(expected).max()
                assert error <= 2 * allowed, (way, chunk, error / allowed)
                session.close()
            if way == "none":
                usual = model.logits(IDS)
                assert np.abs(usual - expected).max() > 100 * allowed * np.abs(expected).max()


@pytest.mark.parametrize("name", ["llama", "gemma3", "granite"])
@pytest.mark.parametrize("tokens", ["last", "all"])
def test_directions_are_those_of_transformers_states(
    name: str, tokens: str, tmp_path: Path
) -> None:
    """The mean and the first singular vector of differences, up to what float32 makes of them."""
    pytest.importorskip("transformers")
    theirs, path = made_of(name, tmp_path)
    differences: list[list[Floats]] = []
    for pair in PAIRS:
        n = 1 if tokens == "last" else min(map(len, pair))
        first, second = (states_of(theirs, ids)[:, -n:] for ids in pair)
        differences.append(list(first - second))
    positive, negative = zip(*PAIRS, strict=True)
    with treadle.load(path, threads=2, kv="f32") as model:
        for method in ("mean", "pca"):
            made = treadle.make_control_vector(
                model, positive, negative, method=method, tokens=tokens
            )
            assert made.model_hint == model.config.arch.name
            assert sorted(made.directions) == list(range(1, model.config.n_layer))
            for layer, row in made.directions.items():
                rows = np.concatenate([each[layer] for each in differences])
                values, right = np.linalg.svd(rows, full_matrices=False)[1:]
                wanted = rows.mean(0) if method == "mean" else right[0]
                wanted = wanted / np.linalg.norm(wanted)
                wanted = wanted * (np.sign(rows.sum(0) @ wanted) or 1.0)
                # A singular vector moves by the matrix' error over the distance of its value.
                size = np.abs(rows).max() * np.sqrt(rows.size)
                gap = values[0] - values[1] if method == "pca" else np.linalg.norm(rows.mean(0))
                assert np.linalg.norm(row - wanted) <= 8 * rounding(model.config) * size / gap


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", [name for name in STANDALONE if ARCHS[name].graph != "encoder_decoder"]
)
def test_every_architecture_adds_them(arch: str, tmp_path: Path) -> None:
    """Of two sequences in one batch, the states of one move by its vector, behind the layer that
    has one. These are the rows that hooks have there, and those after the layer.
    """
    path = tmp_path / "model.gguf"
    write_model(path, arch, n_layer=4)
    with open_gguf(path) as gguf:
        vector = ControlVector("v", {2: draw(load_config(gguf), 3).directions[2]})
    with treadle.load(path, threads=1, kv="f32", n_sequences=2, control_vectors=vector) as model:
        engine = model.engine
        output = model.config.main_output
        seqs = [engine.cache.sequence(lora=lora) for lora in (((0, 0.5),), ())]
        parts = [BatchItem(seq, IDS[:5], 0) for seq in seqs]
        ready = engine._plan_of(parts, output)
        engine._prepare(ready, parts)
        plan = ready.plan
        plan.check()
        labels = [step.label for step in plan]
        assert [label for label in labels if label.endswith(".control")] == ["L2.control"]
        engine.device.run(ready.program, range(labels.index("L2.control") + 1))
        buffer = plan.match("L2.control")[0].args["x"]
        rows = ready.rows(buffer, 10, model.config.n_embd * model.config.n_streams).copy()
        first, second = rows[:5].astype(np.float64), rows[5:].astype(np.float64)
        wanted = 0.5 * np.tile(vector.directions[2], model.config.n_streams)
        wanted = wanted / model.config.residual_scale
        assert np.isfinite(rows).all()
        assert np.abs(first - second - wanted).max() <= 2.0**-22 * np.abs(rows).max()
        for seq in seqs:
            seq.close()
        after = ["L2"] if model.config.n_streams == 1 else []
        with model.trace("L2.control", *after) as t:
            again = [engine.cache.sequence(lora=lora) for lora in (((0, 0.5),), ())]
            engine._run([BatchItem(seq, IDS[:5], 0) for seq in again], lambda _: None, None, output)
        for label in t.labels:
            assert np.array_equal(t[label].values, rows), label
