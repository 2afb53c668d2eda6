"""Which variables a template reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from treadle.chat.template.builtin_templates import BUILT_INS
from treadle.chat.template.template import ChatTemplate
from treadle.chat.template.variables import check_own, check_variables, format_variables
from treadle.errors import TemplateError, TreadleError


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("{{ a }}{% set b = 1 %}{{ b }}{{ c.d['e'] }} f {# g #}", {"a", "c"}),
        ("{% set day = day | default('x') %}{{ day }}", {"day"}),
        ("{% if not day is defined %}{% set day = 1 %}{% endif %}", {"day"}),
        ("{% for x in y %}{% if z %}{% break %}{% endif %}{% endfor %}", {"y", "z"}),
        ("{% generation %}{{ a }}{% endgeneration %}", {"a"}),
    ],
)
def test_names(source: str, names: set[str]) -> None:
    assert ChatTemplate(source).variables() == names


@pytest.mark.parametrize("source", ["{% if %}{{ a }}", "{{" + "(" * 5000 + "a" + ")" * 5000 + "}}"])
def test_a_template_that_cannot_be_parsed(source: str) -> None:
    with pytest.raises(TemplateError):
        check_variables(ChatTemplate(source), ["a"], ())


def test_real_templates_read_the_messages(data: Path) -> None:
    sources = {path.name: path.read_bytes().decode() for path in data.glob("templates/*.jinja")}
    assert len(sources) > 10
    for name, source in sources.items():
        assert "messages" in ChatTemplate(source).variables(), name
    dated = ChatTemplate(sources["meta-llama-Llama-3.1-8B-Instruct.jinja"]).variables()
    assert {"date_string", "tools_in_user_message"} <= dated
    for built_in in BUILT_INS:
        assert "messages" in ChatTemplate(built_in.source, builtin=built_in.name).variables()


def test_a_name_that_is_not_read() -> None:
    template: Any = ChatTemplate("{{ thinking }}", tool_source="{{ mode }}")
    check_variables(template, ["thinking", "mode"], ())
    with pytest.raises(TypeError, match=r"'mod': .* chat template; did you mean 'mode'\?"):
        check_variables(template, ["mod"], ["top_k"])
    with pytest.raises(TypeError, match=r"did you mean 'top_k'\?"):
        check_variables(template, ["topk"], ["top_k"])


@pytest.mark.parametrize("wrong", [5, "x", {1: 2}, {"messages": []}, {"add_generation_prompt": 0}])
def test_variables_that_no_caller_sets(wrong: Any) -> None:
    with pytest.raises(TreadleError, match=r"^template"):
        check_own(wrong)
    assert check_own(None) == {}
    assert check_own({"thinking": False}) == {"thinking": False}


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt"])
def test_what_the_conversation_says_itself(name: str) -> None:
    template: Any = ChatTemplate("{{ messages }}{{ add_generation_prompt }}")
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        check_variables(template, [name], ())


def test_names_of_other_programs() -> None:
    template: Any = ChatTemplate("{{ messages }}")
    for name, said in (
        ("temp", "; did you mean 'temperature'"),
        ("functions", "; did you mean 'tools'"),
        ("num_ctx", "; 'context' is a setting of load"),
        ("stream", "; leave it out"),
    ):
        with pytest.raises(TypeError, match=f"'{name}': neither .*{said}"):
            check_variables(template, [name], ("temperature",))


SCHEMA = {"type": "object", "properties": {"é": {"type": "string"}}}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{{ response_format.type }}",
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        ),
        (
            "{{ response_format.get('type') }}{{ response_schema }}{{ tool_choice }}",
            {
                "response_format": {"type": "json_schema", "schema": SCHEMA},
                "response_schema": SCHEMA,
                "tool_choice": "required",
            },
        ),
        ("{{ response_format | tojson }}", {"response_format": SCHEMA}),
        ("{{ response_format }}", {"response_format": json.dumps(SCHEMA, ensure_ascii=False)}),
        ("{{ messages }}", {}),
        ("{# response_format tool_choice #}", {}),
        ("{% set response_format = 3 %}{{ response_format }}", {}),
        ("{{ response_format", {}),  # rendering it says what is wrong
    ],
)
def test_the_format_of_the_answer(source: str, expected: dict[str, Any]) -> None:
    template = ChatTemplate(source)
    assert format_variables(template, "json_schema", SCHEMA, "required") == expected
    nothing = format_variables(template, None)
    assert nothing == {}
    any_object = format_variables(template, "json_object").get("response_format")
    assert any_object in (None, {"type": "json_object"})
