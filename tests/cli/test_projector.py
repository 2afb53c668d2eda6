"""Projector files in inspect, plan and bench."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copy
from typing import Any

import numpy as np
import pytest

from tests.changed_gguf import write_changed
from tests.cli.conftest import Run
from tests.media.bounded_tower import bounds_of_all, write_bounded_tower
from treadle.api.projector_choice import NO_PROJECTOR
from treadle.cli.commands import bench, plan
from treadle.cli.projector import ImageSize, prepare, steps_of
from treadle.cli.speed import PassCost
from treadle.devices import open_device
from treadle.media.projector import open_projector

PEAKS = {"bandwidth": 1e10, "stream": 1e10, "int8": 1e11, "f32": 1e11}


@pytest.fixture(scope="module")
def media(data: Path) -> Path:
    return data / "media"


# -- inspect ---------------------------------------------------------------------------------------


def test_inspect_of_a_projector(run: Run, media: Path) -> None:
    path = str(media / "gemma4u" / "mmproj.gguf")
    report = json.loads(run("inspect", path, "--json").out)
    towers = report["projector"]["towers"]
    assert [(each["kind"], each["projector_type"]) for each in towers] == [
        ("image", "gemma4uv"),
        ("audio", "gemma4ua"),
    ]
    assert report["problems"] == []
    out = run("inspect", path).out
    assert "projector: pictures: gemma4uv" in out
    assert "projector: sounds: gemma4ua" in out
    assert "missing or unknown\nnothing" in out


def test_inspect_says_a_models_projector(run: Run, media: Path, tmp_path: Path) -> None:
    path = str(media / "qwen3vl" / "text.gguf")
    report = json.loads(run("inspect", path, "--json").out)
    assert report["projector"]["path"] == str(media / "qwen3vl" / "mmproj.gguf")
    assert report["projector"]["towers"][0]["n_deepstack"] == 2
    own = str(media / "qwen3vl" / "mmproj.gguf")
    out = run("inspect", path).out
    assert f"projector: {own}: pictures: qwen3vl_merger, 3 layers" in out
    alone = copy(path, tmp_path / "text.gguf")
    report = json.loads(run("inspect", str(alone), "--json").out)
    assert report["projector"] is None
    assert f"pictures: {NO_PROJECTOR}" in report["problems"]
    report = json.loads(run("inspect", str(alone), "--mmproj", own, "--json").out)
    assert report["projector"]["path"] == own
    other = str(media / "gemma3" / "mmproj.gguf")
    report = json.loads(run("inspect", str(alone), "--mmproj", other, "--json").out)
    assert report["projector"] is None
    assert any("rows are for models of type gemma3" in each for each in report["problems"])


def with_sounds(source: Path, to: Path) -> Path:
    """A projector file that also has a sound encoder, of a type that is not supported."""
    keys = {
        "clip.has_audio_encoder": True,
        "clip.audio.projector_type": "gemma4a",
        "clip.audio.embedding_length": 8,
    }
    return write_changed(source, to, keys)


def test_pictures_are_read_though_sounds_are_not(run: Run, media: Path, tmp_path: Path) -> None:
    """As in the files of Gemma 4 E2B and E4B."""
    made = str(with_sounds(media / "gemma3" / "mmproj.gguf", tmp_path / "mmproj.gguf"))
    report = json.loads(run("inspect", made, "--json").out)
    assert [each["kind"] for each in report["projector"]["towers"]] == ["image"]
    (problem,) = report["problems"]
    assert (
        "projector type 'gemma4a' is not supported: its sound goes through a conformer" in problem
    )
    model = str(media / "gemma3" / "text.gguf")
    picture = str(media / "media" / "plain.png")
    words = ["--mmproj", made, "--image", picture, "-n", "2", "-t", "1", "-c", "256", "--json"]
    assert json.loads(run("run", model, "hi", *words).out)["media"][0]["n_tokens"] == 16
    report = json.loads(run("inspect", model, "--mmproj", made, "--json").out)
    assert len(report["projector"]["towers"]) == 1
    assert problem in report["problems"]


# -- plan ------------------------------------------------------------------------------------------


def test_plan_of_a_projector(run: Run, media: Path) -> None:
    path = str(media / "qwen3vl" / "mmproj.gguf")
    rows = json.loads(run("plan", path, "-t", "1", "--image", "128x128", "--json").out)
    labels = [row["label"] for row in rows]
    assert labels[:3] == ["given.pack", "patch_embd", "L0.attn.norm"]
    assert {"L2.ffn.down", "mm.2", "deepstack.1.fc2"} <= set(labels)
    by_label = {row["label"]: row for row in rows}
    assert by_label["L0.attn.output"]["n_flops"] == 2 * 256 * 64 * 64  # patches, values, values
    assert by_label["mm.2"]["n_flops"] == 2 * 64 * 256 * 64  # rows, joined values, values
    only = json.loads(run("plan", path, "--match", "deepstack.*", "--json").out)
    assert len(only) == 8
    both = run("plan", str(media / "gemma4u" / "mmproj.gguf"), "-t", "1", "--json").out
    assert {row["label"].split(".")[0] for row in json.loads(both)} == {"image", "audio"}


def test_plan_with_times(run: Run, media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "peaks_of", lambda device, n_threads, progress: PEAKS)
    path = str(media / "qwen3vl" / "mmproj.gguf")
    rows = json.loads(run("plan", path, "-t", "1", "--image", "128x128", "--profile", "--json").out)
    assert all(row["seconds"] > 0 for row in rows)
    assert sum(row["share_of_time"] for row in rows) == pytest.approx(1)


@pytest.mark.parametrize(
    ("case", "words", "said"),
    [
        ("mmproj", ["-p", "5"], "-p and -d are for text"),
        ("mmproj", ["--image", "5"], "'5' is not a width and a height"),
        ("mmproj", ["--image", "0x5"], "expected at least one"),
        ("mmproj", ["--image", "99999x99999"], "the limit is 64 million"),
        ("text", ["--image", "5x5"], "are for a projector file"),
    ],
)
def test_wrong_usage_of_plan(run: Run, media: Path, case: str, words: list[str], said: str) -> None:
    ran = run("plan", str(media / "gemma3" / f"{case}.gguf"), *words)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


# -- bench -----------------------------------------------------------------------------------------


def test_bench_of_a_picture(run: Run, media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measured_peaks", lambda model, progress: PEAKS)
    path = str(media / "qwen3vl" / "text.gguf")
    words = ["-t", "1", "-r", "1", "-p", "4", "-n", "0", "--image", "128x128"]
    prompt, picture = json.loads(run("bench", path, *words, "--json").out)
    assert (prompt["test"], prompt["picture"]) == ("pp4", None)
    assert picture["test"] == "image 128x128"
    facts = picture["picture"]
    assert (facts["resized"], facts["n_patches"], facts["n_rows"]) == ([128, 128], 256, 64)
    assert picture["tok_s"] == pytest.approx(64 / facts["seconds"])
    assert picture["ops_s"] * facts["seconds"] == pytest.approx(flops(media))
    out = run("bench", path, *words).out
    assert "image 128x128: read at 128 x 128, 256 patches to 64 tokens in " in out
    small = ["--image", "128x128", "--image-max-tokens", "4"]
    (less,) = json.loads(run("bench", path, *words[:4], "-p", "0", "-n", "0", *small, "--json").out)
    assert less["picture"]["n_rows"] <= 4


def flops(media: Path) -> float:
    """The operations of all steps, by a second way: from their own counts."""
    device: Any = open_device("cpu", None, 1, None)
    projector = open_projector(media / "qwen3vl" / "mmproj.gguf", device)
    (prepared,) = prepare(projector, ImageSize(128, 128), None)
    made = steps_of(projector, prepared)
    total = sum(step.cost(each.parts, 0)[1] for each in made for step in each.steps)
    projector.close()
    device.close()
    return float(total)


def test_costs_add_up() -> None:
    one = PassCost(2, {"f32": 3}, {"f32": 4}, {"bandwidth": 0.5}, PEAKS)
    two = PassCost(5, {"f32": 1, "int8": 2}, {"f32": 1, "int8": 2}, {"f32": 1.0}, PEAKS)
    total = PassCost.sum_of([one, two])
    assert total == PassCost(
        7, {"f32": 4, "int8": 2}, {"f32": 5, "int8": 2}, {"bandwidth": 0.5, "f32": 1.0}, PEAKS
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-p", "0", "-n", "0"], 2, "nothing to time"),
        (["--mmproj", "x"], 2, "need --image WxH"),
        (["--image", "8x8", "--mmproj", "x"], 1, "no such file"),
    ],
)
def test_wrong_usage_of_bench(
    run: Run, media: Path, words: list[str], code: int, said: str
) -> None:
    ran = run("bench", str(media / "gemma3" / "text.gguf"), *words)
    assert (ran.code, ran.out) == (code, "")
    assert said in ran.err


def test_a_random_picture_is_always_the_same() -> None:
    pixels = ImageSize(5, 3).pixels()
    assert pixels.shape == (3, 5, 3)
    assert pixels.dtype == np.uint8
    assert np.array_equal(pixels, ImageSize(5, 3).pixels())


def test_bounds_of_matrices_are_shown(run: Run, tmp_path: Path) -> None:
    """Those of Gemma 4 E2B and E4B: their number, each tensor, and the steps that clamp."""
    made = str(write_bounded_tower(tmp_path / "mmproj.gguf", bounds_of_all()))
    report = json.loads(run("inspect", made, "--json").out)
    (tower,) = report["projector"]["towers"]
    assert tower["n_bounded"] == 13  # of 14: one has none
    said = run("inspect", made).out
    assert "13 matrices with bounds of their values" in said
    assert "v.blk.0.attn_q.input_min" in said
    few = ["--image-max-tokens", "70"]  # the file has positions for 32 patches on a side
    steps = json.loads(run("plan", made, *few, "--match", "L0.ffn.down*", "--json").out)
    assert [step["kernel"] for step in steps if "clamp" in step["kernel"]] == [
        "clamp_between_k96",
        "clamp_between_k64",
    ]
    plain = str(write_bounded_tower(tmp_path / "plain.gguf", {}))
    assert "with bounds" not in run("inspect", plain).out
