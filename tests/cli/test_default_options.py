"""Options for the defaults of answers: what ``serve``, ``batch`` and ``chat`` hand to ``load``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.cli.conftest import Run
from tests.cli.fake import FakeModel
from treadle.chat.template.variables import REASONING
from treadle.cli import default_options
from treadle.cli.default_options import for_other_machines, json_object
from treadle.cli.settings import AnswerSettings

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>{{ mood }}"


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "mine.jinja"
    path.write_text(TURNS)
    return str(path)


def test_the_words_are_the_librarys() -> None:
    assert default_options.REASONING == REASONING


@pytest.mark.parametrize("command", ["serve", "batch"])
def test_they_reach_the_model(
    command: str, run: Run, template: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: dict[str, Any] = {}

    def load(path: object, **settings: Any) -> Any:
        given.update(settings)
        raise treadle.TreadleError("that is enough")

    monkeypatch.setattr(treadle, "load", load)
    lines = tmp_path / "in.jsonl"
    out = tmp_path / "out.jsonl"
    lines.write_text('{"prompt": "x"}\n')
    words = ["serve"] if command == "serve" else ["batch", str(lines), str(out)]
    options = [
        "--chat-template",
        template,
        "--chat-template-kwargs",
        '{"mood": "glad"}',
        "--reasoning",
        "off",
        "--strict",
        "--temp",
        "0.5",
        "--top-k",
        "3",
        "--seed",
        "7",
        "--logit-bias",
        "5-inf",
    ]
    ran = run(*words, *options)
    assert (ran.code, "that is enough" in ran.err) == (1, True)
    assert given["chat_template"] == template
    assert given["chat_template_kwargs"] == {"mood": "glad"}
    assert given["reasoning"] == "off"
    assert given["strict"] is True
    bias = {5: float("-inf")}
    assert given["sampling"] == {"temperature": 0.5, "top_k": 3, "seed": 7, "logit_bias": bias}
    given.clear()
    run(*words)
    own = {"chat_template", "chat_template_kwargs", "reasoning", "sampling", "strict"}
    assert not given.keys() & own


@pytest.mark.parametrize("command", ["serve", "batch a b", "chat a", "doctor a"])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--chat-template", "chatm", "did you mean 'chatml'?): expected a file or one of llama3"),
        ("--chat-template", "BROKEN", "line 2: unexpected '}'"),
        ("--chat-template-kwargs", "[1]", "is not a JSON object"),
        ("--chat-template-kwargs", "{", "is not JSON"),
        ("--chat-template-kwargs", '{"messages": []}', "is set by treadle and cannot be given"),
        ("--reasoning", "maybe", "is not one of 'auto', 'on', 'off'"),
    ],
)
def test_wrong_values_are_wrong_usage(
    command: str, option: str, value: str, message: str, run: Run, tmp_path: Path
) -> None:
    """Told before a model is looked for."""
    if command.startswith("doctor") and option != "--chat-template":
        option = "--chat-template"
        value = ""
        message = "expected a file or a name"
    broken = tmp_path / "broken.jinja"
    broken.write_text("x\n{{ y %}")
    ran = run(*command.split(), option, str(broken) if value == "BROKEN" else value)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


def test_json_objects() -> None:
    assert json_object('{"a": [1, null]}') == {"a": [1, None]}


def test_other_machines_are_sent_the_text(template: str) -> None:
    assert for_other_machines({"chat_template": template})["chat_template"] == TURNS
    assert for_other_machines({"chat_template": "chatml"})["chat_template"] == "chatml"
    assert for_other_machines({"reasoning": "on"}) == {"reasoning": "on"}


def test_a_batch_with_defaults(run: Run, template: str, tmp_path: Path) -> None:
    """A line's own fields win."""
    lines = tmp_path / "in.jsonl"
    out = tmp_path / "out.jsonl"
    asked: list[dict[str, Any]] = [{"prompt": "def f("}] * 2
    asked += [{"prompt": "def f(", "temperature": 0}] * 2
    asked.append({"messages": [{"role": "user", "content": "hi"}]})
    lines.write_text("".join(json.dumps(line) + "\n" for line in asked))
    options = ["-n", "12", "--temp", "1.5", "--seed", "3", "-t", "1", "-c", "128"]
    own = ["--chat-template", template, "--deterministic"]
    ran = run("batch", str(lines), str(out), *options, *own)
    assert ran.code == 0
    found = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    texts = [line.get("text") for line in found[:4]]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    with treadle.load(threads=1, context=128, chat_template=template) as model:
        n = len(model.tokenizer.encode_prompt("<user>hi<assistant>"))
    assert found[4]["usage"]["prompt_tokens"] == n


def test_chat_asks_the_model(run: Run, model: FakeModel, gguf: str, template: str) -> None:
    def asked() -> list[Any]:
        return [call[2].get("reasoning") for call in model.calls if call[0] == "chat"]

    assert run("chat", gguf, "--reasoning", "off", stdin="hi\n/set reasoning on\nhi\n").code == 0
    assert asked() == ["off", "on"]
    model.calls.clear()
    assert (
        run("chat", gguf, stdin="hi\n/set reasoning off\nhi\n/set reasoning auto\nhi\n").code == 0
    )
    assert asked() == [None, "off", None]
    ran = run("chat", gguf, stdin="/set reasoning maybe\nhi\n")
    assert "'maybe' is not one of 'auto', 'on', 'off'" in ran.err
    model.template.builtin = "plain"
    assert "has no chat template" in run("chat", gguf, stdin="hi\n").err
    assert "has no chat" not in run("chat", gguf, "--chat-template", "plain", stdin="hi\n").err


def test_settings_of_a_chat() -> None:
    settings = AnswerSettings()
    assert (settings.of_chat(), settings.changed("reasoning", "off").of_chat()) == (
        {},
        {"reasoning": "off"},
    )
    assert settings.changed("show_reasoning", "on").show_reasoning


@pytest.mark.slow
def test_a_variable_that_the_template_does_not_read(
    run: Run, template: str, tmp_path: Path
) -> None:
    lines = tmp_path / "in.jsonl"
    out = tmp_path / "out.jsonl"
    lines.write_text('{"prompt": "x", "max_tokens": 1}\n')
    words = ["batch", str(lines), str(out), "-t", "1", "-c", "64", "--chat-template", template]
    ran = run(*words, "--chat-template-kwargs", '{"mood": "glad", "moood": "sad"}')
    assert ran.code == 0
    assert "the chat template does not use moood" in ran.err


@pytest.mark.slow
@pytest.mark.parametrize("reasoning", ["on", "off"])
def test_reasoning_that_cannot_be_switched(
    reasoning: str, run: Run, template: str, tmp_path: Path
) -> None:
    lines = tmp_path / "in.jsonl"
    out = tmp_path / "out.jsonl"
    lines.write_text('{"prompt": "x", "max_tokens": 1}\n')
    words = ["batch", str(lines), str(out), "-t", "1", "-c", "64", "--chat-template", template]
    told = f"has no reasoning to switch {reasoning}"
    assert told in run(*words, "--reasoning", reasoning).err
    for more, silent in (("{{ enable_thinking }}", True), ("{# </think> #}", reasoning == "off")):
        Path(template).write_text(TURNS + more)
        out.unlink()
        assert (told not in run(*words, "--reasoning", reasoning).err) == silent


def test_doctor_and_inspect_say_where_it_came_from(
    run: Run, template: str, data: Path, tmp_path: Path
) -> None:
    from treadle.cli.commands import doctor
    from treadle.cli.ui.progress import ProgressBar
    from treadle.convert.open import packaged_model

    path = str(packaged_model())
    about = doctor.look_at(path, ProgressBar(), template)
    assert about.chat is not None
    assert about.chat["template"] == "file mine.jinja, by option"
    about = doctor.look_at(path, ProgressBar(), "chatml")
    assert about.chat is not None
    assert about.chat["template"] == "built-in chatml, by option"
    ran = run("doctor", "--chat-template", template)
    assert (ran.code, "--chat-template needs a MODEL" in ran.err) == (2, True)
    report = json.loads(run("inspect", path, "--json").out)
    assert report["chat_template"] in ("the model's file", "built-in plain, the file has none")
    assert f"chat template: {report['chat_template']}" in run("inspect", path).out
