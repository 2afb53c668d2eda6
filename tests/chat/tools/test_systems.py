"""What the system says in the middle of a conversation."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.chat.tools.families import TEMPLATES, F, found_dialect
from tests.chat.tools.test_manner import REAL, USER, WITHOUT, real
from treadle.chat.template.template import ChatTemplate
from treadle.chat.tools.detect import find_dialect
from treadle.chat.tools.messages import messages_for_template
from treadle.chat.tools.system_messages import system_in_place

FIRST, LATE = ({"role": "system", "content": f"{word} says so"} for word in ("first", "late"))
SAID = {"role": "assistant", "content": "an answer"}
CALLED: list[Any] = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call1",
                "type": "function",
                "function": {"name": "f", "arguments": {"text": "x"}},
            },
        ],
    },
    {"role": "tool", "tool_call_id": "call1", "name": "f", "content": "gave this"},
]
STAYS = {
    "Qwen-Qwen2.5-7B-Instruct": True,
    "meta-llama-Llama-3.1-8B-Instruct": True,
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": False,
    "google-gemma-2-2b-it": False,
    "mistralai-Mistral-Nemo-Instruct-2407": False,
}


@pytest.mark.parametrize("name", [*REAL, *WITHOUT])
def test_it_is_written_once_where_the_template_has_it(name: str, data: Path) -> None:
    template = real(data, name)
    dialect = found_dialect(template)
    assert dialect.system_stays == STAYS.get(name, dialect.system_stays)
    called = [] if "Mistral" in name else [[*CALLED, LATE]]  # behind a result it writes no system's
    for tools in ([], [F]):
        for first in ([], [FIRST]):
            for talk in ([LATE], [SAID, LATE, USER], *(called if tools else [])):
                made, shown = messages_for_template([*first, USER, *talk], tools, dialect)
                text = template.render(made, tools=shown)
                assert text.count(LATE["content"]) == 1
                assert text.count(FIRST["content"]) == len(first)
                if dialect.system_stays and SAID in talk:
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
    assert not find_dialect(ChatTemplate(source)).system_stays
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert find_dialect(ChatTemplate(plain)).system_stays


def test_the_system_in_place() -> None:
    late = LATE["content"]
    first = FIRST["content"]
    both = {"role": "system", "content": f"{first}\n\n{late}"}
    own = {"role": "user", "content": late}
    behind, before = (
        {"role": "user", "content": words} for words in (f"hi\n\n{late}", f"{late}\n\nhi")
    )
    made = system_in_place
    assert made([USER, SAID]) == [USER, SAID]
    assert made([FIRST, USER]) == [FIRST, USER]
    assert made([FIRST, LATE, USER]) == [both, USER]
    assert made([FIRST, USER, LATE]) == [FIRST, behind]
    assert made([USER, LATE, SAID]) == [behind, SAID]
    assert made([FIRST, USER, SAID, LATE]) == [FIRST, USER, SAID, own]
    assert made([USER, SAID, LATE, USER]) == [USER, SAID, before]
    assert made([USER, SAID, LATE, SAID, USER]) == [USER, SAID, own, SAID, USER]
    assert made([USER, {**LATE, "content": ""}]) == [USER]
    assert made([USER, {**LATE, "role": "developer"}]) == [behind]
    given = {**CALLED[1], "content": f"gave this\n\n{late}"}
    assert made([USER, *CALLED, LATE]) == [USER, CALLED[0], given]
    objects = {**CALLED[1], "content": {"é": 1}}
    assert made([objects, LATE])[0]["content"] == f'{{"é": 1}}\n\n{late}'


TURNS: list[Any] = [
    FIRST,
    USER,
    LATE,
    SAID,
    {**USER, "content": "how"},
    {**LATE, "content": "more of it"},
    *CALLED,
    {**LATE, "content": "some of it"},
    *({**CALLED[0], "content": "so"}, CALLED[1]),
    {**LATE, "content": "all of it"},
    SAID,
    {**LATE, "content": "the last of it"},
    {**USER, "content": "so"},
]
ENDS = (3, 6, 9, 12, 15)  # where the model is asked
# Templates that lose the place by themselves: Mistral's write the system and the tools before the
# user's last message.
MOVES = ("mistralai-Mistral-Nemo-Instruct-2407",)


def n_alike(one: str, other: str) -> int:
    """Characters that two texts begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("name", [*REAL, *WITHOUT, *(f"own {each}" for each in TEMPLATES)])
def test_what_was_read_is_the_beginning_of_the_next_prompt(name: str, data: Path) -> None:
    """The system's words moved to the front, and all of the conversation was read again."""
    own = name.removeprefix("own ")
    template = real(data, name) if own == name else ChatTemplate(TEMPLATES[own], bos="<s>")
    dialect = found_dialect(template)

    def lost(turns: list[Any]) -> list[int]:
        """Characters behind the first that is another one in the next prompt."""
        made = [messages_for_template(turn, [F], dialect) for turn in turns]
        texts = [template.render(said, tools=shown) for said, shown in made]
        return [len(one) - n_alike(one, other) for one, other in pairwise(texts)]

    turns = [TURNS[:end] for end in ENDS]
    without = [[m for m in turn if m == FIRST or m["role"] != "system"] for turn in turns]
    assert all(
        LATE["content"] in template.render(messages_for_template(t, [], dialect)[0]) for t in turns
    )
    if name not in MOVES:
        few = len("\n\nmore of it")  # a mark behind a text that goes on
        assert all(a <= b + few for a, b in zip(lost(turns), lost(without), strict=True))
