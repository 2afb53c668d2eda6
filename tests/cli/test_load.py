from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.cli.conftest import Run
from tests.cli.fake import FakeModel
from treadle.cli import engine_process, load
from treadle.cli.commands import bench, plan
from treadle.errors import FileError, TreadleError
from treadle.server.http import log
from treadle.server.router.engine import EngineOrder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("TinyLlama-Q8_0.gguf", "gemma-3-1b.gguf", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("ref", "hint"),
    [
        ("tinyllama-q8_0.gguf", "did you mean TinyLlama-Q8_0.gguf?"),
        ("gemma-3-1b", "did you mean gemma-3-1b.gguf?"),
        ("something-else.gguf", "the folder has TinyLlama-Q8_0.gguf, gemma-3-1b.gguf"),
        (
            "zzz.gguf",
            "no such file; the folder has",
        ),  # that all end in .gguf makes none of them near
        ("loop.gguf", "cannot be opened: a loop of symbolic links"),
        ("", "'': an empty name"),
        ("owner/repo", "(nor the folder owner); for a model on the hub, use hf:owner/repo"),
        ("https://huggingface.co/owner/repo/tree/main", "a web address: use hf:owner/repo"),
        ("https://hf.co/o/r/resolve/main/a.gguf", "a web address: use hf:o/r/a.gguf"),
        ("https://huggingface.co/models", "a web address: use hf:OWNER/REPO, "),
        ("http://a.b/x.gguf", "a web address: download the file, and give its path"),
        ("nowhere/x.gguf", "nor the folder nowhere"),
        ("empty/x.gguf", "no such file"),
        (".", "is a folder"),
    ],
)
def test_a_model_that_is_not_there(folder: Path, ref: str, hint: str) -> None:
    with pytest.raises(FileError) as caught:
        load.find_model(ref)
    assert hint in str(caught.value)
    assert str(caught.value).startswith(ref or "''")


def test_a_split_model_by_its_name(folder: Path) -> None:
    """As the library takes it; its shards are beside that name."""
    for name in ("big-00001-of-00002.gguf", "big-00002-of-00002.gguf"):
        (folder / name).touch()
    for ref in ("big.gguf", "big", folder / "big.gguf"):
        assert load.find_model(str(ref)).name == "big-00001-of-00002.gguf"
    (folder / "big-00001-of-00003.gguf").touch()
    with pytest.raises(FileError, match="no such file; the folder has"):
        load.find_model("big.gguf")


def test_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves ~ as it is within quotes, and the library replaces it too."""
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    assert load.find_model("~/gemma-3-1b.gguf") == folder / "gemma-3-1b.gguf"
    assert load.is_model("~/gemma-3-1b.gguf")


def test_safetensors_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(FileError, match=r"folder of safetensors without config.json: fetch it"):
        load.find_model(str(tmp_path))


def test_the_command_says_so_too(run: Run, folder: Path) -> None:
    ran = run("inspect", "gemma-3-1b.guf")
    assert (ran.code, ran.out) == (1, "")
    expected = "gemma-3-1b.guf: no such file; did you mean gemma-3-1b.gguf?"
    assert ran.err == f"treadle: error: {expected}\n"


def test_a_long_listing_is_cut(tmp_path: Path) -> None:
    for i in range(9):
        (tmp_path / f"{i}.gguf").touch()
    assert load.listing(tmp_path).endswith(" and 4 more")


def test_without_a_model_the_packaged_one_is_meant(run: Run, model: FakeModel) -> None:
    assert run("run", "Once").code == 0
    assert model.calls[0] == ("load", None, {})


@pytest.mark.parametrize("words", [["plan", "--profile"], ["bench", "-r", "1", "-d", "5000"]])
def test_a_measurement_that_needs_more_warns_of_nothing(
    run: Run, model: FakeModel, gguf: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model.config.n_ctx_train = 8
    for module in (bench, plan):
        monkeypatch.setattr(module, "measured_peaks", lambda *_: {"bandwidth": 1e9, "f32": 1e11})
    run(*words, gguf)
    assert model.calls[0][0] == "load"
    assert model.calls[0][2]["context"] >= 4096
    assert "trained" not in run(*words, gguf).err


def test_warnings_of_the_library_are_lines(
    run: Run, model: FakeModel, gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the line of its sources that Python shows, even where Python would hide them."""
    opened = treadle.load

    def warned(*args: Any, **settings: Any) -> Any:
        warnings.warn("mind the gap", stacklevel=2)
        return opened(*args, **settings)

    monkeypatch.setattr(treadle, "load", warned)
    ran = run("run", gguf, "Once")
    assert (ran.code, ran.err.splitlines()[0]) == (0, "treadle: warning: mind the gap")
    assert "UserWarning" not in ran.err


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_context_beyond_the_trained_one_is_said(
    run: Run, model: FakeModel, gguf: str, command: str
) -> None:
    words = [gguf, "Once"] if command == "run" else [gguf]
    assert "trained" not in run(command, *words, "-c", "4096", stdin="hi").err
    ran = run(command, *words, "-c", "4097", stdin="hi")
    assert ran.code == 0
    assert ran.err.startswith(
        "treadle: warning: a context of 4097 tokens: story.gguf was trained for 4096; "
        "output beyond that is unreliable\n"
    )


@pytest.mark.parametrize(("name", "states"), [("mamba2", True), ("cohere", False)])
def test_an_engine_of_a_model_with_states_has_no_page_files(
    name: str,
    states: bool,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The folder is an option for all models of a router."""
    asked: list[Any] = []

    def load_model(ref: str, progress: Any, **loading: Any) -> None:
        asked.append(loading["cache_dir"])
        raise TreadleError("enough")

    monkeypatch.setattr(load, "load_model", load_model)
    monkeypatch.setattr(engine_process, "end_with_router", lambda number: None)
    monkeypatch.setattr(log, "COMMON", {})
    path = data / "arch" / f"{name}.gguf"
    args = (f"--cache-dir={tmp_path}", "--context=64")
    order = EngineOrder("m", str(path), args, "", ("key",), 0)
    reader, writer = os.pipe()
    assert engine_process.run_engine(order.as_json(), writer, 0) == engine_process.FAILED
    assert b"enough" in os.read(reader, 1000)
    os.close(reader)
    os.close(writer)
    assert asked == [None if states else str(tmp_path)]
    assert ("m: --cache-dir is left out: " in capsys.readouterr().err) == states
