"""Hostile templates come to an end, with a TemplateError."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from treadle.chat.template import renderer
from treadle.chat.template.template import ChatTemplate
from treadle.errors import TemplateError

HELLO = [{"role": "user", "content": "hello"}]
GROW = "{% set n = namespace(v=START) %}{% for i in range(60) %}{% set n.v = STEP %}{% endfor %}"
TWINS = (
    "{% set n = namespace(a=(1,), b=(1,)) %}{% for i in range(45) %}"
    "{% set n.a = (n.a, n.a) %}{% set n.b = (n.b, n.b) %}{% endfor %}"
)


def grow(start: str, step: str) -> str:
    return GROW.replace("START", start).replace("STEP", step) + "{{ n.v }}"


def again(statement: str) -> str:
    return "{% for i in range(99999) %}" + statement + "{% endfor %}"


HOSTILE = {
    # No end: C code that compares, hashes, searches, lists.
    "equal twins": TWINS + "{{ n.a == n.b }}",
    "a twin as a key": TWINS + "{{ {n.a: 1}[n.b] }}",
    "a twin in a list": TWINS + "{{ n.a in [n.b] }}",
    "lists": again("{% set x = range(99999) | list %}"),
    "sums": again("{% set x = range(99999) | sum %}"),
    "selections": again("{% set x = range(99999) | select('odd') | list %}"),
    "searches": again("{% set x = 1 in [0] * 16000000 %}"),
    "slices": "{% set s = 'a' * 9999999 %}" + again("{% set x = s[1:] %}"),
    "comparisons": "{% set s = 'a' * 9999999 ~ 'a' %}{% set t = 'a' * 9999999 ~ 'b' %}"
    + again("{% set x = s == t %}"),
    # No end: its own loops.
    "nested loops": "{% for i in range(9**5) %}{% for j in range(9**5) %}{% endfor %}{% endfor %}",
    "exponential macro": "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{% set b = f(n - 1) %}"
    "{% endif %}{% endmacro %}{{ f(60) }}",
    "lipsum": "{{ lipsum(n=10**8) }}",
    # Memory.
    "kept slices": "{% set s = 'a' * 9999999 %}{% set n = namespace(v=[]) %}"
    + again("{% set n.v = n.v + [s[i:]] %}"),
    "appended": "{% set l = [] %}" + again("{% set x = l.append('a' * 9999999 ~ i) %}"),
    "bytes": "{{ ('a'.encode() * 4000000000)[0] }}",
    "to_bytes": "{{ (1).to_bytes(4000000000, 'big') }}",
    "repeat": "{{ 'a' * 10**10 }}",
    "constant folded": "{% set x = 'a' * 9999999999 %}",
    "product": grow("9", "n.v * n.v"),
    "double by +": grow("'ab'", "n.v + n.v"),
    "double by ~": grow("'ab'", "n.v ~ n.v"),
    "double by set": "{% set n = namespace(v='ab') %}{% for i in range(60) %}"
    "{% set x %}{{ n.v }}{{ n.v }}{% endset %}{% set n.v = x %}{% endfor %}",
    "nested lists": grow("[1]", "[n.v, n.v]"),
    "center": "{{ 'a'.center(10**10) }}",
    "format width": "{{ '{:>1000000000}'.format(1) }}",
    "format_map": "{{ '{a:>{b}}'.format_map({'a': 1, 'b': 99999999}) }}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "join": "{{ ('a' * 99999).join(range(99999) | map('string') | list) }}",
    "a long text": "{{ 'a' * 16777217 }}",
    # What it may not do.
    "huge range": "{% for i in range(10**9) %}{% endfor %}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "endless loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "deep source": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "power": "{{ (9**99)**999 }}",
    "change of messages": "{{ messages[0].update(role=1) }}",
    "its own insides": "{{ self._TemplateReference__context.environment }}",
}


@pytest.fixture(scope="module", autouse=True)
def impatient() -> Iterator[None]:
    """The same, sooner. A process goes on with the next template, unless the last has ended it."""
    renderer.RENDERER.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(renderer, "LIMIT_S", 0.1)
        patch.setattr(renderer, "LIMIT_BYTES", 128 << 20)
        yield
    renderer.RENDERER.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(HOSTILE[name]).render(HELLO)


def test_what_is_spent_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TemplateError, match=r"takes more than 0\.1 s"):
        ChatTemplate(HOSTILE["nested loops"]).render(HELLO)
    monkeypatch.setattr(renderer, "LIMIT_S", 60)
    with pytest.raises(TemplateError, match="takes more than 128 MiB of memory"):
        ChatTemplate(HOSTILE["bytes"]).render(HELLO)
