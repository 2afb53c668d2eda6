"""No control byte of a file or a model reaches a terminal: errors, tables, bars, answers."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.fake import FakeModel
from tests.cli.test_progress import put_up_terminal
from treadle import errors
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import SHOWN, emit, heading, print_json, print_table
from treadle.errors import MAX_SHOWN, FileError, TemplateError, TreadleError
from treadle.files.gguf_writer import GGUFWriter
from treadle.files.pickles import load_pickle

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202eno"
SAFE = r"\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202eno"
CONTROLS = {*map(chr, range(32)), *map(chr, range(0x7F, 0xA0))} - set("\n\t")
KINDS = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, TreadleError)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def put_up_stdout(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace standard output (not in a fixture: pytest sets it anew between fixture and test)."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    made = Terminal()
    monkeypatch.setattr("sys.stdout", made)
    return made


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_text_of_an_error_is_safe_and_bounded(kind: type[TreadleError]) -> None:
    def make(text: str) -> TreadleError:
        return FileError(text, path="a.gguf") if issubclass(kind, FileError) else kind(text)

    assert str(make(f"{EVIL}\n\tindeed")).endswith(f"{SAFE}\n\tindeed")
    assert str(make("x" * 10**6)).endswith(" characters)")
    assert len(str(make("x" * 10**6))) < MAX_SHOWN + 50


def test_errors_of_the_system(run: Run, gguf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **settings: object) -> None:
        raise OSError(13, f"broken {EVIL}", f"a{EVIL}.gguf")

    monkeypatch.setattr("treadle.load", load, raising=False)
    ran = run("run", gguf, "hello")
    assert (ran.code, ran.err) == (1, f"treadle: error: a{SAFE}.gguf: broken {SAFE}\n")


def test_names_of_a_pickle() -> None:
    raw = b"\x80\x02c\x1b[2J\x07\nf\n."
    with pytest.raises(FileError) as caught:
        load_pickle(raw, {}, lambda _: None, path=Path("a.pth"), where="data.pkl")
    assert r"asks for \x1b[2J\x07.f" in str(caught.value)


def test_errors_within_a_chat(
    run: Run, model: FakeModel, gguf: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*args: object, **settings: object) -> None:
        raise TemplateError(f"roles {EVIL}")

    monkeypatch.setattr(FakeModel, "chat", refuse)
    lines = ["hi", f"/save {tmp_path}/absent/talk", "/load absent", "/stats"]
    assert run("chat", gguf, stdin="\n".join(lines)).err.splitlines() == [
        f"treadle: error: roles {SAFE}",
        f"treadle: error: not saved: {tmp_path}/absent/talk: cannot be written: its folder does "
        "not exist",
        "treadle: error: cannot read absent: No such file or directory",
        "no answer yet",
    ]


def test_a_saved_system_prompt(
    run: Run, model: FakeModel, gguf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    record = tmp_path / "talk.json"
    record.write_text(json.dumps({"system": EVIL, "messages": []}))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert SAFE[:-8] in run("chat", gguf, "--load", str(record), stdin="/system\n").err


# -- tables, headings, JSON, bars -----------------------------------------------------------------


def test_a_files_keys_names_and_values(run: Run, tmp_path: Path) -> None:
    path = tmp_path / f"{EVIL[:5]}.gguf"
    writer = GGUFWriter(path)
    writer.add("general.architecture", f"llama{EVIL}")
    writer.add(f"key{EVIL}", [EVIL, EVIL])
    writer.write()
    for more in ([], ["--json"], ["--diff", str(path)]):
        ran = run("inspect", str(path), *more)
        assert not CONTROLS & set(ran.out + ran.err)
    assert json.loads(run("inspect", str(path), "--json").out)["path"] == str(path)


def test_headings_cells_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = put_up_stdout(monkeypatch)
    heading(EVIL)
    print_table(["cell"], [[EVIL], ["x" * 10**5]])
    print_json({"text": EVIL})
    first, _, cell, *_, last = terminal.getvalue().splitlines()
    assert first == cell == SAFE
    assert f"… ({10**5} characters)" in terminal.getvalue().replace("\n", "")
    assert len(terminal.getvalue()) < 2 * SHOWN
    assert json.loads(last) == {"text": EVIL}
    assert not CONTROLS & set(last)


def test_a_bars_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = put_up_terminal(monkeypatch, 0.0)
    with ProgressBar() as bar:
        bar(f"downloading {EVIL}.gguf", 1, 100)
        assert "owned\\x07" in terminal.getvalue()
        assert "\x1b]0;" not in terminal.getvalue()


# -- what a model writes --------------------------------------------------------------------------


def test_an_answer_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = put_up_stdout(monkeypatch)
    emit("a\tb\nc\r\nd\r")
    emit("\x1b")
    emit("[2J\x9b \x07 é 猫 👩\u200d💻")
    assert terminal.getvalue() == "a\tb\nc\r\nd\\r\\x1b[2J\\x9b \\x07 é 猫 👩\u200d💻"


@pytest.mark.parametrize("command", ["run", "chat"])
def test_an_answer_in_a_pipe_is_exact(
    run: Run, model: FakeModel, gguf: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.text = EVIL
    assert run(command, gguf, stdin="hi").out.removesuffix("\n") == EVIL
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run(command, gguf, stdin="hi").out.startswith(SAFE[:-8])  # U+202E steers no terminal
