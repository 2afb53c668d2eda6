"""Earlier turns that only some templates take as they are."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.chat.tools.families import (
    BARE_TEMPLATE,
    HERMES_TEMPLATE,
    TEMPLATES,
    TOLD,
    F,
    found_dialect,
)
from tests.chat.tools.test_manner import REAL, WITHOUT
from treadle.chat.messages import lone_results
from treadle.chat.template.template import ChatTemplate
from treadle.chat.tools.detect import dialect_of, find_dialect
from treadle.chat.tools.history import CallContentStyle
from treadle.chat.tools.messages import messages_for_template

# As the families' own have it, in short: a message that calls has text or reasoning, which is left
# out once an answer follows; results stand behind calls; a later system's message is left out.
GPT_OSS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% set ns = namespace(name=none) %}"
    "{% for m in messages %}{% if m.role == 'assistant' and 'tool_calls' in m %}"
    "{% set later = namespace(found=false) %}{% for n in messages[loop.index:] %}"
    "{% if n.role == 'assistant' and 'tool_calls' not in n %}{% set later.found = true %}"
    "{% endif %}"
    "{% endfor %}{% if m.content and m.thinking %}{{ raise_exception('content and thinking') }}"
    "{% elif not later.found and (m.content or m.thinking) %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>"
    "{% endif %}"
    "{% set ns.name = m.tool_calls[0].function.name %}<|start|>assistant to=functions.{{ ns.name }}"
    "<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}{% set ns.name = none %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}{% if ns.name is none %}"
    "{{ raise_exception('no previous assistant message with a tool call') }}{% endif %}"
    "<|start|>functions.{{ ns.name }} to=assistant<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif loop.first or m.role != 'system' %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Text and parts, reasoning as one of them; turns alternate, and none of the assistant's is empty.
MINISTRAL = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{% if not loop.first %}{{ raise_exception('roles') }}{% endif %}[SYSTEM]{{ m.content }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}"
    "{% if m.role == 'user' or not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}"
    "{% if m.role == 'assistant' and not m.content and not m.tool_calls %}"
    "{{ raise_exception('Assistant message must have a string or a list of chunks') }}{% endif %}"
    "{{ '[INST]' if m.role == 'user' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'thinking' %}{{ '[THINK]' + part['thinking'] + '[/THINK]' }}"
    "{% endif %}{% endfor %}{% endif %}{% for c in m.tool_calls or [] %}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '[/INST]' if m.role == 'user' else '</s>' }}{% endif %}{% endfor %}"
)
# A call, or text; the text of a message that has both comes behind the call (DeepSeek R1), the
# result is found behind its call alone (Gemma 4), the user must have spoken (Qwen 3.5).
R1 = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}<｜tool▁calls▁begin｜>"
    "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n"
    "```json\n{{ c.function.arguments | tojson }}\n```<｜tool▁call▁end｜>{% endfor %}"
    "<｜tool▁calls▁end｜>{% endif %}{% if m.role == 'assistant' and m['content'] is not none %}"
    "<｜Assistant｜>{{ m.content }}{% elif m.role != 'assistant' %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}{# </think> #}"
)
GEMMA_4 = (
    "{% for m in messages %}{% if m.role != 'tool' %}<|turn>{{ m.role }}\n{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{text:<|"|>'
    '{{ c.function.arguments.text }}<|"|>}<tool_call|>{% endfor %}'
    "{% if m.tool_calls %}{% set ns = namespace(over=false) %}{% for n in messages[loop.index:] %}"
    "{% if n.role != 'tool' %}{% set ns.over = true %}{% elif not ns.over %}"
    "<|tool_response>{{ n.content }}<tool_response|>{% endif %}{% endfor %}{% endif %}"
    "<turn|>{% endif %}{% endfor %}"
)
QWEN_35 = (
    "{% set ns = namespace(asked=false) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = true %}{% endif %}{% endfor %}{% if not ns.asked %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}" + HERMES_TEMPLATE
)
OWN = {
    "gpt-oss": GPT_OSS,
    "Ministral 3": MINISTRAL,
    "R1": R1,
    "Gemma 4": GEMMA_4,
    "Qwen 3.5": QWEN_35,
    "Hermes": HERMES_TEMPLATE,
    "bare": BARE_TEMPLATE,
    **{f"own {name}": source for name, source in TEMPLATES.items()},
    **{f"told {name}": source for name, source in TOLD.items()},
}
NAMES = [*REAL, *WITHOUT, *OWN]
ANSWER = {"role": "assistant", "content": "ANSWER"}


@cache
def template_of(name: str, data: Path) -> ChatTemplate:
    source = OWN.get(name) or (data / "templates" / f"{name}.jinja").read_text("utf-8")
    return ChatTemplate(source, bos="<s>")


def user(words: str) -> dict[str, Any]:
    return {"role": "user", "content": words}


def call(n: int = 1, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": {"text": f"ARGUMENT{n}"}}
    made = {"id": f"call{n:05}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [made], **more}


def result(n: int = 1) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{n:05}", "name": "f", "content": f"RESULT{n}"}


def check_order(name: str, data: Path, talk: list[Any], *words: str) -> None:
    """Each of the words stands in the prompt once, in this order; with tools and without."""
    template = template_of(name, data)
    for tools in ([], [F]):
        made, shown = messages_for_template(talk, tools, dialect_of(template))
        text = template.render(made, tools=shown)
        assert [text.count(word) for word in words] == [1] * len(words), text
        places = [text.index(word) for word in words]
        assert places == sorted(places), text


@pytest.mark.parametrize("name", NAMES)
def test_a_result_without_its_call(name: str, data: Path) -> None:
    """Some templates raise on it, some leave it out."""
    for talk in ([user("ASKED"), ANSWER, result(), user("MORE")], [user("ASKED"), result()]):
        words = [str(message["content"]) for message in talk]
        check_order(name, data, talk, *words)
        assert len(lone_results(talk)) == 1
    check_order(name, data, [result(), user("MORE")], "RESULT1", "MORE")
    whole = [user("ASKED"), call(), {"role": "system", "content": "LATE"}, result(), ANSWER]
    assert lone_results(whole) == []
    if "Mistral" not in name:  # whose template puts what the system says before the user's last
        check_order(name, data, [*whole, user("MORE")], "ASKED", "ARGUMENT1", "RESULT1", "LATE")


def test_what_is_told_of_a_lone_result() -> None:
    (warning,) = lone_results([user("ASKED"), result()])
    assert warning == (
        "tool result 'call00001' follows no tool call: it is sent to the model as a user message"
    )
    assert len(lone_results([result(), {"role": "tool", "tool_name": "f", "content": "x"}])) == 2
    assert lone_results([call(), result(), result(2)]) == []
    assert len(lone_results([call(), result(), user("MORE"), result()])) == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_system_alone(name: str, data: Path) -> None:
    """Some raise on it, some leave it out, some only with tools."""
    check_order(name, data, [{"role": "system", "content": "TOLD"}], "TOLD")


@pytest.mark.parametrize("name", NAMES)
def test_words_beside_a_call(name: str, data: Path) -> None:
    talk = [user("ASKED"), call(content="WORDS"), result()]
    check_order(name, data, talk, "ASKED", "WORDS", "ARGUMENT1", "RESULT1")
    answered = [*talk, ANSWER, user("MORE")]
    words = ("ASKED", "WORDS", "ARGUMENT1", "RESULT1", "ANSWER", "MORE")
    check_order(name, data, answered, *words)
    again = [*talk, call(2, content="OTHERS"), result(2), ANSWER, user("MORE")]
    check_order(name, data, again, *words[:4], "OTHERS", "ARGUMENT2", "RESULT2", *words[4:])


@pytest.mark.parametrize(
    "name", ["gpt-oss", "Ministral 3", "Gemma 4", "own harmony", "own solar", *REAL]
)
def test_reasoning_words_and_a_call(name: str, data: Path) -> None:
    """gpt-oss' template raises on the three together."""
    names = ("reasoning_content", "thinking", "reasoning")
    said: dict[str, Any] = dict.fromkeys(names, "REASONED")
    talk = [user("ASKED"), call(content="WORDS", **said), result()]
    check_order(name, data, talk, "ASKED", "WORDS", "ARGUMENT1", "RESULT1")
    if name in ("gpt-oss", "Ministral 3"):
        check_order(name, data, talk, "ASKED", "REASONED", "WORDS", "ARGUMENT1", "RESULT1")
    if name in ("own solar", "CohereForAI-c4ai-command-r7b-12-2024-tool_use"):
        # Reasoning is written of messages that call, and these have no words.
        check_order(name, data, talk, "WORDS", "REASONED", "ARGUMENT1")
    more = [call(2, content="OTHERS", **said), result(2)]
    check_order(name, data, [*talk, *more], "WORDS", "ARGUMENT1", "OTHERS", "ARGUMENT2", "RESULT2")


def test_the_three_of_gpt_oss() -> None:
    """As the model wrote them; with an answer behind it the reasoning is left out."""
    template = ChatTemplate(GPT_OSS)
    dialect = found_dialect(template)
    assert dialect.call_content.in_thought is not None
    talk = [user("ASKED"), call(content="WORDS", thinking="REASONED"), result()]
    talk[1] |= {"reasoning_content": "REASONED"}
    text = template.render(messages_for_template(talk, [], dialect)[0])
    assert (
        "<|start|>assistant<|channel|>analysis<|message|>REASONED<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>WORDS<|end|>"
        "<|start|>assistant to=functions.f"
    ) in text
    text = template.render(messages_for_template([*talk, ANSWER, user("MORE")], [], dialect)[0])
    assert "REASONED" not in text
    assert text.index("WORDS") < text.index("ARGUMENT1") < text.index("ANSWER")


@pytest.mark.parametrize("content", ["", None, []])
@pytest.mark.parametrize("name", NAMES)
def test_an_empty_message_of_the_assistant(name: str, content: Any, data: Path) -> None:
    empty = {"role": "assistant", "content": content}
    check_order(name, data, [user("ASKED"), empty, user("MORE")], "ASKED", "MORE")
    thought = {**empty, "reasoning_content": "REASONED"}
    check_order(name, data, [user("ASKED"), thought, user("MORE")], "ASKED", "MORE")
    talk = [user("ASKED"), {**call(), "content": content}, result(), user("MORE")]
    check_order(name, data, talk, "ASKED", "ARGUMENT1", "RESULT1", "MORE")


def test_reasoning_as_a_part_of_the_content() -> None:
    """Ministral's template has it so: it was forgotten."""
    template = ChatTemplate(MINISTRAL)
    dialect = found_dialect(template)
    assert dialect.thought_parts
    assert dialect.empty_raises
    thought: dict[str, Any] = {"reasoning_content": "REASONED"}
    talk = [user("ASKED"), {**ANSWER, **thought}, user("MORE"), call(**thought), result()]
    text = template.render(messages_for_template(talk, [F], dialect)[0], tools=[F])
    assert "[/INST][THINK]REASONED[/THINK]ANSWER</s>" in text
    assert "[THINK]REASONED[/THINK][TOOL_CALLS]f[ARGS]" in text
    alone = [user("ASKED"), {"role": "assistant", "content": "", **thought}, user("MORE")]
    text = template.render(messages_for_template(alone, [], dialect)[0])
    assert "[INST]ASKED[/INST][THINK]REASONED[/THINK]</s>[INST]MORE[/INST]" in text
    assert not find_dialect(
        ChatTemplate(MINISTRAL.replace("part['thinking']", "'-'"))
    ).thought_parts


def test_none_is_apart_where_the_template_has_both() -> None:
    assert find_dialect(ChatTemplate(HERMES_TEMPLATE)).call_content == CallContentStyle()
    assert find_dialect(ChatTemplate(MINISTRAL)).call_content == CallContentStyle()
    assert find_dialect(ChatTemplate(R1)).call_content == CallContentStyle(apart=True)
