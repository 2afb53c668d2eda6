"""The navigation of the site: patterns become pages, long documents become sections."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from typing import Any

from tools.site.split import Parts


class Navigation:
    """The pages that patterns stand for: all but parts of documents, by path from ``docs/`` on."""

    def __init__(self, pages: Iterable[str], parts: Parts) -> None:
        self._pages = sorted(pages)
        self._parts = parts

    def expanded(self, nav: Iterable[Any]) -> list[Any]:
        """Return the navigation of ``mkdocs.yml`` without patterns: the first that a page fits has
        it, unless its name stands somewhere. A section without a page is left out.
        """
        entries = list(nav)
        named = {path for path in paths(entries) if "*" not in path}
        return self._expanded(entries, [page for page in self._pages if page not in named])

    def _expanded(self, nav: Iterable[Any], free: list[str]) -> list[Any]:
        found: list[Any] = []
        for entry in nav:
            if not isinstance(entry, str):
                ((title, value),) = entry.items()
                inner = value if isinstance(value, str) else self._expanded(value, free)
                if inner:
                    found.append({title: inner})
            elif "*" in entry:
                same_folder = [page for page in free if page.count("/") == entry.count("/")]
                fitting = fnmatch.filter(same_folder, entry)
                found += map(self._entry, fitting)
                free[:] = [page for page in free if page not in fitting]
            else:
                found.append(self._entry(entry))
        return found

    def _entry(self, page: str) -> str | dict[str, list[str]]:
        """Return a page's entry: a section, if the document has parts."""
        parts = self._parts.pages.get(page)
        if parts is None:
            return page
        title = self._parts.texts[page].lstrip().partition("\n")[0].removeprefix("# ")
        return {title: [page, *parts]}


def paths(nav: Iterable[Any]) -> Iterator[str]:
    """Yield every page and pattern of a navigation."""
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else paths(value)
