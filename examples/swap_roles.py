"""The model asks and you answer: `python examples/swap_roles.py [MODEL]` (Ctrl-D ends it)."""

from __future__ import annotations

import sys

import treadle

OPENING = (
    "You are a curious person who talks to an assistant. I am the assistant. Ask me something."
)
OTHER = {"user": "assistant", "assistant": "user"}


def swapped(messages: list[dict[str, str]], opening: str = OPENING) -> list[dict[str, str]]:
    """The conversation as the user sees it: who asked now answers.

    ``opening`` comes first, as chat templates want a user before the first assistant.
    """
    turned = [{**m, "role": OTHER.get(m["role"], m["role"])} for m in messages]
    at = 1 if turned and turned[0]["role"] == "system" else 0
    return [*turned[:at], {"role": "user", "content": opening}, *turned[at:]]


if __name__ == "__main__":
    model = treadle.load(*sys.argv[1:2])
    messages: list[dict[str, str]] = []
    while True:
        reply = model.chat(swapped(messages), max_tokens=100)
        for piece in reply:
            print(piece, end="", flush=True)
        messages.append({"role": "user", "content": reply.text})
        try:
            messages.append({"role": "assistant", "content": input("\n> ")})
        except (EOFError, KeyboardInterrupt):
            break
    print()
