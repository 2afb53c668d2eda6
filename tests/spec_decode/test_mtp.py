"""A file's own drafts: the layer that predicts further tokens says what it should, and the text is
that without it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.lowered import lowered
from tests.reference import fed, normed, tensor_of
from tests.reference import mixed as attended
from tests.reference_compressed import blended, mix_of
from tests.spec_decode.tiny_drafters import HOW, Open, check_session, check_texts, ids_of
from tests.spec_decode.tiny_drafters import load as load_with
from tests.tiny import I32, rounding, write_model
from treadle.cli.commands.quantize import remarks
from treadle.engine.batch import BatchItem
from treadle.errors import UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.formats import by_name
from treadle.kernels.run_state import LogitsQuery
from treadle.quantize.imatrix.collect import collect
from treadle.quantize.imatrix.matrix import missing
from treadle.quantize.mixes import WANTS_IMATRIX
from treadle.quantize.plan import find_mix, make_recipe, parse_rule
from treadle.quantize.write import write
from treadle.spec_decode.mtp import MAX_STATES, HiddenStates, NextnDrafter

LAYERS = 3  # of the model; the one behind them predicts
STEM = f"blk.{LAYERS}.nextn."
SIZES: dict[str, dict[str, int]] = {
    "glm4moe": {"n_expert": 4, "n_ff_exp": 64, "n_expert_shared": 1},
    "deepseek2": {},
    "qwen35": {},  # whose other layers keep a state
    "deepseek4": {},  # the layer reads all streams
    "glm5-next": {"n_expert": 4, "n_ff_exp": 64, "n_expert_shared": 1},  # it keeps a state itself
}
LACKS = {  # tensors of the model's layers that this one has not
    "deepseek4": ("compressor", "indexer"),
    "glm5-next": (".hc_",),
}
Change = Callable[[dict[str, Any]], None]


def write_nextn(path: Path, arch: str, change: Change = lambda tensors: None, **sizes: Any) -> Path:
    """A small random model with such a layer; ``change`` is given all tensors."""
    write_model(path, arch, n_layer=LAYERS + 1, tied=0, **{**SIZES.get(arch, {}), **sizes})
    rng = np.random.default_rng(3)
    with open_gguf(path) as file:
        tensors: dict[str, Any] = {
            name: tensor.data.view("<i4").reshape(tensor.shape)
            if tensor.ggml_type == I32
            else tensor.dequantize()
            for name, tensor in file.tensors.items()
        }
        metadata: dict[str, Any] = {
            key: (file.metadata[key], file.types.get(key)) for key in file.metadata
        }
    last = f"blk.{LAYERS}."
    for part in LACKS.get(arch, ()):
        for name in [name for name in tensors if name.startswith(last) and part in name]:
            del tensors[name]
    if ratios := metadata.get(f"{arch}.attention.compress_ratios"):
        metadata[f"{arch}.attention.compress_ratios"] = [*ratios[0][:LAYERS], 0], ratios[1]
    n_embd = tensors["token_embd.weight"].shape[1]
    tensors[f"{STEM}eh_proj.weight"] = rng.standard_normal((n_embd, 2 * n_embd)) / np.sqrt(n_embd)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        tensors[f"{STEM}{name}.weight"] = 1.0 + 0.2 * rng.standard_normal(n_embd)
    change(tensors)
    writer = GGUFWriter(path)
    f32 = by_name("F32")
    for key, (value, kind) in metadata.items():
        writer.add(key, value if isinstance(value, (str, int, float)) else list(value), kind)
    writer.add(f"{arch}.nextn_predict_layers", 1)
    for name, tensor in tensors.items():
        if name.endswith("tid2eid.weight"):
            rows = np.ascontiguousarray(tensor.astype("<i4"))
            writer.add_tensor(name, tensor.shape, I32, rows.view(np.uint8).reshape(-1))
            continue
        writer.add_tensor(name, tensor.shape, f32, f32.quantize_rows(tensor.astype(np.float32)))
    writer.write()
    return path


ENDS = "attn_output.weight", "attn_output_b", "ffn_down", "ssm_out"  # of halves of layers


def right(tensors: dict[str, Any]) -> None:
    """Make all layers add nothing: then a token says which is next, to model and layer alike."""
    for name in tensors:
        if any(stem in name for stem in ENDS):
            tensors[name] = np.zeros_like(tensors[name])
    n = len(tensors["output_norm.weight"])
    tensors[f"{STEM}eh_proj.weight"] = np.concatenate([np.eye(n), np.zeros((n, n))], 1)
    tensors[f"{STEM}enorm.weight"] = np.ones(n)
    tensors[f"{STEM}shared_head_norm.weight"] = tensors["output_norm.weight"]


@pytest.fixture(scope="module", params=SIZES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_nextn(tmp_path_factory.mktemp("nextn") / "random.gguf", request.param)


@pytest.fixture(scope="module", params=["glm4moe", "qwen35", "deepseek4", "glm5-next"])
def foreseen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose layer is always right."""
    return write_nextn(tmp_path_factory.mktemp("nextn") / "right.gguf", request.param, right)


def load(path: Path, **settings: Any) -> treadle.Model:
    return load_with(path, None, **settings)


def either(path: Path) -> tuple[Open, Open]:
    """The model without its layer, and with it."""
    return partial(load, path, speculate=False), partial(load, path, speculate=True)


def drafter_of(model: treadle.Model) -> NextnDrafter:
    made = model.stepper.scheduler.drafting.drafter
    assert isinstance(made, NextnDrafter)
    return made


def test_the_layer_against_float64(path: Path) -> None:
    """The model's states, and the layer's logits of them; ``tests/reference.py`` has each alone."""
    check_layer(path)


@pytest.mark.slow
@pytest.mark.parametrize("n_embd", [128, 64])
def test_the_projection_of_streams(n_embd: int, tmp_path: Path) -> None:
    """By plans of all sizes, which read its matrix once; with streams that are in place, and with
    narrow ones that are copied.
    """
    path = write_nextn(tmp_path / "v4.gguf", "deepseek4", n_embd=n_embd)
    for deterministic in (False, True):
        check_layer(path, (1, 2, 4, 8), deterministic=deterministic)
    with load(path) as model:
        engine = drafter_of(model).engine
        for n in (1, 2, 4, engine.max_tokens):
            products = lowered(engine, n, 1, "ahead").match("nextn*eh_proj")
            assert [step.n_bytes for step in products] == [4 * 2 * n_embd**2]


def check_layer(path: Path, cuts: tuple[int, ...] = (), **settings: Any) -> None:
    """Its logits in one go, and in chunks of some lengths."""
    ids = ids_of(20)
    n = 19
    with load(path, kv="f32", **settings) as model:
        own = drafter_of(model)
        engine = model.engine
        with closing(engine.cache.sequence()) as seq:
            plain = engine.run([BatchItem(seq, ids, 1)])[0]
        engine.cache.forget()
        with closing(engine.cache.sequence()) as seq:
            part = BatchItem(seq, ids, 1, (LogitsQuery(first=True),))
            rows = engine.sample([part], own.observer)
            assert np.array_equal(next(iter(rows)).logits(), plain)
            states = own._states[seq].rows
        made = own.engine
        own.own_observer.given = states[:n]
        with closing(made.cache.sequence()) as seq:
            rows = made.sample([BatchItem(seq, ids[1:], n)], own.own_observer)
            found = {n: np.array([row.logits() for row in rows])}
        for cut in cuts:
            made.cache.forget()
            chunks = []
            with closing(made.cache.sequence()) as seq:
                for at in range(0, n, cut):
                    some = ids[1 + at : 1 + min(n, at + cut)]
                    own.own_observer.given = states[at : at + len(some)]
                    rows = made.sample([BatchItem(seq, some, len(some))], own.own_observer)
                    chunks += [row.logits() for row in rows]
            found[cut] = np.array(chunks)
        made.plan(1, 1, "ahead").check()
        engine.plan(1, 1, "ahead").check()

        tensor = tensor_of(made.gguf)
        config = made.config
        e = normed(tensor("token_embd.weight")[ids[1:]], tensor("nextn.enorm.weight"), config)
        n_streams = config.n_streams if config.arch.nextn == "streams" else 1
        streams = states[:n].astype(np.float64).reshape(n, n_streams, -1)
        h = normed(streams, tensor("nextn.hnorm.weight"), config)
        both = np.concatenate([np.broadcast_to(e[:, None], h.shape), h], 2)
        x = both @ tensor("nextn.eh_proj.weight").T
        if n_streams > 1:
            x = mix_of(config, blended(config, x, ids[1:], tensor), tensor)
        else:
            x = fed(config, 0, attended(config, 0, x[:, 0], tensor, kept={}), tensor)
            x = normed(x, tensor("output_norm.weight"), config)
        exact = x @ tensor("output.weight").T
        allowed = 2 * rounding(config) * np.abs(exact).max()
        for cut, logits in found.items():
            assert np.abs(logits - exact).max() <= allowed, cut


@pytest.mark.parametrize("how", HOW)
def test_the_text_is_that_without_it(path: Path, how: dict[str, Any]) -> None:
    check_texts(partial(load, path, speculate=False), partial(load, path), how)  # on by default


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_a_layer_that_is_right_is_believed(foreseen: Path, how: dict[str, Any]) -> None:
    timings = check_texts(*either(foreseen), how).timings
    if not how["temperature"]:
        assert timings.n_accepted > 0.8 * timings.n_drafted


def test_a_session_that_is_cut_and_forked(foreseen: Path) -> None:
    check_session(*either(foreseen), 11)


def test_a_session_that_was_drafted_for_is_forgotten(foreseen: Path) -> None:
    """Neither the drafter nor its text keeps it alive: its room is there for the next text."""
    with load(foreseen, context=64, n_sequences=1) as model:
        ids = ids_of(40)
        made = model.generate(ids, max_tokens=9, temperature=0, session=model.session())
        made.finish()
        assert made.timings.n_drafted
        assert model.generate(ids[::-1], max_tokens=9).finish() is not None
        assert model.embed(["as long as the context, or nearly so: fifty"]) is not None


@pytest.mark.parametrize("off", [False, 0, np.False_])
def test_off_where_it_is_not_wanted(off: Any, path: Path) -> None:
    with treadle.load(path, threads=1, context=64, speculate=off) as model:
        assert model.stepper.scheduler.drafting.drafter is None
        assert model.stepper.scheduler.drafting.observer.output == "logits"
        assert not model.speculate


@pytest.mark.parametrize("lost", ["nextn.hnorm.weight", "attn_q.weight"])
def test_a_layer_that_lacks_a_tensor(lost: str, tmp_path: Path) -> None:
    """The model is whole without it."""

    def lose(tensors: dict[str, Any]) -> None:
        del tensors[f"blk.{LAYERS}.{lost}"]

    path = write_nextn(tmp_path / "lacks.gguf", "glm4moe", lose)
    named = lost if lost.startswith("nextn") else f"blk.0.{lost}"
    with pytest.warns(UserWarning, match=f"MTP drafting is off: .*{named}"):
        model = treadle.load(path, threads=1, context=64)
    with model:
        assert not model.speculate
        assert len(model.generate([5, 6], max_tokens=4, ignore_eos=True).finish()) >= 0


def test_the_layers_own_head_and_embeddings(tmp_path: Path) -> None:
    """Where it has some, they count."""

    def own(tensors: dict[str, Any]) -> None:
        right(tensors)
        # Other ids than the model's own, for the layer alone: its drafts stay right.
        tensors[f"{STEM}embed_tokens.weight"] = tensors["token_embd.weight"][:, ::-1]
        tensors[f"{STEM}eh_proj.weight"] = tensors[f"{STEM}eh_proj.weight"][::-1]
        tensors[f"{STEM}shared_head_head.weight"] = tensors["output.weight"]

    with load(write_nextn(tmp_path / "own.gguf", "glm4moe", own)) as model:
        text = model.generate(ids_of(5), max_tokens=60, temperature=0, ignore_eos=True)
        text.finish()
        assert text.timings.n_accepted > 30


def write_apart(path: Path, model: Path, layer: Path) -> None:
    """A file's layers of the model in one file, its MTP layer in another."""
    with open_gguf(path) as file:
        arch = file.metadata["general.architecture"]
        last = f"blk.{LAYERS}."
        for to in (model, layer):
            writer = GGUFWriter(to)
            for key, value in file.metadata.items():
                if to == model and key == f"{arch}.nextn_predict_layers":
                    continue
                value = LAYERS if to == model and key == f"{arch}.block_count" else value
                given = value if isinstance(value, (str, int, float)) else list(value)
                writer.add(key, given, file.types.get(key))
            for name, t in file.tensors.items():
                if not name.startswith("blk.") or name.startswith(last) == (to == layer):
                    writer.add_tensor(name, t.shape, t.ggml_type, t.data)
            writer.write()


@pytest.mark.parametrize("arch", ["glm4moe", "deepseek4"])
def test_a_file_of_the_layer_alone(arch: str, tmp_path: Path) -> None:
    """Its drafts are those of the layer beside the model's."""
    whole = write_nextn(tmp_path / "whole.gguf", arch)
    model = tmp_path / "model.gguf"
    layer = tmp_path / "mtp.gguf"
    write_apart(whole, model, layer)
    found = []
    for path, draft in ((whole, None), (model, layer)):
        with load_with(path, draft, deterministic=True) as opened:
            assert drafter_of(opened).engine.gguf.tensors
            text = opened.generate(ids_of(9), max_tokens=20, temperature=0, ignore_eos=True)
            text.finish()
            found.append((text.ids, text.timings.n_drafted, text.timings.n_accepted))
    assert found[0] == found[1]
    with pytest.raises(UnsupportedError, match=r"has only MTP layers.*--draft"):
        treadle.load(layer)
    write_model(other := tmp_path / "other.gguf", arch, n_layer=LAYERS + 2, tied=0)
    says = f"the MTP layers of {arch} with {LAYERS} layers, the model is {arch} with {LAYERS + 2}"
    with pytest.raises(UnsupportedError, match=says):
        treadle.load(other, draft=layer)


def test_states_of_a_text() -> None:
    """They are kept while they follow each other, and are the text's."""
    kept = HiddenStates()
    rows = np.arange(2000, dtype=np.float32)[:, None]
    kept.put(10, [1, 2, 3, 4], rows[10:14])
    kept.put(12, [7, 8], rows[112:114])  # two were taken back
    assert (kept.start, kept.ids, kept.rows[:, 0].tolist()) == (
        10,
        [1, 2, 7, 8],
        [10, 11, 112, 113],
    )
    kept.drop_rejected([0] * 10 + [1, 2, 7, 9])
    assert (kept.end, kept.rows[:, 0].tolist()) == (13, [10, 11, 112])
    kept.drop(12)
    assert (kept.start, kept.ids, len(kept.rows)) == (12, [7], 1)
    kept.put(20, [5], rows[20:21])  # others were run unseen
    assert (kept.start, kept.ids) == (20, [5])
    kept.put(21, list(range(600)), rows[21:621])
    assert (kept.end, len(kept.ids), len(kept.rows)) == (621, MAX_STATES, MAX_STATES)
    kept.put(3, [4], rows[3:4])  # another text in its place
    assert (kept.start, kept.ids) == (3, [4])


@pytest.mark.slow
def test_what_importances_do_not_have(tmp_path: Path) -> None:
    """No program's have anything of the layer; its coarsest matrices become Q4_K, and that is said.
    llama.cpp stops there.
    """
    path = write_nextn(tmp_path / "m.gguf", "glm4moe", n_embd=256, n_ff=256, n_ff_exp=64)
    with treadle.load(path, threads=1, kv="f32") as model:
        windows = np.random.default_rng(5).integers(3, 300, (2, 16)).astype(np.int32)
        matrix = collect(model.engine, windows, "", bos=None)
    assert not [name for name in matrix.entries if name.startswith(f"blk.{LAYERS}.")]
    with open_gguf(path) as gguf:
        mix = find_mix("IQ2_XXS")
        recipe = make_recipe(gguf, mix, imatrix=matrix)
        fine = make_recipe(gguf, find_mix("Q4_K_M"), imatrix=matrix)
        bare = make_recipe(gguf, mix)
        mine = [parse_rule("eh_proj=IQ2_XXS")]
        asked = make_recipe(gguf, mix, imatrix=matrix, rules=mine)
        write(gguf, recipe, tmp_path / "q.gguf", n_threads=1, imatrix=matrix)
    layer = [each for each in recipe.targets if each.tensor.name.startswith(f"blk.{LAYERS}.")]
    noted = [each for each in layer if each.note]
    assert f"{STEM}eh_proj.weight" in {each.tensor.name for each in noted}
    whole = [each for each in noted if not each.tensor.k % 256]
    assert {each.type.name for each in whole} == {"Q4_K"}
    assert all(each.encode is None or each.type.name not in WANTS_IMATRIX for each in layer)
    assert missing(matrix, recipe.wants_imatrix) == []
    said = [text for text in remarks(recipe, matrix) if "MTP layer" in text]
    assert [text.partition(" (")[0] for text in said] == ["Q4_K instead"]
    assert not any("MTP" in each.note for each in (*fine.targets, *bare.targets))
    (eh,) = (each for each in asked.targets if "eh_proj" in each.tensor.name)
    assert eh.type.name == "IQ2_XXS"
    with treadle.load(tmp_path / "q.gguf", threads=1) as model:
        assert np.isfinite(model.logits([3, 4, 5])).all()
