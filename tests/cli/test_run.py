from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.fake import BOS, FakeModel
from treadle.cli import load
from treadle.cli.commands.run import split_words
from treadle.cli.load import is_model
from treadle.sampling.settings import Sampling


def test_the_completion_alone_is_on_standard_output(run: Run, model: FakeModel, gguf: str) -> None:
    ran = run("run", gguf, "Once upon a time")
    assert (ran.code, ran.out, ran.err) == (0, "the quick brown fox", "")
    assert model.calls[1] == ("tokenize", "Once upon a time", None, True)


def test_max_tokens(run: Run, model: FakeModel, gguf: str) -> None:
    assert run("run", gguf, "Once", "-n", "2").out == "the quick"


@pytest.mark.parametrize(
    ("flags", "stdin", "prompt", "bos"),
    [
        ([], "two\nlines\n", "two\nlines", None),
        ([], "no newline", "no newline", None),
        ([], "", "", None),
        (["--raw"], "two\nlines\n", "two\nlines\n", False),
    ],
)
def test_prompt_from_standard_input(
    run: Run, model: FakeModel, gguf: str, flags: list[str], stdin: str, prompt: str, bos: bool
) -> None:
    assert run("run", gguf, *flags, stdin=stdin).code == 0
    assert model.calls[1] == ("tokenize", prompt, bos, not flags)


def test_standard_input_that_is_not_text(run: Run, model: FakeModel, gguf: str) -> None:
    ran = run("run", gguf, stdin=b"abc\xff")
    assert (ran.code, ran.out) == (1, "")
    assert "not UTF-8: byte 3" in ran.err


def test_json(run: Run, model: FakeModel, gguf: str) -> None:
    ran = run("run", gguf, "é", "--json")
    report = json.loads(ran.out)
    assert ran.err == ""
    assert report["text"] == "the quick brown fox"
    assert report["prompt"] == "é"
    assert report["prompt_ids"] == [BOS, 0xC3, 0xA9]
    assert report["ids"] == [0, 1, 2, 3]
    assert report["finish_reason"] == "stop"
    assert report["timings"]["n_generated"] == 4
    assert report["model"] == gguf


def test_a_full_context_is_said(run: Run, model: FakeModel, gguf: str) -> None:
    model.n_ctx = 7
    ran = run("run", gguf, "abcd")
    assert (ran.code, ran.out) == (0, "the quick")
    assert ran.err == "treadle: stopped: the context of 7 tokens is full\n"


def test_a_prompt_that_does_not_fit_is_one_clear_line(
    run: Run, model: FakeModel, gguf: str
) -> None:
    ran = run("run", gguf, "x" * 100)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "treadle: error: 101 tokens do not fit in a context of 64\n"


def test_settings_reach_the_engine(run: Run, model: FakeModel, gguf: str, tmp_path: Path) -> None:
    grammar = tmp_path / "list.gbnf"
    grammar.write_text('root ::= "- " [a-z]+')
    flags = ["-t", "3", "-c", "128", "--temp", "0", "--stop", "\n", "--stop", "END"]
    ran = run("run", gguf, "x", *flags, "--grammar", str(grammar))
    assert ran.code == 0
    assert model.calls[0] == ("load", gguf, {"threads": 3, "context": 128})
    settings = model.calls[2][2]
    assert settings["sampling"].greedy
    assert settings["stop"] == ("\n", "END")
    assert settings["grammar"] == grammar.read_text()
    assert settings["json_schema"] is None
    assert settings["max_tokens"] is None


def test_what_is_not_asked_for_is_as_the_file_recommends(
    run: Run, model: FakeModel, gguf: str
) -> None:
    own = model.sampling = Sampling(temperature=0.5, top_k=7)
    assert run("run", gguf, "x", "--top-k", "9", "--min-p", "0").code == 0
    assert run("chat", gguf, "--top-k", "40", stdin="hi\n/set top_k default\nhi\n").code == 0
    found = [call[-1]["sampling"] for call in model.calls if call[0] in ("generate", "chat")]
    asked = Sampling(temperature=0.5, top_k=40)
    checked = [asked, asked, own, own]  # before the first message, and as it is set
    assert found == [replace(own, top_k=9, min_p=0.0), *checked]


def test_json_schema_is_read_from_its_file(
    run: Run, model: FakeModel, gguf: str, tmp_path: Path
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    assert run("run", gguf, "x", "--json-schema", str(schema)).code == 0
    assert model.calls[2][2]["json_schema"] == '{"type": "object"}'
    assert run("run", gguf, "x", "--json-schema", str(schema), "--grammar", str(schema)).code == 2


def test_what_is_compiled_is_compiled_before_the_text(
    run: Run, model: FakeModel, gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the bar of a later plan is drawn over it; where no bar is, nothing is made early."""
    order: list[str] = []
    pieces = FakeModel.pieces

    def noted(model: FakeModel) -> Iterator[str]:
        order.append("text")
        yield from pieces(model)

    monkeypatch.setattr(FakeModel, "plan", lambda model: order.append("plan"))
    monkeypatch.setattr(FakeModel, "pieces", noted)
    run("run", gguf, "Once")
    assert order == ["text"]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    run("run", gguf, "Once")
    assert order == ["text", "plan", "text"]
    run("run", gguf, "Once", "-n", "1")
    assert order[3:] == ["text"]


def test_which_word_is_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a file with blanks.gguf").touch()
    Path("no-suffix").touch()
    for folder, weights in (("folder", "text"), ("several", "a.gguf"), ("hub", "a.safetensors")):
        Path(folder).mkdir()
        Path(folder, weights).touch()
    models = ("several", "hub", "folder/")
    for word in ("hf:a/b/c.gguf", "absent.gguf", "a file with blanks.gguf", "no-suffix", *models):
        assert is_model(word)
        assert split_words((word,)) == (word, None)
    for word in ("Once upon a time", "folder", "open the file model.gguf", "def f(n):", ""):
        assert not is_model(word)
        assert split_words((word,)) == (None, word)
    assert split_words(()) == (None, None)
    assert split_words(("absent", "Once")) == ("absent", "Once")


def test_words_beyond_model_and_prompt_are_wrong_usage(run: Run, model: FakeModel) -> None:
    ran = run("run", "Once", "upon", "a", "time")
    assert ran.code == 2
    assert "quotes" in ran.err
    assert model.calls == []


@pytest.mark.parametrize("option", ["--grammar", "--json-schema"])
def test_a_grammar_that_is_no_text(
    option: str, run: Run, model: FakeModel, gguf: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad"
    path.write_bytes(b"root \xff")
    ran = run("run", gguf, "x", option, str(path))
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"treadle: error: {path} at byte 5: is not UTF-8 (expected a text)\n"


def test_errors_of_a_grammar_name_its_file(run: Run, data: Path, tmp_path: Path) -> None:
    stories = str(data / "models" / "stories260K.gguf")
    path = tmp_path / "rules"
    path.write_text('root ::= "a')
    ran = run("run", stories, "x", "--grammar", str(path))
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"treadle: error: {path}: grammar, line 1, column 10: ")
    path.write_text('{"type": "string", "pattern": "(?=a)b"}')
    ran = run("run", stories, "x", "--json-schema", str(path))
    said = (
        f'treadle: error: {path}: JSON schema: "pattern": "(?=a)b" cannot be enforced: look-around'
    )
    assert ran.err.startswith(said)
    path.write_text('{"$ref": "#"}')  # found out only as the text begins
    assert f"{path}: rule root" in run("run", stories, "x", "--json-schema", str(path)).err
    assert ran.err.count("\n") == 1


def test_a_complete_grammar_ends_the_text_though_its_end_is_forbidden(
    run: Run, data: Path, tmp_path: Path
) -> None:
    stories = str(data / "models" / "stories260K.gguf")
    path = tmp_path / "rules"
    for grammar, text in (('root ::= "ab" "c"?', ("ab", "abc")), ('root ::= ""', ("",))):
        path.write_text(grammar)
        ran = run("run", stories, "x", "--grammar", str(path), "--ignore-eos", "--json")
        assert (ran.code, ran.err) == (0, "")
        report = json.loads(ran.out)
        assert report["finish_reason"] == "stop"
        assert report["text"] in text


def test_settings_that_the_vocabulary_lacks_are_wrong_usage(run: Run, data: Path) -> None:
    stories = str(data / "models" / "stories260K.gguf")
    ran = run("run", stories, "x", "-l", "99999+1")
    assert (ran.code, ran.out) == (2, "")
    assert "token 99999 is outside the vocabulary of 512" in ran.err
    assert run("run", stories, "x", "-t", "5000").code == 2
    ran = run("run", stories, "", "--raw")
    assert (ran.code, ran.out) == (1, "")
    assert "the prompt is empty: give at least one character as PROMPT or on standard in" in ran.err


def test_checkpoints_that_convert_takes_name_it(run: Run, data: Path, tmp_path: Path) -> None:
    ran = run("run", str(data / "models" / "stories260K.bin"), "x")
    assert (ran.code, ran.out) == (1, "")
    assert "a llama2.c checkpoint; `treadle convert`" in ran.err
    for head, helps in ((b"fmgg\1\0\0\0", True), (b"fmgg\x64\0\0\0", False), (b"what", False)):
        path = tmp_path / "old.bin"
        path.write_bytes(head + bytes(8))
        ran = run("run", str(path), "x")
        assert ran.code == 1
        assert ("treadle convert" in ran.err) is helps


def test_a_file_that_may_not_be_read_is_no_wrong_usage(
    run: Run, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests may run as root, who may read everything."""
    monkeypatch.setattr("os.access", lambda *_: False)
    stories = str(data / "models" / "stories260K.gguf")
    assert run("inspect", stories).code == 0
    assert run("plan", stories).code == 0
    assert run("tokenize", stories, "x").code == 0


@pytest.mark.parametrize("option", ["--grammar", "--json-schema"])
def test_a_grammar_without_an_end(run: Run, model: FakeModel, gguf: str, option: str) -> None:
    ran = run("run", gguf, "x", option, "/dev/zero")
    assert (ran.code, ran.out) == (1, "")
    why = "/dev/zero: has more than 16777216 bytes (expected a text)"
    assert ran.err == f"treadle: error: {why}\n"


def test_a_prompt_without_an_end(
    run: Run, model: FakeModel, gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "MAX_TEXT", 1 << 20)
    ran = run("run", gguf, stdin="x" * ((1 << 20) + 1))
    assert (ran.code, ran.out) == (1, "")
    assert "standard input: has more than 1048576 bytes" in ran.err
    assert "do not fit" in run("run", gguf, stdin="x" * (1 << 20)).err
