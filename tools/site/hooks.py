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
from tools.site.split import Parts, split  # noqa: E402

OUTSIDE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
HOME = "home.md"  # the first page; docs/index.md is the list of documents
WHOLE = ("index.md", "home.md", "changelog.md", "models.md")  # lists are not split
parts = Parts()  # of the build that is running


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put pages in place of patterns, and the parts of long documents beside them."""
    docs = Path(config.docs_dir)
    documents = {path.name: path.read_text("utf-8") for path in sorted(docs.glob("*.md"))}
    documents |= {name: _outside(source) for name, source in OUTSIDE.items()}
    made = split({name: text for name, text in documents.items() if name not in WHOLE})
    vars(parts).update(vars(made))
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
            found += map(_with_parts, fitting)
            free[:] = [page for page in free if page not in fitting]
        elif isinstance(entry, str):
            found.append(_with_parts(entry))
        else:
            ((title, value),) = entry.items()
            inner = value if isinstance(value, str) else _expanded(value, free)
            if inner:
                found.append({title: inner})
    return found


def _with_parts(page: str) -> str | dict[str, list[str]]:
    """Return a page's entry: a section, if the document has parts."""
    if page not in parts.pages:
        return page
    title = parts.texts[page].lstrip().partition("\n")[0].removeprefix("# ")
    return {title: [page, *parts.pages[page]]}


def _outside(source: str) -> str:
    """Return the text of a document beside ``docs/`` as if it lay in it."""
    return markdown.links_from_root((ROOT / source).read_text("utf-8"))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that no file in ``docs/`` has."""
    for name, text in reference.pages().items():
        files.append(File.generated(config, name, content=text))
    for name, source in OUTSIDE.items():
        files.append(File.generated(config, name, content=_outside(source)))
    for name, text in parts.texts.items():
        existing = files.get_file_from_path(name)
        if existing is not None:
            files.remove(existing)
        files.append(File.generated(config, name, content=text))
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
    if page.file.src_uri == HOME:
        page.meta["hide"] = ["navigation", "toc"]
    if page.file.src_uri == "reference/index.md":
        text += reference.contents()
    return markdown.for_site(text, page.file.src_uri, parts.target)
