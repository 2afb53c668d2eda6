from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import Run
from tests.evaluate.test_perplexity import GOLDEN
from treadle.quantize.imatrix.matrix import read


@pytest.fixture
def story(tmp_path: Path) -> str:
    path = tmp_path / "story.txt"
    path.write_text(GOLDEN["text"])
    return str(path)


def test_a_matrix_is_written_and_used(run: Run, data: Path, story: str, tmp_path: Path) -> None:
    model = str(data / "models" / "babyllama105" / "babyllama105-F32.gguf")
    path = tmp_path / "matrix.gguf"
    ran = run("imatrix", model, story, "-o", str(path), "-c", "64", "--chunks", "4")
    assert (ran.code, ran.err) == (0, "")
    assert f"{path}: 35 matrices, 4 windows of 64 tokens, " in ran.out
    assert "no values for token_embd.weight, output.weight" in ran.out
    first = read(path)
    assert first.datasets == (story,)

    again = ["imatrix", model, story, "-o", str(path), "-c", "64", "--chunks", "4"]
    ran = run(*again)
    assert (ran.code, ran.out) == (1, "")
    assert "--force" in ran.err
    ran = run(*again, "--force", "--in-file", str(path), "--process-output", "--json")
    report = json.loads(ran.out)
    assert (report["n_entries"], report["n_chunks"]) == (36, 8)
    assert report["without"] == ["token_embd.weight"]
    name = "blk.2.ffn_up.weight"
    np.testing.assert_allclose(
        read(path).entries[name].sums, 2 * first.entries[name].sums, rtol=1e-3
    )

    made = tmp_path / "small.gguf"
    ran = run("quantize", model, str(made), "Q4_0", "--imatrix", str(path))
    assert ran.code == 0
    keys = json.loads(run("inspect", str(made), "--json").out)["metadata"]
    assert keys["quantize.imatrix.dataset"] == story
    assert keys["quantize.imatrix.chunks_count"] == 8


def test_a_file_that_is_no_matrix(run: Run, data: Path, story: str, tmp_path: Path) -> None:
    model = str(data / "models" / "stories260K.gguf")
    ran = run("imatrix", model, story, "-o", str(tmp_path / "m.gguf"), "--in-file", model)
    assert (ran.code, ran.out) == (1, "")
    assert "is a GGUF file of type 'model'" in ran.err
    assert not (tmp_path / "m.gguf").exists()
