"""What the system says in the middle of a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.speech.families import F
from tests.speech.test_manner import REAL, USER, WITHOUT, real
from treadle.speech.manner import find_manner
from treadle.speech.messages import shaped
from treadle.speech.systems import system_first
from treadle.text.template import ChatTemplate

FIRST, LATE = ({"role": "system", "content": f"{word} says so"} for word in ("first", "late"))
SAID = {"role": "assistant", "content": "an answer"}
CALLED: list[Any] = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call1", "type": "function",
             "function": {"name": "f", "arguments": {"text": "x"}}},
        ],
    },
    {"role": "tool", "tool_call_id": "call1", "name": "f", "content": "gave this"},
]  # fmt: skip
STAYS = {"Qwen-Qwen2.5-7B-Instruct": True, "meta-llama-Llama-3.1-8B-Instruct": True,
         "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": False, "google-gemma-2-2b-it": False,
         "mistralai-Mistral-Nemo-Instruct-2407": False}  # fmt: skip


@pytest.mark.parametrize("name", [*REAL, *WITHOUT])
def test_it_is_written_once_where_the_template_has_it(name: str, data: Path) -> None:
    template = real(data, name)
    manner = find_manner(template)
    assert manner.system_stays == STAYS.get(name, manner.system_stays)
    called = [] if "Mistral" in name else [[*CALLED, LATE]]  # behind a result it writes no system's
    for tools in ([], [F]):
        for first in ([], [FIRST]):
            for talk in ([LATE], [SAID, LATE, USER], *(called if tools else [])):
                made, shown = shaped([*first, USER, *talk], tools, manner)
                text = template.render(made, tools=shown)
                assert text.count(LATE["content"]) == 1
                assert text.count(FIRST["content"]) == len(first)
                if manner.system_stays and SAID in talk:
                    assert text.index(SAID["content"]) < text.index(LATE["content"])


@pytest.mark.parametrize(
    "source",
    [
        # Others than the system and the user are the assistant; the system's is the user's.
        "{% for m in messages %}{% if m.role == 'user' %}U{% elif loop.first and m.role == 'system'"
        " %}S{% else %}A{% endif %}: {{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ 'A' if m.role == 'assistant' else 'U' }}: {{ m.content }}\n"
        "{% endfor %}",
        # It comes first, or not at all.
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if loop.first or m.role != 'system' %}{{ m.role }}: "
        "{{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_it_does_not_stay(source: str) -> None:
    assert not find_manner(ChatTemplate(source)).system_stays
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert find_manner(ChatTemplate(plain)).system_stays


def test_the_system_first() -> None:
    both = {"role": "system", "content": "first says so\n\nlate says so"}
    assert system_first([USER, SAID]) == [USER, SAID]
    assert system_first([FIRST, USER]) == [FIRST, USER]
    assert system_first([FIRST, USER, LATE]) == [both, USER]
    assert system_first([USER, LATE, SAID]) == [LATE, USER, SAID]
    told = {**LATE, "role": "user"}
    assert system_first([FIRST, USER, SAID, LATE]) == [FIRST, USER, SAID, told]
    assert system_first([USER, SAID, LATE]) == [USER, SAID, told]
    assert system_first([FIRST, USER, *CALLED[:1], LATE])[0] == FIRST
