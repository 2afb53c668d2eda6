"""Documents that take longer than five minutes, as several pages of the site.

The files in ``docs/`` stay whole: tests, programs and GitHub name their headings. On the site
``performance.md`` keeps its beginning and a list of parts, and ``performance/zen-4.md`` is one of
them. ``Parts.target`` says where a heading went, so that links can follow.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

LONG = 2000  # words of a document that is split
MOST = 1200  # words of a page: five minutes
SHORT = 600  # words of a document's beginning, with its first section, that stay together
FENCE = re.compile(r"^ *`{3,}")
HEADING = re.compile(r"^(#+) (.+)$")


@dataclass
class Section:
    """A heading and what stands below it, up to the next heading of its level.

    title: of its page, if it has one alone: with the title of the section around it.
    lines: of Markdown, the heading included, which has level 2.
    """

    title: str
    lines: list[str]

    @property
    def n_words(self) -> int:
        """Words, cells of tables included."""
        return len(" ".join(self.lines).split())


@dataclass
class Parts:
    """The pages that documents became.

    texts: of all new pages and of the shortened documents, by path from ``docs/`` on.
    pages: of each document that was split its parts, in order.
    headings: page and anchor of each heading of a document: ``("flow.md", "a-run")`` is a key.
    """

    texts: dict[str, str] = field(default_factory=dict)
    pages: dict[str, list[str]] = field(default_factory=dict)
    headings: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)

    def target(self, path: str, anchor: str) -> tuple[str, str]:
        """Return the page and the anchor of a heading, from those that a document names."""
        return self.headings.get((path, anchor), (path, anchor))


def split(documents: Mapping[str, str]) -> Parts:
    """Split the documents, by path, that have more than ``LONG`` words and several sections."""
    parts = Parts()
    for path, text in documents.items():
        if len(text.split()) > LONG:
            _split(path, text, parts)
    return parts


def _split(path: str, text: str, parts: Parts) -> None:
    head, *sections = sections_of(text.split("\n"), 2)
    if sections and head.n_words + sections[0].n_words < SHORT:
        head.lines += sections.pop(0).lines
    groups = list(_grouped([piece for each in sections for piece in _pieces(each)]))
    if len(groups) < 2:
        return
    stem = path.removesuffix(".md")
    rows = []
    for group in groups:
        title = title_of(group)
        name = f"{stem}/{slug(group[0].title)}.md"
        lines = _raised(group[0].lines) if len(group) == 1 else [f"# {title}", ""]
        if len(group) == 1:
            lines[0] = f"# {title}"
        for section in group if len(group) > 1 else ():
            lines += section.lines
        parts.texts[name] = "\n".join(_rebased(lines, path, name))
        parts.pages.setdefault(path, []).append(name)
        first = slug(_heading(group[0].lines[0])[1])
        for section in group:
            for each in anchors(section.lines):
                own = "" if len(group) == 1 and each == first else each
                parts.headings[path, each] = (name, own)
        rows.append(f"- [{title}]({posixpath.relpath(name, posixpath.dirname(path) or '.')})")
    parts.texts[path] = "\n".join([*head.lines, "", "## Pages", "", *rows, ""])


def sections_of(lines: Iterable[str], level: int) -> list[Section]:
    """Split at headings of a level, of which fences have none. The first section is what stands
    before them.
    """
    found = [Section("", [])]
    fenced = False
    for line in lines:
        if FENCE.match(line):
            fenced = not fenced
        mark, title = ("", "") if fenced else _heading(line)
        if len(mark) == level:
            found.append(Section(plain(title), []))
        found[-1].lines.append(line)
    return found


def _pieces(section: Section) -> Iterator[Section]:
    """Yield a section, or, if it is too long, its beginning and its subsections."""
    first, *inner = sections_of(section.lines, 3)
    if section.n_words <= MOST or not inner:
        yield section
        return
    if len(" ".join(first.lines[1:]).split()) > 60:
        yield Section(section.title, first.lines)
    else:  # a line or two, and an anchor that others link to
        inner[0].lines[:1] = [*first.lines, inner[0].lines[0]]
    for each in inner:
        raised = each.lines if each.lines[0].startswith("## ") else _raised(each.lines)
        yield Section(f"{section.title}: {each.title}", raised)


def _grouped(sections: Iterable[Section]) -> Iterator[list[Section]]:
    """Yield runs of neighbours that are one page together."""
    group: list[Section] = []
    for section in sections:
        if group and sum(each.n_words for each in [*group, section]) > MOST * 2 // 3:
            yield group
            group = []
        group.append(section)
    if group:
        yield group


def title_of(group: Iterable[Section]) -> str:
    """Return the title of sections that are one page; that of a section around them comes once."""
    found = ""
    outer = ""
    for section in group:
        around, mark, own = section.title.partition(": ")
        if mark and around == outer:
            found += f", {own}"
        else:
            found += f"; {section.title}" if outer else f"{', ' if found else ''}{section.title}"
        outer = around if mark else section.title
    return found.replace("; ", ", ")


def _raised(lines: Iterable[str]) -> list[str]:
    """Return lines with headings of one level less."""
    found = []
    fenced = False
    for line in lines:
        if FENCE.match(line):
            fenced = not fenced
        found.append(line[1:] if not fenced and line.startswith("##") else line)
    return found


def _rebased(lines: Iterable[str], old: str, new: str) -> Iterator[str]:
    """Yield lines of ``old`` with links as ``new`` must write them."""

    def link(found: re.Match[str]) -> str:
        target, mark, anchor = found[2].partition("#")
        if re.match(r"[a-z]+:", target):
            return found[0]
        inside = posixpath.join(posixpath.dirname(old), target) if target else old
        here = posixpath.relpath(posixpath.normpath(inside), posixpath.dirname(new))
        return f"{found[1]}{here}{mark}{anchor}{found[3]}"

    fenced = False
    for line in lines:
        if FENCE.match(line):
            fenced = not fenced
        yield line if fenced else re.sub(r"(\]\()([^)\s]+)(\))", link, line)


def anchors(lines: Iterable[str]) -> Iterator[str]:
    """Yield the anchors of all headings."""
    fenced = False
    for line in lines:
        if FENCE.match(line):
            fenced = not fenced
        mark, title = ("", "") if fenced else _heading(line)
        if mark:
            yield slug(title)


def _heading(line: str) -> tuple[str, str]:
    found = HEADING.match(line)
    return (found[1], found[2]) if found else ("", "")


def plain(title: str) -> str:
    """Return a heading without marks of Markdown."""
    return re.sub(r"[`*]", "", title)


def slug(title: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
