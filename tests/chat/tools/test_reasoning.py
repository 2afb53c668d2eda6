"""Reasoning in prompts: a begun answer has the family's own marks; variables that switch it off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from treadle.chat.messages import read_messages
from treadle.chat.template.template import ChatTemplate
from treadle.chat.template.variables import reasoning_setting
from treadle.chat.tools.messages import prompt_with_last_message

HI: list[Any] = [{"role": "user", "content": "hi"}]


def template(said: str, asked: str = "") -> str:
    """One that writes an assistant's message so, and ends a prompt with this."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|a|>" + said + "<|e|>"
        "{% else %}<|u|>{{ m.content }}<|e|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|a|>" + asked + "{% endif %}"
    )


def reasons(open: str, close: str) -> str:
    """A message with its reasoning between these."""
    return (
        "{% if m.reasoning_content %}" + f"{open}{{{{ m.reasoning_content }}}}{close}"
        "{% endif %}{{ m.content }}"
    )


QWEN = reasons("<think>\n", "\n</think>\n\n")
OFF = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
# What a begun answer adds to a prompt, with reasoning and without.
STYLES: list[tuple[str, str, str, str]] = [
    ("Qwen 3", template(QWEN, OFF), "<think>\nhm\n</think>\n\nSo", "So"),
    (
        "Qwen 3.5",
        template(QWEN, "<think>\n"),
        "<think>\nhm\n</think>\n\nSo",
        "<think>\n\n</think>\n\nSo",
    ),
    (
        "Nemotron 3",
        template(reasons("<think>\n", "\n</think>\n"), "<think>\n"),
        "<think>\nhm\n</think>\nSo",
        "<think>\n\n</think>\nSo",
    ),
    (
        "GLM 4.6",
        template(reasons("{{ '\\n' }}<think>", "</think>\n")),
        "\n<think>hm</think>\nSo",
        "So",
    ),
    (
        "Ling 3",
        template(reasons("<think>", "</think>"), "<think>"),
        "<think>hm</think>So",
        "<think></think>So",
    ),
    (
        "Laguna XS",
        template(reasons("{{ '\\n' }}<think>\n", "\n</think>\n"), "\n</think>"),
        "\n<think>\nhm\n</think>\nSo",
        "\n</think>So",
    ),
    (
        "Seed-OSS",
        template(reasons("<seed:think>", "</seed:think>\n")),
        "<seed:think>hm</seed:think>\nSo",
        "So",
    ),
    (
        "Cohere 2",
        template(
            reasons("<|START_THINKING|>", "<|END_THINKING|><|START_TEXT|>"), "<|START_THINKING|>"
        ),
        "<|START_THINKING|>hm<|END_THINKING|><|START_TEXT|>So",
        "<|START_THINKING|><|END_THINKING|><|START_TEXT|>So",
    ),
    (  # the marks are composed
        "Kimi K3",
        "{% macro tag(x, n) %}{{ '<|' + x + '|>' + n + '<|sep|>' }}{% endmacro %}"
        + template(
            "{{ tag('open', 'think') + (m.reasoning_content or '') + tag('close', 'think') }}"
            "{{ tag('open', 'response') + m.content + '<|close|>response<|sep|>' }}",
            "{{ tag('open', 'think') }}",
        ),
        "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>So",
        "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>So",
    ),
    (  # the mark is in the prompt alone
        "Apriel",
        template(reasons("", "\n[BEGIN FINAL RESPONSE]\n"), "Here are my reasoning steps:\n"),
        "Here are my reasoning steps:\nhm\n[BEGIN FINAL RESPONSE]\nSo",
        "Here are my reasoning steps:\n\n[BEGIN FINAL RESPONSE]\nSo",
    ),
    # Templates that leave out the reasoning of messages without calls.
    ("Kimi K2", template("<think></think>{{ m.content }}"), "<think>hm</think>So", "So"),
    ("QwQ", template("{{ m.content }}{# </think> #}"), "<think>\nhm\n</think>\n\nSo", "So"),
    ("Ministral 3", template("{{ m.content }}{# [/THINK] #}"), "[THINK]hm[/THINK]So", "So"),
    (
        "Gemma 4",
        template(
            "{{ m.content }}",
            "{% if enable_thinking is false %}{% endif %}<|channel>thought\n<channel|>",
        ),
        "<|channel>thought\nhm<channel|>So",
        "<|channel>thought\n<channel|>So",
    ),
    (
        "Apertus",
        template("{{ m.content }}{# <|inner_suffix|> #}"),
        "<|inner_prefix|>hm<|inner_suffix|>So",
        "So",
    ),
    (
        "Hy3",
        template("{{ m.content }}{# </think:opensource> #}"),
        "<think:opensource>hm</think:opensource>So",
        "So",
    ),
]


@pytest.mark.parametrize(
    ("source", "thought", "plain"), [s[1:] for s in STYLES], ids=[s[0] for s in STYLES]
)
def test_a_begun_answer_has_the_familys_marks(source: str, thought: str, plain: str) -> None:
    own = ChatTemplate(source)
    asked = own.render(HI, add_generation_prompt=True)
    for reasoning, added in (("hm", thought), ("", plain)):
        (last,) = read_messages([{"role": "assistant", "content": "So", "reasoning": reasoning}])
        assert prompt_with_last_message(own, asked, last) == f"<|u|>hi<|e|><|a|>{added}"


def test_reasoning_that_is_begun_stands_in_a_prompt_that_closed_it() -> None:
    own = ChatTemplate(template(QWEN, OFF))
    asked = own.render(HI, add_generation_prompt=True, enable_thinking=False)
    assert asked.endswith("</think>\n\n")
    last = {"role": "assistant", "content": "So", "reasoning_content": "hm"}
    assert prompt_with_last_message(own, asked, last).endswith("<|a|><think>\nhm\n</think>\n\nSo")
    assert prompt_with_last_message(own, asked, {**last, "reasoning_content": ""}) == f"{asked}So"


def test_marks_of_real_templates(data: Path) -> None:
    names = {
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "<think>\nhm\n</think>\n\nSo",
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use": (
            "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>So"
        ),
    }
    for name, added in names.items():
        own = ChatTemplate((data / f"templates/{name}.jinja").read_text("utf-8"))
        asked = own.render(HI, add_generation_prompt=True)
        last = {"role": "assistant", "content": "So", "reasoning_content": "hm"}
        assert prompt_with_last_message(own, asked, last).endswith(added)


@pytest.mark.parametrize(
    ("variables", "off"),
    [
        ({}, False),
        ({"thinking": True}, False),
        ({"enable_thinking": False}, True),
        ({"thinking": False}, True),
        ({"enable_thinking": 0}, False),
        ({"enable_thinking": None}, False),
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "no_think"}, True),
        ({"reasoning_effort": "low"}, False),
        ({"reasoning_effort": ["none"]}, False),
        ({"thinking_budget": 0}, True),
        ({"thinking_budget": False}, False),
        ({"thinking_mode": "chat"}, True),
    ],
)
def test_what_switches_reasoning_off(variables: dict[str, Any], off: bool) -> None:
    assert (reasoning_setting(variables) == "off") == off
