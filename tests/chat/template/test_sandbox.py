"""Hostile templates come to an end, with a TemplateError; honest heavy ones get through."""

from __future__ import annotations

import resource
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


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same, sooner."""
    renderer.RENDERER.close()
    monkeypatch.setattr(renderer, "LIMIT_S", 0.2)
    monkeypatch.setattr(renderer, "LIMIT_BYTES", 128 << 20)
    yield
    renderer.RENDERER.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str, impatient: None) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(HOSTILE[name]).render(HELLO)


def test_what_is_spent_is_said(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TemplateError, match=r"takes more than 0\.2 s"):
        ChatTemplate(HOSTILE["nested loops"]).render(HELLO)
    monkeypatch.setattr(renderer, "LIMIT_S", 60)
    with pytest.raises(TemplateError, match="takes more than 128 MiB of memory"):
        ChatTemplate(HOSTILE["bytes"]).render(HELLO)


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
