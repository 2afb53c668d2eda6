"""The tool that reads llama.cpp's chat cases: it must tell where treadle differs, and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chat.tools.families import FAMILIES, TEMPLATES, TOOLS

FOLDER = Path(__file__).resolve().parents[2] / "tools"
THINKS = TEMPLATES["tags"] + "{# </think> <|done|> #}"
CASE: dict[str, Any] = {
    "template": "models/templates/own.jinja",
    "messages": [],
    "tools": [],
    "tool_choice": 0,
    "enable_thinking": True,
    "parallel_tool_calls": True,
    "json_schema": "",
    "reasoning_format": 1,
    "continue_final_message": 0,
}
G = [{"name": "g", "description": "G.", "parameters": json.dumps(TOOLS["g"])}]
THOUGHT = {"role": "assistant", "content": "", "reasoning_content": "I"}
BEGUN = {"role": "assistant", "content": "One", "reasoning_content": "I"}
USER = {"role": "user", "content": "hi"}


def case(text: str, content: str, reasoning: str = "", calls: int = 0, **more: Any) -> str:
    told = [{"name": "g", "arguments": "{}"}] * calls
    expect = {"content": content, "reasoning_content": reasoning, "tool_calls": told}
    return json.dumps({**CASE, "input": text, "expect": expect, **more})


SAME = [
    case("yes", "yes"),
    case("<think>so</think>yes<|done|>", "yes", "so"),
    case("<think>so</think>yes", "<think>so</think>yes", reasoning_format=0),
    case(f"a{FAMILIES['tags'].g}", "a", calls=1, tools=G),
    case(FAMILIES["tags"].g, FAMILIES["tags"].g, tools=G, tool_choice=2),
    case(" two", "One two", "I", messages=[USER, BEGUN], continue_final_message=3),
    case(" am</think>yes", "yes", "I am", messages=[USER, THOUGHT], continue_final_message=2),
]
OTHER = [case("yes", "no"), case("<think>so</think>yes", "yes"), case("a", "a", calls=1, tools=G)]
REASON = '[[case]]\ntemplate = "own.jinja"\nnumbers = [{}]\nverdict = "design"\nreason = "so it is"'


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    """tools/parser_cases.py as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(FOLDER), *sys.path])
        import parser_cases  # type: ignore[import-not-found]

        yield parser_cases


def ends(tool: Any, folder: Path, cases: list[str], reasons: str, patch: pytest.MonkeyPatch) -> int:
    """The tool's exit code for these cases."""
    (folder / "own.jinja").write_text(THINKS, "utf-8")
    (folder / "cases.jsonl").write_text("\n".join(cases), "utf-8")
    (folder / "parser_cases.toml").write_text(reasons or "case = []", "utf-8")
    patch.setattr(tool, "HERE", folder)
    said = ["tool", str(folder / "cases.jsonl"), "--templates", str(folder)]
    patch.setattr(sys, "argv", [*said, "--out", str(folder / "out.json")])
    code: int = tool.main()
    return code


def test_what_agrees(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ends(tool, tmp_path, SAME, "", monkeypatch) == 0
    found = json.loads((tmp_path / "out.json").read_text("utf-8"))["own.jinja"]
    assert [each["differs"] for each in found] == [""] * len(SAME)


def test_what_differs_has_a_reason(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reason that is for no difference is told, too."""
    for other in OTHER:
        assert ends(tool, tmp_path, [*SAME, other], "", monkeypatch) == 1
        assert "no reason: own.jinja 7" in capsys.readouterr().err
        assert ends(tool, tmp_path, [*SAME, other], REASON.format(7), monkeypatch) == 0
        assert "| `own` | 8 | 7 | 1 |  | so it is |" in capsys.readouterr().out
    assert ends(tool, tmp_path, SAME, REASON.format(0), monkeypatch) == 1
    assert "no such difference: own.jinja: so it is" in capsys.readouterr().err


def test_reasons_are_of_known_kinds(tool: Any) -> None:
    rows = tool.tomllib.loads((FOLDER / "parser_cases.toml").read_text("utf-8"))["case"]
    assert {row["verdict"] for row in rows} <= {"design", "absent"}
    assert all(row["reason"] for row in rows)
