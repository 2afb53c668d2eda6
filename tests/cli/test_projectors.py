"""``treadle convert`` and ``quantize`` of models that read pictures, as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from treadle.files.gguf import open_gguf


def folder_of(name: str, data: Path) -> str:
    return str(data / "media" / name)


def test_the_projector_is_a_file_beside(run: Run, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "smol.gguf"
    beside = tmp_path / "mmproj-smol.gguf"
    ran = run("convert", folder_of("smolvlm", data), str(out))
    assert (ran.code, ran.err) == (0, "")  # no parts are said to be left out
    assert [line.split()[0] for line in ran.out.splitlines()] == [str(out), str(beside)]
    with open_gguf(beside) as gguf:
        assert gguf.metadata["general.type"] == "mmproj"
    again = run("convert", folder_of("smolvlm", data), str(tmp_path / "smol2.gguf"))
    assert again.code == 0
    again = run("convert", folder_of("smolvlm", data), str(out), "--force")
    assert again.code == 0


def test_an_existing_projector_is_kept(run: Run, data: Path, tmp_path: Path) -> None:
    """Before the model is written."""
    beside = tmp_path / "mmproj-smol.gguf"
    beside.write_bytes(b"mine")
    ran = run("convert", folder_of("smolvlm", data), str(tmp_path / "smol.gguf"))
    assert ran.code == 1
    assert f"{beside}: exists already" in ran.err
    assert beside.read_bytes() == b"mine"
    assert not (tmp_path / "smol.gguf").exists()


def test_its_name_and_format(run: Run, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "q.gguf"
    named = tmp_path / "pictures.gguf"
    options = ("--mmproj", str(named), "--type", "bf16", "--json")
    ran = run("convert", folder_of("qwen25vl", data), str(out), *options)
    assert ran.code == 0
    report = json.loads(ran.out)
    assert [file["path"] for file in report["files"]] == [str(out), str(named)]
    assert any("windows are 112 pixels wide; the file says 56" in note for note in report["notes"])
    assert not any("left out" in note for note in report["notes"])
    with open_gguf(named) as gguf:
        assert gguf.tensors["v.blk.0.attn_q.weight"].type_name == "BF16"


def test_blocks_are_for_the_model_alone(run: Run, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "q.gguf"
    ran = run("convert", folder_of("internvl", data), str(out), "--type", "q8_0", "--align", "page")
    assert ran.code == 0
    with open_gguf(tmp_path / "mmproj-q.gguf") as gguf:
        assert gguf.tensors["v.blk.0.attn_q.weight"].type_name == "F16"
        assert gguf.alignment == 4096


def test_no_projector(run: Run, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "text.gguf"
    ran = run("convert", folder_of("gemma3", data), str(out), "--no-mmproj")
    assert ran.code == 0
    assert "the image and audio parts (" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["text.gguf"]


def test_a_family_without_a_projector(run: Run, data: Path, tmp_path: Path) -> None:
    """The model of text is written all the same, unless the projector was asked for."""
    folder = tmp_path / "folder"
    folder.mkdir()
    source = data / "media" / "smolvlm"
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["model_type"] = "janus"
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(source / name)
    out = tmp_path / "text.gguf"
    ran = run("convert", str(folder), str(out))
    assert ran.code == 0
    assert "no projector is written: " in ran.err
    assert "model_type 'janus' are not supported" in ran.err
    assert "the image and audio parts (" in ran.err
    asked = run("convert", str(folder), str(out), "--force", "--mmproj", str(tmp_path / "p.gguf"))
    assert asked.code == 1
    assert "'janus' are not supported" in asked.err


def test_wrong_usage(run: Run, data: Path, tmp_path: Path) -> None:
    text = str(data / "models" / "stories260K.gguf")
    out = str(tmp_path / "out.gguf")
    ran = run("convert", text, out, "--mmproj", str(tmp_path / "p.gguf"))
    assert ran.code == 2
    assert "is not a folder with a picture or sound part" in ran.err
    ran = run("convert", folder_of("gemma3", data), out, "--mmproj", out)
    assert ran.code == 2
    assert "--mmproj is also DST" in ran.err
    ran = run("convert", folder_of("gemma3", data), out, "--mmproj", out, "--no-mmproj")
    assert ran.code == 2
    assert "exclude each other" in ran.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["qwen3vl", "gemma4u"])
def test_quantized(name: str, run: Run, data: Path, tmp_path: Path) -> None:
    """llama.cpp's files too, whose patch embeddings are F16: they stay so."""
    out = tmp_path / "q.gguf"
    ran = run("quantize", str(data / "media" / name / "mmproj.gguf"), str(out), "q8_0", "-t", "1")
    assert ran.code == 0
    shown = run("inspect", str(out))
    rows = {line.split()[0]: line.split() for line in shown.out.splitlines() if line.split()}
    matrix = "mm.0.weight" if name == "qwen3vl" else "mm.a.input_projection.weight"
    assert rows[matrix][2] == "Q8_0"
    assert rows["v.patch_embd.weight"][2] == "F16"
    assert rows["v.position_embd.weight"][2] == "F32"
