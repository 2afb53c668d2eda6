"""Content as a text and as a list of parts, on templates of every kind."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.chat.messages import read_messages
from treadle.chat.template.builtin_templates import BUILT_INS
from treadle.chat.template.content_form import ContentForm, form_of
from treadle.chat.template.template import ChatTemplate
from treadle.errors import TemplateError, UnsupportedError

# As families' own templates read content.
TEXTS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"  # Llama 3.1
EITHER = """\
{%- for m in messages -%}
<{{ m.role }}>
    {%- if m.content is string -%}{{ m.content }}
    {%- else -%}
        {%- for part in m.content -%}
            {%- if part.type == 'image' -%}<image>{%- else -%}{{ part['text'] }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endfor -%}"""  # Gemma 3, Qwen 2.5 VL
PARTS = """\
{%- for m in messages -%}
<{{ m.role }}>
    {%- for part in m.content -%}
        {%- if part['type'] == 'text' -%}{{ part['text'] }}{%- endif -%}
    {%- endfor -%}
{%- endfor -%}"""  # SmolVLM, Idefics: of a text, nothing is said
STRICT_PARTS = PARTS.replace("{%- if part['type'] ==", "{%- if part['type'] + '' ==")
FIRST_OF_SYSTEM = (
    "{%- if messages[0].role == 'system' -%}"
    "<{{ messages[0].content if messages[0].content is string else messages[0].content[0].text }}>"
    "{%- set messages = messages[1:] -%}{%- endif -%}" + EITHER
)  # Gemma 3
FIRST = "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}{% endfor %}"
FIRST_OR_TEXT = FIRST.replace(
    "m.content[0].text", "m.content if m.content is string else m.content[0].text"
)
MENTIONS = TEXTS + "{# the text of a message #}"


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def said(content: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


@pytest.mark.parametrize(
    ("source", "together"),
    [
        (TEXTS, "<user>one\ntwo"),
        (MENTIONS, "<user>one\ntwo"),
        (EITHER, "<user>onetwo"),
        (PARTS, "<user>onetwo"),
        (STRICT_PARTS, "<user>onetwo"),
        (FIRST_OF_SYSTEM, "<user>onetwo"),
        (FIRST, "<user>one\ntwo"),  # it would drop the second
        (FIRST_OR_TEXT, "<user>one\ntwo"),
    ],
)
def test_every_template_reads_both(source: str, together: str) -> None:
    template = ChatTemplate(source)
    assert template.render(said(parts("one", "two"))) == together
    assert template.render(said(parts("one"))) == "<user>one"
    assert template.render(said("one")) == "<user>one"


@pytest.mark.parametrize("built_in", BUILT_INS, ids=lambda b: b.name)
def test_built_in_templates_read_parts(built_in: Any) -> None:
    template = ChatTemplate(built_in.source, builtin=built_in.name)
    assert template.render(said(parts("one", "two"))) == template.render(said("one\ntwo"))


def test_no_part_of_a_system_message_is_lost() -> None:
    """This template takes its first part alone."""
    messages = said(parts("one", "two"), "system") + said(parts("hello"))
    assert ChatTemplate(FIRST_OF_SYSTEM).render(messages) == "<one\ntwo><user>hello"
    assert ChatTemplate(PARTS).render(messages) == "<system>onetwo<user>hello"
    assert ChatTemplate(FIRST).render(messages) == "<system>one\ntwo<user>hello"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "image", "file"])
@pytest.mark.parametrize("source", [TEXTS, EITHER, PARTS])
def test_what_is_no_text_is_refused(source: str, kind: str) -> None:
    content = [*parts("what is this?"), {"type": kind, kind: {"url": "data:image/png;base64,"}}]
    with pytest.raises(UnsupportedError, match=f"message 1: parts of type '{kind}'"):
        ChatTemplate(source).render([*said("hello"), *said(content)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (["hello"], "part 'hello': expected a dict with a type"),
        ([{"text": "hello"}], "expected a dict with a type"),
        ([{"type": "text"}], "a text part without a text string"),
        ([{"type": "text", "text": 1}], "a text part without a text string"),
    ],
)
def test_parts_of_other_shapes(content: Any, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(TEXTS).render(said(content))


def test_a_tool_answers_with_anything() -> None:
    source = "{{ messages[0].content | tojson }}"
    assert ChatTemplate(source).render(said([{"t": 1}, 2], "tool")) == '[{"t": 1}, 2]'
    assert ChatTemplate(source).render(said({"t": 1}, "tool")) == '{"t": 1}'


def test_parts_keep_what_else_they_have() -> None:
    content = [{**parts("one")[0], "cache_control": {"type": "ephemeral"}}]
    kept = "{{ part['text'] }}{{ part.cache_control.type if part.cache_control }}"
    template = ChatTemplate(EITHER.replace("{{ part['text'] }}", kept))
    assert template.render(said(content)) == "<user>oneephemeral"


def test_no_content_is_no_part() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    for source in (PARTS, FIRST):
        text = ChatTemplate(source).render([*said("hello"), called])
        assert text == "<user>hello<assistant>"


def test_a_template_is_tried_once_and_only_if_it_may_read_parts() -> None:
    tried: list[Any] = []

    def render(messages: list[dict[str, Any]]) -> str | None:
        tried.append(messages)
        return None

    assert form_of(TEXTS, render) is ContentForm.TEXT
    assert not tried
    assert form_of(PARTS, render) is ContentForm.TEXT  # fails on both: as it is
    assert [type(messages[0]["content"]) for messages in tried] == [str, list]


def test_a_list_that_is_printed_is_not_read() -> None:
    """A template that prints its content as it is would print Python's brackets."""
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{# text #}"
    assert ChatTemplate(source).render(said(parts("one", "two"))) == "one\ntwo"


def test_what_json_cannot_say() -> None:
    circle: list[Any] = []
    circle.append(circle)
    template = ChatTemplate("{{ x }}")
    for value in (circle, 10**5000, {1: {2}}):
        with pytest.raises(TemplateError, match=r"JSON|too deeply nested"):
            template.render(said("hello"), x=value)
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    assert template.render(said("hello"), x=deep).count("[") == 400


def test_reasoning_is_found_beside_parts() -> None:
    [message] = read_messages([{**said(parts("a"), "assistant")[0], "reasoning": "hm"}])
    assert message["thinking"] == message["reasoning_content"] == message["reasoning"] == "hm"
