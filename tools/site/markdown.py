"""Markdown that is written for GitHub, as Python-Markdown wants it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable

Moved = Callable[[str, str], tuple[str, str]]
FENCE = re.compile(r"^ *(`{3,})")
ITEM = re.compile(r"^( *)([-*]|\d+\.)( +)(?=\S)")
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
WHOLE_LINK = re.compile(r"\[([^\]\[]+)\]\(([^)\s]+)\)")
# Documents beside docs/, by their paths from the root, and the pages of the site that they are.
BESIDE = {"README.md": "home.md", "CONTRIBUTING.md": "contributing.md"}
BESIDE |= {"CHANGELOG.md": "changelog.md", "notebooks/README.md": "notebooks.md"}
# Fences of the documents' tests, and the languages that they are drawn in.
KINDS = {"": "text", "output": "text", "bash": "bash", "python": "python"}


def for_site(text: str, path: str, moved: Moved) -> str:
    """Return a page's text for the site. ``path``: the page's, from ``docs/`` on; ``moved``: from
    page and anchor of a link to those of the site.
    """
    lines = _lists(text.split("\n"))
    return "\n".join(_prose_lines(lines, path, moved))


def links_from_root(text: str, path: str) -> str:
    """Return the text of a document beside ``docs/`` with links as if it lay in ``docs/``.

    ``path``: the document's, from the root of the project on.
    """

    def link(found: re.Match[str]) -> str:
        target = found[2]
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        from_root = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        return f"{found[1]}{posixpath.relpath(from_root, 'docs')}{found[3]}"

    return LINK.sub(link, text)


def _lists(lines: list[str]) -> list[str]:
    """Indent what belongs to items by four columns a level, and put an empty line before lists.

    GitHub takes the width of an item's mark for the indentation of what follows it.
    """
    found: list[str] = []
    levels: list[int] = []  # columns at which the text of each open item begins
    fence = ""
    for line in lines:
        if fence:
            found.append(_indented(line, levels))
            if line.strip().startswith(fence) and not line.strip(" `"):
                fence = ""
            continue
        indent = len(line) - len(line.lstrip(" "))
        if line.strip() and not _lazy(line, found, levels):
            while levels and indent < levels[-1]:
                levels.pop()
        item = ITEM.match(line)
        if item:
            before = found[-1] if found else ""
            text_before = before.strip() and not before.startswith("    ")
            if not levels and text_before and not ITEM.match(before.lstrip()):
                found.append("")
            found.append(_indented(line, levels))
            levels.append(item.end())
            continue
        opened = FENCE.match(line)
        if opened:
            fence = opened[1]
        found.append(_indented(line, levels))
    return found


def _lazy(line: str, before: list[str], levels: list[int]) -> bool:
    """Return whether the line goes on with an item's paragraph without its indentation."""
    plain = not re.match(r" *([-*#|>]|\d+\.|`{3}|<)", line)
    return bool(levels and plain and before and before[-1].strip() and not line.startswith(" "))


def _indented(line: str, levels: list[int]) -> str:
    if not line.strip():
        return ""
    text = line.lstrip(" ")
    own = len(line) - len(text)
    columns = levels[-1] if levels else 0
    return " " * (4 * len(levels) + max(0, own - columns)) + text


def _prose_lines(lines: list[str], path: str, moved: Moved) -> list[str]:
    """Return the lines with languages in fences, and with links and table cells rewritten."""
    found: list[str] = []
    fence = ""
    for line in lines:
        if fence:
            if line.strip() == fence:
                fence = ""
            found.append(line)
            continue
        opened = FENCE.match(line)
        if opened:
            fence = opened[1]
            head, _, kind = line.partition(fence)
            language = kind.split()[0] if kind.strip() else ""
            found.append(f"{head}{fence}{KINDS.get(language, language)}")
            continue
        if line.lstrip().startswith("|"):  # in a span of code a cell's bar needs no backslash
            line = re.sub(r"`[^`]*`", lambda span: span[0].replace("\\|", "&#124;"), line)
            line = re.sub(r"`([^`]*&#124;[^`]*)`", r"<code>\1</code>", line)
        line = WHOLE_LINK.sub(lambda link: _unlinked(link, path), line)
        found.append(LINK.sub(lambda link: _link(link, path, moved), line))
    return found


def _link(found: re.Match[str], path: str, moved: Moved) -> str:
    """Return the target of a link as the site has it. A link's text may end on this line."""
    target, _, anchor = found[2].partition("#")
    if re.match(r"[a-z]+:", target):
        return found[0]
    folder = posixpath.dirname(path)
    inside = _inside(path, target)
    if inside in BESIDE:
        page = BESIDE[inside]
        own = anchor
    else:
        page, own = moved(inside.removeprefix("docs/"), anchor)
        if (page, own) == (inside.removeprefix("docs/"), anchor):
            return found[0]
    here = "" if page == path else posixpath.relpath(page, folder or ".")
    return f"{found[1]}{here}{'#' if own or not here else ''}{own}{found[3]}"


def _unlinked(found: re.Match[str], path: str) -> str:
    """Return the text of a link to a file that is no part of the site, with the file's path."""
    target = found[2].partition("#")[0]
    inside = _inside(path, target)
    if re.match(r"[a-z]+:", target) or inside in BESIDE or inside.startswith("docs/"):
        return found[0]
    return f"{found[1]} (`{inside}`)"


def _inside(path: str, target: str) -> str:
    """Return the path of a link's target, from the root of the project on."""
    if not target:
        return f"docs/{path}"
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(path), target))
