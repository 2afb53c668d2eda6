"""mkdocs' hooks: pages that are made from the sources, and Markdown as GitHub reads it.

- ``on_config`` puts existing pages in place of patterns in the navigation.
- ``on_files`` adds the reference and the documents that lie beside ``docs/``.
- ``on_page_markdown`` rewrites what GitHub and Python-Markdown read differently.
- ``on_post_build`` refuses a site that would ask another server for a part of a page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "src"):
    sys.path.insert(0, str(folder))

from tools.site import markdown, reference  # noqa: E402 - after the path
from tools.site.navigation import Navigation  # noqa: E402
from tools.site.split import Parts, split  # noqa: E402

OUTSIDE = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "notebooks.md": "notebooks/README.md",
}
HOME = "home.md"  # the first page; docs/index.md is the list of documents
# Lists, and recipes whose steps are one program, are not split.
WHOLE = ("index.md", "home.md", "changelog.md", "models.md", "add-an-isa.md")
FOREIGN = re.compile(r"""<(script|link|img|iframe|source)\b[^>]*(src|href)=["'](https?:)?//""")
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
    config.nav = Navigation(pages, parts).expanded(config.nav or [])
    return config


def _outside(source: str) -> str:
    """Return the text of a document beside ``docs/`` as if it lay in it."""
    return markdown.links_from_root((ROOT / source).read_text("utf-8"), source)


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


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that needs a network: a part of a page that lies on another server."""
    for page in sorted(Path(config.site_dir).rglob("*.html")):
        found = FOREIGN.search(page.read_text("utf-8"))
        if found is not None:
            raise PluginError(f"{page}: a part of another server: {found[0]}")
