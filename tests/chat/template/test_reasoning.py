"""Reasoning switched on and off by the variables that templates have for it."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.chat.template.template import ChatTemplate
from treadle.chat.template.variables import check_reasoning, reasoning_setting, unread
from treadle.chat.tools import keeps_reasoning
from treadle.errors import TreadleError

HELLO = [{"role": "user", "content": "hi"}]
QWEN = "{{ enable_thinking is defined and not enable_thinking }}"
GRANITE = "{% if thinking %}on{% else %}off{% endif %}"
# Of both names the first counts, as in DeepSeek V3.1.
BOTH = (
    "{% if thinking is not defined %}{% set thinking = enable_thinking %}{% endif %}{{ thinking }}"
)
MINIMAX = "{{ thinking_mode | default('adaptive') }}"
SEED = "{{ thinking_budget | default(-1) }}"
HY3 = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'no_think' %}{% endif %}"
    "{{ reasoning_effort }}"
)
SOLAR = "{% if reasoning_effort in ['low', \"minimal\"] %}off{% else %}on{% endif %}"
GPT_OSS = "{{ reasoning_effort | default('medium') }}"


@pytest.mark.parametrize(
    ("source", "auto", "on", "off"),
    [
        (QWEN, "False", "False", "True"),
        (GRANITE, "off", "on", "off"),
        (BOTH, "", "True", "False"),
        (MINIMAX, "adaptive", "enabled", "disabled"),
        (SEED, "-1", "-1", "0"),
        (HY3, "no_think", "high", "no_think"),
        (SOLAR, "on", "on", "off"),
        (GPT_OSS, "medium", "medium", "medium"),  # no word of it means none: a budget does it
        ("no variable", "no variable", "no variable", "no variable"),
    ],
)
def test_each_family_by_its_own_variable(source: str, auto: str, on: str, off: str) -> None:
    for reasoning, expected in (("auto", auto), ("on", on), ("off", off)):
        assert ChatTemplate(source, reasoning=reasoning).render(HELLO) == expected, reasoning
    if on != off:  # the same asked by one call, in the words of most
        template = ChatTemplate(source)
        assert template.render(HELLO, enable_thinking=True) == on
        assert template.render(HELLO, enable_thinking=False) == off


@pytest.mark.parametrize(
    "default", [{"reasoning": "off"}, {"defaults": {"enable_thinking": False}}]
)
@pytest.mark.parametrize("source", [GRANITE, BOTH, MINIMAX])
def test_a_call_wins_over_the_default(source: str, default: dict[str, Any]) -> None:
    template = ChatTemplate(source, **default)
    on = ChatTemplate(source, reasoning="on")
    assert template.render(HELLO) == ChatTemplate(source, reasoning="off").render(HELLO)
    assert template.is_off({})
    for said in ({"enable_thinking": True}, {"thinking": True}, {"reasoning_effort": "low"}):
        assert template.render(HELLO, **said) == on.render(HELLO), said
        assert not template.is_off(said)
    assert on.render(HELLO, reasoning_effort="none") == template.render(HELLO)
    assert on.is_off({"enable_thinking": False})


def test_an_effort_alone_switches_nothing_on() -> None:
    """Clients send one with every call."""
    assert ChatTemplate(GRANITE).render(HELLO, reasoning_effort="medium") == "off"
    assert ChatTemplate(HY3).render(HELLO, reasoning_effort="low") == "low"
    assert ChatTemplate(HY3).render(HELLO, reasoning_effort="none") == "no_think"
    assert ChatTemplate(GPT_OSS).render(HELLO, reasoning_effort="none") == "none"


def test_variables_that_are_given_with_the_template() -> None:
    template = ChatTemplate("{{ mood }} {{ bos_token }}", bos="<s>", defaults={"mood": "glad"})
    assert template.render(HELLO) == "glad <s>"
    assert template.render(HELLO, mood="sad", bos_token="") == "sad "
    assert unread(template, ["mood", "mode"]) == ["mode"]


def test_what_is_said_of_reasoning() -> None:
    assert reasoning_setting({}) is None
    assert reasoning_setting({"mood": 1}) is None
    assert reasoning_setting({"thinking_mode": "disabled", "reasoning_effort": "high"}) == "off"
    assert reasoning_setting({"reasoning_effort": "minimal"}) == "on"
    for wrong in ("yes", "", None, True):
        with pytest.raises(TreadleError, match="expected auto, on, off"):
            check_reasoning(wrong)


@pytest.mark.parametrize(
    ("source", "own", "kept", "left"),
    [
        ("{{ preserve_thinking | default(false) }}", "False", "True", "False"),
        ("{{ keep_past_thinking }}", "", "True", "False"),
        ("{{ clear_thinking is defined and not clear_thinking }}", "False", "True", "False"),
        ("{{ truncate_history_thinking | default(true) }}", "True", "False", "True"),
        ("{{ drop_thinking | default(true) }}", "True", "False", "True"),
        ("{{ think_render_option | default('lastthink') }}", "lastthink", "all", "lastthink"),
        ("no variable", "no variable", "no variable", "no variable"),
    ],
)
def test_history_by_each_familys_variable(source: str, own: str, kept: str, left: str) -> None:
    assert ChatTemplate(source).render(HELLO) == own
    assert ChatTemplate(source, preserve=True).render(HELLO) == kept
    assert ChatTemplate(source, preserve=False).render(HELLO) == left
    for preserve in (None, True, False):
        template = ChatTemplate(source, preserve=preserve)
        assert template.render(HELLO, preserve_reasoning=True) == kept
        assert template.render(HELLO, preserve_reasoning=False) == left


def test_whether_earlier_reasoning_is_kept() -> None:
    always = "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    variable = "{% for m in messages %}{% if preserve_thinking %}{{ m.thinking }}{% endif %}"
    variable += "{{ m.content }}{% endfor %}"
    parts = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'thinking' %}"
        "{{ p.thinking }}{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    assert keeps_reasoning(ChatTemplate(always))
    assert not keeps_reasoning(ChatTemplate(variable))
    assert keeps_reasoning(ChatTemplate(variable, preserve=True))
    assert keeps_reasoning(ChatTemplate(parts))
    assert not keeps_reasoning(ChatTemplate("{{ messages[-1].content }}", preserve=True))
