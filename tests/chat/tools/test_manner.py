"""What a chat template has is found by rendering it: every family's call is found again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.chat.tools.families import (
    ARGUMENTS,
    BARE_TEMPLATE,
    HERMES_TEMPLATE,
    TEMPLATES,
    TOLD,
    TOOLS,
    F,
    found_dialect,
    row,
)
from treadle.chat.template.template import ChatTemplate
from treadle.chat.tools import AnswerMarks, ParsedOutput, find_dialect
from treadle.chat.tools.detect import TemplateDialect
from treadle.chat.tools.formats import BARE, GENERIC, HERMES
from treadle.chat.tools.messages import in_another_form, messages_for_template, short_id
from treadle.chat.tools.schemas import simplified
from treadle.errors import TemplateError

REAL = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "actions",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "action",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek-r1",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek-r1",
    "fireworks-ai-llama-3-firefunction-v2": "functools",
    "llama-cpp-deepseek-r1": "deepseek-r1",
    "meetkai-functionary-medium-v3.1": "function",
    "meetkai-functionary-medium-v3.2": "recipient",
    "meta-llama-Llama-3.1-8B-Instruct": "json",
    "meta-llama-Llama-3.2-3B-Instruct": "json",
    "meta-llama-Llama-3.3-70B-Instruct": "json",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral-list",
}
WITHOUT = ["google-gemma-2-2b-it", "microsoft-Phi-3.5-mini-instruct"]
USER = {"role": "user", "content": "hi"}


def real(data: Path, name: str) -> ChatTemplate:
    return ChatTemplate((data / "templates" / f"{name}.jinja").read_text("utf-8"), bos="<s>")


def calling(arguments: Any = None) -> list[dict[str, Any]]:
    """A conversation with one call and its result."""
    given = ARGUMENTS if arguments is None else arguments
    function = {"name": "f", "arguments": given}
    call = {"id": "call_0123456789", "type": "function", "function": function}
    return [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0123456789", "content": "[2]"},
    ]


def check_found_again(template: ChatTemplate, dialect: TemplateDialect) -> None:
    """The call that is rendered for the model is the one that is read of it."""
    messages, tools = messages_for_template(calling()[:2], [F], dialect)
    rendered = template.render(messages, tools=tools, add_generation_prompt=False)
    own = dialect.row
    mark = own.channels.start if own.channels else own.trigger or '{"name": "f"'
    marks = AnswerMarks(row=own, channels=dialect.channels, tools=TOOLS)
    told = ParsedOutput.of(marks.scanner().feed(rendered[rendered.rindex(mark) :], last=True))
    assert [(c.name, json.loads(c.arguments)) for c in told.calls] == [("f", ARGUMENTS)]
    messages, tools = messages_for_template(calling(), [F], dialect)
    rendered = template.render(messages, tools=tools)
    assert "[2]" in rendered
    assert "F." in rendered  # the tool's description


@pytest.mark.parametrize("name", REAL)
def test_the_templates_of_models(name: str, data: Path) -> None:
    template = real(data, name)
    dialect = found_dialect(template)
    assert dialect.row.name == REAL[name]
    assert dialect.writes_calls
    if not dialect.shows_tools:  # then the prompt shows them, and says how to call
        messages, tools = messages_for_template([USER], [F], dialect)
        assert tools is None
        assert dialect.row.write(("NAME", {"ARGUMENT": "VALUE"})) in template.render(messages)
    check_found_again(template, dialect)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_families_that_have_no_template_there(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name])
    dialect = found_dialect(template)
    assert dialect.row.name == name
    assert dialect.shows_tools
    assert dialect.channels == row(name).channels
    check_found_again(template, dialect)


@pytest.mark.parametrize("name", TOLD)
def test_templates_that_leave_calls_to_contents(name: str) -> None:
    template = ChatTemplate(TOLD[name])
    dialect = found_dialect(template)
    assert dialect.row.name == name
    assert (dialect.writes_calls, dialect.shows_tools, dialect.has_results) == (False, True, True)
    check_found_again(template, dialect)
    messages, tools = messages_for_template(calling(), [F], dialect)
    assert tools is not None
    rendered = template.render(messages, tools=tools)
    assert f"<|turn|>assistant\n{dialect.row.write(('f', ARGUMENTS))}<|end|>" in rendered
    assert "<|turn|>tool\n[2]<|end|>" in rendered


def test_such_templates_without_a_place_for_results() -> None:
    source = TOLD["python"].replace("{{ m.content", "{{ '' if m.role == 'tool' else m.content")
    template = ChatTemplate(source)
    dialect = found_dialect(template)
    assert (dialect.shows_tools, dialect.has_results) == (True, False)
    messages, _ = messages_for_template(calling(), [F], dialect)
    assert "<|turn|>user\n<tool_response>\n[2]\n</tool_response>" in template.render(messages)


def test_ids_that_come_first() -> None:
    """Solar Open's template raises without one, and tells its model of ten letters and digits."""
    template = ChatTemplate(TEMPLATES["solar"])
    dialect = found_dialect(template)
    for own in ("call_0123456789", None):
        talk = calling()
        talk[1]["tool_calls"][0]["id"] = talk[2]["tool_call_id"] = own
        made, shown = messages_for_template(talk, [F], dialect)
        text = template.render(made, tools=shown)
        ids = re.findall(r"<.tool_(?:call|response):begin.>([a-z0-9]{10})<", text)
        assert len(ids) == 2
        assert ids[0] == ids[1]


def test_text_before_calls_that_a_template_leaves_out() -> None:
    """Solar Open's writes a message's text or its calls. The text is a message before them."""
    template = ChatTemplate(TEMPLATES["solar"])
    dialect = found_dialect(template)
    assert dialect.call_content.apart
    talk = calling()
    talk[1] |= {"content": "let me look", "reasoning_content": "hm"}
    made, shown = messages_for_template(talk, [], dialect)
    text = template.render(made, tools=shown)
    order = ("<|content|>let me look<|end|>", "<|tool_calls|>", '"n": -3', "[2]")
    assert [text.index(each) for each in order] == sorted(text.index(each) for each in order)
    assert text.count("let me look") == 1
    begun = "<|tool_calls|>"
    both = TEMPLATES["solar"].replace(begun, f"<|content|>{{{{ m.content }}}}{begun}")
    assert not find_dialect(ChatTemplate(both)).call_content.apart


def test_ids_that_name_the_tool() -> None:
    """Kimi's template writes an id in place of the name, and counts calls."""
    template = ChatTemplate(TEMPLATES["kimi"])
    dialect = found_dialect(template)
    calls = [{"id": id, "type": "function", "function": F["function"]} for id in ("a", "b")]
    for call in calls:
        call["function"] = {"name": "f", "arguments": {}}
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": id, "content": id} for id in ("b", "a", "lost")]
    own = {"id": "a", "type": "function", "function": {"name": "g", "arguments": {}}}
    messages, _ = messages_for_template(
        [USER, turn, *results, {**turn, "tool_calls": [own]}], [F], dialect
    )
    assert [call["id"] for m in messages for call in m.get("tool_calls", ())] == [
        "functions.f:0",
        "functions.f:1",
        "functions.g:2",
    ]
    assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == [
        "functions.f:1",
        "functions.f:0",
        "lost",
    ]


@pytest.mark.parametrize("name", WITHOUT)
def test_templates_without_tools_are_told_by_the_prompt(name: str, data: Path) -> None:
    template = real(data, name)
    dialect = found_dialect(template)
    assert (dialect.row, dialect.writes_calls, dialect.shows_tools) == (GENERIC, False, False)
    messages, tools = messages_for_template(calling(), [F], dialect)
    assert tools is None
    rendered = template.render(messages)
    assert HERMES.write(("f", ARGUMENTS)) in rendered
    assert HERMES.write(("NAME", {"ARGUMENT": "VALUE"})) in rendered
    assert "<tool_response>\n[2]\n</tool_response>" in rendered


RESULTS = [{"x": [None, "é"]}, [{"x": 1}], [1, 2], 3, True]


@pytest.mark.parametrize("name", [*REAL, *WITHOUT])
def test_results_that_are_no_text(name: str, data: Path) -> None:
    """Are JSON where templates raise on them, or write them as Python does."""
    template = real(data, name)
    for result in RESULTS:
        said = [*calling()[:2], {**calling()[2], "content": result}]
        messages, tools = messages_for_template(said, [F], found_dialect(template))
        expected = json.dumps(result, ensure_ascii=False)
        assert expected in template.render(messages, tools=tools)
        if "DeepSeek" in name or "functionary" in name:
            with pytest.raises(TemplateError) as raised:
                template.render(said)
            assert expected in template.render(in_another_form(said, template, raised.value))


def test_a_template_that_writes_objects_itself_is_given_them(data: Path) -> None:
    """A text is quoted there."""
    template = real(data, "meta-llama-Llama-3.1-8B-Instruct")
    said = [*calling()[:2], {**calling()[2], "content": {"x": 1}}]
    messages, tools = messages_for_template(said, [F], found_dialect(template))
    assert '\n\n{"x": 1}' in template.render(messages, tools=tools)


def test_schemas_that_say_little(data: Path) -> None:
    """Command R+'s template wants a description of everything, and what is within."""
    template = real(data, "CohereForAI-c4ai-command-r-plus-tool_use")
    dialect = found_dialect(template)
    inner: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "array"}}}
    inner["additionalProperties"] = False
    properties: dict[str, Any] = {"a": {"type": "string"}, "b": {}, "c": inner}
    properties["d"] = {"type": "array", "items": inner}
    parameters = {"type": "object", "properties": properties}
    function = {"name": "f", "description": "F.", "parameters": parameters}
    for tool in (function, {"name": "f"}, {"name": "f", "parameters": {"type": "object"}}):
        made, shown = messages_for_template(
            [USER], [{"type": "function", "function": tool}], dialect
        )
        assert "def f(" in template.render(made, tools=shown)


def test_calls_of_one_message_where_a_template_has_one(data: Path) -> None:
    """Llama 3's raises on two. Each result stands behind its call, by id or in order."""
    template = real(data, "meta-llama-Llama-3.1-8B-Instruct")
    dialect = found_dialect(template)
    assert dialect.one_call
    calls = [
        {"id": id, "type": "function", "function": {"name": "f", "arguments": {"x": id}}}
        for id in ("a", "b", "c")
    ]
    said = {"role": "assistant", "content": "so:", "tool_calls": calls}
    ids = ("c", "a", "z", "b")
    results = [{"role": "tool", "tool_call_id": id, "content": f"of {id}"} for id in ids]
    made, tools = messages_for_template([USER, said, *results, USER], [F], dialect)
    found = [m.get("tool_call_id") or (m.get("tool_calls") or [m])[0].get("id") for m in made]
    # The words are a message of their own: with a call the template leaves them out.
    assert found == [None, None, "a", "a", "b", "b", "c", "c", "z", None]
    assert [m["content"] for m in made if m["role"] == "assistant"] == ["so:", "", "", ""]
    text = template.render(made, tools=tools)
    assert text.index('"x": "b"') < text.index("of b") < text.index('"x": "c"')
    bare = [{"role": "tool", "content": str(i)} for i in range(3)]
    made, _ = messages_for_template([USER, said, *bare], [F], dialect)
    assert [m["content"] for m in made if m["role"] == "tool"] == ["0", "1", "2"]
    assert [m["role"] for m in made[1:]] == ["assistant", *["assistant", "tool"] * 3]
    assert not find_dialect(real(data, "Qwen-Qwen2.5-7B-Instruct")).one_call


@pytest.mark.parametrize("name", REAL)
def test_what_clients_leave_out(name: str, data: Path) -> None:
    """Hermes' and Functionary's templates raise for a tool without a description, Command R7B's for
    one without parameters, Llama 3's for a message with no calls in its list.
    """
    template = real(data, name)
    dialect = found_dialect(template)
    bare: Any = {"type": "function", "function": {"name": "bare", "description": None}}
    said = {"role": "assistant", "content": "so", "tool_calls": []}
    for tools in ([], [bare]):
        messages, shown = messages_for_template([USER, said, USER], tools, dialect)
        assert ("bare" in template.render(messages, tools=shown)) == bool(tools)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [("", {}), (None, {}), ('{"text": "ab', {}), ('{"n": 3, "text": "a', {"n": 3})],
)
def test_arguments_that_are_empty_or_were_cut(name: str, arguments: Any, expected: Any) -> None:
    """Clients have "" for none; templates raised, or wrote JSON in quotes."""
    template = ChatTemplate(TEMPLATES[name])
    dialect = found_dialect(template)
    talk = calling()
    talk[1]["tool_calls"][0]["function"]["arguments"] = arguments
    made, shown = messages_for_template(talk, [F], dialect)
    found = made[1]["tool_calls"][0]["function"]["arguments"]
    assert (json.loads(found) if dialect.arguments_as_text else found) == expected
    assert "[2]" in template.render(made, tools=shown)


@pytest.mark.parametrize("name", [name for name in REAL if "deepseek" in name])
def test_text_before_calls(name: str, data: Path) -> None:
    """DeepSeek's templates write no call of a message that has text."""
    template = real(data, name)
    talk = calling()
    talk[1] |= {"content": "let me look", "reasoning_content": "hm"}
    made, shown = messages_for_template(talk, [], found_dialect(template))
    text = template.render(made, tools=shown)
    assert text.index("let me look") < text.index('"n": -3') < text.index("[2]")
    assert made[2].keys() == {"role", "content", "tool_calls"}


@pytest.mark.parametrize("name", [*REAL, *WITHOUT])
def test_contents_that_are_none(name: str, data: Path) -> None:
    """Templates raised on them, or wrote None."""
    template = real(data, name)
    talk: list[Any] = [USER, {"role": "assistant", "content": None}, *calling(), USER]
    talk[-2]["content"] = None
    for tools in ([], [F]):
        made, shown = messages_for_template(talk, tools, found_dialect(template))
        assert "None" not in template.render(made, tools=shown).replace("] = None", "")


ODD_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": ["string", "null"], "description": "A."},
        "b": {"type": "array", "items": True},
        "c": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "d": {"oneOf": [{"$ref": "#/$defs/null"}, False]},
        "e": {"type": ["string", "integer", "null"]},
        "f": True,
        "type": {"enum": [True, None]},
    },
    "$defs": {"null": {"type": "null"}},
}


@pytest.mark.parametrize("name", REAL)
def test_schemas_of_other_words(name: str, data: Path) -> None:
    """Hermes' templates never come back from the type "null", Functionary's raise on a schema that
    is true. Other templates are given them as they are.
    """
    template = real(data, name)
    dialect = found_dialect(template)
    odd = {
        "type": "function",
        "function": {"name": "odd", "description": "", "parameters": ODD_SCHEMA},
    }
    messages, shown = messages_for_template([USER], [odd], dialect)
    assert "odd" in template.render(messages, tools=shown)
    assert dialect.plain_schemas == any(each in name for each in ("Hermes", "v3.2", "-plus"))
    if shown is not None and not dialect.plain_schemas:
        assert shown == [odd]


def test_the_same_schema_in_plain_words() -> None:
    nullable = {"type": "string", "nullable": True, "description": "A."}
    assert simplified(ODD_SCHEMA) == {
        "type": "object",
        "properties": {
            "a": nullable,
            "b": {"type": "array", "items": {}},
            "c": {"anyOf": [{"type": "integer"}, {"enum": [None]}]},
            "d": {"oneOf": [{"$ref": "#/$defs/null"}, {"not": {}}]},
            "e": {"type": ["string", "integer"], "nullable": True},
            "f": {},
            "type": {"enum": [True, None]},
        },
        "$defs": {"null": {"enum": [None]}},
    }


@pytest.mark.parametrize("name", [*REAL, *WITHOUT])
def test_a_user_who_speaks_behind_calls_and_results(name: str, data: Path) -> None:
    """Mistral's templates do not count calls and results, and raise on two users in a row."""
    template = real(data, name)
    dialect = found_dialect(template)
    so = {"role": "user", "content": "so?"}
    made, shown = messages_for_template(
        [*calling(), so, *calling()[1:], so, *calling()[1:2], so], [F], dialect
    )
    assert template.render(made, tools=shown).count("so?") == 3
    said = [m["content"] for m in made if m["role"] == "assistant" and not m.get("tool_calls")]
    assert (said == ["", "", ""]) == ("Mistral-Nemo" in name)
    begun, _ = messages_for_template(
        [*calling()[1:], so], [], dialect
    )  # where nobody has asked before
    assert "so?" in template.render(begun)


def test_a_gap_that_must_have_text(data: Path) -> None:
    """As newer templates of Mistral want it."""
    source = real(data, "mistralai-Mistral-Nemo-Instruct-2407").source
    said = '{%- elif message["role"] == "assistant" %}'
    assert said in source
    check = "{% if not message.content %}{{ raise_exception('nothing') }}{% endif %}"
    template = ChatTemplate(source.replace(said, said + check))
    made, shown = messages_for_template([*calling(), USER], [F], found_dialect(template))
    assert [m["content"] for m in made[-2:]] == ["Done.", "hi"]
    assert "Done." in template.render(made, tools=shown)


@pytest.mark.parametrize("name", [*REAL, *WITHOUT])
def test_a_greeting_of_the_assistant(name: str, data: Path) -> None:
    template = real(data, name)
    dialect = found_dialect(template)
    greeting = {"role": "assistant", "content": "welcome"}
    for first in ([], [{"role": "system", "content": "be brief"}]):
        for tools in ([], [F]):
            made, shown = messages_for_template([*first, greeting, USER], tools, dialect)
            text = template.render(made, tools=shown)
            assert "welcome" in text
            assert ("be brief" in text) == bool(first)


@pytest.mark.parametrize("tools", [[], [F]])
def test_a_system_where_a_template_raises(tools: list[Any], data: Path) -> None:
    """Gemma 2's: it stands before what the user says, as in Gemma 3's."""
    template = real(data, "google-gemma-2-2b-it")
    dialect = found_dialect(template)
    system = {"role": "system", "content": "be brief"}
    made, _ = messages_for_template(
        [system, USER, {"role": "assistant", "content": "so"}, USER], tools, dialect
    )
    assert [m["role"] for m in made] == ["user", "assistant", "user"]
    assert made[0]["content"].startswith("be brief\n\nhi")
    assert "be brief" in template.render(made)
    alone, _ = messages_for_template([system], tools, dialect)
    assert "be brief" in template.render(alone)


@pytest.mark.parametrize(
    ("name", "alternates"),
    [
        ("google-gemma-2-2b-it", True),
        ("mistralai-Mistral-Nemo-Instruct-2407", True),
        ("Qwen-Qwen2.5-7B-Instruct", False),
        ("meta-llama-Llama-3.1-8B-Instruct", False),
    ],
)
def test_neighbours_of_one_role(name: str, alternates: bool, data: Path) -> None:
    """Ollama joins them for each of its templates; some of the models' own raise on two."""
    template = real(data, name)
    dialect = found_dialect(template)
    assert dialect.alternates == alternates
    parts = [{"type": "text", "text": "two"}]
    said = [{"role": "assistant", "content": text} for text in ("a", "b")]
    talk: list[Any] = [USER, {"role": "user", "content": parts}, *said, USER]
    messages, _ = messages_for_template(talk, [], dialect)
    if alternates:
        assert [message["content"] for message in messages] == ["hi\ntwo", "a\nb", "hi"]
    else:
        assert messages == talk
    assert "two" in template.render(messages)


def test_ids_for_calls_that_have_none(data: Path) -> None:
    """As Ollama's clients send them; Mistral's templates raise."""
    template = real(data, "mistralai-Mistral-Nemo-Instruct-2407")
    dialect = found_dialect(template)
    calls: Any = [{"function": {"name": name, "arguments": {}}} for name in ("f", "g", "f")]
    results = [
        {"role": "tool", "content": "of g", "tool_name": "g"},
        {"role": "tool", "content": "of f", "tool_name": "f"},
        {"role": "tool", "content": "of the second f"},
    ]
    talk: Any = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    made, shown = messages_for_template(talk, [F], dialect)
    assert [call["id"] for call in made[1]["tool_calls"]] == ["call00001", "call00002", "call00003"]
    assert [m["tool_call_id"] for m in made[2:]] == ["call00002", "call00001", "call00003"]
    assert "of the second f" in template.render(made, tools=shown)


def test_a_template_without_a_system_gets_the_tools_from_the_user(data: Path) -> None:
    dialect = find_dialect(real(data, "google-gemma-2-2b-it"))
    assert not dialect.has_system
    messages, _ = messages_for_template([USER], [F], dialect)
    assert [message["role"] for message in messages] == ["user"]
    assert messages[0]["content"].startswith("hi\n\n")
    with_system = find_dialect(ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}"))
    messages, _ = messages_for_template([USER], [F], with_system)
    assert [message["role"] for message in messages] == ["system", "user"]


def test_results_and_questions_of_one_turn_are_one_message() -> None:
    dialect = TemplateDialect()
    two = [*calling(), calling()[2], {"role": "user", "content": "so?"}]
    messages, _ = messages_for_template(two, [], dialect)
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[-1]["content"].endswith("so?")


def test_a_conversation_without_tools_is_left_alone() -> None:
    messages, tools = messages_for_template([USER], [], TemplateDialect())
    assert (messages, tools) == ([USER], None)


def test_ids() -> None:
    for name, id in (("mistral-id", "Abcdefgh1"), ("solar", "abcdefghi1")):
        own = row(name)
        assert short_id(id, own) == id
        assert short_id("call_1", own) == short_id("call_1", own) != short_id("call_2", own)
        assert len(short_id("call_1", own)) == own.id_size == len(own.new_id())
    assert short_id("ABCDEFGHI1", row("solar")) != "ABCDEFGHI1"


def test_small_templates() -> None:
    assert find_dialect(ChatTemplate(HERMES_TEMPLATE)).row == HERMES
    assert find_dialect(ChatTemplate(BARE_TEMPLATE)).row == BARE
    unknown = HERMES_TEMPLATE.replace("<tool_call>", "<unheard_of>")
    found = find_dialect(ChatTemplate(unknown.replace('{"name"', '("name"')))
    assert not found.writes_calls
    assert not found.shows_tools  # what is not understood is not used
    assert find_dialect(ChatTemplate("{{ nothing.at.all }}")) == TemplateDialect(has_system=False)


def test_reasoning_shows_in_the_template() -> None:
    found = find_dialect(ChatTemplate("{{ '<think></think>' }}")).thought
    assert found is not None
    assert (found.open, found.close) == ("<think>", "</think>")
    assert find_dialect(ChatTemplate(HERMES_TEMPLATE)).thought is None
    parts = (
        "{% set end = '</think{}>'.format(':opensource') %}{% if add_generation_prompt %}{{ end }}"
    )
    found = find_dialect(ChatTemplate(parts + "{% endif %}")).thought  # no mark is whole in it
    assert found is not None
    assert found.open == "<think:opensource>"


def test_whether_the_prompt_has_begun() -> None:
    reasons = find_dialect(ChatTemplate("{{ '<think></think>' }}"))
    assert reasons.marks("...<think>\n").opened
    assert not reasons.marks("...<think>\n\n</think>\n").opened
    recipient = TemplateDialect(row=row("recipient"))
    assert recipient.marks("assistant\n\n>>>").begun
    assert not recipient.marks("assistant\n\n").begun
