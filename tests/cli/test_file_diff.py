from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import Run
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.formats import by_name


def write(path: Path, tensors: dict[str, tuple[str, np.ndarray]], **keys: object) -> str:
    writer = GGUFWriter(path)
    for key, value in keys.items():
        writer.add(f"x.{key}", value)
    for name, (fmt, x) in tensors.items():
        row = by_name(fmt)
        writer.add_tensor(name, x.shape, row, row.quantize_rows(x.astype(np.float32)))
    writer.write()
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    x = np.random.default_rng(8).standard_normal((3, 5, 32))
    bad = x.copy()
    bad[0, 0, 0] = np.inf
    a = write(
        tmp_path / "a.gguf",
        {
            "same": ("F32", x),
            "coarse": ("F32", x),
            "shape": ("F32", x),
            "only_a": ("F32", x),
            "wild": ("F32", x),
        },
        one=1,
        two=[1, 2],
        both="b",
    )
    b = write(
        tmp_path / "b.gguf",
        {
            "same": ("F32", x),
            "coarse": ("Q4_0", x),
            "shape": ("F32", x[:2]),
            "wild": ("F32", bad),
            "only_b": ("F32", x),
        },
        two=[1, 3],
        both="b",
        three=3.0,
    )
    return a, b


def test_what_differs(run: Run, files: tuple[str, str]) -> None:
    ran = run("inspect", "--diff", *files, "--json")
    assert (ran.code, ran.err) == (0, "")
    report = json.loads(ran.out)
    assert {row["key"] for row in report["metadata"]} == {"x.one", "x.two", "x.three"}
    rows = {row["name"]: row for row in report["tensors"]}
    assert [name for name, row in rows.items() if row["identical"]] == ["same"]
    assert rows["only_a"]["formats"] == ["F32", None]
    assert rows["only_b"]["shapes"] == [None, [3, 5, 32]]
    assert rows["shape"]["rmse"] is None
    assert rows["wild"]["rmse"] is None  # infinity is no error of so much
    with open_gguf(files[0]) as a, open_gguf(files[1]) as b:
        x = a.tensors["coarse"].dequantize().astype(float)
        d = b.tensors["coarse"].dequantize() - x
    assert rows["coarse"]["rmse"] == pytest.approx(np.sqrt(np.mean(d**2)))
    assert rows["coarse"]["relative"] == pytest.approx(np.sqrt(np.mean(d**2) / np.mean(x**2)))
    assert rows["coarse"]["largest"] == pytest.approx(np.abs(d).max())
    assert report["identical"] is False


def test_the_tables(run: Run, files: tuple[str, str]) -> None:
    lines = [line.split() for line in run("inspect", files[0], "--diff", files[1]).out.splitlines()]
    assert ["x.one", "1", "-"] in lines
    coarse = next(line for line in lines if line[:1] == ["coarse"])
    assert coarse[1:4] == ["3×5×32", "F32", "Q4_0"]
    assert ["1", "of", "6", "tensors", "are", "identical"] in lines
    assert not [line for line in lines if line[:1] == ["same"]]


def test_a_file_and_itself(run: Run, files: tuple[str, str]) -> None:
    report = json.loads(run("inspect", "--diff", files[0], files[0], "--json").out)
    assert report["identical"] is True
    assert report["metadata"] == []


@pytest.mark.parametrize("args", [["--diff", "a.gguf"], ["a.gguf", "b.gguf"]])
def test_two_files_and_the_option_go_together(run: Run, args: list[str]) -> None:
    ran = run("inspect", *args)
    assert (ran.code, ran.out) == (2, "")
    assert "--diff" in ran.err


def test_what_the_formats_cost(run: Run, data: Path) -> None:
    path = data / "models" / "babyllama105_pad256" / "mixed_Q4_K_M.gguf"
    report = json.loads(run("inspect", str(path), "--json").out)
    rows = {row["format"]: row for row in report["formats"]}
    assert rows["Q4_K"]["bits_per_weight"] == 4.5
    assert rows["Q6_K"]["f16_share"] == pytest.approx(6.5625 / 16)
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    n_bytes = sum(row["n_bytes"] for row in rows.values())
    assert report["bits_per_weight"] == pytest.approx(8 * n_bytes / report["n_parameters"])
