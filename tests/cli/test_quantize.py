from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import Run
from tests.conftest import WriteTiny
from treadle.files.gguf import open_gguf
from treadle.quantize.imatrix.matrix import ImatrixEntry, ImportanceMatrix


@pytest.fixture
def source(data: Path) -> str:
    return str(data / "models" / "babyllama105" / "babyllama105-F32.gguf")


def test_a_file_is_written(run: Run, source: str, tmp_path: Path) -> None:
    target = tmp_path / "small.gguf"
    ran = run("quantize", source, str(target), "q8_0", "--tensor", "ffn_down=Q4_0", "-t", "1")
    assert (ran.code, ran.err) == (0, "")
    first, size, done = ran.out.splitlines()
    assert first == "Q8_0: 32 Q8_0, 11 F32, 5 Q4_0"
    assert size.startswith("3.6 MiB -> ")
    assert "32.00 -> 7.5" in size
    assert done.startswith(f"{target} in ")
    with open_gguf(target) as made:
        assert made.tensors["blk.3.ffn_down.weight"].type_name == "Q4_0"
    assert run("run", str(target), "Once", "-n", "3", "--temp", "0").code == 0


def test_a_dry_run_shows_every_tensor(run: Run, source: str, tmp_path: Path) -> None:
    ran = run("quantize", source, str(tmp_path / "small.gguf"), "Q4_K_M", "--dry-run")
    assert ran.code == 0
    rows = {line.split()[0]: line.split() for line in ran.out.splitlines() if line.split()}
    assert rows["blk.2.attn_v.weight"][1:4] == ["64×128", "F32", "Q8_0"]  # Q6_K, but for the rows
    assert rows["blk.0.attn_norm.weight"][1:4] == ["128", "F32", "F32"]
    assert "(not written)" in ran.out
    said = [line for line in ran.err.splitlines() if "rows of" in line]
    assert said == [  # one line, not one a tensor
        "treadle: rows of 128, 352 weights do not divide into whole blocks: "
        "Q5_0 instead of Q4_K (32 matrices), Q8_0 instead of Q6_K (4 matrices)"
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_json(run: Run, source: str, tmp_path: Path) -> None:
    target = tmp_path / "small.gguf"
    ran = run("quantize", source, str(target), "Q8_0", "--json")
    report = json.loads(ran.out)
    assert report["formats"] == {"Q8_0": 37, "F32": 11}
    assert report["n_bytes"] == target.stat().st_size
    assert report["bits_per_weight"] == pytest.approx(8.53, abs=0.01)
    assert (report["mix"], report["file_type"]) == ("Q8_0", 7)
    told = json.loads(run("quantize", source, str(target), "Q8_0", "--json", "--dry-run").out)
    assert abs(told["n_bytes"] - report["n_bytes"]) < 256  # of the header's new keys


def test_importances_that_lack_are_noticed(run: Run, tiny: WriteTiny, tmp_path: Path) -> None:
    source = str(tiny("llama", "F32", n_embd=256, n_ff=256))
    ran = run("quantize", source, str(tmp_path / "a.gguf"), "IQ2_XXS", "--dry-run")
    assert "become very coarse without --imatrix" in ran.err
    path = tmp_path / "imatrix.gguf"
    name = "blk.0.attn_q.weight"
    ImportanceMatrix({name: ImatrixEntry(np.ones((1, 256)), np.ones(1))}).write(path)
    ran = run(
        "quantize", source, str(tmp_path / "a.gguf"), "IQ2_XXS", "--dry-run", "--imatrix", str(path)
    )
    assert "the importance matrix has no values for blk.0.attn_k.weight" in ran.err


def test_formats_that_take_no_notice_of_importances_are_named(
    run: Run, tiny: WriteTiny, tmp_path: Path
) -> None:
    source = str(tiny("llama", "F32", n_embd=64, n_ff=96))
    path = tmp_path / "imatrix.gguf"
    one = ImatrixEntry(np.ones((1, 64)), np.ones(1))
    ImportanceMatrix({"blk.0.attn_q.weight": one, "blk.0.attn_k.weight": one}).write(path)

    def said(mix: str, *more: str) -> str:
        ran = run("quantize", source, "a.gguf", mix, "--dry-run", "--imatrix", str(path), *more)
        assert ran.code == 0
        return ran.err

    assert "the importance matrix has no effect in Q8_0 (2 matrices)" in said("Q8_0")
    assert "Q8_0 (1 matrix)" in said("Q4_0", "--tensor", "attn_q=Q8_0")
    assert "has no effect" not in said("Q4_0")
    assert "has no effect" not in said("F16")


@pytest.mark.parametrize(
    ("mix", "wide", "told"),
    [
        ("MXFP4", False, "2.4 times the squared error of IQ4_XS; use IQ4_XS, or IQ4_NL where"),
        ("MXFP4", True, "2.4 times the squared error of IQ4_XS; use IQ4_XS"),
        ("nvfp4", False, "1.7 times the squared error of IQ4_NL; use IQ4_NL"),
        ("TQ2_0", True, "almost all of the model's quality; use IQ2_XXS"),
        ("Q1_0", True, "almost all of the model's quality; use IQ1_S"),
    ],
)
def test_formats_for_weights_that_were_trained_in_them(
    run: Run, tiny: WriteTiny, mix: str, wide: bool, told: str
) -> None:
    width = 256 if wide else 64
    source = str(tiny("llama", "F32", n_embd=width, n_ff=width))
    said = [
        line
        for line in run("quantize", source, "a.gguf", mix, "--dry-run").err.splitlines()
        if f" in {mix.upper()}, which suits only weights trained in it" in line
    ]
    assert len(said) == 1
    assert told in said[0]
    assert "trained" not in run("quantize", source, "a.gguf", "Q4_K_M", "--dry-run").err


def test_a_dry_run_refuses_importances_of_another_model(
    run: Run, source: str, tmp_path: Path
) -> None:
    path = tmp_path / "imatrix.gguf"
    ImportanceMatrix({"blk.0.attn_q.weight": ImatrixEntry(np.ones((1, 64)), np.ones(1))}).write(
        path
    )
    ran = run("quantize", source, "a.gguf", "Q8_0", "--dry-run", "--imatrix", str(path))
    assert (ran.code, ran.out) == (1, "")
    assert "has importances of shape [1, 64] (expected [1, 128]" in ran.err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["Q4_KM"], 2, "did you mean Q4_K_M"),
        (["Q8_0", "--tensor", "ffn_down"], 2, "'ffn_down' is not PATTERN=FORMAT"),
        (["Q8_0", "--tensor", "(=Q8_0"], 2, "not a regular expression"),
        (["Q8_0", "--output-type", "Q9"], 2, "unknown weight format 'Q9'"),
        (["Q8_0", "--tensor", "ffn_dwn=Q4_0"], 1, "no matrix name matches"),
        (
            ["Q4_K", "--pure"],
            1,
            "Q4_K needs rows that are multiples of 256; these have 128 weights",
        ),
        (["Q8_0", "--imatrix", "absent.gguf"], 1, "absent.gguf: cannot be opened"),
    ],
)
def test_what_cannot_be(
    run: Run, source: str, tmp_path: Path, args: list[str], code: int, message: str
) -> None:
    ran = run("quantize", source, str(tmp_path / "small.gguf"), *args)
    assert (ran.code, ran.out) == (code, "")
    assert message in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_stays(run: Run, source: str, tmp_path: Path) -> None:
    target = tmp_path / "small.gguf"
    target.write_bytes(b"mine")
    ran = run("quantize", source, str(target), "Q8_0")
    assert (ran.code, target.read_bytes()) == (1, b"mine")
    assert "--force" in ran.err
    assert run("quantize", source, str(target), "Q8_0", "--force").code == 0
    ran = run("quantize", str(target), str(tmp_path / "again.gguf"), "Q4_0")
    assert ran.code == 1
    assert "already quantized" in ran.err
    ran = run("quantize", str(target), str(tmp_path / "again.gguf"), "Q4_0", "--allow-requantize")
    assert ran.code == 0


def test_a_folder_is_to_be_converted_first(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    ran = run("quantize", str(tmp_path), str(tmp_path / "small.gguf"), "Q8_0")
    assert (ran.code, ran.out) == (1, "")
    assert "treadle convert" in ran.err
