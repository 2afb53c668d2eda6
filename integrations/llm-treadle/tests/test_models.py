"""The plugin in the real llm: its Python API, its command line and its logs."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import llm
import pytest
from click.testing import CliRunner
from llm.cli import cli
from llm.parts import StreamEvent
from pydantic import BaseModel

import treadle
from llm_treadle.loaded import close_models, loaded_model
from llm_treadle.registry import VECTORS, Entry, add_entry

ROOT = Path(__file__).resolve().parents[3]
DATA = Path(os.environ.get("TREADLE_TEST_DATA", ROOT.parent / "shared" / "data"))
DEMO = Path(treadle.__file__).parent / "data" / "demo.gguf"
NAME = "treadle/code"
GREEDY = {"temperature": 0.0, "max_tokens": 8}
HI = [{"role": "user", "content": "hi"}]


class Colour(BaseModel):
    name: Literal["red", "green"]
    dark: bool


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """llm's folder. The models on this machine are one: the demo, under the name of NAME."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "code.gguf").symlink_to(DEMO)
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TREADLE_MODELS", str(folder))
    return tmp_path


@pytest.fixture(autouse=True, scope="session")
def models_end() -> Iterator[None]:
    yield
    close_models()


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


def demo() -> treadle.Model:
    """The model behind NAME."""
    return loaded_model(llm.get_model(NAME).entry.source, {})


def expected(messages: Any = HI, n: int = 8, **settings: Any) -> str:
    made: treadle.Generation = demo().chat(messages, temperature=0, max_tokens=n, **settings)
    return made.finish()


def test_prompt() -> None:
    response = llm.get_model(NAME).prompt("hi", **GREEDY)
    pieces = list(response)
    assert len(pieces) > 2
    assert "".join(pieces) == response.text() == expected()
    usage = response.usage()
    assert usage.output == 8
    assert usage.input == len(demo().tokenize(demo().chat_prompt(HI)))
    assert response.json()["finish_reason"] == "length"


def test_conversation_with_a_system_prompt() -> None:
    conversation = llm.get_model(NAME).conversation()
    first = conversation.prompt("hi", system="Be brief.", **GREEDY).text()
    second = conversation.prompt("again", **GREEDY).text()
    asked = [{"role": "system", "content": "Be brief."}, *HI]
    assert first == expected(asked)
    asked += [{"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
    assert second == expected(asked)


def test_options() -> None:
    model = llm.get_model(NAME)
    assert model.prompt("hi", regex="a{3}b").text() == "aaab"
    assert model.prompt("hi", grammar='root ::= "yes"').text() == "yes"
    seeded = [model.prompt("hi", seed=5, temperature=2.0, max_tokens=12).text() for _ in "ab"]
    assert seeded[0] == seeded[1] != expected(n=12)
    text = expected(n=12)
    assert model.prompt("hi", stop=text[6:9], temperature=0, max_tokens=12).text() == text[:6]
    with pytest.raises(ValueError, match="top_p"):
        model.prompt("hi", top_p=3)
    with pytest.raises(llm.ModelError, match="top_k"):
        model.prompt("hi", top_k=2**40).text()
    with pytest.raises(llm.ModelError, match="32"):
        model.prompt("word " * 40, context=32).text()


def test_schema() -> None:
    made = llm.get_model(NAME).prompt("hi", schema=Colour).text()
    Colour.model_validate_json(made)


def test_tools() -> None:
    """A call, its result, and the answer that follows: what treadle itself makes of them."""

    def paint(colour: Literal["red", "green"]) -> str:
        """Paint the house."""
        return f"painted {colour}"

    # A stub in place of the demo, which never calls by itself.
    model = llm.get_model(NAME)
    real = demo().chat
    asked: list[Any] = []

    def forced(messages: Any, **settings: Any) -> Any:
        asked.append((messages, settings))
        if messages[-1]["role"] == "user":
            settings["tool_choice"] = "required"
            settings["parallel"] = False
        else:
            settings = {**settings, "regex": "done"}
            settings.pop("tools")
        return real(messages, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo(), "chat", forced)
        chain = model.chain("hi", tools=[paint])
        text = chain.text()
        events = list(chain._responses[0].stream_events())
    (call,) = chain._responses[0].tool_calls()
    assert call.name == "paint"
    result = f"painted {call.arguments['colour']}"
    assert text == "done"
    messages = asked[1][0]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["id"] == call.tool_call_id
    assert json.loads(messages[1]["tool_calls"][0]["function"]["arguments"]) == call.arguments
    assert messages[2]["content"] == result
    assert messages[2]["tool_call_id"] == call.tool_call_id
    assert asked[0][1]["tools"][0]["function"]["description"] == "Paint the house."
    assert [event.type for event in events][:2] == ["tool_call_name", "tool_call_args"]


def test_a_call_that_is_cut_short() -> None:
    def paint(colour: Literal["red", "green"]) -> str:
        return colour

    model = llm.get_model(NAME)
    real = demo().chat
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo(), "chat", lambda *a, **s: real(*a, **s, tool_choice="paint"))
        with pytest.raises(llm.ModelError, match=r"within its call of paint \(length\)"):
            model.prompt("hi", tools=[paint], max_tokens=16).text()


def test_reasoning() -> None:
    """Reasoning is an event of its own, is in the history, and may be hidden."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}<think>\n{# </think> #}"
    )
    entry = llm.get_model(NAME).entry
    options = {"chat_template": template}
    thinking = type(llm.get_model(NAME))(type(entry)("t", entry.source, options=options))
    response = thinking.prompt("hi", reasoning_budget=3, max_tokens=12, temperature=0)
    events = list(response.stream_events())
    assert {event.type for event in events} == {"reasoning", "text"}
    assert all(isinstance(event, StreamEvent) for event in events)
    reasoning = "".join(event.chunk for event in events if event.type == "reasoning")
    follow = response.reply("again", max_tokens=1, reasoning="off")
    follow.text()
    model = loaded_model(entry.source, options)
    assert reasoning
    assert model.chat_prompt([*HI]).endswith("<think>\n")
    hidden = thinking.prompt("hi", reasoning_budget=3, max_tokens=12, hide_reasoning=True)
    assert {event.type for event in hidden.stream_events()} <= {"text"}


def test_async() -> None:
    model = llm.get_async_model(NAME)

    async def ask() -> tuple[str, int | None, list[str]]:
        response = model.prompt("hi", **GREEDY)
        pieces = [piece async for piece in response]
        both = await asyncio.gather(
            *(model.prompt("hi", temperature=0, max_tokens=n).text() for n in (2, 3))
        )
        return "".join(pieces), (await response.usage()).output, both

    text, n_tokens, both = asyncio.run(ask())
    assert (text, n_tokens) == (expected(), 8)
    assert both == [expected(n=2), expected(n=3)]


def test_an_abandoned_async_answer_ends() -> None:
    async def ask() -> None:
        generator = llm.get_async_model(NAME).prompt("hi", max_tokens=400).astream_events()
        await anext(generator)
        await generator.aclose()

    asyncio.run(ask())
    assert demo().stepper.scheduler.idle


def test_pictures(home: Path) -> None:
    """A picture of a prompt reaches the model: its answer is that of treadle's own chat."""
    if not DATA.is_dir():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{DATA} is absent under CI")
        pytest.skip(f"{DATA} is absent: this test needs the shared models")
    source = DATA / "media" / "qwen3vl" / "text.gguf"
    picture = DATA / "media" / "media" / "plain.png"
    made = CliRunner().invoke(
        cli, ["treadle", "register", "eyes", str(source), "-o", "context", "1024"]
    )
    assert made.exit_code == 0, made.output
    model = llm.get_model("eyes")
    assert "image/png" in model.attachment_types
    assert not llm.get_model(NAME).attachment_types
    parts = [{"type": "text", "text": "What?"}, {"type": "image", "path": str(picture)}]
    own = loaded_model(str(source), {"context": 1024})
    text = own.chat([{"role": "user", "content": parts}], temperature=0, max_tokens=4).finish()
    for attachment in (
        llm.Attachment(path=str(picture)),
        llm.Attachment(content=picture.read_bytes()),
    ):
        made = model.prompt("What?", attachments=[attachment], temperature=0, max_tokens=4)
        assert made.text() == text
        assert made.usage().input > 70  # rows of the picture


# -- the command line --------------------------------------------------------------------------


def test_prompt_is_logged(runner: CliRunner, home: Path) -> None:
    asked = ["-m", NAME, "-o", "temperature", "0", "-o", "max_tokens", "8"]
    made = runner.invoke(cli, ["prompt", "hi", *asked])
    assert made.exit_code == 0, made.output
    assert made.output.rstrip("\n") == expected().rstrip("\n")
    again = runner.invoke(cli, ["prompt", "again", "--continue", *asked])
    assert again.exit_code == 0, again.output
    logged = runner.invoke(cli, ["logs", "--json", "-n", "2"])
    first, second = json.loads(logged.output)
    assert (first["model"], first["prompt"], first["output_tokens"]) == (NAME, "hi", 8)
    assert first["response_json"]["finish_reason"] == "length"
    assert first["conversation_id"] == second["conversation_id"]
    assert second["input_tokens"] > first["input_tokens"]
    history = [*HI, {"role": "assistant", "content": first["response"]}]
    assert second["response"] == expected([*history, {"role": "user", "content": "again"}])


def test_schema_and_errors(runner: CliRunner) -> None:
    made = runner.invoke(cli, ["prompt", "hi", "-m", NAME, "--schema", "name, age int"])
    assert made.exit_code == 0, made.output
    assert set(json.loads(made.output)) == {"name", "age"}
    wrong = runner.invoke(cli, ["prompt", "hi", "-m", NAME, "-o", "grammar", "root ::= ("])
    assert wrong.exit_code == 1
    assert "Error: " in wrong.output


def test_embeddings(runner: CliRunner) -> None:
    """Vectors of the model itself. That of the demo will do, though it is no embedding model."""
    add_entry(Entry("vectors", str(DEMO), VECTORS, aliases=("v",)))
    own = loaded_model(str(DEMO), {})
    made = runner.invoke(cli, ["embed", "-m", "v", "-c", "hello", "-f", "json"])
    assert made.exit_code == 0, made.output
    assert json.loads(made.output) == own.embed(["hello"])[0].tolist()
    model = llm.get_embedding_model("vectors")
    many = list(model.embed_multi(["a", "b c", "d"], batch_size=2))
    assert many == [*own.embed(["a", "b c"]).tolist(), *own.embed(["d"]).tolist()]
    listed = runner.invoke(cli, ["embed-models", "list"]).output
    assert "TreadleEmbedding: vectors (aliases: v)" in listed
    with pytest.raises(llm.ModelError, match="tokens"):
        model.embed("word " * 5000)


def test_list_and_register(runner: CliRunner, home: Path) -> None:
    listed = runner.invoke(cli, ["treadle", "list"])
    assert listed.output.startswith(f"{NAME}: text, ")
    made = runner.invoke(
        cli, ["treadle", "register", "mine", str(DEMO), "-a", "m", "-o", "context", "64"]
    )
    assert made.exit_code == 0, made.output
    entries = {
        each["name"]: each
        for each in json.loads(runner.invoke(cli, ["treadle", "list", "--json"]).output)
    }
    assert entries["mine"]["options"] == {"context": 64}
    assert entries["mine"]["aliases"] == ["m"]
    assert entries[NAME]["registered"] is False
    assert llm.get_model("m").model_id == "mine"
    with pytest.raises(llm.ModelError, match="64"):
        llm.get_model("m").prompt("word " * 80).text()
    assert "Treadle" in runner.invoke(cli, ["models", "list"]).output
    assert runner.invoke(cli, ["treadle", "unregister", "mine"]).exit_code == 0
    gone = runner.invoke(cli, ["treadle", "unregister", "mine"])
    assert "mine: no registered model has this name" in gone.output
    bert = DATA / "arch" / "bert.gguf"
    if bert.is_file():
        made = runner.invoke(cli, ["treadle", "register", "bert", str(bert)])
        assert made.output == f"bert: embeddings, {bert.resolve()}\n"
    none = runner.invoke(cli, ["treadle", "register", "none", "/nowhere/none.gguf"])
    assert none.exit_code == 1
    assert "none.gguf" in none.output
    (home / "treadle.json").write_text("[1]")
    broken = runner.invoke(cli, ["treadle", "list"])
    assert "mend or remove it" in broken.output
