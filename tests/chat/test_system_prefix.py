"""Where the system prompt of a rendered conversation ends."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.base.text_overlap import n_common
from treadle.chat.system_prefix import MOST, SystemPrefixes
from treadle.errors import TemplateError

Messages = list[dict[str, Any]]


def encode(text: str) -> list[int]:
    return list(text.encode())


def in_marks(messages: Messages) -> str:
    return "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>"


def merged(messages: Messages) -> str:
    """Gemma's way: the system prompt is the beginning of the user's first message."""
    first, *rest = messages
    if first["role"] == "system":
        user, *rest = rest
        first = {"role": "user", "content": f"{first['content']}\n\n{user['content']}"}
    return in_marks([first, *rest])


def user(content: str = "question") -> dict[str, Any]:
    return {"role": "user", "content": content}


RULES = {"role": "system", "content": "rules"}


ANSWER = {"role": "assistant", "content": "answer"}
PICTURE = {"role": "system", "content": [{"type": "image"}]}


@pytest.mark.parametrize(
    ("render", "messages", "beginning"),
    [
        (in_marks, [RULES, user()], "<system>rules</><user>"),
        (in_marks, [RULES, user("A7?"), ANSWER, user()], "<system>rules</><user>"),
        (in_marks, [user()], "<user>"),
        (in_marks, [RULES, RULES, user()], "<system>rules</><system>rules</><user>"),
        (in_marks, [RULES], "<system>rules</><"),
        (merged, [RULES, user()], "<user>rules\n\n"),
        (in_marks, [RULES, ANSWER, user()], ""),
        (in_marks, [PICTURE, user()], ""),
    ],
)
def test_the_end_of_a_system_prompt(render: Any, messages: Messages, beginning: str) -> None:
    ids = encode(render(messages))
    n = SystemPrefixes(encode).end(ids, messages, render, None)
    assert render(messages)[:n] == beginning


def test_a_system_prompt_is_rendered_anew_only_if_it_has_changed() -> None:
    calls: list[Messages] = []
    day = "Monday"

    def dated(messages: Messages) -> str:
        calls.append(messages)
        return f"{day}: {in_marks(messages)}"

    prefixes = SystemPrefixes(encode)

    def end(content: str, given: object = None) -> int:
        messages = [RULES, user(content)]
        return prefixes.end(encode(f"{day}: {in_marks(messages)}"), messages, dated, given)

    n = len("Monday: <system>rules</><user>")
    assert [end("one"), end("two"), len(calls)] == [n, n, 2]
    assert [end("one", {"tools": 1}), len(calls)] == [n, 4]
    day = "Tuesday"
    assert [end("one"), end("two"), len(calls)] == [n + 1, n + 1, 6]
    for i in range(MOST):
        end("one", i)
    assert len(prefixes._found) == MOST


def test_a_template_that_refuses_the_beginning_alone() -> None:
    def refuses(messages: Messages) -> str:
        raise TemplateError("roles must alternate")

    assert SystemPrefixes(encode).end([1, 2], [RULES, user()], refuses, None) == 0


def test_ids_in_common() -> None:
    assert [n_common(a, b) for a, b in (([], [1]), ([1, 2], [1, 3]), ([1], [1, 2]))] == [0, 1, 1]
