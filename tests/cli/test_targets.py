"""The commands that write files: never over a pipe, nor over what they read."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.fake import FakeModel
from tests.loras import draw_pairs, write_gguf

COMMANDS = [
    ["perplexity", "MODEL", "TEXT", "--save-logits", "OUT", "--force"],
    ["imatrix", "MODEL", "TEXT", "-o", "OUT", "--force"],
    ["convert", "MODEL", "OUT", "--force"],
    ["convert", "MODEL", "OUT", "--force", "--type", "F16"],
    ["quantize", "MODEL", "OUT", "Q8_0", "--force"],
]


@pytest.fixture
def files(data: Path, tmp_path: Path) -> dict[str, Path]:
    """A model, a text, and a link to each."""
    named = {"MODEL": tmp_path / "model.gguf", "TEXT": tmp_path / "story.txt"}
    shutil.copy(data / "models" / "stories260K.gguf", named["MODEL"])
    named["TEXT"].write_text("Once upon a time " * 100)
    for name, path in list(named.items()):
        named[f"{name}_LINK"] = path.with_name(f"{name}.link")
        named[f"{name}_LINK"].symlink_to(path)
    return named


def with_out(command: list[str], files: dict[str, Path], out: Path) -> list[str]:
    return [str((files | {"OUT": out}).get(word, word)) for word in command]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_stays_a_pipe(run: Run, files: dict[str, Path], command: list[str]) -> None:
    pipe = files["TEXT"].with_name("pipe")
    os.mkfifo(pipe)
    ran = run(*with_out(command, files, pipe))
    assert (ran.code, ran.out) == (1, "")
    assert f"{pipe}: is no regular file" in ran.err
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize(
    ("command", "out"),
    [
        (c, w + link)
        for c in COMMANDS
        for w in ("MODEL", "TEXT")
        if w in c
        for link in ("", "_LINK")
    ],
)
def test_what_is_read_is_not_replaced(
    run: Run, files: dict[str, Path], command: list[str], out: str
) -> None:
    path = files[out]
    before = path.read_bytes()
    ran = run(*with_out(command, files, path))
    assert (ran.code, ran.out) == (1, "")
    assert f"{path}: is also the input" in ran.err
    assert (path.read_bytes(), path.is_symlink()) == (before, out.endswith("LINK"))


def test_a_shard_that_is_read_is_not_replaced(run: Run, files: dict[str, Path]) -> None:
    made = files["MODEL"].with_name("split.gguf")
    assert run("convert", str(files["MODEL"]), str(made), "--split-max-size", "500K").code == 0
    shards = sorted(made.parent.glob("split-*"))
    assert len(shards) > 1
    for command in COMMANDS:
        words = with_out(command, files | {"MODEL": shards[0]}, shards[1])
        before = shards[1].read_bytes()
        ran = run(*words)
        assert (ran.code, "is also the input" in ran.err) == (1, True), words
        assert shards[1].read_bytes() == before


@pytest.mark.parametrize("command", [COMMANDS[0], COMMANDS[-1]])
def test_an_adapter_that_is_read_is_not_replaced(
    run: Run, files: dict[str, Path], command: list[str]
) -> None:
    path = files["MODEL"].with_name("adapter.gguf")
    write_gguf(path, draw_pairs(files["MODEL"], 2, 1))
    before = path.read_bytes()
    ran = run(*with_out([*command, "--lora", f"{path}=0.5"], files, path))
    assert (ran.code, "is also the input" in ran.err) == (1, True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("option", ["--save-logits", "--kl-from"])
def test_an_empty_name_is_not_taken_for_none(run: Run, files: dict[str, Path], option: str) -> None:
    ran = run("perplexity", str(files["MODEL"]), str(files["TEXT"]), "-c", "16", option, "")
    assert (ran.code, ran.out) == (1, "")
    assert "an empty name" in ran.err


@pytest.mark.parametrize("command", COMMANDS[:2])
def test_a_folder_that_is_not_there_is_told_before_the_work(
    run: Run, model: FakeModel, files: dict[str, Path], command: list[str]
) -> None:
    ran = run(*with_out(command, files, files["TEXT"].with_name("nodir") / "x"))
    assert (ran.code, ran.out) == (1, "")
    assert "nodir/x: cannot be written: its folder does not exist" in ran.err
    assert model.calls == []  # not even loaded
