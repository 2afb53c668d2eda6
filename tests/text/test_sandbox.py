"""Hostile templates come to an end, with a TemplateError; honest heavy ones get through."""

from __future__ import annotations

import pytest

from treadle.errors import TemplateError
from treadle.text import sandbox
from treadle.text.template import ChatTemplate

HELLO = [{"role": "user", "content": "hello"}]
GROW = "{% set n = namespace(v=START) %}{% for i in range(60) %}{% set n.v = STEP %}{% endfor %}"


def grow(start: str, step: str) -> str:
    return GROW.replace("START", start).replace("STEP", step) + "{{ n.v }}"


HOSTILE = {
    "huge range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": "{% for i in range(9**5) %}{% for j in range(9**5) %}{% endfor %}{% endfor %}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "exponential macro": "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{% set b = f(n - 1) %}"
    "{% endif %}{% endmacro %}{{ f(60) }}",
    "endless loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "deep source": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "repeat": "{{ 'a' * 10**10 }}",
    "repeat list": "{{ [1] * 10**9 }}",
    "constant folded": "{% set x = 'a' * 99999999 %}",
    "power": "{{ (9**99)**999 }}",
    "product": grow("9", "n.v * n.v"),
    "double by +": grow("'ab'", "n.v + n.v"),
    "double by ~": grow("'ab'", "n.v ~ n.v"),
    "double by list": grow("[1]", "n.v + n.v"),
    "double by set": "{% set n = namespace(v='ab') %}{% for i in range(60) %}"
    "{% set x %}{{ n.v }}{{ n.v }}{% endset %}{% set n.v = x %}{% endfor %}",
    "nested lists": grow("[1]", "[n.v, n.v]"),
    "nested lists as JSON": grow("[1]", "[n.v, n.v]").replace("{{ n.v }}", "{{ n.v | tojson }}"),
    "center": "{{ 'a'.center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**10) }}",
    "center filter": "{{ 'a' | center(10**10) }}",
    "indent filter": "{{ 'a\nb' | indent(10**10) }}",
    "tojson indent": "{{ [1] | tojson(indent=10**9) }}",
    "format width": "{{ '{:>1000000000}'.format(1) }}",
    "format argument": "{{ '{0:{1}}'.format(1, 10**9) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent argument": "{{ '%*d' % (10**9, 1) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "replace": "{{ ('a' * 9999).replace('a', 'b' * 9999) }}",
    "replace filter": "{{ ('a' * 9999) | replace('a', 'b' * 9999) }}",
    "join": "{{ ('a' * 99999).join(range(99999) | map('string') | list) }}",
    "lipsum": "{{ lipsum(n=10**8) }}",
    "change of messages": "{{ messages.append(1) }}",
    "underscore": "{% set n = namespace(__class__=1) %}",
    "own meter": "{{ self._TemplateReference__context.environment }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "BUDGET", 200_000)  # the same, sooner
    with pytest.raises(TemplateError):
        ChatTemplate(HOSTILE[name]).render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '%s' | attr('__class__') }}",
        "{{ dict.__class__ }}{{ namespace.__init__ }}",
        "{{ messages | map(attribute='__class__') | list }}",
    ],
)
def test_insides_are_out_of_reach(source: str) -> None:
    try:
        text = ChatTemplate(source).render(HELLO)
    except TemplateError:
        return
    assert "<" not in text.replace("[Undefined]", "")


def test_long_conversations_are_within_the_budget() -> None:
    source = (
        "{% for m in messages %}{% set content = m.content | trim %}"
        "{{ '<' + m.role + '>' ~ content.replace('a', 'aa') }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a b c " * 2000}] * 500
    assert len(ChatTemplate(source).render(messages)) > 6_000_000


def test_each_rendering_has_its_own_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "BUDGET", 1000)
    template = ChatTemplate("{% for i in range(600) %}{% endfor %}")
    for _ in range(3):
        assert template.render(HELLO) == ""
    with pytest.raises(TemplateError, match="1000 steps"):
        ChatTemplate("{% for i in range(1600) %}{% endfor %}").render(HELLO)
