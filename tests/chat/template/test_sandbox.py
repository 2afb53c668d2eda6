"""What templates may not do is said, and honest heavy ones get through."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from treadle.chat.template import renderer
from treadle.chat.template.template import ChatTemplate
from treadle.errors import TemplateError

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n\n{% break %}", "line 3: 'break' outside loop"),
        ("a\n{% continue %}", "line 2: 'continue' not properly in loop"),
        (
            "{% for i in [1] %}\n{% macro f() %}\n\n{% break %}{% endmacro %}{% endfor %}",
            "line 4: 'break' outside loop",
        ),
        (
            "\n".join(["{% for i in [1] %}"] * 30 + ["{% endfor %}"] * 30),
            r"line \d+: too many (statically nested blocks|levels of indentation)",
        ),
        (
            "\n".join(["{% if true %}"] * 120 + ["{% endif %}"] * 120),
            r"line \d+: too many levels of indentation",
        ),
    ],
)
def test_what_pythons_own_compiler_refuses(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source).render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}{{ strftime_now.__self__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '%s' | attr('__class__') }}",
        "{{ dict.__class__ }}{{ namespace.__init__ }}{{ dict.mro() }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ lipsum.__globals__ }}{{ cycler.__init__.__globals__ }}",
    ],
)
def test_insides_are_out_of_reach(source: str) -> None:
    try:
        text = ChatTemplate(source).render(HELLO)
    except TemplateError:
        return
    assert "<" not in text.replace("[Undefined]", "")


def test_lists_grow_and_shrink_and_nothing_else_changes() -> None:
    source = "{% set l = [] %}{% for i in 'ab' %}{% set _ = l.append(i) %}{% endfor %}"
    assert ChatTemplate(f"{source}{{{{ l.pop(0) }}}}{{{{ l }}}}").render(HELLO) == "a['b']"
    given = [*HELLO]
    assert ChatTemplate("{{ messages.pop().content }}").render(given) == "hello"
    assert given == HELLO
    for change in ("[1].clear()", "[2, 1].sort()", "{}.update(a=1)", "messages[0].pop('role')"):
        with pytest.raises(TemplateError, match="is unsafe"):
            ChatTemplate(f"{{{{ {change} }}}}").render(HELLO)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """A busy machine may take longer than the limit, which is one of processor seconds here."""
    limit_s = renderer.LIMIT_S
    renderer.RENDERER.close()
    monkeypatch.setattr(renderer, "LIMIT_S", 60 * limit_s)
    yield limit_s
    renderer.RENDERER.close()


def test_long_conversations_are_within_the_limits(patient: float) -> None:
    source = (
        "{% for m in messages %}{% set content = m.content | trim %}"
        "{{ '<' + m.role + '>' ~ content.replace('a', 'aa') }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a b 猫 " * 2000}] * 500
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert len(ChatTemplate(source).render(messages)) > 6_000_000
    renderer.RENDERER.close()  # its time is known when it has ended
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < patient


def test_an_error_quotes_a_template_safely_and_shortly() -> None:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate("{{ raise_exception('no\\n\x1b[2J\x9b' + 'x' * 100000) }}").render(HELLO)
    assert str(caught.value).startswith(r"chat template, line 1: no\n\x1b[2J\x9bxxx")
    assert len(str(caught.value)) < 1100
