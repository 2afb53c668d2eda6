"""The site of the documents: navigation, long documents in parts, Markdown, the reference."""

from __future__ import annotations

import re
from pathlib import Path

import treadle
from tests.docs.test_docs import of_options, sources
from tools.site import markdown, reference
from tools.site.navigation import Navigation
from tools.site.split import MOST, Parts, split
from treadle.cli.app import COMMANDS
from treadle.server.app import DELETE, GET, NOT_YET, POST
from treadle.server.router.app import OWN

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def long_document() -> str:
    words = "word " * (MOST // 2)
    fence = "```\n## no heading\n```\n"
    return (
        f"# Title\n\nFirst.\n\n## One\n\n[two](#two), [b](b.md#x) {words}\n\n{fence}\n### Inner\n\n"
        f"text\n\n## Two\n\n[one](#one) [in](#inner) {words}\n\n## Three\n\n![p](a/p.png) {words}\n"
        f"## Four\n\n{words}\n"
    )


def test_a_long_document_has_parts() -> None:
    parts = split({"long.md": long_document(), "short.md": "# Short\n\n## A\n\nx\n"})
    assert parts.pages == {
        "long.md": ["long/one.md", "long/two.md", "long/three.md", "long/four.md"]
    }
    assert parts.texts["long.md"].startswith("# Title\n\nFirst.\n")
    assert "- [Two](long/two.md)" in parts.texts["long.md"]
    one = parts.texts["long/one.md"]
    assert one.startswith("# One\n")
    assert "\n## Inner\n" in one
    assert "\n## no heading\n" in one
    assert "[two](../long.md#two), [b](../b.md#x)" in one
    assert "![p](../a/p.png)" in parts.texts["long/three.md"]
    assert parts.target("long.md", "one") == ("long/one.md", "")
    assert parts.target("long.md", "inner") == ("long/one.md", "inner")
    assert parts.target("long.md", "gone") == ("long.md", "gone")


def test_links_follow_the_parts() -> None:
    parts = split({"long.md": long_document()})
    two = markdown.for_site(parts.texts["long/two.md"], "long/two.md", parts.target)
    assert "[one](one.md) [in](one.md#inner)" in two
    here = markdown.for_site("[x](../long.md#three)", "start/a.md", parts.target)
    assert here == "[x](../long/three.md)"


def stay(path: str, anchor: str) -> tuple[str, str]:
    return path, anchor


def test_markdown_as_python_markdown_wants_it() -> None:
    source = "Text:\n- item\n  more\n  - inner\n\n  | a |\n  |---|\n\n1. one\n   two\n"
    lists = "Text:\n\n- item\n    more\n    - inner\n\n    | a |\n    |---|\n\n1. one\n    two\n"
    assert markdown.for_site(source, "a.md", stay) == lists
    fences = "```python no-run\nx\n```\n```output\n[a](../b)\n```\n"
    expected = "```python\nx\n```\n```text\n[a](../b)\n```\n"
    assert markdown.for_site(fences, "a.md", stay) == expected
    bar = markdown.for_site(r"| `a\|b` | `c` |", "a.md", stay)
    assert bar == "| <code>a&#124;b</code> | `c` |"


def test_links_out_of_the_documents() -> None:
    text = "[r](../README.md) [c](../CONTRIBUTING.md#a) [k](../bench/x.md#y) [w](https://a.org/b)"
    assert markdown.for_site(text, "a.md", stay) == (
        "[r](home.md) [c](contributing.md#a) k (`bench/x.md`) [w](https://a.org/b)"
    )
    moved = markdown.links_from_root("[a](docs/a.md#b) [l](LICENSE) [h](#x)", "README.md")
    assert moved == "[a](a.md#b) [l](../LICENSE) [h](#x)"
    inner = markdown.links_from_root("[a](../docs/a.md#b) [n](1.ipynb)", "notebooks/README.md")
    assert inner == "[a](a.md#b) [n](../notebooks/1.ipynb)"
    assert markdown.for_site("[n](../notebooks/README.md)", "a.md", stay) == "[n](notebooks.md)"


def test_patterns_of_the_navigation() -> None:
    pages = ["a.md", "hooks.md", "in/b.md", "in/c.md", "long.md", "z.md"]
    parts = split({"long.md": long_document()})
    nav = ["a.md", {"S": ["hooks*.md", {"None": ["check*.md"]}]}, {"I": ["in/c.md", "in/*.md"]}]
    assert Navigation(pages, parts).expanded([*nav, "*.md"]) == [
        "a.md",
        {"S": ["hooks.md"]},
        {"I": ["in/c.md", "in/b.md"]},
        {"Title": ["long.md", *parts.pages["long.md"]]},
        "z.md",
    ]
    assert Navigation([], Parts()).expanded([{"S": ["x*.md"]}]) == []


def test_every_page_has_its_place() -> None:
    """Those of ``mkdocs.yml`` exist; only pages that other tasks bring may come by ``*.md``."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    entries = re.findall(r'^ +- "?([\w./*-]+\.md)"?$', text, re.MULTILINE)
    entries += re.findall(r"^  - (home\.md)$", text, re.MULTILINE)
    made = {*reference.pages(), "contributing.md", "changelog.md", "notebooks.md"}
    for entry in entries:
        assert "*" in entry or entry in made or (DOCS / entry).is_file(), entry
    for folder in ("start", "how-to", "coming-from", "reference"):
        for page in (DOCS / folder).glob("*.md"):
            assert page.relative_to(DOCS).as_posix() in entries


def test_the_reference_has_everything() -> None:
    pages = reference.pages()
    for name in treadle.__all__:
        page = "errors" if name.endswith("Error") else "python"
        assert re.search(rf"^::: treadle\.\S*\b{name}$", pages[f"reference/{page}.md"], re.M), name
    table = pages["reference/http.md"]
    paths = [*POST, *GET, *DELETE, *NOT_YET, *(path for _, path in OWN)]
    assert all(f"`{path}`" in table for path in paths)
    words = [each for each, _ in reference.every_command()]
    assert {each.split()[0] for each in words} == set(COMMANDS)
    assert all(f"reference/commands/{each.replace(' ', '-')}.md" in pages for each in words)
    assert "command-line.md#control-vector)" in pages["reference/commands/control-vector.md"]
    serve = pages["reference/commands/serve.md"]
    assert "| `--port INTEGER RANGE` | 8080 | Port to listen on; 0 picks a free one." in serve


def test_variables_are_in_their_page() -> None:
    page = (DOCS / "reference" / "environment.md").read_text("utf-8")
    texts = sources().values()
    used = {name for text in texts for name in re.findall(r"\bTREADLE_[A-Z_]+\b", text)}
    own = {name for name in used if not name.endswith("_")} - of_options()
    assert own <= set(re.findall(r"`(TREADLE_[A-Z_]+)`", page))


def test_files_of_the_site_are_in_a_clone() -> None:
    """Git keeps no empty folder, and mkdocs refuses a folder or file that is not there."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    options = re.findall(r"^ +(custom_dir|logo|favicon): +(\S+)", text, re.MULTILINE)
    assert options
    for option, path in options:
        found = DOCS / path if option != "custom_dir" else ROOT / path
        assert found.is_file() or any(each.is_file() for each in found.glob("**/*")), path


def test_every_page_is_linked_from_another() -> None:
    """A reader who begins at the list of documents comes to each page."""
    pages = {path.resolve(): path.read_text("utf-8") for path in DOCS.rglob("*.md")}
    first = (DOCS / "index.md").resolve()
    known = {first}
    left = [first]
    while left:
        page = left.pop()
        for target in re.findall(r"\]\(([^)#\s]+\.md)", pages[page]):
            found = (page.parent / target).resolve()
            if found in pages and found not in known:
                known.add(found)
                left.append(found)
    assert set(pages) == known, sorted(str(path.relative_to(ROOT)) for path in set(pages) - known)
