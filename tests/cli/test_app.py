from __future__ import annotations

import errno
import os

import pytest

import treadle
from tests.cli.conftest import Run
from tests.cli.fake import FakeModel
from treadle.cli import app
from treadle.errors import TreadleError


def test_help_names_every_command(run: Run) -> None:
    ran = run("--help")
    assert (ran.code, ran.err) == (0, "")
    for name in app.COMMANDS:
        assert f"\n  {name} " in ran.out
    assert "..." not in ran.out.partition("Commands:")[2]  # a line is whole
    assert max(map(len, ran.out.splitlines())) <= 80


@pytest.mark.parametrize("name", app.COMMANDS)
def test_every_command_has_help(run: Run, name: str) -> None:
    ran = run(name, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"Usage: treadle {name}")


def test_no_command_is_wrong_usage(run: Run) -> None:
    ran = run()
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("Usage: treadle")


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["rum"], "did you mean 'run'?"),
        (["help"], "try 'treadle --help'"),
        (["version"], "try 'treadle --version'"),
        (["download", "x"], "did you mean 'pull'?"),
        (["delete", "x"], "did you mean 'rm'?"),
        (["push"], "models are not uploaded"),
        ([os.sep], "is a folder, not a command: try 'treadle run"),
        (["show", "x", "--ngl", "3"], "--ngl is no option of this command: leave it out"),
        (["list", "--verbose"], "--verbose is no option of this command: leave it out"),
        (["show", "x", "--ctx-size", "3"], "No such option '--ctx-size'"),
        (["serve", "--port", "abc"], "'--port': 'abc': expected a whole number from 0 to 65535"),
        (["run", "x", "-c", "many"], "'many': expected a whole number from 1"),
        (["inspct", "x"], "did you mean 'inspect'?"),
        (["zzz"], "commands: run, chat"),
        (["story.gguf", "Once"], "try 'treadle run story.gguf PROMPT'"),
        (["run", "--tmep", "1"], "--temp"),
        (["bench", "--jsn", "m"], "--json"),
    ],
)
def test_misspelt_names_get_suggestions(run: Run, args: list[str], hint: str) -> None:
    ran = run(*args)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("treadle: error: ")
    assert hint in ran.err
    assert "--help'" in ran.err


@pytest.mark.parametrize("args", [["run", "-n", "0", "x"], ["run", "-n"], ["run", "--top-p", "2"]])
def test_wrong_values_are_wrong_usage(run: Run, args: list[str]) -> None:
    ran = run(*args)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("treadle: error: ")


def test_version(run: Run) -> None:
    ran = run("--version")
    assert (ran.code, ran.out, ran.err) == (0, f"treadle {treadle.__version__}\n", "")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (TreadleError("no such luck"), 1, "treadle: error: no such luck\n"),
        (
            OSError(errno.EACCES, "Permission denied", "m.gguf"),
            1,
            "treadle: error: m.gguf: Permission denied\n",
        ),
        (MemoryError(), 1, "treadle: error: out of memory\n"),
        (
            ImportError("a.so: failed to map segment", path="/b/a.so"),
            1,
            "treadle: error: a.so: failed to map segment "
            "(too little memory, or an incomplete file)\n",
        ),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)), 141, ""),
    ],
)
def test_what_goes_wrong_has_its_exit_code(
    run: Run,
    model: FakeModel,
    gguf: str,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    message: str,
) -> None:
    def fail(*args: object, **settings: object) -> None:
        raise error

    monkeypatch.setattr(FakeModel, "generate", fail)
    ran = run("run", gguf, "Once")
    assert (ran.code, ran.out, ran.err) == (code, "", message)


def test_our_own_bugs_keep_their_traceback(
    run: Run, model: FakeModel, gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FakeModel, "generate")
    with pytest.raises(AttributeError):
        run("run", gguf, "Once")


@pytest.mark.parametrize(
    "args",
    [
        ["inspect", "a\nb.gguf"],
        ["run", "a\nb.gguf", "x"],
        ["batch", "a\nb", "OUT"],
        ["run", "a\nb.gguf", "x", "--cache-dir", "c\nd"],
    ],
)
def test_an_error_is_one_line(run: Run, args: list[str]) -> None:
    ran = run(*args)
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert "a\\nb" in ran.err


@pytest.mark.parametrize("words", [["run"], ["serve"], ["cluster", "serve"], ["cluster"]])
@pytest.mark.parametrize("option", ["--port", "--no-such"])
def test_help_that_is_named_is_the_commands_own(run: Run, words: list[str], option: str) -> None:
    said = {"run": "-n", "cluster": "--no-such"}.get(words[-1], option)
    ran = run(*words, said)
    assert (ran.code, ran.err.splitlines()[1]) == (2, f"See 'treadle {' '.join(words)} --help'.")


def test_wrong_usage_is_one_line_and_where_help_is(run: Run, gguf: str) -> None:
    ran = run("run", gguf, "x", "--lora", "a\nb", "--kv", "c\nd")
    assert (ran.code, ran.err.count("\n")) == (2, 2)


@pytest.mark.parametrize(
    "args",
    [
        ["batch", "", "OUT"],
        ["batch", os.devnull, ""],
        ["imatrix", "{}", ""],
        ["imatrix", "{}", os.devnull, "-o", ""],
    ],
)
def test_an_empty_name_is_named(run: Run, gguf: str, args: list[str]) -> None:
    ran = run(*(arg.format(gguf) for arg in args))
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "treadle: error: '': an empty name (expected a file name)\n"
