"""Folders of many families become the GGUF that they became when they were recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.convert.recorded import GOLDEN, made_of, projection, values_of, write_folder
from treadle.convert.hf.folder import open_hf
from treadle.models.load import load_config

CASES: dict[str, Any] = json.loads(GOLDEN.read_text())


@pytest.mark.every_case
@pytest.mark.parametrize("case", CASES)
def test_the_same_keys_and_rows_as_recorded(case: str, tmp_path: Path) -> None:
    about = CASES[case]
    folder = write_folder(tmp_path / "hf", about)
    made = made_of(folder)
    expected = about["made"]
    assert made["keys"] == expected["keys"]
    assert made["tensors"].keys() == expected["tensors"].keys()
    for name, (kind, shape, at) in expected["tensors"].items():
        assert made["tensors"][name][:2] == [kind, shape], name
        assert made["tensors"][name][2] == pytest.approx(at, abs=1e-5), name  # exp differs by CPU


@pytest.mark.every_case
@pytest.mark.parametrize("case", list(CASES)[::4])
def test_in_place_the_tensors_have_the_same_names_and_shapes(case: str, tmp_path: Path) -> None:
    about = CASES[case]
    with open_hf(write_folder(tmp_path / "hf", about)) as model:
        config = load_config(model)
        shapes = {name: list(tensor.shape) for name, tensor in model.tensors.items()}
    assert config.arch.name == about["made"]["keys"]["general.architecture"]
    # Of some architectures llama.cpp calls the experts' bias without ``.bias``.
    expected = {name: each[1] for name, each in about["made"]["tensors"].items()}
    for table in (shapes, expected):
        for name in [name for name in table if name.endswith("exp_probs_b.bias")]:
            table[name.removesuffix(".bias")] = table.pop(name)
    assert shapes == expected


def test_a_projection_sees_every_change() -> None:
    """Rows that change places, a sign, a scale of one value."""
    rows = values_of("a", (4, 6))
    at = projection("a", rows)
    changed = [rows[[1, 0, 2, 3]], rows[:, ::-1], -rows, rows * [1, 1, 1, 1, 1, 1.01]]
    for other in changed:
        assert abs(projection("a", other) - at) > 1e-4
    assert projection("b", rows) != at
