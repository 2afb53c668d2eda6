"""Adapters at run time, against models whose weights have them added (float64)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.loras import (
    MATRICES,
    draw_pairs,
    merged,
    peft_names,
    with_names,
    write_gguf,
    write_peft,
)
from tests.tiny import rounding
from tests.twins import logits_of_twins
from treadle.api.model import Model
from treadle.cli import main
from treadle.cli.options import adapter
from treadle.convert.hf.row_order import halves_to_pairs
from treadle.convert.lora.lora import open_adapter
from treadle.engine.batch import BatchItem
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.files.safetensors import open_file
from treadle.kernels.run_state import PAGE
from treadle.models.load import load_config

IDS = [1 + 7 * i % 200 for i in range(2 * PAGE + 9)]
WriteTiny = Callable[..., Path]


@pytest.fixture(scope="module")
def base(tiny: WriteTiny) -> Path:
    return tiny("llama", "F32")


@pytest.fixture(scope="module")
def files(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three adapters of different ranks; one of a few matrices alone."""
    folder = tmp_path_factory.mktemp("loras")
    made = {"one": (5, MATRICES), "two": (16, MATRICES), "few": (3, ("attn_v", "ffn_down"))}
    return {
        name: write_gguf(folder / f"{name}.gguf", draw_pairs(base, rank, rank, only))
        for name, (rank, only) in made.items()
    }


@pytest.fixture(scope="module")
def model(base: Path, files: dict[str, Path]) -> Iterator[Model]:
    given = [(path, 0.0) for path in files.values()]
    with treadle.load(base, lora=given, threads=2, kv="f32", n_sequences=8) as made:
        yield made


def expect(model: Model, files: dict[str, Path], scales: dict[str, float]) -> np.ndarray:
    return merged(model.path, model.config, {files[n]: s for n, s in scales.items()}, IDS)


def check(model: Model, rows: np.ndarray, expected: np.ndarray) -> None:
    """As far from it as the model without adapters may be, and as much again for what they add:
    a product of rank r has fewer roundings than the one beside it.
    """
    allowed = 2 * rounding(model.config) * np.abs(expected).max()
    assert np.abs(rows - expected).max() <= allowed
    assert expected.std() > 1.0


SETS = ({"one": 1.0}, {"two": -0.5}, {"few": 1.0}, {"one": 0.5, "two": 0.25, "few": 2.0})


@pytest.mark.parametrize("scales", SETS, ids=lambda scales: "+".join(scales))
def test_equals_merged_weights(
    model: Model, files: dict[str, Path], scales: dict[str, float]
) -> None:
    """In one go, in chunks, token by token."""
    expected = expect(model, files, scales)
    plain = model.logits(IDS)
    assert np.abs(expected - plain).max() > 1.0
    session = model.session(lora=scales)
    check(model, session.logits(IDS), expected)
    for size in (1, 3, 17):
        session.reset()
        for at in range(0, len(IDS), size):
            last = session.feed(IDS[at : at + size])
            check(model, last, expected[min(at + size, len(IDS)) - 1])
    session.close()


def test_each_row_of_a_batch_has_its_own(model: Model, files: dict[str, Path]) -> None:
    """Four sequences, two of them with one adapter; prompts and single tokens mixed."""
    each: list[dict[str, float]] = [{}, {"one": 1.0}, {"two": 1.0}, {"one": 1.0}]
    expected = [expect(model, files, scales) for scales in each]
    sessions = [model.session(lora=scales) for scales in each]
    at = [0, 0, 0, 0]
    for sizes in ((3, 20, 1, 7), (1, 1, 1, 1), (2, 1, 40, 1)):
        parts = [
            BatchItem(session.seq, IDS[start : start + n], n)
            for session, start, n in zip(sessions, at, sizes, strict=True)
        ]
        rows = model.engine.run(parts)
        row = 0
        for which, n in enumerate(sizes):
            check(model, rows[row : row + n], expected[which][at[which] : at[which] + n])
            at[which] = at[which] + n
            row = row + n
    for session in sessions:
        session.close()


def test_without_adapters_not_a_bit_changes(model: Model, base: Path) -> None:
    with treadle.load(base, threads=2, kv="f32") as alone:
        assert np.array_equal(alone.logits(IDS), model.logits(IDS))
        assert [s.label for s in alone.plan(4)] == [s.label for s in model.plan(4)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_threads_do_not_change_a_bit(
    tiny: WriteTiny, files: dict[str, Path], deterministic: bool
) -> None:
    path = tiny("llama", "Q8_0")
    rows = []
    for threads in (1, 3):
        more: dict[str, Any] = {"threads": threads, "deterministic": deterministic}
        with treadle.load(path, lora=[files["one"]], **more) as model:
            rows.append(model.logits(IDS))
            if deterministic:  # nor does the cut
                session = model.session()
                rows.append(np.concatenate([session.logits(IDS[:5]), session.logits(IDS[5:])]))
    assert all(np.array_equal(rows[0], other) for other in rows[1:])


def test_every_step_is_its_twin(model: Model) -> None:
    """Plans with adapters hold what every plan must, and their twins give the same."""
    session = model.session(lora={"one": 1.0, "few": -1.0})
    parts = [BatchItem(session.seq, IDS[:20])]
    plan, (twin,) = logits_of_twins(model.engine, parts)
    plan.check()
    labels = [step.label for step in plan]
    assert {"L0.attn.qkv.lora_a", "L0.attn.qkv.lora_b", "L2.ffn.down.lora_b"} <= set(labels)
    session.reset()
    rows = session.feed(IDS[:20])
    assert np.abs(rows - twin).max() <= rounding(model.config) * np.abs(twin).max()
    session.close()


def test_pages_are_of_their_adapters(model: Model, files: dict[str, Path]) -> None:
    """The same prompt with another adapter, another scale, or none finds nothing."""
    asked: tuple[dict[str, float], ...] = (
        {"one": 1.0},
        {"one": 0.5},
        {"two": 1.0},
        {},
        {"one": 1.0, "two": 1.0},
    )
    model.engine.cache.forget()
    for hits in (0, 2 * PAGE):
        for scales in asked:
            made = model.generate(IDS, max_tokens=1, temperature=0.0, lora=scales)
            made.finish()
            assert made.timings.n_cached == hits, (scales, hits)
            expected = expect(model, files, scales)[-1]
            assert made.ids == [] or made.ids[0] == int(expected.argmax())


def test_page_files_are_of_their_adapters(
    base: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    """In another process, as it were: by what is in an adapter, not by its place in a list."""
    folder = tmp_path / "pages"
    for given, hits in (
        ([files["one"]], 0),
        ([files["two"]], 0),
        ([files["two"], files["one"]], 2 * PAGE),
        ([], 0),
    ):
        with treadle.load(base, lora=given, threads=1, cache_dir=folder) as model:
            name = {} if not given else {given[-1].stem: 1.0}
            made = model.generate(IDS, max_tokens=1, lora=name)
            made.finish()
            assert made.timings.n_cached == hits, given


def test_requests_of_several_adapters_are_written_together(
    model: Model, files: dict[str, Path]
) -> None:
    """Each as if it were alone; greedy, where no two logits are near."""
    each: list[dict[str, float]] = [{}, {"one": 1.0}, {"two": 1.0}, {"few": 1.5}]
    given: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}

    async def all_of() -> list[list[int]]:
        made = [model.generate(IDS[:11], lora=scales, **given) for scales in each]

        async def read(one: Any) -> list[int]:
            async for _ in one:
                pass
            return list(one.ids)

        return list(await asyncio.gather(*map(read, made)))

    together = asyncio.run(all_of())
    alone = []
    for scales in each:
        made = model.generate(IDS[:11], lora=scales, **given)
        made.finish()
        alone.append(made.ids)
    assert together == alone
    assert len({tuple(ids) for ids in alone}) == len(each)


def test_loaded_scales_are_the_default(base: Path, files: dict[str, Path]) -> None:
    with treadle.load(base, lora=[(files["one"], 0.5)], threads=1, kv="f32") as model:
        expected = expect(model, files, {"one": 0.5})
        check(model, model.logits(IDS), expected)
        assert model.states(IDS[:5]).shape == (5, model.config.n_embd)
        session = model.session(lora={})
        assert np.abs(session.feed(IDS) - expected[-1]).max() > 1.0
        with pytest.raises(TreadleError, match="the session uses other adapters"):
            model.generate(IDS, session=session, lora={"one": 1.0})


def test_session_files_name_their_adapters(
    base: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    """The bits of who went on, where the same adapters are in the same order, whatever they are
    called.
    """
    path = tmp_path / "saved"
    plain = tmp_path / "plain"
    last = IDS[-1:]
    load: dict[str, Any] = {"threads": 1, "deterministic": True}
    with treadle.load(base, lora=[files["one"], files["few"]], **load) as model:
        with model.session(lora={"few": 0.3, "one": -0.5}) as session:
            session.feed(IDS[:-1])
            session.save(path)
            expected = session.feed(last)
        with model.session(lora={}) as session:
            session.feed(IDS[:-1])
            session.save(plain)
    with open_file(path) as file, open_file(plain) as other:
        about = dict(file.metadata)
        assert (about["version"], other.metadata["version"]) == ("3", "2")
        assert "lora" not in other.metadata
        said = [(each["name"], each["scale"]) for each in json.loads(about["lora"])]
        assert said == [("one", -0.5), ("few", float(np.float32(0.3)))]
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(files["few"].read_bytes())
    with treadle.load(base, lora=[files["two"], files["one"], renamed], **load) as model:
        with model.load_session(path) as session:
            assert session.seq.lora == ((1, -0.5), (2, float(np.float32(0.3))))
            assert np.array_equal(session.feed(last), expected)
        with model.session(lora={"one": -0.5, "renamed": 0.3}) as session:
            assert session.match(IDS) > 0  # what others find too
        with model.load_session(plain) as session:
            assert session.seq.lora == ()
    for given in ([files["one"]], []):
        with treadle.load(base, lora=given, **load) as model:
            name = "few" if given else "one"
            with pytest.raises(FileError, match=f"used the adapter '{name}', but no such adapter"):
                model.load_session(path)
            assert not model.engine.cache.tree.root.next
    whole = path.read_bytes()
    with treadle.load(base, lora=[files["one"], files["few"]], **load) as model:
        for old, new, why in (
            (b'"version": "3"', b'"version": "2"', "another format version: '2'"),
            (b"scale", b"scaly", "is damaged"),
            (b"-0.5", b" NaN", "is damaged"),
        ):
            assert old in whole
            path.write_bytes(whole.replace(old, new, 1))
            with pytest.raises(FileError, match=why):
                model.load_session(path)


@pytest.mark.parametrize(
    ("lora", "why"),
    [
        ({"four": 1.0}, "no adapter 'four': loaded are one, two, few"),
        ({3: 1.0}, "no adapter 3"),
        ({-1: 1.0}, "no adapter -1"),
        ({True: 1.0}, "no adapter True"),
        *(
            ({"one": scale}, r"adapter 'one': the scale .*expected a number from -1e\+06 to 1e\+06")
            for scale in (float("nan"), float("inf"), 1.1e6, 10**400, "1", True, None)
        ),
        (["one"], "expected a dict"),
    ],
)
def test_scales_that_make_no_sense(model: Model, lora: Any, why: str) -> None:
    with pytest.raises(TreadleError, match=why):
        model.generate(IDS, lora=lora)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([("{one}", 1e7)], "the scale 10000000.0: expected a number from"),
        ({"{one}": "much"}, "the scale 'much'"),
        ([5], r"lora: 5: expected a path or a \(path, scale\) pair"),
        ([("{one}", 1.0, 2.0)], r"expected a path or a \(path, scale\) pair"),
        (5, "lora: expected a list"),
    ],
    ids=str,
)
def test_adapters_that_make_no_sense(
    base: Path, files: dict[str, Path], given: Any, why: str
) -> None:
    def named(value: Any) -> Any:
        if isinstance(value, dict):
            return {named(key): scale for key, scale in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(named, value))
        return files["one"] if value == "{one}" else value

    with pytest.raises(TreadleError, match=why):
        treadle.load(base, lora=named(given))


def test_an_adapter_is_no_model(files: dict[str, Path]) -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"a LoRA adapter, not a model: load its model and pass this file with --lora",
    ):
        treadle.load(files["one"])


def test_adapters_by_their_scales(base: Path, files: dict[str, Path]) -> None:
    """A dict says what a list of pairs does; numpy's numbers are as good as Python's."""
    pairs = [(files["one"], 0.5), (files["two"], np.float32(0.25))]
    given: Any
    for given in (pairs, dict(pairs), {str(path): scale for path, scale in pairs}):
        with treadle.load(base, lora=given, threads=1) as model:
            assert [adapter.name for adapter in model.engine.adapters] == ["one", "two"]
            assert model.engine.cache.lora == ((0, 0.5), (1, 0.25))
            assert model.session(lora={np.int64(1): 2}).seq.lora == ((1, 2.0),)


def test_architectures_that_fuse_their_matrices(tiny: WriteTiny, tmp_path: Path) -> None:
    """Rows of one tensor are several matrices in the graph: phi3's q, k, v and gate, up."""
    path = tiny("phi3", "F32")
    pairs = draw_pairs(path, 4, 4, ("attn_qkv", "ffn_up", "attn_output", "ffn_down"))
    file = write_gguf(tmp_path / "phi.gguf", pairs, arch="phi3")
    with treadle.load(path, lora=[file], threads=2, kv="f32") as model:
        check(model, model.logits(IDS), merged(path, model.config, {file: 1.0}, IDS))


# -- PEFT ----------------------------------------------------------------------------------------


def test_peft_folders(base: Path, tmp_path: Path) -> None:
    """Rows of q and k are transformers'; ranks, alphas and rsLoRA as the configuration says."""
    pairs = draw_pairs(base, 4, 9)
    turned = {}
    for name, (a, b) in pairs.items():
        heads = {"attn_q": 4, "attn_k": 2}.get(name.split(".")[2], 0)
        turned[name] = a, halves_to_pairs(b, heads) if heads else b
    plain = write_peft(tmp_path / "plain", peft_names(pairs))
    root = write_peft(tmp_path / "root", peft_names(pairs), use_rslora=True)
    own = {"alpha_pattern": {"layers.1.self_attn.q_proj": 2}}
    some = write_peft(tmp_path / "some", peft_names(pairs), **own)
    expected = write_gguf(tmp_path / "gguf.gguf", turned)
    with treadle.load(base, lora=[plain, root, some], threads=1, kv="f32") as model:
        for folder, scale in ((plain, 1.0), (root, 0.5)):
            session = model.session(lora={folder.name: scale})
            check(model, session.logits(IDS), merged(base, model.config, {expected: 1.0}, IDS))
            session.close()
        factors = {name: low.factor for name, low in model.engine.adapters[2].ranks.items()}
        assert factors.pop("blk.1.attn_q.weight") == 0.5
        assert set(factors.values()) == {2.0}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"use_dora": True}, "use_dora: DoRA"),
        ({"modules_to_save": ["lm_head"]}, "fully trained modules"),
        ({"bias": "all"}, "trained biases"),
        ({"peft_type": "IA3"}, "treadle supports only LORA"),
        ({"lora_alpha": "much"}, "lora_alpha"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights pissa_niter_16"),
        ({"init_lora_weights": "OLoRA"}, "init_lora_weights OLoRA"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights loftq"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora: BD-LoRA"),
        ({"init_lora_weights": "olora"}, "subtracts it from the model's weights"),
        ({"init_lora_weights": "corda"}, "subtracts it from the model's weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_peft_configurations_that_are_refused(
    base: Path, tmp_path: Path, config: dict[str, Any], why: str
) -> None:
    folder = write_peft(tmp_path / "bad", peft_names(draw_pairs(base, 4, 9)), **config)
    with pytest.raises((UnsupportedError, FileError), match=why):
        treadle.load(base, lora=[folder])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("model.layers.0.mlp.experts.3.gate_proj.lora_A", "a module without a matrix"),
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
        ("lm_head.lora_A", "the output matrix"),
        ("model.layers.0.mixer.in_proj.lora_A", "a module without a matrix"),
    ],
    ids=lambda value: value.rpartition(".")[2],
)
def test_peft_tensors_that_are_refused(base: Path, tmp_path: Path, name: str, why: str) -> None:
    tensors = peft_names(draw_pairs(base, 4, 9))
    tensors[f"base_model.model.{name}.weight"] = np.zeros((4, 64), np.float32)
    tensors[f"base_model.model.{name}.weight".replace("_A", "_B")] = np.zeros((64, 4), np.float32)
    with pytest.raises(UnsupportedError, match=why):
        treadle.load(base, lora=[write_peft(tmp_path / "bad", tensors)])


def test_an_adapter_of_a_deeper_model(base: Path, tmp_path: Path) -> None:
    tensors = peft_names(draw_pairs(base, 4, 9))
    deeper = "base_model.model.model.layers.7.self_attn.q_proj.lora_"
    tensors |= {
        f"{deeper}A.weight": np.zeros((4, 64), np.float32),
        f"{deeper}B.weight": np.zeros((128, 4), np.float32),
    }
    with pytest.raises(FileError, match=r"blk.7.attn_q.weight: is not a tensor of the model"):
        treadle.load(base, lora=[write_peft(tmp_path / "deeper", tensors)])


# -- GGUF ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"general.type": "model"}, "general.type"),
        ({"adapter.type": "control"}, "adapter.type"),
        ({"arch": "qwen2"}, "an adapter for a llama model"),
        ({"adapter.alora.invocation_tokens": [1]}, "activated LoRA"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_files_of_something_else(
    base: Path, tmp_path: Path, keys: dict[str, Any], why: str
) -> None:
    file = write_gguf(tmp_path / "bad.gguf", draw_pairs(base, 4, 9), **keys)
    with pytest.raises((UnsupportedError, FileError), match=why):
        treadle.load(base, lora=[file])


def pair(m: int, k: int, rank: int = 4) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((rank, k), np.float32), np.zeros((m, rank), np.float32)


@pytest.mark.parametrize(
    ("name", "matrices", "why"),
    [
        ("blk.0.attn_q.weight", pair(128, 63), r"\[rank, 64\]"),
        ("blk.0.attn_q.weight", (pair(128, 64)[0], pair(128, 64, 5)[1]), r"\[128, rank\]"),
        ("blk.7.attn_q.weight", pair(128, 64), "not a tensor of the model"),
        ("token_embd.weight", pair(512, 64), "one rank for 320 rows of 64 values"),
        ("output.weight", pair(512, 64), "the output matrix"),
        ("blk.0.attn_norm.weight", pair(1, 64), "a vector"),
    ],
)
def test_pairs_that_do_not_fit(
    base: Path, tmp_path: Path, name: str, matrices: Any, why: str
) -> None:
    file = write_gguf(tmp_path / "bad.gguf", {name: matrices})
    with pytest.raises((UnsupportedError, FileError), match=why):
        treadle.load(base, lora=[file])


def test_one_half_of_a_pair(base: Path, tmp_path: Path) -> None:
    from treadle.files.gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "half.gguf")
    for key, value in {"general.type": "adapter", "adapter.type": "lora"}.items():
        writer.add(key, value)
    writer.add("general.architecture", "llama")
    writer.add_tensor("blk.0.attn_q.weight.lora_a", (4, 64), "F32", np.zeros((4, 64), np.float32))
    writer.write()
    with pytest.raises(FileError, match="one half of a pair"):
        treadle.load(base, lora=[tmp_path / "half.gguf"])


# -- written: as GGUF, and into the weights ----------------------------------------------------


def test_peft_folders_become_gguf(base: Path, files: dict[str, Path], tmp_path: Path) -> None:
    """One file's alpha, though modules have several; to the rounding of B times their ratio."""
    own = {"alpha_pattern": {"layers.1.self_attn.q_proj": 3}, "use_rslora": True}
    folder = write_peft(tmp_path / "folder", peft_names(draw_pairs(base, 4, 9)), **own)
    target = tmp_path / "made.gguf"
    assert main(["convert", str(folder), str(target), "--base", str(base)]) == 0
    with open_gguf(base) as gguf:
        config = load_config(gguf)
        made, read = (open_adapter(path, gguf, config) for path in (target, folder))
        assert made.ranks.keys() == read.ranks.keys()
        for name, low in made.ranks.items():
            other = read.ranks[name]
            assert np.array_equal(low.a(), other.a())
            np.testing.assert_allclose(low.factor * low.b(), other.factor * other.b(), rtol=1e-6)


@pytest.mark.parametrize("own", [{"layers.0.self_attn.q_proj": 0}, {"": 0}], ids=["one", "all"])
def test_an_alpha_of_zero_adds_nothing(base: Path, tmp_path: Path, own: dict[str, int]) -> None:
    """In a GGUF file an alpha of 0 stands for factors of 1."""
    alphas: dict[str, Any] = {"lora_alpha": 0} if "" in own else {"alpha_pattern": own}
    folder = write_peft(tmp_path / "folder", peft_names(draw_pairs(base, 4, 9)), **alphas)
    target = tmp_path / "made.gguf"
    assert main(["convert", str(folder), str(target), "--base", str(base)]) == 0
    with open_gguf(base) as gguf:
        ranks = open_adapter(target, gguf, load_config(gguf)).ranks
    sizes = {name: np.abs(low.factor * low.b() @ low.a()).max() for name, low in ranks.items()}
    assert sizes.pop("blk.0.attn_q.weight") == 0
    assert all((size == 0) == ("" in own) for size in sizes.values())


def test_a_folder_needs_its_base(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_peft(tmp_path / "folder", peft_names(draw_pairs(base, 4, 9)))
    for words, why in (
        ([str(folder), "x.gguf"], "name its base model with --base MODEL"),
        (
            [str(folder), "x.gguf", "--base", str(base), "--set", "a=b"],
            "--set cannot be used with adapters",
        ),
        (
            [str(folder), "x.gguf", "--base", str(base), "--align", "32"],
            "--align cannot be used with adapters",
        ),
        (
            [str(folder), "x.gguf", "--base", str(base), "--no-resume"],
            "--resume cannot be used with adapters",
        ),
        ([str(base), "x.gguf", "--base", str(base)], "is not a folder with adapter_config.json"),
    ):
        assert main(["convert", *words]) == 2
        assert why in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("mix", ["F32", "Q8_0"])
def test_quantize_merges(base: Path, files: dict[str, Path], tmp_path: Path, mix: str) -> None:
    """What is written is the sum in float32, in the format that was asked for."""
    target = tmp_path / "merged.gguf"
    words = ["quantize", str(base), str(target), mix, "--lora", f"{files['few']}=0.5"]
    assert main([*words, "--lora", str(files["one"])]) == 0
    with open_gguf(base) as gguf, open_gguf(target) as made:
        config = load_config(gguf)
        adapters = [(open_adapter(files["few"], gguf, config), 0.5)]
        adapters.append((open_adapter(files["one"], gguf, config), 1.0))
        for name, tensor in gguf.tensors.items():
            w: np.ndarray = tensor.dequantize()
            for one, scale in adapters:
                if (low := one.ranks.get(name)) is not None:
                    w = w + scale * low.factor * low.b() @ low.a()
            fmt = made.tensors[name].format
            assert fmt is not None
            step = np.abs(w).max() * (1 / 127 if fmt.name == "Q8_0" else 1e-6)
            assert np.abs(made.tensors[name].dequantize() - w).max() <= step, name


@pytest.mark.parametrize(
    ("arch", "sizes", "names", "only"),
    [
        ("t5encoder", {}, {"blk.": "enc.blk.", "attn_output": "attn_o"}, ("attn_o", "ffn_up")),
        (
            "gemma4",
            {"n_expert": 4, "n_ff_exp": 32},
            {"ffn_gate_inp_norm.weight": "ffn_gate_inp.scale"},
            ("ffn_gate_inp",),
        ),
    ],
)
def test_quantize_merges_by_the_names_of_the_file(
    tiny: WriteTiny,
    tmp_path: Path,
    arch: str,
    sizes: dict[str, int],
    names: dict[str, str],
    only: tuple[str, ...],
) -> None:
    """T5's names are not the graph's; the scale of Gemma 4's router is one of its input."""
    model = with_names(tiny(arch, "F32", **sizes), tmp_path / "model.gguf", names)
    pairs = draw_pairs(model, 3, 5, only)
    target = tmp_path / "merged.gguf"
    file = write_gguf(tmp_path / "lora.gguf", pairs, arch=arch, alpha=3.0)
    assert main(["quantize", str(model), str(target), "F32", "--lora", str(file)]) == 0
    with open_gguf(model) as gguf, open_gguf(target) as made:
        for name, (a, b) in pairs.items():
            w = gguf.tensors[name].dequantize() + b @ a
            np.testing.assert_allclose(made.tensors[name].dequantize(), w, atol=1e-5)


def test_perplexity_is_that_of_the_merged_weights(
    base: Path, files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And without the adapter another one."""
    text = tmp_path / "text"
    target = tmp_path / "merged.gguf"
    few = f"{files['few']}=0.5"
    text.write_text("the quick brown fox jumps over the lazy dog " * 4)
    assert main(["quantize", str(base), str(target), "F32", "--lora", few]) == 0
    found = []
    for words in ([str(base), str(text), "--lora", few], [str(target), str(text)]):
        capsys.readouterr()
        assert main(["perplexity", *words, "-c", "16", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["perplexity"]["value"])
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert main(["perplexity", str(base), str(text), "-c", "16", "--json"]) == 0
    bare = json.loads(capsys.readouterr().out)["perplexity"]["value"]
    assert bare != pytest.approx(found[1], rel=1e-2)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a.gguf", ("a.gguf", 1.0)),
        ("a.gguf=-0.5", ("a.gguf", -0.5)),
        ("r=16/a.gguf", ("r=16/a.gguf", 1.0)),
        ("r=16=2", ("r=16", 2.0)),
    ],
)
def test_how_adapters_are_typed(text: str, found: tuple[str, float]) -> None:
    assert adapter(text) == found


def test_encoders_have_adapters_too(tiny: WriteTiny, tmp_path: Path) -> None:
    path = tiny("bert", "F32")
    pairs = draw_pairs(path, 4, 4, ("attn_q", "attn_output", "ffn_up", "ffn_down"))
    file = write_gguf(tmp_path / "bert.gguf", pairs, arch="bert")
    with treadle.load(path, lora=[file], threads=1, kv="f32") as model:
        added = model.engine.embed([IDS[:9]], unit=False)
        model.engine.cache.lora = ()
        plain = model.engine.embed([IDS[:9]], unit=False)
    with treadle.load(path, threads=1, kv="f32") as alone:
        assert np.array_equal(plain, alone.engine.embed([IDS[:9]], unit=False))
    assert np.abs(added - plain).max() > 0.1
