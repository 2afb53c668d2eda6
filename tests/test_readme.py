"""The README's examples run as they stand, on a real model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from treadle.chat.tools.formats import ROWS, THOUGHTS
from treadle.models.archs import ARCHS

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_the_library_examples(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    first, hooks = re.findall(r"```python\n(.*?)```", readme, re.S)
    (tmp_path / "model.gguf").symlink_to(data / "models" / "stories260K.gguf")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(first, "README.md", "exec"), names)
    assert capsys.readouterr().out.startswith(", there was a little girl named Lily.")
    assert names["logits"].shape[1] == 512
    assert names["answer"].finish_reason in ("stop", "length", "context")
    exec(compile(hooks, "README.md", "exec"), names)
    assert capsys.readouterr().out.startswith("(")  # a shape
    assert names["guesses"].logits.shape[-1] == 512
    names["model"].close()


def test_every_architecture_is_in_the_list_of_models() -> None:
    """docs/models.md has each in a cell or in brackets; the README says how many they are."""
    rows = (ROOT / "docs/models.md").read_text("utf-8")
    cells = re.findall(r"\| ([^|]+) \|$|\(([^)]+)\)", rows, re.M)
    named = {name.strip() for cell in cells for name in re.split("[;,]", "".join(cell))}
    assert set(ARCHS) <= named, set(ARCHS) - named
    (count,) = re.findall(r"(\d+) architectures of GGUF", (ROOT / "README.md").read_text("utf-8"))
    assert int(count) == len(ARCHS)


def test_the_table_of_names_says_what_is_so() -> None:
    """Architectures, formats of calls and marks of reasoning are rows of the program, and each
    architecture is in a test against transformers.
    """
    page = (ROOT / "docs/models.md").read_text("utf-8")
    _, _, table = page.partition("| card | architecture | tool calls | reasoning | command |\n")
    lines = [line for line in table.partition("\n\n")[0].splitlines()[1:] if line]
    formats = {row.name for row in ROWS}
    marks = {f"`{thought.begin}`" for thought in THOUGHTS} | {"harmony", "none"}
    folders = (ROOT / "tests/models", ROOT / "tests/convert")
    tests = "".join(path.read_text("utf-8") for at in folders for path in at.glob("*.py"))
    assert len(lines) > 30
    for line in lines:
        text = line.strip("| ").replace("\\|", "\0")
        card, arch, calls, reasoning, command = [
            cell.strip().replace("\0", "|") for cell in text.split(" | ")
        ]
        assert arch in ARCHS, card
        assert calls in formats | {"none"}, (card, calls)
        assert reasoning in marks, (card, reasoning)
        assert re.fullmatch(r"`treadle chat hf:[\w.-]+/[\w.-]+`", command), command
        assert f'"{arch}"' in tests, arch
    cards = " ".join(lines)
    for name in ("Qwen 3.6", "Qwen 3.8", "LFM2.5", "Nemotron 3.5", "Ornith", "Gemma 4", "gpt-oss"):
        assert name in cards
    for name in ("Qwen 3.8", "LFM2.5", "Nemotron 3.5", "Ornith", "Gemma 4", "Ministral 3"):
        assert name in (ROOT / "README.md").read_text("utf-8"), name


def test_a_first_conversation_is_one_command() -> None:
    """`make demo` ends with it, and the README names it."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    demo = re.search(r"^demo:.*\n((?:\t.*\n)+)", makefile, re.M)
    assert demo is not None
    assert "make chat" in demo[1].splitlines()[-1]
    assert re.search(r"^chat:", makefile, re.M)
    assert "make chat" in (ROOT / "README.md").read_text("utf-8")
