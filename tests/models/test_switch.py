"""Granite Switch: adapters within a model, which control tokens choose. Against float64, whose
adapters are chosen as by llama.cpp's graph (``tests/reference_switch.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.conftest import WriteTiny
from tests.loras import MATRICES, write_gguf
from tests.models.test_arch_truth import check_truth
from tests.models.ways import NARROW, check_instruction_set
from tests.reference import forward
from tests.reference_switch import chosen
from tests.tiny import SWITCH, rounding
from tests.twins import logits_of_twins
from treadle.api.model import Model
from treadle.engine.batch import BatchItem
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.kernels.run_state import PAGE
from treadle.models.config import Switch
from treadle.models.load import load_config
from treadle.models.stages import staged
from treadle.models.switch import ControlTokens

A, B, C = SWITCH["token_ids_activate"]
IDS: list[int] = np.random.default_rng(7).integers(9, 280, 3 * PAGE + 5).tolist()


def with_token(at: int, token: int, ids: list[int] = IDS) -> list[int]:
    return [*ids[:at], token, *ids[at + 1 :]]


TEXTS = {
    "none": IDS,
    "first": with_token(0, C),
    "within a page": with_token(PAGE + 3, B),
    "at the end": with_token(len(IDS) - 1, A),
    "two": with_token(40, C, with_token(5, A)),  # 1, then their mean: 2
    "the same twice": with_token(40, B, with_token(5, B)),
}


@pytest.fixture(scope="module")
def path(tiny: WriteTiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewritten(tiny("graniteswitch"), tmp_path_factory.mktemp("switch") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with treadle.load(path, threads=2, kv="f32", n_sequences=6, context=256) as made:
        yield made


def exact(model: Model, ids: list[int]) -> np.ndarray:
    return forward(model.gguf, model.config, ids)


def check(model: Model, rows: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(rows - expected).max() <= 2 * rounding(model.config) * np.abs(expected).max()


def rewritten(path: Path, to: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """The file with llama.cpp's names, other keys, and without some tensors."""
    with open_gguf(path) as file:
        writer = GGUFWriter(to)
        keys = {f"graniteswitch.{key.replace('__', '.')}": v for key, v in changes.items()}
        for key, value in {**file.metadata, **keys}.items():
            if value is not None:
                writer.add(key, value)
        for tensor in file.tensors.values():
            name = re.sub(r"_lora_([ab])\.weight$", r".lora_\1", tensor.name)
            if name not in drop:
                writer.add_tensor(name, tensor.shape, tensor.ggml_type, tensor.data)
        writer.write()
    return to


# -- which adapter a token has ---------------------------------------------------------------------

SINGLE = Switch(3, 5, (A, B, C), (7, 8, 8), 15.0)


def adapters_of(switch: Switch, ids: list[int], cuts: list[int]) -> list[int]:
    """The adapters of a text that is read in pieces, which end at ``cuts``."""
    tokens = ControlTokens(switch)
    marks: list[tuple[int, int, int]] = []
    found: list[int] = []
    start = 0
    for end in (*cuts, len(ids)):
        tokens.add_marks(marks, ids[:end], start)
        for stop, adapter in tokens.runs(marks, start, end) if marks else [(end, 0)]:
            assert stop > len(found)
            found += [adapter] * (stop - len(found))
        start = end
    return found


@pytest.mark.parametrize("gain", [15.0, 2.0, 0.5, 0.0])
@pytest.mark.parametrize("seed", range(4))
def test_adapters_are_those_of_attention(gain: float, seed: int) -> None:
    """With a small gain other tokens count too, so an adapter fades."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(9, 280, 60).tolist()
    for at in rng.integers(0, 60, 4):
        ids[at] = int(rng.choice([A, B, C]))
    switch = Switch(3, 5, (A, B, C), (7, 8, 8), gain)
    expected = chosen(switch, ids)
    for cuts in ([], [1], [7, 8, 40], list(range(1, 60))):
        assert adapters_of(switch, ids, cuts) == expected


def test_halves_are_rounded_up() -> None:
    assert adapters_of(SINGLE, [9, A, 9, B, 9, C], []) == [0, 1, 1, 2, 2, 2]
    assert adapters_of(SINGLE, [B, 9, C, 9], []) == [2, 2, 3, 3]


def test_the_last_token_chooses() -> None:
    latest = Switch(3, 5, (A, B, C), (7, 8, 8), 15.0, latest=True)
    assert adapters_of(latest, [9, C, 9, A, 9, B], [3]) == [0, 3, 3, 1, 1, 2]
    none_too = Switch(3, 5, (9, A, B, C), (7, 7, 8, 8), 15.0, latest=True)
    assert adapters_of(none_too, [1, C, 1, 9, 1, A], [3, 4]) == [0, 3, 3, 0, 0, 1]


def test_what_is_read_in_their_place() -> None:
    tokens = ControlTokens(SINGLE)
    assert tokens.substituted([A, 9, C]) == [7, 9, 8]
    assert tokens.substituted(IDS) is IDS


# -- logits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [name if name == "two" else pytest.param(name, marks=pytest.mark.slow) for name in TEXTS],
)
def test_in_one_go_and_by_decode(model: Model, name: str) -> None:
    ids = TEXTS[name]
    expected = exact(model, ids)
    if name not in ("none", "at the end"):
        plain = exact(model, IDS)
        assert np.abs(expected - plain)[-1].max() > 0.2 * np.abs(plain).max()
    model.engine.cache.forget()
    check(model, model.logits(ids), expected)
    model.engine.cache.forget()
    with closing(model.session()) as session:
        check(model, np.concatenate([session.logits([token]) for token in ids]), expected)


@pytest.mark.slow
def test_in_every_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one go, in chunks, by decode, the same bits for every number of threads."""
    ids = with_token(9, B, IDS[:40])
    monkeypatch.setattr("tests.models.test_arch_truth.ids_of", lambda: ids)
    with open_gguf(path) as file:
        truth = forward(file, load_config(file), ids)
    check_truth(path, truth)
    check_instruction_set(path, ids, truth, NARROW)


@pytest.mark.slow
def test_the_cut_changes_no_bit(path: Path) -> None:
    """On a deterministic engine, with adapters and without in the same text."""
    ids = with_token(2 * PAGE + 5, B)
    with treadle.load(path, threads=2, deterministic=True) as model:
        whole = model.logits(ids)
        for step in (1, 3, PAGE):
            model.engine.cache.forget()
            with closing(model.session()) as session:
                rows = [session.logits(ids[at : at + step]) for at in range(0, len(ids), step)]
            assert np.array_equal(np.concatenate(rows), whole)


@pytest.mark.slow
def test_every_step_is_its_twin(model: Model) -> None:
    ids = TEXTS["two"][:50]
    parts = [BatchItem(model.engine.cache.sequence(), ids, 50)]
    plan, found = logits_of_twins(model.engine, parts)
    plan.check()
    assert "L0.attn.qkv.lora_b" in {step.label for step in plan}
    model.plan(1).check()
    assert not any("lora" in step.label for step in model.plan(1))
    check(model, found, exact(model, ids))


@pytest.mark.slow
def test_sequences_with_different_adapters(model: Model) -> None:
    """Prompts and single tokens in one batch."""
    texts = list(TEXTS.values())[:4]
    expected = [exact(model, ids) for ids in texts]
    model.engine.cache.forget()
    seqs = [model.engine.cache.sequence() for _ in texts]
    at = [0] * 4
    for sizes in ((3, 20, 1, 7), (1, 1, 30, 1), (30, 8, 1, 20), (2, 1, 1, 1)):
        ends = [start + n for start, n in zip(at, sizes, strict=True)]
        parts = [
            BatchItem(seq, ids[start:end], end - start)
            for seq, ids, start, end in zip(seqs, texts, at, ends, strict=True)
        ]
        rows = model.engine.run(parts)
        for which, n in enumerate(sizes):
            check(model, rows[:n], expected[which][at[which] : ends[which]])
            rows = rows[n:]
        at = ends
    for seq in seqs:
        seq.close()


# -- cached texts ----------------------------------------------------------------------------------


def test_a_prefix_is_found_with_its_adapter(model: Model) -> None:
    """A text that goes on behind a cached control token, and one that has none there."""
    cache = model.engine.cache
    cache.forget()
    ids = TEXTS["first"]
    with closing(model.session()) as session:
        session.prefill(ids)
    longer = [*ids[: 2 * PAGE + 1], *IDS[:9]]
    with closing(model.session()) as session:
        assert session.match(longer) == 2 * PAGE
        assert session.seq.marks == [(1, 1, 3)]
        check(model, session.prefill(longer), exact(model, longer)[-1])
    with closing(model.session()) as session:
        assert session.match(IDS) == 0
        check(model, session.prefill(IDS), exact(model, IDS)[-1])


def test_texts_are_cut_and_forked(model: Model) -> None:
    engine = model.engine
    engine.cache.forget()
    ids = TEXTS["two"]
    seq = engine.cache.sequence()
    engine.run([BatchItem(seq, ids, 0)])
    assert len(seq.marks) == 2
    fork = engine.cache.fork(seq)
    engine.truncate(fork, 41)
    assert len(fork.marks) == 2  # the second is the 41st token
    engine.truncate(fork, 40)
    assert len(fork.marks) == 1
    other = [*ids[:40], *IDS[40:48]]
    found = engine.run([BatchItem(fork, other[40:], 8), BatchItem(seq, IDS[:2], 2)])
    check(model, found[:8], exact(model, other)[40:])
    check(model, found[8:], exact(model, [*ids, *IDS[:2]])[-2:])
    engine.truncate(fork, 0)
    assert not fork.marks
    fork.close()
    seq.close()


@pytest.mark.slow
def test_saved_texts(path: Path, tmp_path: Path) -> None:
    """A session's file, and page files that another process finds."""
    ids = TEXTS["first"]
    given: dict[str, Any] = {"threads": 2, "kv": "f32", "cache_dir": tmp_path / "pages"}
    with treadle.load(path, **given) as model, closing(model.session()) as session:
        session.prefill(ids[:-2])
        session.save(tmp_path / "text.session")
    with (
        treadle.load(path, threads=2, kv="f32") as model,
        closing(model.load_session(tmp_path / "text.session")) as session,
    ):
        check(model, session.logits(ids[-2:]), exact(model, ids)[-2:])
    with treadle.load(path, **given) as model, closing(model.session()) as session:
        assert session.match(ids) == 3 * PAGE
        check(model, session.logits(ids[3 * PAGE :]), exact(model, ids)[3 * PAGE :])


# -- beside other things ---------------------------------------------------------------------------


@pytest.mark.slow
def test_with_loaded_adapters(path: Path, model: Model, tmp_path: Path) -> None:
    """A loaded adapter adds to the chosen one."""
    rng = np.random.default_rng(3)
    with open_gguf(path) as file:
        shapes = {
            f"blk.{i}.{name}.weight": file.tensors[f"blk.{i}.{name}.weight"].shape
            for i in range(model.config.n_layer)
            for name in MATRICES
            if f"blk.{i}.{name}.weight" in file.tensors
        }
    pairs = {
        name: (
            (rng.standard_normal((4, k)) / np.sqrt(k)).astype(np.float32),
            (rng.standard_normal((m, 4)) / 2).astype(np.float32),
        )
        for name, (m, k) in shapes.items()
    }
    adapter = write_gguf(tmp_path / "a.gguf", pairs, arch="graniteswitch", alpha=4.0)
    ids = TEXTS["within a page"]
    with open_gguf(path) as file:
        writer = GGUFWriter(tmp_path / "merged.gguf")
        for key, value in file.metadata.items():
            writer.add(key, value)
        for tensor in file.tensors.values():
            rows = tensor.dequantize()
            if tensor.name in pairs:
                a, b = pairs[tensor.name]
                rows = rows + b @ a
            writer.add_tensor(tensor.name, rows.shape, "F32", rows)
        writer.write()
    with open_gguf(tmp_path / "merged.gguf") as file:
        expected = forward(file, load_config(file), ids)
    with treadle.load(path, threads=2, kv="f32", lora=[adapter]) as made:
        rows = made.logits(ids)
        assert np.abs(rows - expected).max() <= 4 * rounding(made.config) * np.abs(expected).max()


@pytest.mark.slow
def test_read_in_float16(tiny: WriteTiny) -> None:
    with treadle.load(tiny("graniteswitch", "F16"), threads=2, kv="f32") as model:
        ids = TEXTS["first"][:20]
        expected = exact(model, ids)
        assert np.abs(model.logits(ids) - expected).max() <= 0.02 * np.abs(expected).max()


# -- broken files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"adapters__count": None}, "adapters.count: the key is missing"),
        ({"adapters__count": 0}, "adapters.count: is 0"),
        ({"adapters__count": 5000}, "adapters.count: is 5000"),
        ({"adapters__lora_rank": None}, "adapters.lora_rank: the key is missing"),
        ({"adapters__lora_rank": 4}, r"attn_q_lora_a.weight: shape \[4, 5, 64\].*\[4, 4, 64\]"),
        ({"adapters__count": 2}, "adapters.token_ids_activate: has 3 entries"),
        ({"adapters__token_ids_activate": None}, "token_ids_activate: the key is missing"),
        ({"adapters__token_ids_activate": [A, B, 320]}, "token_ids_activate: holds 320"),
        ({"adapters__token_ids_activate": [A, -1, C]}, "token_ids_activate: holds -1"),
        ({"adapters__token_ids_activate": [A, B, B]}, "token_ids_activate: has token 291 twice"),
        ({"adapters__token_ids_substitute": [7, 8, 320]}, "token_ids_substitute: holds 320"),
        ({"adapters__token_ids_substitute": [7, 8]}, "token_ids_substitute: has 2 entries"),
        ({"adapters__token_ids_substitute": 7}, "token_ids_substitute: is 7"),
        ({"adapters__router_gain": float("nan")}, "adapters.router_gain: is nan"),
        ({"expert_count": 4, "expert_used_count": 2}, "expert_count: layer 0 is experts"),
    ],
)
def test_broken_keys(path: Path, tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(TreadleError, match=why):
        treadle.load(rewritten(path, tmp_path / "broken.gguf", **changes))


def test_broken_tensors(path: Path, tmp_path: Path) -> None:
    for name, graph_name in (
        ("blk.1.ffn_down.lora_b", "blk.1.ffn_down_lora_b.weight"),
        ("blk.2.attn_q.lora_a", "blk.2.attn_q_lora_a.weight"),
        ("blk.0.attn_qkv.weight", "blk.0.attn_qkv.weight"),
    ):
        broken = rewritten(path, tmp_path / "broken.gguf", drop=(name,))
        with pytest.raises(FileError, match=f"{graph_name}: the tensor is missing"):
            treadle.load(broken)
    with open_gguf(path) as file:
        writer = GGUFWriter(tmp_path / "base.gguf")
        for key, value in file.metadata.items():
            writer.add(key, value)
        for tensor in file.tensors.values():
            rows = tensor.dequantize()
            if tensor.name.startswith("blk.1.attn_k.lora"):
                rows[0, 0, 0] = 1.0
            writer.add_tensor(tensor.name, rows.shape, "F32", rows)
        writer.write()
    with pytest.raises(FileError, match=r"attn_k\.lora_a: is not zero for adapter 0"):
        treadle.load(tmp_path / "base.gguf")


def test_keys_of_llama_cpp(path: Path, tmp_path: Path) -> None:
    """Its converter writes that no experts are used, and may leave out the gain."""
    changes: dict[str, Any] = {"expert_used_count": 0, "adapters__router_gain": None}
    with treadle.load(rewritten(path, tmp_path / "theirs.gguf", **changes), threads=1) as model:
        assert model.config.switch == SINGLE


def test_stages_are_refused(model: Model) -> None:
    with pytest.raises(UnsupportedError, match="cannot be split into stages"):
        staged(model.config, range(1))
