from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from treadle.base.humanize import n_weights
from treadle.formats import FORMATS, by_name


def test_a_real_model(run: Run, data: Path) -> None:
    ran = run("inspect", str(data / "models" / "stories260K.gguf"), "--json")
    assert (ran.code, ran.err) == (0, "")
    report = json.loads(ran.out)
    assert len(report["tensors"]) == 48
    assert report["metadata"]["llama.block_count"] == 5
    assert report["metadata"]["tokenizer.ggml.tokens"]["length"] == 512
    assert report["metadata"]["tokenizer.ggml.tokens"]["type"] == "string"
    assert [row["format"] for row in report["formats"]] == ["F32"]
    assert report["problems"] == ["chat: the file has no chat template"]


def test_the_tables(run: Run, data: Path) -> None:
    ran = run("inspect", str(data / "models" / "stories260K.gguf"))
    assert (ran.code, ran.err) == (0, "")
    lines = [line.split() for line in ran.out.splitlines()]
    assert ["blk.4.ffn_up.weight", "172×64", "F32", "43.0", "KiB"] in lines
    assert ["llama.block_count", "5"] in lines


@pytest.mark.parametrize("name", ["qwen35moe", "gpt-oss", "gemma4-moe"])
def test_what_a_token_reads_of_experts(name: str, run: Run, data: Path) -> None:
    """Of 8 experts 2; of embeddings a row, unless they are the output as well."""
    path = str(data / "arch" / f"{name}.gguf")
    report = json.loads(run("inspect", path, "--json").out)
    n_parameters = report["n_parameters"]
    tensors = {tensor["name"]: math.prod(tensor["shape"]) for tensor in report["tensors"]}
    expected = n_parameters - sum(n * 3 // 4 for name, n in tensors.items() if "_exps" in name)
    if "output.weight" in tensors:
        n_vocab = next(t["shape"][0] for t in report["tensors"] if t["name"] == "token_embd.weight")
        expected -= tensors["token_embd.weight"] * (n_vocab - 1) // n_vocab
    assert report["per_token"] == {
        "n_experts": 8,
        "n_experts_used": 2,
        "n_parameters": expected,
        "n_bytes": 4 * expected,
    }
    line = run("inspect", path).out.splitlines()[2]
    few = n_weights(expected)
    every = n_weights(n_parameters)
    assert line.startswith(f"8 experts, 2 used: {few} of {every} parameters and ")


def test_what_a_token_reads_of_others(run: Run, data: Path) -> None:
    path = str(data / "models" / "stories260K.gguf")
    assert run("inspect", path).out.splitlines()[2] == "1016 KiB read per token"
    vocabulary = str(data / "vocab" / "ggml-vocab-gpt-2.gguf")
    assert json.loads(run("inspect", vocabulary, "--json").out)["per_token"] is None


def test_formats_that_treadle_lacks_are_named(
    run: Run, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(FORMATS, by_name("Q8_0").ggml_id)
    ran = run("inspect", str(data / "models" / "babyllama105_pad256" / "Q8_0.gguf"))
    assert (ran.code, ran.err) == (0, "")
    problems = ran.out.partition("missing or unknown\n")[2].splitlines()
    assert problems == [
        "chat: the file has no chat template",
        "tensors: format Q8_0 is not supported yet",
    ]


def test_a_file_that_is_no_model(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "README.gguf"
    path.write_text("# nothing of the kind")
    ran = run("inspect", str(path))
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"treadle: error: {path}")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("name", ["other", "malformed"])
def test_every_file_gets_a_report_or_one_clear_line(run: Run, data: Path, name: str) -> None:
    folder = data / name if name == "malformed" else data / "models" / name
    paths = sorted(folder.glob("*.gguf"))
    assert paths
    for path in paths:
        ran = run("inspect", str(path), "--json")
        if ran.code:
            assert (ran.code, ran.out) == (1, "")
            assert ran.err.startswith("treadle: error: ")
        else:
            assert json.loads(ran.out)["path"] == str(path)


def test_tensors_that_are_not_used_are_named(run: Run, tmp_path: Path) -> None:
    from tests.tiny import write_model

    path = tmp_path / "surplus.gguf"
    write_model(path, others={"blk.0.attn_rot_embd": (6,)})
    ran = run("inspect", str(path))
    assert "tensors: blk.0.attn_rot_embd is not used" in ran.out.splitlines()


def test_numbers_have_the_fewest_digits_that_tell_them() -> None:
    import numpy as np

    from treadle.cli.metadata import written

    assert written(float(np.float32(1e-6))) == "1e-06"  # as f32 in the file
    assert written(0.1) == "0.1"  # an f64 that is no f32
    assert [written(x) for x in (10000.0, 1e300, float("inf"))] == ["10000.0", "1e+300", "inf"]
