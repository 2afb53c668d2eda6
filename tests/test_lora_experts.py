"""Adapters of experts: merged into the weights, and at run time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.loras import Pair, merged, write_gguf
from tests.tiny import rounding
from treadle.cli import main
from treadle.convert import writer as output
from treadle.engine.batch import BatchItem
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.kernels.run_state import PAGE
from treadle.models.config import Config

SIZES = {"n_expert": 4, "n_ff_exp": 32}
WriteTiny = Callable[..., Path]


def draw(model: Path, parts: tuple[str, ...], rank: int = 3, seed: int = 5) -> dict[str, Pair]:
    """Of each expert its own: A ``[E, rank, k]`` and B ``[E, m, rank]``."""
    rng = np.random.default_rng(seed)
    made = {}
    with open_gguf(model) as gguf:
        for name, tensor in gguf.tensors.items():
            if name.endswith(tuple(f"{part}.weight" for part in parts)):
                *each, m, k = tensor.shape
                a = rng.standard_normal((*each, rank, k)) / np.sqrt(k)
                b = rng.standard_normal((*each, m, rank)) / np.sqrt(rank)
                made[name] = a.astype(np.float32), b.astype(np.float32)
    assert made
    return made


def fused(model: Path, path: Path) -> Path:
    """Each expert's gate and up in one matrix, as llama.cpp's --fuse-gate-up-exps has them."""
    writer = GGUFWriter(path)
    with open_gguf(model) as gguf:
        for key, value in gguf.metadata.items():
            writer.add(key, value)
        for name, tensor in gguf.tensors.items():
            rows = tensor.dequantize()
            if "ffn_gate_exps" in name:
                continue
            if "ffn_up_exps" in name:
                gate = gguf.tensors[name.replace("_up_", "_gate_")].dequantize()
                name = name.replace("_up_", "_gate_up_")
                rows = np.concatenate([gate, rows], 1)
            writer.add_tensor(name, rows.shape, "F32", rows)
        writer.write()
    return path


def quantize(model: Path, target: Path, *lora: str | Path) -> int:
    words = (word for each in lora for word in ("--lora", str(each)))
    return main(["quantize", str(model), str(target), "F32", *words])


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("qwen3moe", ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "attn_v")),
        ("fused", ("ffn_gate_up_exps",)),
    ],
)
def test_each_expert_has_its_own_product(
    tiny: WriteTiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    parts: tuple[str, ...],
) -> None:
    """In strips of seven rows and in one; the scale is 0.5 of alpha / rank."""
    model = tiny("qwen3moe", "F32", **SIZES)
    if kind == "fused":
        model = fused(model, tmp_path / "fused.gguf")
    pairs = draw(model, parts)
    file = write_gguf(tmp_path / "lora.gguf", pairs, arch="qwen3moe", alpha=6.0)
    assert quantize(model, tmp_path / "whole.gguf", f"{file}=0.5") == 0
    monkeypatch.setattr(output, "TASK_WEIGHTS", 7 * 64)
    assert quantize(model, tmp_path / "strips.gguf", f"{file}=0.5") == 0
    for path in (tmp_path / "whole.gguf", tmp_path / "strips.gguf"):
        with open_gguf(model) as gguf, open_gguf(path) as made:
            for name, tensor in gguf.tensors.items():
                w = tensor.dequantize()
                found = made.tensors[name].dequantize()
                a, b = pairs.get(name, (None, None))
                if a is None or b is None:
                    assert np.array_equal(found, w), name
                    continue
                for e in np.ndindex(w.shape[:-2]):
                    np.testing.assert_allclose(found[e], w[e] + b[e] @ a[e], atol=1e-5)


@pytest.mark.parametrize("parts", [("gate", "up"), ("up",)], ids="+".join)
def test_gates_and_up_of_a_model_that_has_them_in_one_matrix(
    tiny: WriteTiny, tmp_path: Path, parts: tuple[str, ...]
) -> None:
    apart = tiny("qwen3moe", "F32", **SIZES)
    target = tmp_path / "made.gguf"
    pairs = draw(apart, tuple(f"ffn_{part}_exps" for part in parts))
    file = write_gguf(tmp_path / "lora.gguf", pairs, arch="qwen3moe", alpha=6.0)
    model = fused(apart, tmp_path / "fused.gguf")
    assert quantize(model, target, f"{file}=0.5") == 0
    with open_gguf(apart) as gguf, open_gguf(target) as made:
        for i in range(3):
            each = []
            for part in ("gate", "up"):
                name = f"blk.{i}.ffn_{part}_exps.weight"
                w: np.ndarray = gguf.tensors[name].dequantize()
                if name in pairs:
                    w = w + pairs[name][1] @ pairs[name][0]
                each.append(w)
            found = made.tensors[f"blk.{i}.ffn_gate_up_exps.weight"].dequantize()
            np.testing.assert_allclose(found, np.concatenate(each, 1), atol=1e-5)
    short = {name: (a[:, :, :-1], b) for name, (a, b) in pairs.items()}
    file = write_gguf(tmp_path / "bad.gguf", short, arch="qwen3moe")
    with pytest.raises(FileError, match=r"for a matrix of shape \[4, 32, 64\]"):
        treadle.load(model, lora=[file])


def pair(*, n: int = 4, m: int = 32, k: int = 64, rank_b: int = 3, flat: bool = False) -> Pair:
    a = np.ones((n, 3, k), np.float32)
    b = np.ones((n, m, rank_b), np.float32)
    return (a[0], b[0]) if flat else (a, b)


@pytest.mark.parametrize("sizes", [{"n": 3}, {"m": 33}, {"k": 63}, {"rank_b": 4}, {"flat": True}])
def test_pairs_that_do_not_fit(
    tiny: WriteTiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: dict[str, Any]
) -> None:
    model = tiny("qwen3moe", "F32", **SIZES)
    given = {"blk.0.ffn_up_exps.weight": pair(**sizes)}
    file = write_gguf(tmp_path / "bad.gguf", given, arch="qwen3moe")
    assert quantize(model, tmp_path / "made.gguf", file) == 1
    said = capsys.readouterr().err
    assert "blk.0.ffn_up_exps.weight: shapes [" in said
    assert "[4, rank, 64] and [4, 32, rank], for a matrix of shape [4, 32, 64]" in said
    assert not (tmp_path / "made.gguf").exists()


def test_experts_in_an_adapter_of_a_plain_matrix(tiny: WriteTiny, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "bad.gguf", {"blk.0.attn_q.weight": pair(m=128)})
    with pytest.raises(FileError, match=r"expected \[rank, 64\] and \[128, rank\]"):
        treadle.load(tiny("llama", "F32"), lora=[file])


PARTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
IDS = [1 + 7 * i % 200 for i in range(2 * PAGE + 9)]


@pytest.fixture(scope="module")
def models(tiny: WriteTiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """With two matrices a gate and with one, and of experts that have no gate."""
    folder = tmp_path_factory.mktemp("experts")
    apart = tiny("qwen3moe", "F32", **SIZES)
    plain = tiny("nemotron_h_moe", "F32", **SIZES)
    return {"apart": apart, "fused": fused(apart, folder / "fused.gguf"), "plain": plain}


CASES = {
    "all": ("apart", (*PARTS, "attn_v")),
    "gate": ("apart", PARTS[:1]),
    "down": ("apart", PARTS[2:]),
    "fused": ("fused", ("ffn_gate_up_exps",)),
    "plain": ("plain", PARTS[1:]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_at_run_time_they_equal_merged_weights(
    models: dict[str, Path], tmp_path: Path, case: str, deterministic: bool
) -> None:
    """In one go, in chunks, token by token; two adapters of other ranks, each by itself and both,
    in one batch.
    """
    kind, parts = CASES[case]
    model = models[kind]
    with_gguf = {}
    with open_gguf(model) as gguf:
        arch = str(gguf.metadata["general.architecture"])
    for name, rank in (("one", 3), ("two", 8)):
        pairs = draw(model, parts, rank, seed=rank)
        with_gguf[name] = write_gguf(tmp_path / f"{name}.gguf", pairs, arch=arch)
    given = [(path, 0.0) for path in with_gguf.values()]
    sets: list[dict[str, float]] = [{}, {"one": 1.0}, {"two": -0.5}, {"one": 0.5, "two": 0.25}]
    more: dict[str, Any] = {"kv": "f32", "n_sequences": 8, "deterministic": deterministic}
    with treadle.load(model, lora=given, threads=2, **more) as loaded:
        config = loaded.config
        expected = [
            merged(model, config, {with_gguf[n]: s for n, s in each.items()}, IDS) for each in sets
        ]
        assert all(np.abs(one - expected[0]).max() > 0.1 for one in expected[1:])
        for scales, wanted in zip(sets, expected, strict=True):
            session = loaded.session(lora=scales)
            check(config, session.logits(IDS), wanted)
            for size in (1, 3, 40):
                session.reset()
                fed = [session.feed(IDS[at : at + size]) for at in range(0, len(IDS), size)]
                ends = [min(at + size, len(IDS)) - 1 for at in range(0, len(IDS), size)]
                check(config, np.stack(fed), wanted[ends])
            session.close()
        sessions = [loaded.session(lora=scales) for scales in sets]
        begun = [0] * len(sets)
        for sizes in ((3, 20, 1, 7), (1, 1, 1, 1), (2, 1, 40, 1)):
            batch = [
                BatchItem(session.seq, IDS[start : start + n], n)
                for session, start, n in zip(sessions, begun, sizes, strict=True)
            ]
            rows = loaded.engine.run(batch)
            row = 0
            for which, n in enumerate(sizes):
                at = begun[which]
                check(config, rows[row : row + n], expected[which][at : at + n])
                begun[which] = at + n
                row = row + n
        for session in sessions:
            session.close()


def check(config: Config, rows: np.ndarray, expected: np.ndarray) -> None:
    """As of other matrices (tests/test_lora.py)."""
    allowed = 2 * rounding(config) * np.abs(expected).max()
    assert np.abs(rows - expected).max() <= allowed


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["Q8_0", "Q4_K"])
def test_codes_are_multiplied_beside_them(tiny: WriteTiny, tmp_path: Path, fmt: str) -> None:
    """As near to merged weights as the model without adapters is to its own, and by any number of
    threads the same bits. Two tokens are met row by row, all of them by tiles.
    """
    model = tiny("qwen3moe", fmt, n_expert=4, n_ff_exp=256, n_embd=256, head_dim=64)
    file = write_gguf(tmp_path / "lora.gguf", draw(model, PARTS), arch="qwen3moe")
    made: dict[tuple[int, int], np.ndarray] = {}
    for threads in (1, 3):
        with treadle.load(model, lora=[file], threads=threads, kv="f32") as loaded:
            for n in (2, len(IDS)):
                session = loaded.session()
                made[threads, n] = session.logits(IDS[:n])
                session.close()
            config = loaded.config
    with treadle.load(model, kv="f32") as alone:
        plain = alone.logits(IDS)
    own = merged(model, config, {}, IDS)
    with_it = merged(model, config, {file: 1.0}, IDS)
    off = typical(plain, own)
    for n in (2, len(IDS)):
        assert np.array_equal(made[1, n], made[3, n])
        assert typical(made[1, n], with_it[:n]) <= 3 * off
    assert typical(own, with_it) > 10 * off


def typical(found: np.ndarray, exact: np.ndarray) -> float:
    """The median over tokens of how far their logits are off: where two experts' scores are close,
    rounding chooses the other one.
    """
    return float(np.median(np.sqrt(((found - exact) ** 2).mean(1))))


def test_a_scale_beside_the_last_matrix(tiny: WriteTiny, tmp_path: Path) -> None:
    others = {"blk.0.ffn_down_exps.scale": (4,)}
    model = tiny("gemma4", "F32", **SIZES, n_layer=1, others=others)
    file = write_gguf(tmp_path / "lora.gguf", draw(model, ("ffn_down_exps",)), arch="gemma4")
    with pytest.raises(UnsupportedError, match=r"scaled by blk\.0\.ffn_down_exps\.scale"):
        treadle.load(model, lora=[file])


def test_what_an_expert_gives_is_scaled(
    tiny: WriteTiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """llama.cpp adds what an adapter gives behind the scale."""
    others = {"blk.0.ffn_down_exps.scale": (4,)}
    model = tiny("gemma4", "F32", **SIZES, n_layer=1, others=others)
    file = write_gguf(tmp_path / "lora.gguf", draw(model, ("ffn_down_exps",)), arch="gemma4")
    assert quantize(model, tmp_path / "made.gguf", file) == 1
    assert "it scales the output of blk.0.ffn_down_exps.weight" in capsys.readouterr().err


def test_matrices_by_head_are_no_experts(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = data / "arch" / "deepseek3.gguf"
    file = write_gguf(tmp_path / "lora.gguf", draw(model, ("attn_v_b",)), arch="deepseek2")
    assert quantize(model, tmp_path / "made.gguf", file) == 1
    assert "blk.0.attn_v_b.weight: an adapter of per-head matrices" in capsys.readouterr().err
