"""DSpark of DeepSeek V4: what it drafts is what plain numpy makes of the model's streams in
float64; texts are those without it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference import Layer, log_softmax, rms_norm, tensor_of
from tests.reference_compressed import blended, fed, mix_of, turned, weights
from tests.spec_decode import tiny_drafters as tiny
from tests.spec_decode.test_dflash import drafter_of
from tests.spec_decode.tiny_drafters import HOW, N_EMBD, Owner, ids_of, load
from tests.tiny import COMPRESSED, rounding
from treadle.engine.batch import BatchItem
from treadle.errors import TreadleError
from treadle.files.gguf import open_gguf
from treadle.kernels.run_state import LogitsQuery
from treadle.models.archs import WITH_KEY
from treadle.models.config import Config
from treadle.models.drafters.dflash import BLOCK, MASK
from treadle.models.drafters.target import TARGET_LAYERS
from treadle.selftest import model_check

ROW = WITH_KEY["dflash"][1]
FIRST = LogitsQuery(first=True)
RATIOS = "attention.compress_ratios"
KEYS: dict[str, Any] = {
    **{key: value for key, value in COMPRESSED.items() if key != "hash_layer_count"},
    TARGET_LAYERS: [2, 5, 6],
    BLOCK: 5,
    MASK: 4,
    RATIOS: [0, 0],
}
SIZES: dict[str, Any] = {
    "n_layer": 2,
    "n_head_kv": 1,
    "n_expert": 4,
    "n_ff_exp": 64,
    "n_expert_shared": 1,
    "n_markov": 32,
    "own": ("conf_proj.weight", *(f"ffn_{name}_shexp.weight" for name in ("gate", "up", "down"))),
    "row": ROW,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model and its drafter; and a model with a drafter that is always right."""
    root = tmp_path_factory.mktemp("dspark")
    model = tiny.target(root / "model.gguf", "deepseek4")
    made = {"model": model, "sure model": tiny.adds_nothing(model, root / "sure.gguf")}
    made["drafter"] = tiny.write_drafter(root / "drafter.gguf", "dflash", KEYS, **SIZES)

    def right(tensors: dict[str, np.ndarray]) -> None:
        """The bias by the token before is all that the model does."""
        with open_gguf(model) as file:
            embeddings, norm, output = (
                file.tensors[f"{name}.weight"].dequantize().astype(np.float64)
                for name in ("token_embd", "output_norm", "output")
            )
        tensors["output_norm.weight"] *= 0
        tensors["markov_w1.weight"] = rms_norm(embeddings, norm, 1e-5)
        tensors["markov_w2.weight"] = output

    given = SIZES | {"n_markov": N_EMBD, "change": right}
    made["sure"] = tiny.write_drafter(root / "right.gguf", "dflash", KEYS, **given)
    return made


def twin(config: Config, tensor: Any, features: np.ndarray, block: list[int]) -> np.ndarray:
    """Logits of a block behind the tokens of ``features``, in float64, without a bias by tokens."""
    eps = config.norm_eps
    h = rms_norm(features @ tensor("fc.weight").T, tensor("enc.output_norm.weight"), eps)
    n = len(h)
    x = np.repeat(tensor("token_embd.weight")[block][:, None], config.n_streams, 1)
    for i, at in enumerate(config.layers):
        maps = Layer(config, i, tensor)
        for name in ("attn", "ffn"):
            pre, post, comb = weights(config, x, tensor, f"blk.{i}.hc_{name}")
            own = maps.norm((pre[:, :, None] * x).sum(1), f"{name}_norm")
            made = fed(maps, own, block) if name == "ffn" else attended(maps, own, h, n)
            x = post[:, :, None] * made[:, None] + np.einsum("tji,tjd->tid", comb, x)
        assert at.window == 12
    return np.asarray(mix_of(config, x, tensor) @ tensor("output.weight").T)


def attended(maps: Layer, own: np.ndarray, h: np.ndarray, n: int) -> np.ndarray:
    """Attention of a block to itself and to the window before it."""
    at = maps.at
    sizes = at.compressed
    assert sizes is not None
    eps = maps.config.norm_eps
    blk = f"blk.{maps.i}.attn_"
    places = n + np.arange(len(own))
    rank = rms_norm(maps.linear(own, "attn_q_a"), maps.tensor(f"{blk}q_a_norm.weight"), eps)
    q = maps.linear(rank, "attn_q_b").reshape(len(own), at.n_head, -1)
    q = turned(maps, rms_norm(q, np.ones(1), eps), places)
    rows = maps.linear(np.concatenate([h, own]), "attn_kv")
    rows = rms_norm(rows, maps.tensor(f"{blk}kv_a_norm.weight"), eps)
    rows = turned(maps, rows[:, None], np.arange(len(rows)))[:, 0][max(0, n - at.window) :]
    score = np.einsum("thd,sd->hts", q, rows) * maps.config.attn_scale
    sinks = maps.tensor(f"{blk}sinks.weight")[:, None, None]
    sinks = np.broadcast_to(sinks, (at.n_head, len(own), 1))
    p = np.exp(log_softmax(np.concatenate([score, sinks], -1)))[..., :-1]
    y = turned(maps, np.einsum("hts,sd->thd", p, rows), -places)
    y = y.reshape(len(own), sizes.n_groups, -1)
    a = maps.tensor(f"{blk}output_a.weight").reshape(sizes.n_groups, sizes.n_o_rank, -1)
    return maps.linear(np.einsum("tgi,goi->tgo", y, a).reshape(len(own), -1), "attn_output_b")


def means_before(config: Config, tensor: Any, ids: list[int], layers: tuple[int, ...]) -> Any:
    """The means of the model's streams before some layers, side by side."""
    x = np.repeat(tensor("token_embd.weight")[ids][:, None], config.n_streams, 1)
    found = []
    for i in layers:
        part = replace(config, layers=config.layers[:i])
        found.append((blended(part, x, ids, tensor) if i else x).mean(1))
    return np.concatenate(found, 1)


def test_drafts_against_float64(files: dict[str, Path]) -> None:
    """Of several texts in one run: short, at the edge of a page, and longer than the window."""
    texts = [ids_of(2), ids_of(17), ids_of(40, 8)]
    with load(files["model"], files["drafter"], kv="f32") as model:
        own = drafter_of(model)
        engine = model.engine
        made = own.engine
        config = made.config
        traits = config.draft
        assert traits is not None
        assert traits.anchored
        wanted: dict[Owner, tuple[list[int], int]] = {}
        features = []
        for ids in texts:
            owner = Owner(engine.cache.sequence())
            engine.sample([BatchItem(owner.seq, ids[:-1], 1, (FIRST,))], own.observer)
            features.append(own._states[owner.seq].rows.astype(np.float64))
            while not own.can_draft(owner, ids):
                own.prefill_chunk(owner, ids, 1e9)
            wanted[owner] = ids, 5
        drafted = own.draft_ids(wanted)
        assert own.draft_ids(wanted) == drafted
        for sizes in ((1, 1), (4, 4), (16, 16)):
            for output in ("logits", "keys", "markov"):
                made.plan(*sizes, output).check()
        tensor = tensor_of(made.gguf)
        target = tensor_of(model.gguf)
        for (owner, (ids, n)), rows in zip(wanted.items(), features, strict=True):
            exact = means_before(model.config, target, ids[:-1], traits.layers)
            assert np.abs(rows - exact).max() <= rounding(model.config) * np.abs(exact).max()
            block = [ids[-1], *[traits.mask] * (n - 1)]
            logits = twin(config, tensor, rows, block)
            seq = own._texts[owner].seq
            assert seq.ids == ids[:-1]
            seq.n_drafted = n
            got = np.array(
                [row.logits() for row in made.sample([BatchItem(seq, block, n, (FIRST,))])]
            )
            assert np.abs(got - logits).max() <= 2 * rounding(config) * np.abs(logits).max()
            own._drop_block(own._texts[owner])
            found = []
            token = ids[-1]
            for i in range(n):
                logits[i] += tensor("markov_w1.weight")[token] @ tensor("markov_w2.weight").T
                found.append(token := int(logits[i].argmax()))
            assert drafted[owner] == found
            owner.seq.close()


@pytest.mark.parametrize("how", HOW)
def test_the_text_is_that_without_it(how: dict[str, Any], files: dict[str, Path]) -> None:
    tiny.check_texts(*tiny.either(files["model"], files["drafter"]), how)


def test_one_that_is_right_is_believed(files: dict[str, Path]) -> None:
    timings = tiny.check_texts(*tiny.either(files["sure model"], files["sure"]), HOW[0]).timings
    assert timings.n_accepted > 0.8 * timings.n_drafted > 20
    tiny.check_session(*tiny.either(files["sure model"], files["sure"]), 10)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({RATIOS: [0, 4]}, "layer 1 of a drafter has units"),
        ({"hash_layer_count": 1}, "only drafters with routers"),
        ({TARGET_LAYERS: [1, 9, 3]}, r"layers \[1, 9, 3\], the model has 6"),
        ({"expert_gating_func": 5}, "expert_gating_func"),
    ],
)
def test_what_is_refused(
    wrong: dict[str, Any], why: str, files: dict[str, Path], tmp_path: Path
) -> None:
    path = tiny.write_drafter(tmp_path / "draft.gguf", "dflash", KEYS, wrong=wrong, **SIZES)
    with pytest.raises(TreadleError, match=why):
        load(files["model"], path)


def test_a_model_of_one_stream(files: dict[str, Path], tmp_path: Path) -> None:
    """Of the same width of states, it may have such a drafter; without means it has none."""
    other = tiny.target(tmp_path / "glm.gguf", "glm5-next")
    with pytest.raises(TreadleError, match="glm5-next has no states between layers"):
        load(other, files["drafter"])


@pytest.mark.slow
def test_the_self_test_checks_its_kernels(files: dict[str, Path]) -> None:
    with load(files["model"], files["drafter"], n_sequences=4, context=1100) as model:
        report = model_check.CheckReport({}, {}, quick=True)
        model_check.check_kernels(model, report)
    assert report.passed
    assert "fc" in {kernel.label for kernel in report.kernels}
