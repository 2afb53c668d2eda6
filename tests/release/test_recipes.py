"""Workflows of the forge and the recipe of the image, by their linters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.release.tools import ROOT, program, run

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PIN = re.compile(r"uses: [\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+\n")


def test_workflows_are_of_the_forge_s_schema() -> None:
    check = (program("check-jsonschema"), "--builtin-schema")
    assert "ok" in run(*check, "vendor.github-workflows", *WORKFLOWS)
    assert "ok" in run(*check, "vendor.dependabot", ROOT / ".github" / "dependabot.yml")


def test_workflows_give_nothing_away() -> None:
    """Least permissions, no credentials left behind, no text of others in a shell."""
    run(program("zizmor"), "--offline", "--no-progress", ROOT / ".github")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(PIN.findall(text)) == text.count("uses: ") > 0


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_what_there_is(path: Path) -> None:
    text = path.read_text("utf-8")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"run: make ([\w -]+?)(?: #.*)?$", text, re.MULTILINE):
        for name in target.split():
            assert re.search(rf"^{name}:", makefile, re.MULTILINE), name
    for script in re.findall(r"python ((?:tools|integrations)/\S+)", text):
        assert (ROOT / script).is_file(), script


def test_every_python_is_tested_that_is_promised() -> None:
    promised = re.findall(
        r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE
    )
    (row,) = re.findall(
        r"python: \[(.*)\]", (ROOT / ".github/workflows/tests.yml").read_text("utf-8")
    )
    assert re.findall(r"[\d.]+", row) == promised


def test_the_recipe_of_the_image() -> None:
    assert run(program("hadolint"), "--failure-threshold", "info", ROOT / "Containerfile") == ""
