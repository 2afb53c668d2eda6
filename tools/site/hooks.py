"""mkdocs' hooks: pages that are made from the sources, and Markdown as GitHub reads it.

- ``on_config`` puts existing pages in place of patterns in the navigation.
- ``on_files`` adds the reference and the two documents that lie beside ``docs/``.
- ``on_page_markdown`` rewrites what GitHub and Python-Markdown read differently.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "src"):
    sys.path.insert(0, str(folder))

from tools.site import markdown, reference  # noqa: E402 - after the path

OUTSIDE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
HOME = "home.md"  # the first page; docs/index.md is the list of documents


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put pages in place of patterns."""
    docs = Path(config.docs_dir)
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    pages |= {*OUTSIDE, *reference.pages()}
    named = {path for path in _paths(config.nav or []) if "*" not in path}
    config.nav = _expanded(config.nav or [], sorted(pages - named))
    return config


def _paths(nav: Iterable[Any]) -> Iterator[str]:
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else _paths(value)


def _expanded(nav: Iterable[Any], free: list[str]) -> list[Any]:
    """Return the navigation without patterns; a section that has no page is left out. Pages that a
    pattern fits are removed from ``free``: the first pattern takes them.
    """
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and "*" in entry:
            same_folder = [page for page in free if page.count("/") == entry.count("/")]
            fitting = fnmatch.filter(same_folder, entry)
            found += fitting
            free[:] = [page for page in free if page not in fitting]
        elif isinstance(entry, str):
            found.append(entry)
        else:
            ((title, value),) = entry.items()
            inner = value if isinstance(value, str) else _expanded(value, free)
            if inner:
                found.append({title: inner})
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that no file in ``docs/`` has."""
    for name, text in reference.pages().items():
        files.append(File.generated(config, name, content=text))
    for name, source in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text("utf-8")))
    documents = files.get_file_from_path("index.md")
    home = files.get_file_from_path(HOME)
    assert documents is not None
    assert home is not None
    documents.dest_uri = "documents.html"
    home.dest_uri = "index.html"
    for file in files:  # programs and data beside pages are no part of the site
        if file.src_uri.endswith((".py", ".ipynb")):
            file.inclusion = InclusionLevel.EXCLUDED
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite a page for Python-Markdown."""
    source = OUTSIDE.get(page.file.src_uri)
    if source is not None:
        text = markdown.links_from_root(text)
    if page.file.src_uri == "reference/index.md":
        text += reference.contents()
    return markdown.for_site(text, page.file.src_uri)
