"""The built-in template of Kimi K3, and its answers."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.chat.template.builtin_templates import BUILT_INS
from treadle.chat.template.template import ChatTemplate
from treadle.chat.tools.detect import dialect_of
from treadle.chat.tools.output import ParsedOutput

K3 = ChatTemplate(next(each.source for each in BUILT_INS if each.name == "kimi-k3"))
END = "<|close|>message<|sep|><|end_of_msg|>"
EFFORT = (
    '<|open|>message role="system" type="thinking-effort"<|sep|>`thinking_effort` guides on how '
    "much to think in your thinking channel (not including the response channel), supported values "
    "include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with "
    f"`thinking_effort=max`.{END}"
)
USER: dict[str, Any] = {"role": "user", "content": "hi"}
ASKED = '<|open|>message role="user"<|sep|>hi' + END
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
ARGUMENTS = {"a": 'x&"', "n": 3, "l": [1, "é"], "o": None, "b": True}
CALL = (
    '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>x&"'
    '<|close|>argument<|sep|><|open|>argument key="n" type="number"<|sep|>3<|close|>argument<|sep|>'
)
CALLED = (
    f"<|open|>tools<|sep|>{CALL}"
    '<|open|>argument key="l" type="array"<|sep|>[1, "é"]<|close|>argument<|sep|>'
    '<|open|>argument key="o" type="null"<|sep|>null<|close|>argument<|sep|>'
    '<|open|>argument key="b" type="boolean"<|sep|>true<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>"
)


def answer(**more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "So", "reasoning_content": "hm", **more}


def calling(id: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": ARGUMENTS}
    return answer(tool_calls=[{"id": id, "type": "function", "function": function}])


def said(text: str) -> str:
    """An assistant's turn."""
    thought = "<|open|>think<|sep|>hm<|close|>think<|sep|>"
    response = "<|open|>response<|sep|>So<|close|>response<|sep|>"
    return f'<|open|>message role="assistant"<|sep|>{thought}{response}{text}{END}'


@pytest.mark.parametrize(
    ("talk", "given", "prompt"),
    [
        ([USER], {}, EFFORT + ASKED),
        ([USER], {"thinking": False}, ASKED),
        ([USER], {"thinking_effort": "low"}, EFFORT.replace("=max", "=low") + ASKED),
        ([USER, answer(), USER], {}, EFFORT + ASKED + said("") + ASKED),
        (
            [USER, calling("1"), {"role": "tool", "tool_call_id": "1", "content": "r"}],
            {},
            f'{EFFORT}{ASKED}{said(CALLED)}<|open|>message role="tool" tool="f" index="1"<|sep|>r'
            + END,
        ),
        (
            [USER, calling("1"), {"role": "tool", "content": "r"}],
            {},
            f'{EFFORT}{ASKED}{said(CALLED)}<|open|>message role="tool" tool="f" index="1"<|sep|>r'
            + END,
        ),
    ],
)
def test_prompts(talk: list[dict[str, Any]], given: dict[str, Any], prompt: str) -> None:
    """As llama.cpp's template for it writes them, which was compared once."""
    assert K3.render(talk, add_generation_prompt=False, **given) == prompt
    begun = "response" if given.get("thinking") is False else "think"
    asked = f'<|open|>message role="assistant"<|sep|><|open|>{begun}<|sep|>'
    assert K3.render(talk, add_generation_prompt=True, **given) == prompt + asked


def test_tools() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    prompt = K3.render([USER], add_generation_prompt=False, tools=[tool])
    whole = (
        '{"function":{"name":"f","parameters":{"properties":{"a":{"type":"string"},'
        '"n":{"type":"integer"}},"type":"object"}},"type":"function"}'
    )
    head = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
    start = '<|open|>message role="system" type="tool-declare"<|sep|>'
    assert prompt == f"{start}{head}[{whole}]\n```{END}{EFFORT}{ASKED}"


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("closed", ["<|close|>think<|sep|>", ""])
def test_answers(closed: str, step: int) -> None:
    """Reasoning, text and a call, at once and by characters; models may leave the end of reasoning
    out.
    """
    dialect = dialect_of(K3)
    assert dialect.row.name == "elements"
    prompt = K3.render([USER], add_generation_prompt=True)
    text = (
        f"hm{closed}<|open|>response<|sep|>So, response<|close|>response<|sep|>"
        f"<|open|>tools<|sep|>{CALL}<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
    )
    scanner = dialect.marks(prompt, tools={"f": SCHEMA}).scanner()
    parts = []
    for at in range(0, len(text), step):
        parts += scanner.feed(text[at : at + step])
    found = ParsedOutput.of([*parts, *scanner.feed("", last=True)])
    assert (found.reasoning, found.content) == ("hm", "So, response")
    assert [(c.name, c.arguments) for c in found.calls] == [("f", '{"a": "x&\\"", "n": 3}')]
    assert found.calls[0].id.startswith("call_")  # the number is no id
