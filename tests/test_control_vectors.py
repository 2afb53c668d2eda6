"""Control vectors at run time: files, batches, caches, sessions, settings that make no sense, the
command line and the server. ``tests/models/test_control_vectors.py`` has their numbers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import treadle
from tests.loras import draw_pairs, write_gguf
from tests.server.conftest import running, talking
from tests.server.test_openai import post
from tests.tiny import rounding
from tests.twins import logits_of_twins
from treadle.api.model import Model
from treadle.api.options import packaged_model
from treadle.cli import main
from treadle.cli.options import control_vector
from treadle.engine.batch import BatchItem
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import GGUFWriter
from treadle.kernels.run_state import PAGE
from treadle.models.control_vector import ControlVector

IDS = [1 + 7 * i % 200 for i in range(2 * PAGE + 9)]
WriteTiny = Callable[..., Path]


def draw(seed: int, n_embd: int = 64, layers: tuple[int, ...] = (1, 2)) -> ControlVector:
    rng = np.random.default_rng(seed)
    rows = {layer: rng.standard_normal(n_embd).astype(np.float32) for layer in layers}
    return ControlVector(f"v{seed}", rows, "llama")


@pytest.fixture(scope="module")
def base(tiny: WriteTiny) -> Path:
    return tiny("llama", "F32")


@pytest.fixture(scope="module")
def model(base: Path) -> Iterator[Model]:
    given = [(draw(1), 0.0), (draw(2), 0.0)]
    with treadle.load(base, control_vectors=given, threads=2, kv="f32", n_sequences=8) as made:
        yield made


# -- files ----------------------------------------------------------------------------------------


def test_files_are_llama_cpps(tmp_path: Path) -> None:
    """What its cvector-generator writes, by the gguf package; and back again."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "happy.gguf"
    vector = draw(3, layers=(1, 2, 5))
    vector.save(path)
    file = gguf.GGUFReader(path)
    types = {name: file.fields[name].types[0] for name in file.fields if "controlvector." in name}
    assert types == {
        "controlvector.model_hint": gguf.GGUFValueType.STRING,
        "controlvector.layer_count": gguf.GGUFValueType.INT32,
    }
    assert file.fields["general.architecture"].contents() == "controlvector"
    assert file.fields["controlvector.layer_count"].contents() == 3
    assert [(t.name, t.tensor_type.name, list(t.shape)) for t in file.tensors] == [
        (f"direction.{layer}", "F32", [64]) for layer in (1, 2, 5)
    ]
    with pytest.raises(FileError, match="exists already"):
        vector.save(path)
    again = ControlVector.open(path)
    assert (again.name, again.model_hint, again.mark) == ("happy", "llama", vector.mark)
    theirs = gguf.GGUFWriter(tmp_path / "theirs.gguf", "controlvector")
    theirs.add_string("controlvector.model_hint", "mistral")  # repeng has transformers' names
    theirs.add_int32("controlvector.layer_count", 2)
    for layer in (2, 1):
        theirs.add_tensor(f"direction.{layer}", vector.directions[layer])
    theirs.write_header_to_file()
    theirs.write_kv_data_to_file()
    theirs.write_tensors_to_file()
    theirs.close()
    made = ControlVector.open(tmp_path / "theirs.gguf")
    assert made.mark == vector.for_layers(1, 2).mark
    assert made.model_hint == "mistral"


def test_strengths_by_layer() -> None:
    vector = draw(4, layers=(1, 2, 3))
    made = vector.scaled({1: 0.5, 3: -2})
    assert sorted(made.directions) == [1, 3]
    assert np.array_equal(made.directions[3], -2 * vector.directions[3])
    assert np.array_equal(vector.scaled(3).directions[2], 3 * vector.directions[2])
    with pytest.raises(TreadleError, match="no direction of layer 4"):
        vector.scaled({4: 1.0})
    assert sorted(vector.for_layers(2, 9).directions) == [2, 3]


def written(path: Path, *tensors: tuple[str, np.ndarray], **keys: Any) -> Path:
    writer = GGUFWriter(path)
    for key, value in {"general.architecture": "controlvector", **keys}.items():
        writer.add(key, value)
    for name, row in tensors:
        writer.add_tensor(name, row.shape, "F32", row.astype(np.float32))
    writer.write()
    return path


ROW = np.ones(64)


@pytest.mark.parametrize(
    ("tensors", "keys", "why"),
    [
        ([("direction.1", np.ones(32))], {}, r"direction.1: has 32 values \(expected 64 values"),
        ([("direction.3", ROW)], {}, "direction.3: is of a layer that the model does not have"),
        ([("direction.0", ROW)], {}, "direction.0.*: is of layer 0"),
        ([("direction.x", ROW)], {}, "direction.x.*: is no tensor of a control vector"),
        ([("blk.1", ROW)], {}, "is no tensor of a control vector"),
        ([("direction.1", ROW.reshape(2, 32))], {}, "has the shape"),
        ([("direction.1", ROW * np.nan)], {}, "is not a finite number"),
        ([], {}, "has no tensors"),
        ([("direction.1", ROW)], {"general.architecture": "llama"}, "is 'llama'"),
        (
            [("direction.1", ROW)],
            {"controlvector.model_hint": "gemma3"},
            "is for a gemma3 model .*a llama model",
        ),
    ],
)
def test_files_that_do_not_fit(
    tensors: Any, keys: dict[str, Any], why: str, base: Path, tmp_path: Path
) -> None:
    path = written(tmp_path / "v.gguf", *tensors, **keys)
    with pytest.raises(FileError, match=why):
        treadle.load(base, control_vectors=path)


def test_a_vector_is_no_model(tmp_path: Path) -> None:
    path = written(tmp_path / "v.gguf", ("direction.1", ROW))
    with pytest.raises(
        UnsupportedError, match=r"a control vector, not a model: .*--control-vector"
    ):
        treadle.load(path)


# -- runs -----------------------------------------------------------------------------------------


def test_without_control_vectors_not_a_bit_changes(model: Model, base: Path) -> None:
    """Alone, and beside sequences that have some: with the same sizes of batches."""
    with treadle.load(base, threads=2, kv="f32", n_sequences=8) as bare:
        assert np.array_equal(bare.logits(IDS), model.logits(IDS))
        for n in (1, 4):
            assert [s.label for s in bare.plan(n)] == [s.label for s in model.plan(n)]
        rows = []
        for which, strengths in ((bare, {}), (model, {"v1": 1.0})):
            seqs = [
                which.session(control_vectors=each).seq for each in ({}, strengths, {}, strengths)
            ]
            at = [0, 0, 0, 0]
            found = []
            for sizes in ((3, 20, 1, 7), (1, 1, 1, 1), (2, 1, 40, 1)):
                parts = [
                    BatchItem(seq, IDS[start : start + n], n)
                    for seq, start, n in zip(seqs, at, sizes, strict=True)
                ]
                made = np.split(which.engine.run(parts), np.cumsum(sizes)[:-1])
                found.append(made)
                at = [start + n for start, n in zip(at, sizes, strict=True)]
            rows.append(found)
            for seq in seqs:
                seq.close()
    for plain, mixed in zip(*rows, strict=True):
        for i, (one, other) in enumerate(zip(plain, mixed, strict=True)):
            assert np.array_equal(one, other) == (i % 2 == 0)


@pytest.mark.slow
def test_beside_adapters(base: Path, tmp_path: Path) -> None:
    """In one batch: an adapter, a vector, both, none; each as it is alone, up to rounding."""
    lora = write_gguf(tmp_path / "one.gguf", draw_pairs(base, 4, 4))
    more: dict[str, Any] = {"threads": 2, "kv": "f32", "n_sequences": 8}
    with treadle.load(base, lora=[(lora, 0.0)], control_vectors=[(draw(1), 0.0)], **more) as model:
        kinds: list[Any] = [
            ({"one": 1.0}, {}),
            ({}, {"v1": 0.5}),
            ({"one": 1.0}, {"v1": 0.5}),
            ({}, {}),
        ]
        alone = []
        for adapters, strengths in kinds:
            with model.session(lora=adapters, control_vectors=strengths) as session:
                alone.append(session.logits(IDS[:20]))
        sessions = [model.session(lora=a, control_vectors=s) for a, s in kinds]
        parts = [BatchItem(session.seq, IDS[:20], 20) for session in sessions]
        together = np.split(model.engine.run(parts), 4)
        allowed = 2 * rounding(model.config)
        for one, other in zip(alone, together, strict=True):
            assert np.abs(one - other).max() <= allowed * np.abs(one).max()
        for i in range(4):
            for j in range(i):
                assert np.abs(alone[i] - alone[j]).max() > 0.1
        made = model.generate(IDS, lora={"one": 1.0}, control_vectors={"v1": 0.5}, max_tokens=1)
        made.finish()
        assert sessions[2].seq.lora == ((0, 1.0), (1, 0.5))
        model.engine.cache.lora = sessions[2].seq.lora
        for given, wanted in (
            ({"lora": {}}, ((1, 0.5),)),
            ({"control_vectors": {}}, ((0, 1.0),)),
            ({"lora": {0: 2.0}, "control_vectors": {0: -1.0}}, ((0, 2.0), (1, -1.0))),
            ({}, ((0, 1.0), (1, 0.5))),
        ):
            with model.session(**given) as session:  # each setting leaves the other's default
                assert session.seq.lora == wanted


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_threads_do_not_change_a_bit(tiny: WriteTiny, deterministic: bool) -> None:
    path = tiny("llama", "Q8_0")
    rows = []
    for threads in (1, 3):
        more: dict[str, Any] = {"threads": threads, "deterministic": deterministic}
        with treadle.load(path, control_vectors=draw(1), **more) as model:
            rows.append(model.logits(IDS))
            if deterministic:  # nor does the cut
                session = model.session()
                rows.append(np.concatenate([session.logits(IDS[:5]), session.logits(IDS[5:])]))
    assert all(np.array_equal(rows[0], other) for other in rows[1:])


def test_every_step_is_its_twin(model: Model) -> None:
    session = model.session(control_vectors={"v1": 1.0, "v2": -0.5})
    parts = [BatchItem(session.seq, IDS[:20])]
    plan, (twin,) = logits_of_twins(model.engine, parts)
    plan.check()
    assert [s.label for s in plan if s.label.endswith(".control")] == ["L1.control", "L2.control"]
    session.reset()
    rows = session.feed(IDS[:20])
    assert np.abs(rows - twin).max() <= rounding(model.config) * np.abs(twin).max()
    session.close()


def test_vectors_and_scores_have_them_too(model: Model) -> None:
    """Of the engine's default, which ``load`` and servers set."""
    with model.session(control_vectors={"v1": 1.0}) as session:
        lora = session.seq.lora
    plain = model.engine.embed([IDS], lora=())
    assert np.array_equal(model.embed([IDS])[0], plain[0])
    assert np.abs(model.engine.embed([IDS], lora=lora) - plain).max() > 0.01


# -- caches and sessions --------------------------------------------------------------------------


def test_pages_are_of_their_vectors(model: Model) -> None:
    """The same prompt with another vector, another strength, or none finds nothing; and what is
    found gives the logits of a prompt that was read as a whole.
    """
    asked: tuple[dict[str, float], ...] = ({"v1": 1.0}, {"v1": 0.5}, {"v2": 1.0}, {})
    model.engine.cache.forget()
    first: list[int] = []
    for hits in (0, 2 * PAGE):
        for strengths in asked:
            made = model.generate(IDS, max_tokens=1, temperature=0.0, control_vectors=strengths)
            made.finish()
            assert made.timings.n_cached == hits, (strengths, hits)
            first += made.ids
    assert first[:4] == first[4:]


def test_page_files_are_of_their_vectors(base: Path, tmp_path: Path) -> None:
    """In another process, as it were: by the directions, not by a name or a place in a list."""
    folder = tmp_path / "pages"
    renamed = ControlVector("other", draw(1).directions)
    cases: list[tuple[list[Any], int]] = [
        ([draw(1)], 0),
        ([draw(2)], 0),
        ([(draw(2), 0.0), renamed], 2 * PAGE),
        ([(draw(1), 0.5)], 0),
        ([draw(1).for_layers(1, 1)], 0),
        ([], 0),
    ]
    for given, hits in cases:
        with treadle.load(base, control_vectors=given, threads=1, cache_dir=folder) as model:
            made = model.generate(IDS, max_tokens=1)
            made.finish()
            assert made.timings.n_cached == hits, given


@pytest.mark.slow
def test_session_files_name_their_vectors(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    load: dict[str, Any] = {"threads": 1, "deterministic": True, "kv": "f32"}
    lora = write_gguf(tmp_path / "one.gguf", draw_pairs(base, 4, 4))
    with (
        treadle.load(base, control_vectors=[draw(1), draw(2)], **load) as model,
        model.session(control_vectors={"v2": 0.3}) as session,
    ):
        session.feed(IDS[:-1])
        session.save(path)
        expected = session.feed(IDS[-1:])
    with (
        treadle.load(base, control_vectors=[draw(2)], **load) as model,
        model.load_session(path) as session,
    ):
        assert session.seq.lora == ((0, float(np.float32(0.3))),)
        assert np.array_equal(session.feed(IDS[-1:]), expected)
    with (
        treadle.load(base, lora=[lora], control_vectors=[draw(2)], **load) as model,
        model.load_session(path) as session,
    ):
        assert session.seq.lora == ((1, float(np.float32(0.3))),)
        allowed = 2 * rounding(model.config) * np.abs(expected).max()  # in the steps of adapters
        assert np.abs(session.feed(IDS[-1:]) - expected).max() <= allowed
    for given in ([draw(1)], []):
        with treadle.load(base, control_vectors=given, **load) as model:
            why = "used the control vector 'v2', but no such control vector is loaded"
            with pytest.raises(FileError, match=why):
                model.load_session(path)


def test_requests_are_written_together(model: Model) -> None:
    """Each as if it were alone; greedy, where no two logits are near."""
    each: list[dict[str, float]] = [{}, {"v1": 1.0}, {"v2": 1.0}, {"v1": -1.0}]
    given: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}

    async def all_of() -> list[list[int]]:
        made = [model.generate(IDS[:11], control_vectors=one, **given) for one in each]

        async def read(one: Any) -> list[int]:
            async for _ in one:
                pass
            return list(one.ids)

        return list(await asyncio.gather(*map(read, made)))

    together = asyncio.run(all_of())
    alone = []
    for strengths in each:
        made = model.generate(IDS[:11], control_vectors=strengths, **given)
        made.finish()
        alone.append(made.ids)
    assert together == alone
    assert len({tuple(ids) for ids in alone}) == len(each)


def test_drafts_change_nothing(base: Path) -> None:
    given: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    texts = []
    for speculate in (False, True):
        more: dict[str, Any] = {"speculate": speculate, "deterministic": True}
        with treadle.load(base, control_vectors=draw(1), threads=1, **more) as model:
            made = model.generate(IDS[:9] * 4, **given)
            made.finish()
            texts.append(made.ids)
    assert texts[0] == texts[1]


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strengths", "why"),
    [
        ({"v3": 1.0}, "no control vector 'v3': loaded are v1, v2"),
        ({2: 1.0}, "no control vector 2"),
        ({True: 1.0}, "no control vector True"),
        *(
            ({"v1": one}, r"control vector 'v1': the strength .*expected a number from -1e\+06 to")
            for one in (float("nan"), float("inf"), 1.1e6, 10**400, "1", True, None)
        ),
        (["v1"], "control_vectors=.*expected a dict of control vectors and their strengths"),
    ],
)
def test_strengths_that_make_no_sense(model: Model, strengths: Any, why: str) -> None:
    with pytest.raises(TreadleError, match=why):
        model.generate(IDS, control_vectors=strengths)
    with pytest.raises(TreadleError, match=why):
        model.session(control_vectors=strengths)


@pytest.mark.parametrize(
    ("given", "more", "why"),
    [
        ([3], {}, "control_vectors: 3: expected a path or a ControlVector"),
        ([(draw(1), "much")], {}, "the strength 'much'"),
        (3, {}, "control_vectors"),
        (draw(1), {"control_vector_layers": (2, 1)}, r"\(2, 1\): expected the first and the last"),
        (draw(1), {"control_vector_layers": (0, 1)}, "expected the first and the last layer"),
        (draw(1), {"control_vector_layers": 3}, "expected the first and the last layer"),
        (draw(1), {"control_vector_layers": (3, 9)}, "'v1': no direction in layers 3 to 9"),
        ((), {"control_vector_layers": (1, 2)}, "needs control_vectors"),
        (ControlVector("x", {}), {}, "'x': it has no direction"),
        (ControlVector("x", {0: ROW}), {}, "'x': layer 0"),  # type: ignore[dict-item]
        (ControlVector("x", {1: ROW * np.inf}), {}, "finite numbers"),  # type: ignore[dict-item]
        (draw(1, n_embd=32), {}, "has 32 values"),
    ],
)
def test_loads_that_make_no_sense(base: Path, given: Any, more: dict[str, Any], why: str) -> None:
    with pytest.raises(TreadleError, match=why):
        treadle.load(base, control_vectors=given, **more)


def test_a_sessions_vectors_stay(model: Model) -> None:
    with model.session(control_vectors={"v1": 1.0}) as session:
        session.feed(IDS)
        with pytest.raises(TreadleError, match="other adapters or control vectors"):
            model.generate([5], session=session, control_vectors={"v2": 1.0})
        model.generate([5], session=session, control_vectors={0: 1.0}, max_tokens=1).finish()
        model.generate([5], session=session, max_tokens=1).finish()


def test_names(base: Path) -> None:
    loaded: list[Any] = [draw(1), draw(1), (draw(2), 0)]
    with treadle.load(base, control_vectors=loaded, threads=1, kv="f32") as model:
        assert [one.name for one in model.engine.control_vectors] == ["v1", "v1-2", "v2"]
        assert model.engine.cache.lora == ((0, 1.0), (1, 1.0))
        twice = model.logits(IDS)
    with treadle.load(base, control_vectors=[(draw(1), 2.0)], threads=1, kv="f32") as model:
        allowed = 2 * rounding(model.config) * np.abs(twice).max()
        assert np.abs(model.logits(IDS) - twice).max() <= allowed


# -- making ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positive", "negative", "more", "why"),
    [
        ([], [[1]], {}, "positive: no texts"),
        ([[1]], [], {}, "negative: no texts"),
        ([[1, 2], [3]], [[4]], {}, "2 positive and 1 negative texts"),
        ([[1], []], [[2], [3]], {}, "positive: text 1 is empty"),
        ([[1, 2]], [[1, 2]], {}, "do not differ"),
        ([[1]], [[2]], {"method": "median"}, "method='median': expected pca or mean"),
        ([[1]], [[2]], {"tokens": "first"}, "tokens='first': expected last or all"),
        ("abc", [[2]], {}, "positive"),
        ([[10**6]], [[2]], {}, "token id"),
        ([[5] * 5000], [[2]], {}, "context"),
    ],
)
def test_pairs_that_make_no_sense(
    model: Model, positive: Any, negative: Any, more: dict[str, Any], why: str
) -> None:
    with pytest.raises(TreadleError, match=why):
        treadle.make_control_vector(model, positive, negative, **more)


@pytest.mark.parametrize(
    ("arch", "why"), [("bert", "of an encoder is not supported"), ("gemma3n", "several streams")]
)
def test_models_that_none_is_made_of(arch: str, why: str, tiny: WriteTiny) -> None:
    sizes = {"window": 16} if arch == "gemma3n" else {}
    with (
        treadle.load(tiny(arch, "F32", **sizes), threads=1) as model,
        pytest.raises(UnsupportedError, match=why),
    ):
        treadle.make_control_vector(model, [[5, 6]], [[7]])


def test_making_leaves_the_model_as_it_was(model: Model) -> None:
    """Vectors that texts have by default take no part, and all pages are given back."""
    before = model.logits(IDS)
    model.engine.cache.forget()
    room = model.engine.cache.available_pages()
    told: list[tuple[str, int, int]] = []
    pairs = [[IDS[:40], [7] * 600], [IDS[1:], [9]]]
    made = treadle.make_control_vector(model, *pairs, progress=lambda *a: told.append(a))
    assert told[0] == ("states", 0, 4)
    assert told[-1] == ("states", 4, 4)
    model.engine.cache.lora = ((0, 1.0),)
    again = treadle.make_control_vector(model, *pairs)
    model.engine.cache.lora = ()
    assert made.mark == again.mark
    model.engine.cache.forget()
    assert model.engine.cache.available_pages() == room
    assert np.array_equal(model.logits(IDS), before)


# -- the command line -----------------------------------------------------------------------------


def run(*args: object) -> int:
    return main([str(arg) for arg in args])


def test_command(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Made of two files, then used by ``run``: the text that the library gives."""
    positive, negative = tmp_path / "p.txt", tmp_path / "n.txt"
    positive.write_text("I am glad\\nYes\n\nSuch joy\n", "utf-8")
    negative.write_text("I am sad\\nNo\nSuch grief\n\n", "utf-8")
    path = packaged_model()
    out = tmp_path / "glad.gguf"
    command: list[object] = ["control-vector", path, "--positive", positive]
    command += ["--negative", negative, "-o", out, "-t", 1]
    assert run(*command, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    with treadle.load(path, threads=1) as model:
        texts = ["I am glad\nYes", "Such joy"], ["I am sad\nNo", "Such grief"]
        made = treadle.make_control_vector(model, *texts)
        n_layer = model.config.n_layer
    assert ControlVector.open(out).mark == made.mark
    assert (report["n_pairs"], report["n_layers"]) == (2, n_layer - 1)
    assert run(*command) == 1
    assert "exists already" in capsys.readouterr().err
    assert run(*command, "--force", "--method", "mean", "--tokens", "all") == 0
    assert "2 pairs of texts" in capsys.readouterr().out
    mean = ControlVector.open(out)
    assert mean.mark != made.mark
    asked: list[object] = ["run", path, "def f(", "-n", 8, "--temp", 0, "--raw", "-t", 1]
    asked += ["--control-vector", f"{out}:20", "--control-vector-layer-range", "2:4"]
    assert run(*asked) == 0
    text = capsys.readouterr().out
    given = [(mean, 20.0)]
    with treadle.load(path, threads=1, control_vectors=given, control_vector_layers=(2, 4)) as one:
        expected = one.generate("def f(", max_tokens=8, temperature=0).finish()
        usual = one.generate("def f(", max_tokens=8, temperature=0, control_vectors={}).finish()
    assert text.rstrip("\n") == expected.rstrip("\n")
    assert usual != expected


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (("", "a\n"), "p.txt: has no texts"),
        (("a\n", "\n\n"), "n.txt: has no texts"),
        (("a\nb\n", "c\n"), "p.txt has 2 texts, .*n.txt 1: expected as many"),
        (("a\n", "a\n"), "do not differ"),
    ],
)
def test_files_of_texts_that_make_no_sense(
    lines: tuple[str, str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    names = [tmp_path / "p.txt", tmp_path / "n.txt"]
    for name, text in zip(names, lines, strict=True):
        name.write_text(text, "utf-8")
    sides = [*("--positive", names[0]), *("--negative", names[1]), "-o", tmp_path / "out.gguf"]
    assert run("control-vector", packaged_model(), *sides) == 1
    assert re.search(why, capsys.readouterr().err)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("a.gguf", ("a.gguf", 1.0)),
        ("a.gguf:0.5", ("a.gguf", 0.5)),
        ("C:\\a.gguf", ("C:\\a.gguf", 1.0)),
        ("C:\\a.gguf:-2", ("C:\\a.gguf", -2.0)),
        (":3", (":3", 1.0)),
    ],
)
def test_option(text: str, parsed: tuple[str, float]) -> None:
    assert control_vector(text) == parsed


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        (["--control-vector", "v.gguf:nan"], 2, "the strength nan: expected a number"),
        (["--control-vector-layer-range", "3"], 2, "'3': expected A:B"),
        (["--control-vector-layer-range", "1:2"], 1, "needs control_vectors"),
        (["--control-vector", "nowhere.gguf"], 1, "nowhere.gguf: no such file"),
        (["--control-vector-scaled", "v.gguf", "2"], 2, "use --control-vector FILE:STRENGTH"),
    ],
)
def test_options_that_make_no_sense(
    options: list[str], code: int, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", *options, "x") == code
    assert why in capsys.readouterr().err


# -- the server -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steered() -> Iterator[Model]:
    """The packaged model with two vectors, the second of which texts have."""
    with treadle.load(threads=1) as model:
        n_embd = model.config.n_embd
    given = [(draw(seed, n_embd).scaled(0.5), float(seed - 1)) for seed in (1, 2)]
    given = [
        (ControlVector(name, vector.directions), strength)
        for name, (vector, strength) in zip(("calm", "wild"), given, strict=True)
    ]
    settings: dict[str, Any] = {"threads": 2, "context": 256, "deterministic": True}
    with treadle.load(control_vectors=given, n_sequences=4, **settings) as model:
        yield model


@pytest.fixture
def caller(steered: Model) -> Iterator[TestClient]:
    before = steered.engine.cache.lora
    with running(steered) as service, talking(service) as client:
        yield client
    steered.engine.cache.lora = before


def text(model: Model, strengths: Any) -> str:
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    return model.generate("def f(", control_vectors=strengths, **given).finish()


BODY: dict[str, Any] = {"prompt": "def f(", "temperature": 0, "max_tokens": 8}


def test_a_call_chooses(caller: TestClient, steered: Model) -> None:
    said = []
    for strengths in ({}, {"calm": 1.0}, {"calm": -0.5, "wild": 0.25}, None):
        more: dict[str, Any] = {} if strengths is None else {"control_vectors": strengths}
        found = post(caller, "/v1/completions", **BODY, **more)
        said.append(found["choices"][0]["text"])
        assert said[-1] == text(steered, strengths)
    assert len({*said}) > 2
    vectors = []
    settings: list[dict[str, Any]] = [{"control_vectors": {}}, {}]
    for more in settings:
        found = post(caller, "/v1/embeddings", input=[5, 6, 7], **more)
        vectors.append(found["data"][0]["embedding"])
    bare, usual = vectors
    assert bare != usual == steered.embed([[5, 6, 7]])[0].tolist()


def test_the_servers_own_strengths(caller: TestClient, steered: Model) -> None:
    listed = caller.get("/control-vectors").json()
    assert [(one["id"], one["name"], one["strength"], one["layers"]) for one in listed] == [
        (0, "calm", 0.0, [1, 2]),
        (1, "wild", 1.0, [1, 2]),
    ]
    assert caller.get("/lora-adapters").json() == []
    made = caller.post("/control-vectors", json={"calm": 2.0})
    assert made.json() == {"success": True}
    assert [one["strength"] for one in caller.get("/control-vectors").json()] == [2.0, 0.0]
    assert post(caller, "/completion", **BODY)["content"] == text(steered, {"calm": 2.0})


@pytest.mark.parametrize(
    ("strengths", "why"),
    [
        ({"loud": 1.0}, "no control vector 'loud': loaded are calm, wild"),
        ({"calm": "much"}, "a number from -1e+06 to 1e+06"),
        ({"calm": 1e7}, "a number from -1e+06 to 1e+06"),
        ([{"id": 0, "scale": 1.0}], "an object"),
    ],
)
def test_calls_that_make_no_sense(caller: TestClient, strengths: Any, why: str) -> None:
    body = {"control_vectors": strengths}
    for answer in (
        caller.post("/completion", json={**BODY, **body}),
        caller.post("/control-vectors", json=strengths),
        caller.post("/v1/embeddings", json={"input": "a", **body}),
        caller.post("/v1/rerank", json={"query": "a", "documents": ["b"], **body}),
    ):
        assert answer.status_code == 400
        assert why in answer.json()["error"]["message"]
