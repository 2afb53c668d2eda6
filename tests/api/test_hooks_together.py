"""Hooks beside control vectors, adapters and pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import treadle
from tests.conftest import WriteTiny
from tests.loras import draw_pairs, write_gguf
from tests.media.decoder_cases import CASES, load, prompt_of
from tests.models.hf_tiny import N_VOCAB
from tests.tiny import rounding
from treadle.engine.batch import BatchItem
from treadle.models.control_vector import ControlVector

IDS: list[int] = np.random.default_rng(9).integers(3, N_VOCAB, 20).tolist()
Floats = npt.NDArray[np.float32]


def assert_near(found: np.ndarray, expected: np.ndarray, share: float) -> None:
    error = np.abs(found - expected).max()
    assert error <= share * np.abs(expected).max(), (error, np.abs(expected).max())


# -- control vectors -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vector() -> ControlVector:
    row = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    return ControlVector("v", {1: row}, "llama")


def test_traces_have_what_a_vector_adds(tiny: WriteTiny, vector: ControlVector) -> None:
    """Of two sequences in one batch, those of one: in "L1.control", and in "L1", which are the
    states after layer 1, but not in the layer's last product.
    """
    path = tiny("llama", "F32")
    with treadle.load(
        path, threads=2, kv="f32", n_sequences=2, control_vectors=[(vector, 0.0)]
    ) as model:
        plain = model.logits(IDS)
        seqs = [model.session(control_vectors=each).seq for each in ({"v": 0.5}, {})]
        with model.trace("L1.ffn.down", "L1.control", "L1") as t:
            model.engine.run([BatchItem(seq, IDS, 0) for seq in seqs])
        assert t.labels == ("L1.ffn.down", "L1.control", "L1")
        before, after, states = (t[label] for label in t.labels)
        assert after.axes == ("token", "embd")
        assert np.array_equal(after.values, states.values)
        added = 0.5 * vector.directions[1]
        assert np.array_equal(after.sequence(1).values, before.sequence(1).values)
        steered = before.sequence(0).values + added
        assert_near(after.sequence(0).values, steered, 2.0**-23)
        for seq in seqs:
            seq.close()
        with model.trace("L1.control") as t:  # of a text without vectors
            assert np.array_equal(model.logits(IDS), plain)
        with pytest.raises(treadle.TreadleError, match="no run had this step"):
            t["L1.control"]
    with treadle.load(path, threads=2, kv="f32", control_vectors=[(vector, 0.5)]) as model:
        found = model.states(IDS, layers=[1, 2, 3])
    with treadle.load(path, threads=2, kv="f32") as model:
        bare = model.states(IDS, layers=[1, 2, 3])
    assert np.array_equal(found[0], bare[0])
    assert_near(found[1], bare[1] + added, rounding(model.config))
    assert np.abs(found[2] - bare[2]).max() > 0.1


@pytest.mark.parametrize("label", ["L1.control", "L1"])
def test_a_patch_that_takes_a_vector_off(
    label: str, tiny: WriteTiny, vector: ControlVector
) -> None:
    """The logits are those without it, in the prompt and token by token."""
    with treadle.load(
        tiny("llama", "F32"), threads=2, kv="f32", control_vectors=[(vector, 0.5)]
    ) as model:
        steered = model.logits(IDS)
        with model.session(control_vectors={}) as session:
            expected = session.logits(IDS)
        allowed = 4 * rounding(model.config)  # the sum and the difference are rounded as well
        assert np.abs(steered - expected).max() > 1000 * allowed

        def without(values: Floats) -> Floats:
            return values - np.float32(0.5) * vector.directions[1]

        with model.patch({label: without}):
            assert_near(model.logits(IDS), expected, allowed)
            with model.session() as session:
                each = [session.logits([id]) for id in IDS]
            assert_near(np.concatenate(each), expected, allowed)
        assert np.array_equal(model.logits(IDS), steered)


# -- adapters --------------------------------------------------------------------------------------


def test_traces_have_what_an_adapter_adds(tiny: WriteTiny, tmp_path: Path) -> None:
    """The point of a product is after its adapter: what it gives is the sum of the matrix' product,
    the adapter's, and the states before. What is patched before it reaches both.
    """
    path = tiny("llama", "F32")
    name = "blk.1.ffn_down.weight"
    pairs = draw_pairs(path, 4, 4)
    lora = write_gguf(tmp_path / "one.gguf", pairs)
    labels = "L1.attn.output", "L1.ffn.silu", "L1.ffn.down", "L1"
    with treadle.load(path, threads=2, kv="f32", lora=[(lora, 0.0)]) as model:
        a, b = (each.astype(np.float64) for each in pairs[name])
        matrix = model.gguf.tensors[name].dequantize().astype(np.float64)
        scale = 8.0 / 4  # alpha / rank
        for strength in (0.5, 0.0):
            whole = matrix + strength * scale * b @ a
            for factor in (1.0, 2.0):
                patch = {"L1.ffn.silu": lambda values, factor=factor: values * factor}
                with (
                    model.session(lora={"one": strength}) as session,
                    model.patch(patch),
                    model.trace(*labels) as t,
                ):
                    session.logits(IDS)
                before, silu, down, states = (t[each].values.astype(np.float64) for each in labels)
                assert_near(down, before + silu @ whole.T, rounding(model.config))
                assert np.array_equal(down, states)


# -- pictures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma3", "qwen3vl"])
def test_rows_of_pictures(name: str, data: Path) -> None:
    """A picture's rows in "token_embd.media" are those of its encoder; with others patched in their
    place, the logits are those of a prompt with the other picture. Qwen3-VL adds rows after layers.
    """
    case = next(each for each in CASES if each.name == name)
    with load(data / "media", case) as model:
        prompt = prompt_of(model, data / "media", case)
        (entry,) = prompt.entries
        of_picture = np.isin(prompt.ids, entry.ids)
        assert entry.rows is not None
        n_embd = model.config.n_embd
        plain = model.logits(prompt.ids)
        deep = range(case.deepstack)
        labels = ["token_embd.media", *(f"L{i}.media" for i in deep)]
        traced = [*labels, *(f"L{i}.ffn.down" for i in deep), *(f"L{i}" for i in deep)]
        with model.trace(*traced) as t:
            assert np.array_equal(model.logits(prompt.ids), plain)
        rows = t["token_embd.media"]
        assert rows.tokens.tolist() == prompt.ids
        assert rows.positions.tolist() == list(range(len(prompt.ids)))
        assert np.array_equal(rows.values[of_picture], entry.rows[:, :n_embd])
        for i in deep:
            added = np.zeros_like(rows.values)
            added[of_picture] = entry.rows[:, n_embd * (i + 1) : n_embd * (i + 2)]
            assert_near(t[f"L{i}.media"].values, t[f"L{i}.ffn.down"].values + added, 2.0**-23)
            assert np.array_equal(t[f"L{i}"].values, t[f"L{i}.media"].values)
        states = model.states(prompt.ids, layers=[0])[0]
        assert np.array_equal(states, rows.values)

        other = entry.rows[::-1].copy()

        def put(values: Floats, step: treadle.StepValues) -> None:
            first = n_embd * labels.index(step.label)
            here = np.isin(step.tokens, entry.ids)
            new = other[:, first : first + n_embd]
            old = entry.rows[:, first : first + n_embd]
            values[here] = new if first == 0 else values[here] - old + new

        with model.patch(dict.fromkeys(labels, put)):
            patched = model.logits(prompt.ids)
        entry.rows = other
        model.engine.cache.forget()
        expected = model.logits(prompt.ids)
        assert_near(patched, expected, 4 * rounding(model.config))
        assert np.abs(plain - expected).max() > 0.01 * np.abs(expected).max()
