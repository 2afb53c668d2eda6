"""DFlash 1 and 2 and DSpark: what they draft is what plain numpy makes of the model's states in
float64; texts are those without them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.reference import Layer, fed, gated, log_softmax, normed, rms_norm, rope, tensor_of
from tests.spec_decode import tiny_drafters as tiny
from tests.spec_decode.tiny_drafters import HOW, N_EMBD, Owner, ids_of, load
from tests.tiny import rounding
from treadle.engine.batch import BatchItem
from treadle.engine.engine import Engine
from treadle.errors import TreadleError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.kernels.elementwise.top_records import LogitsQuery
from treadle.models.config import Config
from treadle.models.drafters.dflash import (
    ANCHORED,
    BLOCK,
    CONV_GROUP,
    CONV_TAPS,
    MASK,
    SELECTOR_RANK,
    SELECTOR_TOP,
)
from treadle.models.drafters.target import TARGET_LAYERS, tokens_of
from treadle.selftest import model_check
from treadle.spec_decode.dflash import BlockDrafter

FIRST = LogitsQuery(first=True)
KEYS: dict[str, Any] = {TARGET_LAYERS: [1, 3, 5], BLOCK: 8, MASK: 4}
WINDOWS = {"attention.sliding_window": 12, "attention.sliding_window_pattern": [True, False]}
GEMMA = {
    "embedding_scale": 8.0,
    "attention.scale": 1.0,
    "attention.value_scale": 0.5,
    "hidden_activation": "gelu_pytorch_tanh",
}
CHOSEN = {
    **{CONV_TAPS: 3, CONV_GROUP: 8, SELECTOR_RANK: 16, SELECTOR_TOP: 8},
    "logit_scale": 0.5,
    "final_logit_softcapping": 4.0,
}
NORMS = ("post_attention_norm.weight", "post_ffw_norm.weight", "layer_output_scale.weight")
VARIANTS: dict[str, dict[str, Any]] = {
    "dflash": {"keys": KEYS | WINDOWS},
    "own": {"keys": KEYS, "own": ("output.weight", "token_embd.weight"), "n_draft": 100},
    "dspark": {"keys": KEYS | GEMMA, "n_markov": 32, "own": NORMS, "alone": True},
    "bonus": {"keys": KEYS | {ANCHORED: False}, "n_markov": 32},
    "dflash2": {"keys": KEYS | WINDOWS | CHOSEN, "n_selector": 16},
    "dflash2 own": {
        "keys": KEYS | CHOSEN | {CONV_TAPS: 2, CONV_GROUP: 16},
        "n_selector": 16,
        "own": ("output.weight", "token_embd.weight"),
        "n_draft": 100,
    },
    "causal": {"keys": KEYS | {"attention.causal": True}},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, its drafters by variant; and a model with a drafter that is always right."""
    root = tmp_path_factory.mktemp("dflash")
    made = {"model": tiny.target(root / "model.gguf")}
    for name, given in VARIANTS.items():
        path = root / f"{name}.gguf"
        made[name] = tiny.write_drafter(path, "dflash", **{"n_layer": 2, **given})
    made["sure model"] = tiny.adds_nothing(made["model"], root / "sure.gguf")

    def right(tensors: dict[str, np.ndarray]) -> None:
        """The bias by the token before is all that the model does."""
        with open_gguf(made["model"]) as file:
            embeddings, norm, output = (
                file.tensors[f"{name}.weight"].dequantize().astype(np.float64)
                for name in ("token_embd", "output_norm", "output")
            )
        tensors["output_norm.weight"] *= 0
        tensors["markov_w1.weight"] = rms_norm(embeddings, norm, 1e-5)
        tensors["markov_w2.weight"] = output

    path = root / "right.gguf"
    given = {"n_markov": N_EMBD, "n_layer": 2, "change": right}
    made["sure"] = tiny.write_drafter(path, "dflash", KEYS, **given)
    return made


def drafter_of(model: treadle.Model) -> BlockDrafter:
    made = model.stepper.scheduler.drafting.drafter
    assert isinstance(made, BlockDrafter)
    return made


def convolved(maps: Layer, stem: str, x: np.ndarray, delta: np.ndarray, side: int) -> np.ndarray:
    """One of a sublayer's convolutions within a block."""
    taps = maps.at.block_taps
    if taps is None:
        return x
    base = maps.tensor(f"blk.{maps.i}.{stem}_conv_base")[side]
    delta = delta.reshape(len(x), 2, taps.n, -1)[:, side]
    weights = base + np.repeat(delta, taps.group, 2)
    before = np.concatenate([np.zeros((taps.n - 1, x.shape[1])), x])
    shifted = [before[taps.n - 1 - j :][: len(x)] for j in range(taps.n)]
    return np.asarray(np.einsum("tjd,jtd->td", weights, np.array(shifted)))


def twin(config: Config, tensor: Any, features: np.ndarray, block: list[int]) -> np.ndarray:
    """The last normed states of a block behind the tokens of ``features``, in float64."""
    h = rms_norm(features @ tensor("fc.weight").T, tensor("enc.output_norm.weight"), 1e-5)
    x = tensor("token_embd.weight")[block] * config.embd_scale
    n = len(h)
    inverse, factor = config.ropes[0].frequencies(config.n_ctx_train)
    for i, at in enumerate(config.layers):
        maps = Layer(config, i, tensor)
        own = maps.norm(x, "attn_norm")
        delta = maps.linear(own, "attn_conv_proj") if at.block_taps else own
        own = convolved(maps, "attn", own, delta, 0)

        def heads(rows: np.ndarray, stem: str, maps: Layer = maps) -> np.ndarray:
            weight = maps.tensor(f"blk.{maps.i}.attn_{stem}.weight")
            return (rows @ weight.T).reshape(len(rows), -1, maps.at.head_dim)

        def turned(rows: np.ndarray, stem: str, n: int = 0, maps: Layer = maps) -> np.ndarray:
            rows = maps.norm(rows, f"attn_{stem}_norm")
            front = np.zeros((n, *rows.shape[1:]))
            return rope(np.concatenate([front, rows]), inverse, factor, "neox")[n:]

        rows = np.concatenate([h, own])
        alone = at.mixer == "attention_keys"
        v = heads(rows, "k" if alone else "v")
        v = rms_norm(v, np.ones(1), 1e-5) if alone else v
        k = turned(heads(rows, "k"), "k")
        q = turned(heads(own, "q"), "q", n)
        k, v = (np.repeat(each, at.n_head // at.n_head_kv, 1) for each in (k, v))
        age = n + np.arange(len(x))[:, None] - np.arange(len(k))
        seen = (age < at.window) if at.window else np.full(age.shape, True)
        seen &= (age >= 0) | (not at.causal)
        score = np.einsum("qhd,khd->hqk", q, k) * config.attn_scale
        weight = np.exp(log_softmax(np.where(seen, score, -np.inf)))
        y = np.einsum("hqk,khd->qhd", weight, v).reshape(len(x), -1) * config.value_scale
        y = convolved(maps, "attn", y @ tensor(f"blk.{i}.attn_output.weight").T, delta, 1)
        x = x + maps.norm(y, "post_attention_norm")
        if at.block_taps:
            inner = maps.norm(x, "ffn_norm")
            delta = maps.linear(inner, "ffn_conv_proj")
            inner = gated(maps, convolved(maps, "ffn", inner, delta, 0))
            x = x + convolved(maps, "ffn", inner, delta, 1)
        else:
            x = fed(config, i, x, tensor)
        if "layer_output_scale.weight" in config.optional:
            x = x * tensor(f"blk.{i}.layer_output_scale.weight")
    return np.asarray(normed(x, tensor("output_norm.weight"), config))


def logits_of(config: Config, tensor: Any, h: np.ndarray) -> np.ndarray:
    """The logits of normed states, without a bias by tokens."""
    logits = h @ tensor("output.weight").T * config.logit_scale
    cap = config.logit_softcap
    return np.asarray(cap * np.tanh(logits / cap) if cap else logits)


def chosen(tensor: Any, n: int, h: np.ndarray, logits: np.ndarray, tokens: Any, last: int) -> int:
    """The selector's choice among the ``n`` largest logits of a place whose normed states are
    ``h``, behind the token ``last``: an index of a row.
    """
    best = np.argsort(-logits, kind="stable")[:n]
    place = tensor("selector_hidden.weight") @ h
    behind = tensor("selector_successor.weight")[best if tokens is None else tokens[best]]
    scores = logits[best] + behind @ (place * tensor("selector_predecessor.weight")[last])
    return int(best[scores.argmax()])


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_against_float64(name: str, files: dict[str, Path]) -> None:
    """Of several texts in one run: short, at the edge of a page, and longer than a window."""
    texts = [ids_of(2), ids_of(17), ids_of(40, 8)]
    with load(files["model"], files[name], kv="f32") as model:
        own = drafter_of(model)
        engine = model.engine
        made = own.engine
        config = made.config
        traits = config.draft
        assert traits is not None
        wanted: dict[Owner, tuple[list[int], int]] = {}
        features = []
        for ids in texts:
            owner = Owner(engine.cache.sequence())
            assert not own.can_draft(owner, ids)
            engine.sample([BatchItem(owner.seq, ids[:-1], 1, (FIRST,))], own.observer)
            features.append(own._states[owner.seq].rows.astype(np.float64))
            while not own.can_draft(owner, ids):
                own.prefill_chunk(owner, ids, 1e9)
            wanted[owner] = ids, 5
        drafted = own.draft_ids(wanted)
        assert own.draft_ids(wanted) == drafted
        for sizes in ((1, 1), (4, 4), (16, 16)):
            more = [
                word
                for word, n in (
                    ("markov", traits.n_markov),
                    ("selector_vectors", traits.n_selector),
                )
                if n
            ]
            for output in ("logits", "keys", *more):
                made.plan(*sizes, output).check()
        tensor = tensor_of(made.gguf)
        tokens = tokens_of(made.gguf, config.n_vocab)
        for (owner, (ids, n)), rows in zip(wanted.items(), features, strict=True):
            exact = tiny.states_before(model, ids[:-1], traits.layers)
            assert np.abs(rows - exact).max() <= rounding(model.config) * np.abs(exact).max()
            block = [ids[-1], *[traits.mask] * (n - traits.anchored)]
            h = twin(config, tensor, rows, block)[-n:]
            logits = logits_of(config, tensor, h)
            found = []
            token = ids[-1]
            for i in range(n):
                if traits.n_markov:
                    bias = tensor("markov_w1.weight")[token] @ tensor("markov_w2.weight").T
                    logits[i] += bias
                if traits.n_selector:
                    given = (h[i], logits[i], tokens, token)
                    token = chosen(tensor, traits.n_candidates, *given)
                else:
                    token = int(logits[i].argmax())
                token = token if tokens is None else int(tokens[token])
                found.append(token)
            assert drafted[owner] == found
            seq = own._texts[owner].seq
            assert seq.ids == ids[:-1]
            if not traits.n_markov:
                own._texts[owner].seq.n_drafted = len(block)
                part = BatchItem(seq, block, n, (FIRST,))
                got = np.array([row.logits() for row in made.sample([part])])
                allowed = 2 * rounding(config) * np.abs(logits).max()
                assert np.abs(got - logits).max() <= allowed
                own._drop_block(own._texts[owner])
            owner.seq.close()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["dflash", "dspark", "dflash2"])
def test_the_text_is_that_without_it(
    name: str, how: dict[str, Any], files: dict[str, Path]
) -> None:
    tiny.check_texts(*tiny.either(files["model"], files[name]), how)


def test_one_that_is_right_is_believed(files: dict[str, Path]) -> None:
    timings = tiny.check_texts(*tiny.either(files["sure model"], files["sure"]), HOW[0]).timings
    assert timings.n_accepted > 0.8 * timings.n_drafted > 20
    tiny.check_session(*tiny.either(files["sure model"], files["sure"]), 10)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"keys": KEYS | {TARGET_LAYERS: [1, 9]}}, r"layers \[1, 9\], the model has 6"),
        ({"keys": KEYS, "wrong": {TARGET_LAYERS: "all"}}, "target_layers: is 'all'"),
        ({"keys": KEYS, "n_embd": 128}, "reads states of 128 values, the model has 64"),
        ({"keys": KEYS, "wrong": {SELECTOR_TOP: 4}}, "selector_predecessor.weight: .* is missing"),
        ({"keys": KEYS | CHOSEN, "n_selector": 16, "wrong": {SELECTOR_RANK: 8}}, "selector_prede"),
        ({"keys": KEYS | CHOSEN, "n_selector": 16, "wrong": {SELECTOR_TOP: 65}}, "is 65"),
        ({"keys": KEYS | CHOSEN, "n_selector": 16, "wrong": {CONV_GROUP: 24}}, "divisor of 64"),
        ({"keys": KEYS | CHOSEN, "n_selector": 16, "wrong": {CONV_TAPS: 2}}, "attn_conv_base"),
        (
            {"keys": KEYS, "n_markov": 8, "wrong": {SELECTOR_TOP: 8}},
            "selector beside a Markov head is not supported",
        ),
        ({"keys": KEYS, "wrong": {BLOCK: 1}}, "block_size: is 1"),
        ({"keys": KEYS, "wrong": {"hidden_activation": "relu"}}, "'relu': treadle supports gelu"),
    ],
)
def test_another_model(
    change: dict[str, Any], why: str, files: dict[str, Path], tmp_path: Path
) -> None:
    draft = tiny.write_drafter(tmp_path / "draft.gguf", "dflash", **{"n_layer": 2, **change})
    with pytest.raises(TreadleError, match=why):
        load(files["model"], draft)


def test_states_of_many_texts(files: dict[str, Path]) -> None:
    """More than one run takes."""
    texts = [ids_of(n, n) for n in (20, 27, 30)]
    with load(files["model"], files["dflash"], kv="f32") as model:
        own = drafter_of(model)
        wanted: dict[Owner, tuple[list[int], int]] = {}
        for ids in texts:
            owner = Owner(model.engine.cache.sequence())
            model.engine.sample([BatchItem(owner.seq, ids[:-1], 1, (FIRST,))], own.observer)
            while not own.can_draft(owner, ids):
                own.prefill_chunk(owner, ids, 1e9)
            own._drop_block(own._texts[owner])
            wanted[owner] = ids, 3
        drafted = own.draft_ids(wanted)
        assert all(len(found) == 3 for found in drafted.values())
        for owner, (ids, _) in wanted.items():  # the states again, and read in parts
            model.engine.truncate(owner.seq, 0)
            model.engine.sample([BatchItem(owner.seq, ids[:-1], 1, (FIRST,))], own.observer)
            own.engine.cache.truncate(own._texts[owner].seq, 0)
            own._texts[owner].n = own._texts[owner].start = 0
        own.engine.max_tokens = 32
        assert own.draft_ids(wanted) == drafted
        for owner in wanted:
            owner.seq.close()


def test_states_that_are_elsewhere(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "has_states", False)
    with pytest.raises(UnsupportedError, match="dflash drafts from the model's states, which are"):
        load(files["model"], files["dflash"])


def test_a_drafter_is_no_model(files: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedError, match=r"dflash only drafts .* with --draft"):
        treadle.load(files["dflash"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dspark", "dflash2"])
def test_the_self_test_checks_its_kernels(name: str, files: dict[str, Path]) -> None:
    with load(files["model"], files[name], n_sequences=4, context=1100) as model:
        report = model_check.CheckReport({}, {}, quick=True)
        model_check.check_kernels(model, report)
    assert report.passed
    assert "fc" in {kernel.label for kernel in report.kernels}
