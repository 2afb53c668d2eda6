"""What a bundle makes of the arguments that are typed behind its name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from treadle.cli import bundled as start
from treadle.cli.app import COMMANDS
from treadle.files.bundled import START, BundleHeader

OWN = "/opt/talk"


def made(typed: str, command: str = "chat", *args: str, talks: bool = True) -> list[str]:
    bundled = BundleHeader("story.gguf", START, 1, command, args)
    return start.arguments(typed.split(), OWN, bundled, [*COMMANDS], talks)


def test_alone_it_does_what_it_was_made_for() -> None:
    assert made("") == ["chat", OWN]
    assert made("", talks=False) == ["run", OWN]  # a prompt comes from a pipe
    assert made("", "run") == ["run", OWN]
    assert made("", "serve", "--port", "9") == ["serve", OWN, "--alias", "story", "--port", "9"]
    assert made("", "chat", "-c", "99") == ["chat", OWN, "-c", "99"]


def test_a_prompt_is_completed() -> None:
    assert made("hello -n 5") == ["run", OWN, "hello", "-n", "5"]
    assert made("-n 5 hello", "run", "--temp", "0") == [
        "run",
        OWN,
        "--temp",
        "0",
        "-n",
        "5",
        "hello",
    ]
    assert made("--port 7", "serve") == ["serve", OWN, "--alias", "story", "--port", "7"]


def test_a_command_takes_the_bundle_as_its_model() -> None:
    assert made("run hello", "serve", "--port", "9") == ["run", OWN, "hello"]
    assert made("bench -p 16") == ["bench", OWN, "-p", "16"]
    assert made("inspect --json") == ["inspect", OWN, "--json"]


def test_a_file_of_requests_is_answered_by_the_bundles_model() -> None:
    own = ["batch", "--model", OWN, "--alias", "story"]
    assert made("batch in out --max-tokens 5") == [*own, "in", "out", "--max-tokens", "5"]
    for other in ("-m a", "-ma", "--model a", "--model=a"):
        assert made(f"batch {other} in out") == ["batch", *other.split(), "in", "out"]


def test_llamafiles_modes() -> None:
    assert made("--server --port 7") == ["serve", OWN, "--alias", "story", "--port", "7"]
    assert made("--cli hello") == ["run", OWN, "hello"]
    assert made("--chat") == ["chat", OWN]


@pytest.mark.parametrize("typed", ["--help", "-h", "--version", "kernels --ir", "convert a b"])
def test_what_concerns_no_model_is_passed_on(typed: str) -> None:
    assert made(typed) == typed.split()


def test_every_command_that_begins_with_a_model_is_known() -> None:
    from importlib import import_module

    for name in COMMANDS:
        params = import_module(f"treadle.cli.commands.{name.replace('-', '_')}").command.params
        first = next((p.name for p in params if p.param_type_name == "argument"), None)
        takes = first in ("model", "models", "words") and name != "bundle"
        assert takes == (name in start.OF_MODELS), name


def test_where_the_program_lies_is_noted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREADLE_BUNDLE", "id-machine")
    start.remember(str(tmp_path))
    note = tmp_path / "id-machine"
    assert note.read_text() == f"{sys.executable}\n"
    note.write_text("as it was\n")
    start.remember(str(tmp_path))
    assert note.read_text() == "as it was\n"
    start.remember(str(tmp_path / "absent"))
    start.remember(None)
    assert [*tmp_path.iterdir()] == [note]


def test_kernels_lie_beside_it_where_the_usual_place_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = tmp_path / "usual"
    monkeypatch.setenv("TREADLE_CACHE", str(usual))
    start.keep_kernels(str(tmp_path / "b"))
    assert os.environ["TREADLE_CACHE"] == str(usual)
    monkeypatch.setenv("TREADLE_CACHE", "/proc/none")
    start.keep_kernels(str(tmp_path / "b"))
    assert os.environ["TREADLE_CACHE"] == str(tmp_path / "b" / "kernels")
