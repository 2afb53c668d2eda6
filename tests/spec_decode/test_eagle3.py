"""EAGLE 3: what it drafts is what plain numpy makes of the model's states in float64; texts are
those without it.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.reference import Layer, attended, gated, normed, rms_norm, tensor_of
from tests.spec_decode import tiny_drafters as tiny
from tests.spec_decode.tiny_drafters import HOW, N_EMBD, N_VOCAB, Owner, ids_of, load
from tests.tiny import rounding
from treadle.engine.batch import BatchItem
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.kernels.run_state import LogitsQuery
from treadle.models.config import Config
from treadle.models.drafters.eagle3 import N_TARGET
from treadle.models.drafters.target import D2T, tokens_of
from treadle.models.load import load_config
from treadle.selftest import model_check
from treadle.spec_decode.eagle3 import Eagle3Drafter

FIRST = LogitsQuery(first=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"keys": {}},
    "own": {
        "keys": {"target_layers": [1, 3, 6], "norm_before_fc": True, "norm_before_residual": True},
        "own": ("enc.output_norm.weight", "output.weight", "token_embd.weight"),
        "n_draft": 100,
    },
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, its drafters by variant; and a model with a drafter that is always right."""
    root = tmp_path_factory.mktemp("eagle3")
    made = {"model": tiny.target(root / "model.gguf")}
    for name, given in VARIANTS.items():
        made[name] = tiny.write_drafter(root / f"{name}.gguf", "eagle3", **given)
    made["sure model"] = tiny.adds_nothing(made["model"], root / "sure.gguf")

    def right(tensors: dict[str, np.ndarray]) -> None:
        """Attention finds the token itself, as only equal tokens have a large score. Values take
        the states away that the residual adds.
        """
        eye = np.eye(N_EMBD, 2 * N_EMBD)
        heads = [0, 0, 1, 1]  # the key head of each query head
        rows = np.concatenate([np.arange(32) + 32 * head for head in heads])
        tensors["blk.0.attn_q.weight"] = 10 * eye[rows]
        tensors["blk.0.attn_k.weight"] = 10 * eye
        tensors["blk.0.attn_v.weight"] = eye - np.eye(N_EMBD, 2 * N_EMBD, N_EMBD)
        out = np.zeros((N_EMBD, 2 * N_EMBD))
        out[:32, :32] = out[32:, 64:96] = np.eye(32)
        tensors["blk.0.attn_output.weight"] = out
        for name in ("attn_norm", "attn_norm_2"):
            tensors[f"blk.0.{name}.weight"] = np.ones(N_EMBD)
        for name in ("fc.weight", "blk.0.ffn_down.weight"):
            tensors[name] *= 0
        with open_gguf(made["model"]) as file:
            tensors["output_norm.weight"] = file.tensors["output_norm.weight"].dequantize()

    made["sure"] = tiny.write_drafter(root / "right.gguf", "eagle3", {}, change=right)
    return made


def drafter_of(model: treadle.Model) -> Eagle3Drafter:
    made = model.stepper.scheduler.drafting.drafter
    assert isinstance(made, Eagle3Drafter)
    return made


def twin(
    config: Config, tensor: Any, ids: list[int], features: np.ndarray, more: int
) -> np.ndarray:
    """The drafter's logits in float64: of ``ids``, each with the states of the token before, then
    of ``more`` tokens that it drafts itself, from its own states.
    """
    assert config.draft is not None
    if config.draft.norm_before:
        features = rms_norm(features, tensor("enc.output_norm.weight"), config.norm_eps)
    states = features @ tensor("fc.weight").T
    maps = Layer(config, 0, tensor)
    logits = np.zeros((0, config.n_logits))
    for i in range(more + 1):
        e = normed(tensor("token_embd.weight")[ids], tensor("blk.0.attn_norm.weight"), config)
        g = normed(states, tensor("blk.0.attn_norm_2.weight"), config)
        x = g if config.draft.norm_residual else states
        x = x + attended(maps, np.concatenate([e, g], 1))
        x = x + gated(maps, normed(x, tensor("blk.0.ffn_norm.weight"), config))
        h = normed(x, tensor("output_norm.weight"), config)
        row = h @ tensor("output.weight").T
        logits = np.concatenate([logits, row[-1:] if i else row])
        token = int(row[-1].argmax())
        ids = [*ids, int(tensor(D2T)[token]) if config.draft and D2T in tensor.names else token]
        states = np.concatenate([states, x[-1:]])
    return logits


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_against_float64(name: str, files: dict[str, Path]) -> None:
    """The model's states between layers, and what the drafter makes of them, in one run or some."""
    ids = ids_of(20)
    with load(files["model"], files[name], kv="f32") as model:
        own = drafter_of(model)
        engine = model.engine
        with closing(engine.cache.sequence()) as seq:
            plain = engine.run([BatchItem(seq, ids, 1)])[0]
        engine.cache.forget()
        owner = Owner(engine.cache.sequence())
        rows = engine.sample([BatchItem(owner.seq, ids, 1, (FIRST,))], own.observer)
        assert np.array_equal(next(iter(rows)).logits(), plain)
        engine.truncate(owner.seq, len(ids) - 2)
        engine.sample([BatchItem(owner.seq, [9], 1, (FIRST,))], own.observer)  # wrong
        engine.truncate(owner.seq, len(ids) - 2)
        assert not own.can_draft(owner, ids)
        engine.sample([BatchItem(owner.seq, ids[-2:-1], 1, (FIRST,))], own.observer)
        made = own.engine.config
        assert made.draft is not None
        features = own._states[owner.seq].rows.astype(np.float64)
        exact = tiny.states_before(model, ids[:-1], made.draft.layers)
        assert np.abs(features - exact).max() <= rounding(model.config) * np.abs(exact).max()

        assert not own.can_draft(owner, ids)
        own.prefill_chunk(owner, ids, 1e9)
        assert own.can_draft(owner, ids)
        drafted = own.draft_ids({owner: (ids, 4)})[owner]
        tensor = tensor_of(own.engine.gguf)
        tokens = tokens_of(own.engine.gguf, N_VOCAB)

        def named(name: str) -> Any:
            return tokens if name == D2T else tensor(name)

        named.names = own.engine.gguf.tensors  # type: ignore[attr-defined]
        exact = twin(made, named, ids[1:], features[: len(ids) - 1], 3)
        best = exact[-4:].argmax(1)
        assert drafted == [int(x) if tokens is None else int(tokens[x]) for x in best]
        seq = own.engine.cache.sequence()
        own.own_observer.set_inputs(features[: len(ids) - 1].astype(np.float32), own=False)
        found = []
        for part in ([*ids[1:]], *([token] for token in drafted[:3])):
            item = BatchItem(seq, part, len(part), (FIRST,))
            rows = own.engine.sample([item], own.own_observer)
            found += [row.logits().copy() for row in rows]
            own.own_observer.set_inputs(own.own_observer.rows[-1:], own=True)
        allowed = 2 * rounding(made) * np.abs(exact).max()
        assert np.abs(np.array(found) - exact).max() <= allowed
        seq.close()
        owner.seq.close()
        for output in ("logits", "ahead"):
            own.engine.plan(1, 1, output).check()
        engine.plan(1, 1, "tapped").check()


@pytest.mark.parametrize("how", HOW)
def test_the_text_is_that_without_it(how: dict[str, Any], files: dict[str, Path]) -> None:
    tiny.check_texts(*tiny.either(files["model"], files["own"]), how)


@pytest.mark.slow
def test_a_model_that_keeps_states(files: dict[str, Path], tmp_path: Path) -> None:
    """Drafts that are partly wrong are taken back as a whole, and their right part is run again."""
    keeps = tiny.target(tmp_path / "qwen35.gguf", "qwen35")
    tiny.check_texts(*tiny.either(keeps, files["own"]), HOW[0])


def test_one_that_is_right_is_believed(files: dict[str, Path]) -> None:
    timings = tiny.check_texts(*tiny.either(files["sure model"], files["sure"]), HOW[0]).timings
    assert timings.n_accepted > 0.8 * timings.n_drafted > 20
    tiny.check_session(*tiny.either(files["sure model"], files["sure"]), 10)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"keys": {N_TARGET: 96}}, "reads states of 96 values, the model has 64"),
        ({"keys": {"target_layers": [1, 2, 7]}}, r"layers \[1, 2, 7\], the model has 6"),
        ({"wrong": {"target_layers": [1, 2]}}, r"has 2 entries \(expected 3"),
        ({"wrong": {"target_layers": [1, 2, -1]}}, r"holds -1 \(expected layers from 0"),
        ({"wrong": {"target_layers": 3}}, r"target_layers: is 3 \(expected a list"),
        ({"wrong": {"norm_before_fc": True}}, "no enc.output_norm.weight"),
        ({"wrong": {"block_count": 2}}, "is 2: treadle supports drafters of one layer"),
        ({"n_draft": 50}, "d2t and no output.weight"),
        ({"keys": {N_TARGET: 64}, "n_embd": 128}, "rows of 64 values, expected 128"),
    ],
)
def test_another_model(
    change: dict[str, Any], why: str, files: dict[str, Path], tmp_path: Path
) -> None:
    draft = tiny.write_drafter(tmp_path / "draft.gguf", "eagle3", **{"keys": {}, **change})
    with pytest.raises(TreadleError, match=why):
        load(files["model"], draft)


def test_models_and_vocabularies_that_do_not_fit(files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"eagle3 only drafts .* with --draft"):
        treadle.load(files["plain"])
    bare: dict[str, Any] = {"vocabulary": False, "n_vocab": 200}
    other = tiny.write_drafter(tmp_path / "bare.gguf", "eagle3", {}, **bare)
    with pytest.raises(UnsupportedError, match=f"drafts 200 tokens, the model has {N_VOCAB}"):
        load(files["model"], other)
    bare["n_vocab"] = N_VOCAB
    tiny.write_drafter(other, "eagle3", {}, **bare)
    with load(files["model"], other) as model:
        text = model.generate(ids_of(9), max_tokens=9, ignore_eos=True)
        text.finish()
        assert text.timings.n_drafted
    streams = tiny.target(tmp_path / "streams.gguf", "gemma3n")
    with pytest.raises(UnsupportedError, match="gemma3n has no states between layers"):
        load(streams, files["plain"])


def test_tokens_that_the_model_lacks(files: dict[str, Path]) -> None:
    with open_gguf(files["own"]) as file:
        assert load_config(file).n_logits == 100
        with pytest.raises(FileError, match=r"d2t: holds \d+ \(expected tokens from 0 to 9"):
            tokens_of(file, 10)


@pytest.mark.slow
def test_the_self_test_checks_its_kernels(files: dict[str, Path]) -> None:
    with load(files["model"], files["own"], n_sequences=4, context=1100) as model:
        report = model_check.CheckReport({}, {}, quick=True)
        model_check.check_kernels(model, report)
    assert report.passed
    assert "fc" in {kernel.label for kernel in report.kernels}
