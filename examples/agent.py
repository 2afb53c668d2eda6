"""A model that looks into a folder by calling functions:

python examples/agent.py "How many files are here?" [MODEL]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import treadle


def list_files(folder: str = ".") -> list[str]:
    """The names of the files in a folder.

    Args:
        folder: Its path.
    """
    return sorted(path.name for path in Path(folder).iterdir() if path.is_file())


def count_lines(file: str) -> int:
    """How many lines a file of text has."""
    return len(Path(file).read_text("utf-8").splitlines())


def show(message: dict[str, Any]) -> None:
    for call in message.get("tool_calls", ()):
        print(f"{call['function']['name']}({call['function']['arguments']})")
    if message["content"]:
        print(f"{message['role']}: {message['content']}")


def answer(question: str, model: treadle.Model, **settings: Any) -> list[dict[str, Any]]:
    talk = [{"role": "user", "content": question}]
    tools = [list_files, count_lines]
    return treadle.run_tools(model, talk, tools, told=show, **settings)


if __name__ == "__main__":
    with treadle.load(*sys.argv[2:3]) as model:
        answer(sys.argv[1], model, max_tokens=200)
