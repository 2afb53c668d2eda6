"""Options for the defaults of answers: what ``serve``, ``batch`` and ``chat`` hand to ``load``."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import treadle
from tests.cli.conftest import Run
from tests.cli.fake import FakeModel
from treadle.chat.template.template import ChatTemplate
from treadle.chat.template.variables import REASONING
from treadle.cli import answer_options
from treadle.cli.answer_options import for_other_machines, json_object
from treadle.cli.commands import serve
from treadle.cli.foreign_options import ADVICE, advice
from treadle.cli.load import warn_of_template
from treadle.cli.settings import AnswerSettings
from treadle.cli.ui.progress import ProgressBar

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>{{ mood }}"


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "mine.jinja"
    path.write_text(TURNS)
    return str(path)


def test_the_words_are_the_librarys() -> None:
    assert answer_options.REASONING == REASONING


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
        "--reasoning-budget",
        "0",
        "--reasoning-budget-message",
        "Enough.",
        "--no-reasoning-preserve",
        "--jinja",
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
    budget = {"reasoning_budget": 0, "reasoning_budget_message": "Enough."}
    assert budget.items() <= given.items()
    assert given["reasoning_preserve"] is False
    assert given["strict"] is True
    bias = {5: float("-inf")}
    assert given["sampling"] == {"temperature": 0.5, "top_k": 3, "seed": 7, "logit_bias": bias}
    given.clear()
    run(*words)
    own = {"chat_template", "chat_template_kwargs", "sampling", "strict"}
    assert not given.keys() & own
    assert not any(name.startswith("reasoning") for name in given)


@pytest.mark.parametrize("command", ["serve", "batch a b", "chat a", "run hi", "doctor a"])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--chat-template", "chatm", "did you mean 'chatml'?): expected a file or one of last"),
        ("--chat-template", "BROKEN", "line 2: unexpected '}'"),
        ("--chat-template-kwargs", "[1]", "is not a JSON object"),
        ("--chat-template-kwargs", "{", "is not JSON"),
        ("--chat-template-kwargs", '{"messages": []}', "is set by treadle and cannot be given"),
        ("--reasoning", "maybe", "is not one of 'auto', 'on', 'off'"),
        ("--reasoning-budget", "-2", "is not in the range x>=-1"),
        ("--chat-template-file", "no/such.jinja", "is neither a file nor a built-in template"),
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


@pytest.mark.parametrize("command", ["serve", "chat a", "run hi", "batch a b"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--reasoning-effort low",
            "--reasoning-effort is no option of this command: use --chat-te",
        ),
        ("--ctx-size 99", "--ctx-size is no option of this command: use -c"),
        ("--ctx-size=99", "--ctx-size is no option of this command: use -c"),
        ("--max_tokens 9", "--max_tokens is no option of this command: use --max-tokens"),
        ("--max-new-tokens 9", "--max-new-tokens is no option of this command: use --max-tokens"),
        ("--num-ctx 9", "--num-ctx is no option of this command: use --context"),
        ("--ngl 99", "--ngl is no option of this command: leave it out"),
        ("-ngl 99", "-ngl is no option of this command: leave it out"),
        ("--no-jinja", "--no-jinja is no option of this command: leave it out"),
        ("-hf a/b", "-hf is no option of this command: give hf:OWNER/REPO as MODEL"),
        ("--temp -1 --mlock", "--mlock is no option"),
        ("--temp hot", "'hot' is not a valid float"),
        ("--nonsense", "No such option"),
    ],
)
def test_options_of_other_programs(command: str, words: str, said: str, run: Run) -> None:
    ran = run(*command.split(), *words.split())
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_prompts_as_options(run: Run) -> None:
    for option in ("-p", "--prompt"):
        ran = run("run", "a", option, "Once")
        assert (ran.code, ran.out) == (2, "")
        assert f"{option} is no option of this command: give the prompt without an" in ran.err
    assert "No such option" in run("serve", "-p", "80").err


def test_advice_is_for_options_that_a_command_lacks() -> None:
    assert advice(["--model", "a", "-c", "5"], {"--model"}) is None
    assert advice(["--model", "a"], ()) is not None
    own = {name for param in serve.command.params for name in param.opts}
    assert not own & (ADVICE.keys() - {"-m", "--model"})


def test_json_objects() -> None:
    assert json_object('{"a": [1, null]}') == {"a": [1, None]}


def test_other_machines_are_sent_the_text(template: str) -> None:
    assert for_other_machines({"chat_template": template})["chat_template"] == TURNS
    assert for_other_machines({"chat_template": "chatml"})["chat_template"] == "chatml"
    assert for_other_machines({"chat_template": "tool_use"})["chat_template"] == "tool_use"
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
    from treadle.api.options import packaged_model
    from treadle.cli.commands import doctor
    from treadle.cli.ui.progress import ProgressBar

    path = str(packaged_model())
    about = doctor.read_model_file(path, ProgressBar(), template)
    assert about.chat is not None
    assert about.chat["template"] == "file mine.jinja, by option"
    about = doctor.read_model_file(path, ProgressBar(), "chatml")
    assert about.chat is not None
    assert about.chat["template"] == "built-in chatml, by option"
    ran = run("doctor", "--chat-template", template)
    assert (ran.code, "--chat-template needs a MODEL" in ran.err) == (2, True)
    report = json.loads(run("inspect", path, "--json").out)
    assert report["chat_template"] in ("the model's file", "built-in plain, the file has none")
    assert f"chat template: {report['chat_template']}" in run("inspect", path).out


ASKED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
FAST = ["-t", "1", "-c", "128", "-n", "4", "--temp", "0"]


def prompt_of(run: Run, *words: str) -> str:
    """The prompt that ``run`` makes of the packaged model's."""
    ran = run("run", *words, *FAST, "--json")
    assert ran.code == 0, ran.err
    with treadle.load(threads=1, context=64) as model:
        return model.detokenize(json.loads(ran.out)["prompt_ids"], special=True)


def test_run_asks_by_the_template_that_is_named(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "asked.jinja"
    path.write_text(ASKED + "{{ mood }}")
    assert prompt_of(run, "hi").endswith("hi")
    assert "<user>" not in prompt_of(run, "hi", "--strict")
    own = ["--chat-template", str(path)]
    assert prompt_of(run, "hi", *own).endswith("<user>hi<assistant>")
    kwargs = ["--chat-template-kwargs", '{"mood": "glad"}']
    assert prompt_of(run, "hi", *own, *kwargs).endswith("<user>hi<assistant>glad")
    assert prompt_of(run, "hi", "--chat-template", "zephyr").endswith("<|assistant|>\n")
    ran = run("run", "hi", *own, "--raw")
    assert (ran.code, "--raw uses no chat template: leave out --chat-template" in ran.err) == (2, 1)


def test_run_shows_no_reasoning(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "opened.jinja"
    path.write_text(ASKED + "<think>\n{# </think> #}")
    words = ["run", "hi", "--chat-template", str(path), "-t", "1", "-c", "128", "--temp", "0"]
    ran = run(*words, "-n", "4")
    assert (ran.code, ran.out) == (0, "")
    assert "ended within the model's reasoning" in ran.err
    for own in (["--reasoning-budget", "3"], ["--reasoning", "off"], ["--reasoning-budget", "0"]):
        ran = run(*words, "-n", "24", *own)
        assert ran.code == 0
        assert ran.out
        assert "<think>" not in ran.out


@pytest.mark.parametrize(
    "command", [["run", "hi"], ["serve", "--port", "0"], ["batch", "IN", "OUT"]]
)
def test_a_template_that_refuses_messages_is_told_at_the_start(
    command: list[str], run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "refuses.jinja"
    path.write_text("\n{{ raise_exception('only the system may speak') }}")
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    names = {"IN": str(lines), "OUT": str(tmp_path / "out.jsonl")}
    words = [names.get(word, word) for word in command]
    ran = run(*words, "--chat-template", str(path), "-t", "1", "-c", "64")
    assert (ran.code, ran.out) == (1, "")
    assert "chat template, line 2: only the system may speak (from file refuses.jinja" in ran.err
    ran = run(*words, "--chat-template", "tool_use", "-t", "1", "-c", "64")
    assert (ran.code, ran.out) == (1, "")
    assert "'tool_use' is not a file, nor a template of demo.gguf, which has no template" in ran.err


def test_chat_shows_reasoning_with_a_budget(run: Run, tmp_path: Path) -> None:
    """The packaged model, which reasons without sense."""
    path = tmp_path / "opened.jinja"
    path.write_text(ASKED + "<think>\n{# </think> #}")
    with treadle.load(threads=1) as model:
        demo = str(model.path)
    record = tmp_path / "talk.json"
    words = ["chat", demo, "--chat-template-file", str(path), *FAST[:4], "-n", "20", "--temp", "0"]
    words += ["--reasoning-budget", "5", "--reasoning-budget-message", "So be it."]
    ran = run(*words, stdin="hi\n")
    assert ran.code == 0, ran.err
    assert "thought for " in ran.err
    assert ran.out.strip()
    ran = run(*words, "--show-reasoning", stdin="hi\n")
    assert "So be it." in ran.err
    assert "So be it." not in ran.out
    ran = run(*words, "--reasoning-preserve", stdin=f"hi\nho\n/save {record}\n/swap\n")
    assert "warning: --reasoning-preserve: the chat template leaves out reasoning" in ran.err
    saved = json.loads(record.read_text())["messages"]
    assert saved[1]["reasoning_content"].endswith("So be it.")
    assert "So be it." not in saved[1]["content"]
    ran = run(*words, "--load", str(record), stdin="/save " + str(record) + "\n")
    assert json.loads(record.read_text())["messages"] == saved


def test_a_budget_without_reasoning_is_told(run: Run, template: str) -> None:
    words = ["run", "hi", *FAST, "--chat-template", template]
    told = "warning: --reasoning-budget: the chat template has no reasoning to limit"
    assert told in run(*words, "--reasoning-budget", "5").err
    assert told in run(*words, "--reasoning-budget-message", "So.").err
    assert told not in run(*words, "--reasoning-budget", "-1").err


@pytest.mark.parametrize(
    ("source", "own", "told"),
    [
        (TURNS, True, ""),
        ("\n{{ raise_exception('no') }}", True, "line 2: no"),
        ("\n{{ raise_exception('no') }}", False, ""),  # an error of load
        ("hello", True, "leaves out what the user says"),
    ],
)
def test_serve_warns_of_a_files_own_template(
    source: str, own: bool, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model: Any = SimpleNamespace(
        defaults=SimpleNamespace(template=None if own else object()),
        gguf=SimpleNamespace(metadata={"tokenizer.chat_template": source}),
        template=ChatTemplate(source),
    )
    warn_of_template(model, ProgressBar())
    said = capsys.readouterr().err
    assert bool(told) == bool(said)
    assert told in said
    assert said.endswith("; --chat-template replaces it\n") or not told
