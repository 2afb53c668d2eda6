"""Comparison of models step by step: models that agree, and models with one fault each, whose label
must be found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import treadle
from tests.tiny import write_model
from treadle.api.step_diff import (
    FLOOR,
    ModelDifference,
    activation_rounding,
    check_alike,
    compare,
    ids_of,
    middle_of,
    orders,
    record,
    relative,
    rounding,
)
from treadle.errors import TreadleError, UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.formats import by_name
from treadle.models.archs import ARCHS

IDS: list[int] = np.random.default_rng(3).integers(3, 300, 24).tolist()
Change = Callable[[str, np.ndarray], np.ndarray]


def open_model(path: Path) -> treadle.Model:
    return treadle.load(path, threads=1, kv="f32", context=64)


def compared(a: Path, b: Path, tolerance: float | None = None) -> ModelDifference:
    """What a comparison of model ``a`` with reference ``b`` finds."""
    with open_model(a) as model, open_model(b) as other:
        reference = record(other, IDS)
        tensors = other.gguf.tensors
        return compare(model, IDS, reference, tensors=tensors, tolerance=tolerance)


def rewrite(source: Path, path: Path, change: Change, fmt: str = "F32", **keys: float) -> Path:
    """The file ``source`` with other weights, matrices in the format ``fmt``, and other keys."""
    with open_gguf(source) as gguf:
        writer = GGUFWriter(path)
        arch = gguf.metadata["general.architecture"]
        given = {f"{arch}.{key}": value for key, value in keys.items()}
        for key, value in {**gguf.metadata, **given}.items():
            writer.add(key, value)
        for name, tensor in gguf.tensors.items():
            rows = change(name, tensor.dequantize().reshape(tensor.shape)).astype(np.float32)
            row = by_name("F32" if rows.ndim < 2 else fmt)
            writer.add_tensor(name, rows.shape, row, row.quantize_rows(rows))
        writer.write()
    return path


def same(name: str, rows: np.ndarray) -> np.ndarray:
    return rows


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("step_diff") / "llama.gguf"
    write_model(path, "llama", n_embd=64, n_ff=96)
    return path


def test_a_model_and_itself(llama: Path) -> None:
    found = compared(llama, llama)
    assert found.first is None
    assert found.aligned
    assert found.missing == ()
    assert found.same_top == len(IDS)
    assert all(step.error == 0 for step in found.steps)
    assert [step.key for step in found.layer(1)][:4] == [
        "L1.attn.norm",
        "L1.attn.q",
        "L1.attn.k",
        "L1.attn.v",
    ]
    assert found.steps[0].layer == -1
    assert found.steps[-1].layer == 3


@pytest.mark.parametrize("fmt", ["F16", "Q8_0", "Q4_0"])
def test_formats_have_their_tolerance(fmt: str, llama: Path, tmp_path: Path) -> None:
    found = compared(rewrite(llama, tmp_path / "small.gguf", same, fmt), llama)
    assert found.first is None
    own = [step.own for step in found.steps if step.own is not None]
    assert 0 < max(own) < 4 * 2.0 ** (-11 if fmt == "F16" else -2)
    last = found.layer(2)[-1]
    assert last.own is not None
    assert last.own < last.error  # its own error, without those of earlier layers


def test_formats_group_products_in_other_ways(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "mixed.gguf"
    write_model(path, "llama", "Q8_0", n_embd=64, n_ff=96, formats=(("attn_v", "Q4_0"),))
    found = compared(path, llama)
    assert found.first is None
    labels = {step.key: step.label for step in found.layer(0)}
    assert labels["L0.attn.v"] == "L0.attn.v"
    assert labels["L0.attn.q"] == "L0.attn.q_k"
    assert found.missing == ()


@pytest.mark.parametrize(
    ("tensor", "key"),
    [
        ("token_embd.weight", "token_embd"),
        ("blk.1.attn_norm.weight", "L1.attn.norm"),
        ("blk.1.attn_k.weight", "L1.attn.k"),
        ("blk.2.attn_output.weight", "L2.attn.output"),
        ("blk.0.ffn_up.weight", "L0.ffn.up"),
        ("blk.1.ffn_down.weight", "L1.ffn.down"),
        ("output_norm.weight", "output_norm"),
    ],
)
@pytest.mark.parametrize("fmt", ["F32", "Q8_0"])
def test_the_step_of_a_wrong_tensor(
    tensor: str, key: str, fmt: str, llama: Path, tmp_path: Path
) -> None:
    """Rows in another order, as a conversion may leave them."""

    def change(name: str, rows: np.ndarray) -> np.ndarray:
        return np.roll(rows, 5, axis=0) if name == tensor else rows

    found = compared(rewrite(llama, tmp_path / "wrong.gguf", change, fmt), llama)
    assert found.first is not None
    assert found.first.key == key


@pytest.mark.parametrize("fmt", ["F32", "Q8_0"])
def test_a_wrong_epsilon(fmt: str, llama: Path, tmp_path: Path) -> None:
    """A key, not a weight: every norm has it, and the first is named."""
    eps = {"attention.layer_norm_rms_epsilon": 1e-2}
    found = compared(rewrite(llama, tmp_path / "eps.gguf", same, fmt, **eps), llama)
    assert found.first is not None
    assert found.first.key == "L0.attn.norm"


def test_a_wrong_rope(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other pairs of a head: products agree, and what the rope makes of them does not."""
    with open_model(llama) as other:
        reference = record(other, IDS)
        tensors = other.gguf.tensors
    monkeypatch.setitem(ARCHS, "llama", replace(ARCHS["llama"], rope="neox"))
    with open_model(llama) as model:
        found = compare(model, IDS, reference, tensors=tensors)
    assert found.first is not None
    assert (found.first.key, found.first.layer) == ("L0.attn.rope", 0)
    assert [step.key for step in found.jumps] == [f"L{i}.attn.rope" for i in range(3)]


def test_rows_of_the_other_rope(llama: Path, tmp_path: Path) -> None:
    """A file that pairs halves, with its queries and keys reordered: no difference."""
    head = np.arange(32).reshape(-1, 2).T.ravel()

    def change(name: str, rows: np.ndarray) -> np.ndarray:
        if "attn_q." in name or "attn_k." in name:
            return rows.reshape(-1, 32, rows.shape[-1])[:, head].reshape(rows.shape)
        return rows

    path = rewrite(llama, tmp_path / "halves.gguf", change)
    with open_model(llama) as other:
        reference = record(other, IDS)
        tensors = other.gguf.tensors
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHS, "llama", replace(ARCHS["llama"], rope="neox"))
        with open_model(path) as model:
            assert compare(model, IDS, reference, tensors=tensors).first is None


def test_a_tolerance_of_ones_own(llama: Path, tmp_path: Path) -> None:
    path = rewrite(llama, tmp_path / "small.gguf", same, "Q8_0")
    found = compared(path, llama, tolerance=1e-6)
    assert found.first is not None
    assert found.first.tolerance == 1e-6
    assert compared(path, llama, tolerance=1.0).first is None


@pytest.mark.slow
def test_experts(tmp_path: Path) -> None:
    """Products of experts have no labels; what routers chose and the sums have."""
    path = tmp_path / "experts.gguf"
    write_model(path, "qwen3moe", n_expert=8, n_ff_exp=32)

    def change(name: str, rows: np.ndarray) -> np.ndarray:
        return rows * 1.5 if name == "blk.1.ffn_down_exps.weight" else rows

    found = compared(rewrite(path, tmp_path / "wrong.gguf", change), path)
    assert found.first is not None
    assert found.first.key == "L1.ffn.combine"


@pytest.mark.slow
def test_several_streams_are_not_aligned(tmp_path: Path) -> None:
    path = tmp_path / "streams.gguf"
    write_model(path, "gemma3n")
    found = compared(path, path)
    assert not found.aligned
    assert found.first is None
    assert all(step.own is None for step in found.steps)


@pytest.mark.slow
def test_an_encoder(tmp_path: Path) -> None:
    path = tmp_path / "encoder.gguf"
    write_model(path, "nomic-bert")
    found = compared(path, path)
    assert found.first is None
    assert found.same_top is None


def test_models_that_cannot_be_compared(llama: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "deep.gguf", "llama", n_layer=4)
    write_model(tmp_path / "wide.gguf", "llama", n_embd=96)
    with open_model(llama) as model:
        for name, said in (
            ("deep", "different numbers of layers: .* has 3 layers, .* 4"),
            ("wide", "different widths: .* has 64 values"),
        ):
            path = tmp_path / f"{name}.gguf"
            with open_model(path) as other, pytest.raises(UnsupportedError, match=said):
                check_alike(model, other)


class Texts:
    """A model that reads a text as fixed ids."""

    def __init__(self, path: str, ids: list[int]) -> None:
        self.path = path
        self.ids = ids

    def tokenize(self, text: str) -> list[int]:
        return self.ids


def test_ids_of_a_text(llama: Path) -> None:
    with open_model(llama) as model:
        assert ids_of(model, model, "some words", 4) == model.tokenize("some words")[:4]
        with pytest.raises(TreadleError, match="the text has no tokens"):
            ids_of(model, None, "", 4)
        other: treadle.Model = Texts("other.gguf", model.tokenize("some")[:2])  # type: ignore[assignment]
        with pytest.raises(TreadleError, match=r"token 2 of the text is \d+ .*, the end for other"):
            ids_of(model, other, "some words", 4)


def test_errors_of_rows() -> None:
    a = [[3.0, 4.0], [0.0, 0.0], [0.0, 0.0]]
    b = [[3.0, 3.0], [0.0, 0.0], [1.0, 0.0]]
    assert relative(a, b).tolist() == [0.2, 0.0, np.inf]
    assert middle_of("L0.attn", np.array([3.0, 4.0])) == pytest.approx(np.sqrt(12.5))
    assert middle_of("L0.ffn.route", np.array([0.0, 1.0, 9.0])) == 1.0


def test_roundings(llama: Path, tmp_path: Path) -> None:
    """That of a format is the error of normal weights, within a factor of two."""
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    for fmt in ("BF16", "F16", "Q8_0", "Q6_K", "Q5_0", "Q4_K", "Q4_0", "Q3_K"):
        row = by_name(fmt)
        writer = GGUFWriter(tmp_path / "x.gguf")
        writer.add_tensor("x", x.shape, row, row.quantize_rows(x))
        writer.write()
        with open_gguf(tmp_path / "x.gguf") as gguf:
            tensor = gguf.tensors["x"]
            error = relative(x.ravel(), tensor.dequantize().ravel())
            assert 0.5 < rounding(tensor) / error < 4.0, fmt
    assert activation_rounding(32) == 0 < FLOOR < activation_rounding(16) < activation_rounding(9)


def test_orders_of_a_head() -> None:
    to_halves, to_pairs = orders(6, 4)
    assert to_halves == (0, 2, 1, 3, 4, 5)
    assert sorted(to_pairs) == list(range(6))
    assert [to_halves[i] for i in to_pairs] == list(range(6))
