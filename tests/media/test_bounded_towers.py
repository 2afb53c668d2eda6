"""Towers whose matrices clamp what they multiply, and their products (Gemma 4 E2B and E4B)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.media.bounded_tower import (
    ENDS,
    INF,
    MATRICES,
    bounds_of_all,
    rows_by_numpy,
    write_bounded_tower,
)
from tests.media.media_cases import off, picture
from treadle.devices import open_device
from treadle.devices.protocol import Device
from treadle.errors import FileError
from treadle.files.gguf import GGUF, open_gguf
from treadle.media.projector import Projector, open_projector
from treadle.quantize.mixes import MIXES
from treadle.quantize.plan import make_recipe
from treadle.quantize.write import write

TOLERANCE = 1e-5  # a bound that is not used is 1e-2 off and more
MAX_ROWS = 70


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bounded_tower(tmp_path_factory.mktemp("bounded") / "mmproj.gguf", bounds_of_all())


@cache
def device(isa: str | None) -> Device:
    return open_device("cpu", isa, 1, None)


def opened(source: Path | GGUF, isa: str | None = None) -> Projector:
    return open_projector(source, device(isa), exact=True)


def rows_of(projector: Projector) -> np.ndarray:
    return projector.encode(projector.prepare(picture(), MAX_ROWS))


def labels(projector: Projector) -> list[str]:
    return [step.label for step in projector.towers["image"].engine.plan_for(300).plan.steps]


@pytest.mark.parametrize("isa", [None, "portable"])
def test_rows_are_those_of_numpy(isa: str | None, file: Path) -> None:
    projector = opened(file, isa)
    (only,) = projector.prepare(picture(), MAX_ROWS).inputs
    found = rows_of(projector)
    expected = rows_by_numpy(only.patches, only.grid, bounds_of_all())
    assert off(found, expected) < TOLERANCE
    assert off(rows_by_numpy(only.patches, only.grid, {}), expected) > 0.1


@pytest.mark.parametrize("matrix", MATRICES)
def test_every_bound_counts(matrix: str, file: Path) -> None:
    """Without one of them the rows are others, as numpy has them."""
    bounds = bounds_of_all()
    layer = 0 if matrix == "attn_out" else 1
    for which, value in enumerate(bounds[layer, matrix]):
        name = f"v.blk.{layer}.{matrix}.{ENDS[which]}"
        gguf = open_gguf(file)
        if not np.isfinite(value):
            assert name not in gguf.tensors
            continue
        del gguf.tensors[name]
        less = dict(bounds)
        less[layer, matrix] = tuple(  # type: ignore[assignment]
            (-INF if i % 2 == 0 else INF) if i == which else at
            for i, at in enumerate(bounds[layer, matrix])
        )
        projector = opened(gguf)
        (only,) = projector.prepare(picture(), MAX_ROWS).inputs
        found = rows_of(projector)
        assert off(found, rows_by_numpy(only.patches, only.grid, less)) < TOLERANCE, name
        assert off(found, rows_by_numpy(only.patches, only.grid, bounds)) > 1e-3, name


def test_infinite_bounds_are_none(file: Path, tmp_path: Path) -> None:
    """llama.cpp's converter writes them."""
    other = opened(write_bounded_tower(tmp_path / "mmproj.gguf", bounds_of_all(), infinite=True))
    assert labels(other) == labels(opened(file))
    assert np.array_equal(rows_of(other), rows_of(opened(file)))


def test_steps_of_a_tower_with_bounds(file: Path, tmp_path: Path) -> None:
    """Matrices with the same bounds of inputs share the clamped rows and a product; without any
    bounds the plan has no such steps.
    """
    found = [label for label in labels(opened(file)) if label.startswith("L0.")]
    assert [label for label in found if "clamp" in label and "pack" not in label] == [
        "L0.attn.qkv.input_clamp",
        "L0.attn.qkv.input_clamp.1",
        "L0.attn.qkv.attn_q_clamp",
        "L0.attn.qkv.attn_k_clamp",
        "L0.attn.qkv.attn_v_clamp",
        "L0.attn.output.input_clamp",
        "L0.attn.output.output_clamp",
        "L0.attn.output.output_clamp.post_norm",
        "L0.ffn.gate_up.input_clamp.1",
        "L0.ffn.gate_up.ffn_gate_clamp",
        "L0.ffn.gate_up.ffn_up_clamp",
        "L0.ffn.down.input_clamp",
        "L0.ffn.down.output_clamp",
        "L0.ffn.down.output_clamp.post_norm",
    ]
    assert {"L0.attn.qkv", "L0.attn.qkv.1"} <= set(found)
    plain = labels(opened(write_bounded_tower(tmp_path / "mmproj.gguf", {})))
    assert not any("clamp" in label for label in plain)


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("v.blk.0.attn_q.input_min", [1.5], "is 1.5, above the maximum 1"),
        ("v.blk.0.attn_q.output_max", [0.5, 0.5], r"shape \[2\]"),
        ("v.blk.1.ffn_up.output_max", [np.nan], "is not a number"),
        ("v.blk.1.ffn_mid.output_max", [1.0], "nothing reads this tensor"),
        ("v.blk.1.ln1.output_max", [1.0], "nothing reads this tensor"),
    ],
)
def test_damaged_bounds_are_named(name: str, values: list[float], said: str, file: Path) -> None:
    gguf = open_gguf(file)
    like = gguf.tensors["v.blk.0.attn_q.input_min"]
    assert like.format is not None
    data = np.array(values, np.float32).view(np.uint8)
    gguf.tensors[name] = like.in_memory(name, (len(values),), like.format, data)
    with pytest.raises(FileError, match=said) as refused:
        opened(gguf)
    assert name.removeprefix("v.") in str(refused.value)


def test_bounds_stay_when_a_file_is_quantised(file: Path, tmp_path: Path) -> None:
    to = tmp_path / "q8.gguf"
    with open_gguf(file) as gguf:
        write(gguf, make_recipe(gguf, MIXES["Q8_0"]), to, n_threads=1)
        n = 0
        with open_gguf(to) as made:
            for name, tensor in gguf.tensors.items():
                if name.endswith(ENDS):
                    assert made.tensors[name].type_name == "F32"
                    assert np.array_equal(made.tensors[name].dequantize(), tensor.dequantize())
                    n += 1
            assert made.tensors["v.blk.0.attn_q.weight"].type_name == "Q8_0"
        assert n == sum(np.isfinite(each).sum() for each in bounds_of_all().values())
    assert 1e-4 < off(rows_of(opened(to)), rows_of(opened(file))) < 0.1
    gguf = open_gguf(to)
    gguf.tensors = {
        name: tensor for name, tensor in gguf.tensors.items() if not name.endswith(ENDS)
    }
    assert off(rows_of(opened(gguf)), rows_of(opened(file))) > 0.1


def test_another_bound_is_another_picture_for_the_cache(file: Path) -> None:
    """A picture's rows are known by its digest, which the bounds are part of."""
    one = opened(file).prepare(picture(), MAX_ROWS)
    gguf = open_gguf(file)
    name = "v.blk.0.attn_q.input_min"
    like = gguf.tensors[name]
    assert like.format is not None
    data = np.array([-0.5], np.float32).view(np.uint8)
    gguf.tensors[name] = like.in_memory(name, (1,), like.format, data)
    assert opened(gguf).prepare(picture(), MAX_ROWS).digest != one.digest
    assert opened(file).prepare(picture(), MAX_ROWS).digest == one.digest
